"""What leaves: tables, JSON, plots; and the parts of the other commands that need no machine to be checked."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ai_engine.bench import svg
from ai_engine.bench.ceilings import measure, thread_counts
from ai_engine.bench.client import Answer
from ai_engine.bench.compare import MUSTS, asked_for, meets
from ai_engine.bench.engine import share_of_limit
from ai_engine.bench.host import LoadWatch, identity, machine_cpu
from ai_engine.bench.kernels import ROWS, greedy, step_batch
from ai_engine.bench.llamacpp import TOOLS, LlamaCpp, build_fraction, explicit_flags, find, server_flags
from ai_engine.bench.load import Run
from ai_engine.bench.options import COMMANDS, add_bench, run_bench
from ai_engine.bench.report import Deadline, Report, file_name, plain, table
from ai_engine.bench.serve import check
from ai_engine.bench.stats import Interval
from ai_engine.bench.versus import rows_of
from ai_engine.bench.workloads import SHAPES, Prompts
from ai_engine.hardware.ceilings import Ceilings, load_ceilings, save_ceilings
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.errors import ConfigError, EngineError
from ai_engine.ports.model import DType
from ai_engine.ports.progress import no_progress
from bench.machine import RESULTS
from bench.roofline import PLOT, draw


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench(parser)
    return parser.parse_args(words)


def test_table_aligns_and_shows_what_is_missing() -> None:
    lines = table(["case", "tok/s"], [["a", 1234.5], ["longer", None], ["b", math.nan], ["c", 0.01234]]).splitlines()
    assert [len(line) for line in lines] == [len("longer  0.0123")] * 5
    assert [line.split()[-1] for line in lines] == ["tok/s", "1234", "-", "-", "0.0123"]


def test_result_is_json_without_nan_beside_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x", tmp_path / "new" / "folder", as_json=True)
    report.plot("ratios", svg.bars("t", "x", []))
    report.finish({"ratio": Interval(1.5, 1.0, math.inf), "by": {2: [math.nan, 1.23456789]}})
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found == json.loads((tmp_path / "new/folder/x.json").read_text())
    assert found["ratio"] == {"value": 1.5, "low": 1.0, "high": None}
    assert found["by"] == {"2": [None, 1.23457]}
    assert found["machine"]["cpu_name"] == read_machine().cpu_name
    assert (tmp_path / "new/folder/x-ratios.svg").exists()
    assert "written" in captured.err


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        Report("x", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", "org-name"), ("/a/b.Q4_1.gguf", "b.Q4_1"), ("smollm2", "smollm2"), ("//", "model")],
)
def test_file_names(name: str, expected: str) -> None:
    assert file_name(name) == expected


def test_deadline() -> None:
    assert Deadline(0).passed
    assert Deadline(0).left_s == 1.0
    assert 59 < Deadline(1).left_s <= 60
    assert plain({"a": (1, 2)}) == {"a": [1, 2]}


# --- plots


def drawn(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for numbers in re.findall(r'points="([^"]+)"', text):
        for pair in numbers.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    return root


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_lines_are_drawn_to_scale_with_their_names() -> None:
    text = svg.lines("Title & <more>", "ms", "share", [svg.Series("a<b", [1, 10, 100], [0, 0.5, 1])], log_x=True)
    root = drawn(text)
    assert {"Title & <more>", "ms", "share", "a<b"} <= set(texts(root))
    points = next(re.finditer(r'points="([^"]+)"', text))[1].split()
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, pair.split(","))) for pair in points)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # 1, 10, 100: equal steps of a logarithmic axis
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_lines_of_nothing_say_so() -> None:
    assert "nothing was measured" in texts(drawn(svg.lines("t", "x", "y", [svg.Series("a", [], [])])))


def test_bars_show_value_interval_and_aim() -> None:
    root = drawn(svg.bars("t", "ratio", [svg.Bar("decode", 2.0, 1.5, 2.5, aim=1.9), svg.Bar("x", 0.5, 0.4, 0.6)]))
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    widths = [float(rect.attrib["width"]) for rect in rects]
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    assert {"decode", "2.00", "0.50"} <= set(texts(root))
    aims = [e for e in root.iter("{http://www.w3.org/2000/svg}line") if e.attrib["class"] == "line c1"]
    assert len(aims) == 1


def test_roofline_has_its_ridge_where_bandwidth_meets_arithmetic() -> None:
    text = svg.roofline(20.0, 200.0, 2000.0, [("Q4_1 x 1", 3.2, 50.0), ("Q4_1 x 512", 1600.0, 900.0)])
    root = drawn(text)
    assert {"20.0 GB/s", "int8 dot 2000", "f32 FMA 200", "Q4_1 x 1", "Q4_1 x 512"} <= set(texts(root))
    ridges = [float(pairs.split()[1].split(",")[0]) for pairs in re.findall(r'points="([^"]+)"', text)]
    assert ridges[0] > ridges[1]  # the higher roof is met later


def test_the_roofline_of_the_docs_is_drawn_from_the_committed_data() -> None:
    """`python -m bench.roofline` makes it."""
    data = json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))
    assert draw(data) == PLOT.read_text(encoding="utf-8")
    assert {(case["type"], case["tokens"]) for case in data["cases"]} == set(
        itertools.product((t.value for t in DType), ROWS)
    )


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (0, 12345), (-2, 2), (0, 1e-3), (5, 5)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = svg.ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-12 <= t <= high + 1e-12 for t in found)


# --- the machine's figures


def test_ceilings_are_kept_for_this_machine_alone(tmp_path: Path) -> None:
    machine, path = read_machine(), tmp_path / "bench" / "machine.json"
    assert load_ceilings(path) is None
    figures = {1: 10.0, 2: 18.0}
    saved = Ceilings(
        cpu_name=machine.cpu_name, cores=machine.cores, measured_s=1.0, target="avx2", read_gb_s=figures,
        fma_gflop_s=figures, dot_gop_s={},
    )  # fmt: skip
    save_ceilings(saved, path)
    assert load_ceilings(path) == saved
    assert saved.best(figures, 1) == 10.0
    assert saved.best(figures, 64) == 18.0
    assert saved.best({}, 2) == 0.0
    path.write_text(path.read_text().replace(machine.cpu_name, "another"))
    assert load_ceilings(path) is None
    path.write_text("{")
    assert load_ceilings(path) is None


@pytest.mark.parametrize("count", [1, 2])
def test_ceilings_are_measured_on_so_many_threads(count: int) -> None:
    """Rates of nothing in particular, but of work that was done: every item is read once, whoever takes it."""
    found, detail = measure([count], rounds=2, passes=2, nbytes=4 << 20, deadline=Deadline(1))
    assert set(found.read_gb_s) == {count}
    for figures in (found.read_gb_s, found.fma_gflop_s, found.dot_gop_s):
        assert 0.1 < figures[count] < 1e6
    assert len(detail["rounds"]["read"][count]) == 2
    assert set(detail["read_gb_s_by_mib"]) == {1}
    assert found.dot_gop_s[count] > found.fma_gflop_s[count] / 4


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts(most: int, counts: list[int]) -> None:
    assert thread_counts(most) == counts


def test_identity_names_what_a_reader_compares() -> None:
    facts = identity()
    assert {"cpu_name", "cpu_features", "cores", "system", "governor", "huge_pages", "python", "ai_engine"} <= set(
        facts
    )
    json.dumps(facts, allow_nan=False)


def test_steal_and_busy_time_are_told_apart() -> None:
    busy, steal = machine_cpu("cpu  100 0 50 1000 20 5 5 40 0 0\ncpu0 1 1 1")
    assert (busy * 100, steal * 100) == (160, 40)  # in ticks of 10 ms, Linux's own
    assert machine_cpu("cpu 1") == (0.01, 0.0)
    report = LoadWatch().report()
    assert 0 <= report["steal_share"] <= 1
    assert 0 <= report["foreign_share"] <= 2


def test_share_of_limit() -> None:
    """100 tokens a second in steps of 4, 0.5 GB each, at 25 GB/s: 12.5 GB of 25."""
    assert share_of_limit(100, 4, 500_000_000, 25.0) == pytest.approx(0.5)


def test_step_batch_gives_every_sequence_its_own_pages() -> None:
    batch = step_batch([(1, 100), (3, 40)], 32, greedy(2, 64), 2)
    assert batch.positions.tolist() == [99, 37, 38, 39]
    assert batch.seq_start.tolist() == [0, 1, 4]
    used = [*batch.page_table[0, :4].tolist(), *batch.page_table[1, :2].tolist()]
    assert sorted(used) == list(range(6))


# --- llama.cpp


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("SmolLM2.Q4_1.gguf", "Q4_1"),
        ("x.Q4_1-abc-Q4_0.gguf", "Q4_0"),
        ("gemma-3-270m-q4_k_m.gguf", "Q4_K_M"),
        ("x", ""),
    ],
)
def test_what_is_asked_of_a_file_is_by_its_last_format(name: str, mark: str) -> None:
    assert asked_for(Path(name)) == MUSTS.get(mark, {})


def test_meets() -> None:
    ratio = Interval(1.0, 0.9, 1.1)
    assert meets(ratio, 0.9, at_most=False)
    assert not meets(ratio, 1.1, at_most=False)
    assert meets(ratio, 1.05, at_most=True)
    assert not meets(ratio, 0.95, at_most=True)


def test_build_lines_and_flags() -> None:
    assert build_fraction("[ 45%] Building CXX object ggml.cpp.o") == 0.45
    assert build_fraction("-- Configuring done") is None
    flags = explicit_flags(("avx2", "fma", "avx512bw"))
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=OFF"} <= set(flags)
    assert "-DGGML_NATIVE=ON" not in flags


def test_server_flags_are_overridden_not_repeated() -> None:
    flags = server_flags(2, 8, 1024, ["-ub", "512", "--kv-unified"], cache=False)
    assert flags.count("-ub") == 1
    assert flags[flags.index("-ub") + 1] == "512"
    assert flags[flags.index("-c") + 1] == "8192"
    assert "--kv-unified" in flags
    assert flags[flags.index("--cache-ram") + 1] == "0"
    assert "--cache-ram" not in server_flags(2, 8, 1024, [], cache=True)


def fake_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_llama_bench_is_read(tmp_path: Path) -> None:
    rows = [{"n_prompt": 512, "avg_ts": 300.5}, {"n_prompt": 0, "avg_ts": 100.25}]
    fake_tool(tmp_path, "llama-bench", f"echo '{json.dumps(rows)}'")
    fake_tool(tmp_path, "llama-batched-bench", """echo noise; echo '{"pl": 16, "speed_tg": 123.5}'""")
    llama = LlamaCpp(tmp_path)
    assert llama.bench(Path("m"), 2) == {"prefill": 300.5, "decode": 100.25}
    assert llama.batched(Path("m"), 2, 16, 32, 16) == 123.5


def test_what_goes_wrong_with_llama_cpp_is_said(tmp_path: Path) -> None:
    fake_tool(tmp_path, "llama-bench", "echo 'no such model' >&2; exit 3")
    llama = LlamaCpp(tmp_path)
    with pytest.raises(EngineError, match="llama-bench ended with status 3: no such model"):
        llama.bench(Path("m"), 2)
    assert not llama.runs(Path("m"))
    fake_tool(tmp_path, "llama-bench", "exec sleep 60")
    with pytest.raises(EngineError, match="longer than 0 s"):
        llama.bench(Path("m"), 2, timeout_s=0.2)
    with pytest.raises(ConfigError, match="has no llama-batched-bench"):
        find(tmp_path, Path("m"), no_progress)
    for name in TOOLS:
        fake_tool(tmp_path, name, "exit 0")
    assert find(tmp_path, Path("m"), no_progress).folder == tmp_path


def test_requantising_leaves_no_half_file(tmp_path: Path) -> None:
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    fake_tool(tmp_path, "llama-quantize", 'cp "$2" "$3"; exit 1')
    source.write_bytes(b"weights")
    with pytest.raises(EngineError):
        LlamaCpp(tmp_path).quantize(source, target)
    assert sorted(p.name for p in tmp_path.glob("b*")) == []
    fake_tool(tmp_path, "llama-quantize", 'cp "$2" "$3"')
    LlamaCpp(tmp_path).quantize(source, target)
    assert target.read_bytes() == b"weights"


def answers(gap_s: float, first_s: float) -> list[Answer]:
    times = [first_s + gap_s * i for i in range(40)]
    return [Answer(ended_s=times[-1], texts_s=times, prompt_tokens=1, completion_tokens=40) for _ in range(32)]


def test_rows_of_two_servers() -> None:
    """Twice as fast in every respect; tails appear with enough samples only, and only for many streams."""
    runs = {
        "ours": [Run(answers(0.010, 0.05), 0.0, 2.0, cpu_s=1.0) for _ in range(7)],
        "llama.cpp": [Run(answers(0.020, 0.10), 0.0, 4.0, cpu_s=3.0) for _ in range(7)],
    }
    rows = rows_of("streams", {"runs": runs}, 3.0)
    assert {name: round(row["ratio"].value, 3) for name, row in rows.items()} == {
        "streams: tokens/s": 2.0, "streams: ttft p95 ms": 0.5, "streams: gap p99 ms": 0.5,
        "streams: CPU s/1k tokens": 0.333,
    }  # fmt: skip
    assert rows["streams: tokens/s"]["must"] == 3.0
    assert rows["streams: gap p99 ms"]["at_most"]
    few = {side: each[:6] for side, each in runs.items()}  # 192 answers: no p95
    assert list(rows_of("streams", {"runs": few}, None)) == [
        "streams: tokens/s", "streams: gap p99 ms", "streams: CPU s/1k tokens"
    ]  # fmt: skip
    assert list(rows_of("single", {"runs": runs}, None)) == ["single: tokens/s", "single: CPU s/1k tokens"]


# --- words


def test_every_command_parses_and_exists() -> None:
    for name, words in {
        "machine": [],
        "kernels": [],
        "tune": ["--show", "--types", "Q4_1,int8"],
        "model": ["m"],
        "serve": ["m"],
        "compare": ["llama.cpp", "m"],
    }.items():
        assert parsed(name, *words).bench == name
    assert set(COMMANDS) == {"machine", "kernels", "tune", "model", "serve", "compare"}


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["machine", "--minutes", "0"], "--minutes"),
        (["machine", "--rounds", "-1"], "--rounds"),
        (["kernels", "--threads", "1000"], "--threads"),
    ],
)
def test_wrong_words_name_the_flag(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        run_bench(parsed(*words))


def test_serve_needs_something_to_measure() -> None:
    with pytest.raises(ConfigError, match="--url"):
        check(parsed("serve"))
    with pytest.raises(ConfigError, match="--workload is 'S1,S9'"):
        check(parsed("serve", "m", "--workload", "S1,S9"))
    assert check(parsed("serve", "m", "--workload", "s1, S5")) == ["S1", "S5"]
    assert set(SHAPES) == {"S1", "S2", "S3", "S4", "S5", "S6", "S8"}


def test_prompts_of_two_runs_share_no_prefix_and_one_seed_gives_the_same() -> None:
    first, same, other = (Prompts("http://h", "m", None, seed) for seed in (1, 1, 2))
    one = first.prompt(100)
    assert one == same.prompt(100)
    assert one.split()[0] != other.prompt(100).split()[0]
    assert one.split()[0] != first.prompt(100).split()[0]
    other.reseed(7)
    same.reseed(7)
    assert other.prompt(30) == same.prompt(30)
    shared = first.shared(50, 3, 10)
    assert len({text[:100] for text in shared}) == 1
    assert len(set(shared)) == 3
