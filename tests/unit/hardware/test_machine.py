"""Machine facts from fixture trees: bare metal, cgroup v1 and v2, an aarch64 board, and nothing at all."""

from __future__ import annotations

from pathlib import Path

from ai_engine.hardware.machine import read_machine

X86 = """processor\t: 0
model name\t: AMD EPYC 7R13 Processor
flags\t\t: fpu sse4_1 avx2 fma f16c avx512_vnni avx_vnni abm bmi1 pni
processor\t: 1
model name\t: AMD EPYC 7R13 Processor
flags\t\t: fpu avx2
"""
ARM = """processor\t: 0
Features\t: fp asimd asimdhp asimddp i8mm
processor\t: 1
Features\t: fp asimd asimdhp asimddp i8mm
"""
MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1000000 kB\nMemAvailable:   12000000 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nothing_is_known(tmp_path: Path) -> None:
    m = read_machine(tmp_path)
    assert (m.cores, m.numa_nodes, m.memory_total_bytes, m.gpus, m.cpu_features) == (1, 1, 0, (), ())
    assert m.quota_cores == float("inf")
    assert m.default_threads == 1


def test_bare_metal(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    files = {"proc/cpuinfo": X86, "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user.slice\n"}
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K"), ("3", "Unified", "32M")]
    ):
        files |= {f"{cache}/index{index}/{n}": v for n, v in (("level", level), ("type", kind), ("size", size + "\n"))}
    files |= {"sys/devices/system/node/node0/cpulist": "0", "sys/devices/system/node/node1/cpulist": "1"}
    m = read_machine(write(tmp_path, files))
    assert m.cpu_name == "AMD EPYC 7R13 Processor"
    assert {"avx2", "fma", "f16c", "sse4.1", "avx512vnni", "avxvnni", "lzcnt", "bmi", "sse3"} <= set(m.cpu_features)
    assert (m.cores, m.numa_nodes, m.default_threads) == (2, 2, 2)
    assert (m.cache_l1d_bytes, m.cache_l2_bytes, m.cache_l3_bytes) == (32 << 10, 512 << 10, 32 << 20)
    assert (m.memory_total_bytes, m.memory_available_bytes) == (16000000 * 1024, 12000000 * 1024)


def test_cgroup_v2_limits_of_an_ancestor_count(tmp_path: Path) -> None:
    m = read_machine(
        write(
            tmp_path,
            {
                "proc/cpuinfo": X86,
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/memory.max": "2000000000\n",
                "sys/fs/cgroup/pod/memory.current": "1500000000\n",
                "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 300000000\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
            },
        )
    )
    assert m.quota_cores == 1.5
    assert m.default_threads == 1
    assert (m.memory_total_bytes, m.memory_available_bytes) == (2_000_000_000, 800_000_000)


def test_cgroup_v1(tmp_path: Path) -> None:
    m = read_machine(
        write(
            tmp_path,
            {
                "proc/cpuinfo": X86,
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
        )
    )
    assert m.quota_cores == 0.5
    assert m.default_threads == 1
    assert m.memory_total_bytes == m.memory_available_bytes == 1_000_000


def test_arm_names_and_gpu(tmp_path: Path) -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": ARM,
            f"{device}/class": "0x030200\n",
            f"{device}/vendor": "0x10de\n",
            f"{device}/device": "0x2335\n",
            "drivers/nvidia/bind": "",
            "sys/bus/pci/devices/0000:02:00.0/class": "0x020000\n",
        },
    )
    (root / device / "driver").symlink_to(root / "drivers/nvidia")
    m = read_machine(root)
    assert {"neon", "dotprod", "fullfp16", "i8mm"} <= set(m.cpu_features)
    assert m.cores == 2
    assert m.gpus == ("nvidia 10de:2335",)


def test_this_machine() -> None:
    m = read_machine()
    assert m.cores >= 1
    assert 0 < m.memory_available_bytes <= m.memory_total_bytes
    assert m.cpu_features
