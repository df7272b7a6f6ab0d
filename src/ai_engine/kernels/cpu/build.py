"""Kernels to machine code: emit, optimise, cache as one file, load.

The cache file is keyed by everything that can change its content: the text of every file of this package, the target,
llvmlite's and LLVM's versions and the ABI version. It carries the digest of its objects, which is checked on every
load, so a stale or damaged file is never run. Builds happen in child processes (one per core): LLVM's working memory
does not stay in the server, and an LLVM abort becomes an error here.

Does not own: which kernels exist (the ``KERNELS`` of each module in `MODULES`), nor calling them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite
import msgspec

from ai_engine.kernels.cpu import abi
from ai_engine.kernels.cpu.lang import TARGETS, KernelDef, Module, Target, detect_target
from ai_engine.ports.errors import EngineError
from ai_engine.ports.progress import Progress, no_progress

MODULES = ("executor", "elementwise", "matmul", "attention", "sample", "screen")
"""Modules of this package with a ``KERNELS: Sequence[KernelDef]``."""

_MAGIC = b"ai-engine kernels\n"
_MAX_PARTS = 4
_KEPT_BUILDS = 4  # per target; older files of other versions are deleted


class Loaded:
    """Machine code in memory; keeps it alive. ``address`` of a kernel by name."""

    def __init__(self, engine: Any, target: Target) -> None:
        self._engine = engine
        self.target = target
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        if name not in self._addresses:
            self._addresses[name] = int(self._engine.get_function_address(name))
            assert self._addresses[name] != 0, f"no kernel named {name} for {self.target.name}"
        return self._addresses[name]

    def call(self, name: str, args: int, ctx: int) -> None:
        """Run one kernel on this thread (tests)."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self.address(name))(args, ctx)


def host_target() -> Target:
    """The target for this machine, or the lower one that AI_ENGINE_CPU names."""
    import llvmlite.binding as llvm

    features = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return detect_target(features, str(llvm.get_host_cpu_name()), os.environ.get("AI_ENGINE_CPU", ""))


def definitions(target: Target) -> list[KernelDef]:
    """Every kernel that exists for ``target``."""
    found: list[KernelDef] = []
    for name in MODULES:
        full = f"ai_engine.kernels.cpu.{name}"
        if importlib.util.find_spec(full) is not None:
            found += getattr(importlib.import_module(full), "KERNELS", ())
    names = [d.name for d in found]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return [d for d in found if not d.targets or target.name in d.targets]


# ---------------------------------------------------------------------------------------------------------------------
# Emit and optimise


def emit_module(kernels: Sequence[KernelDef], target: Target) -> str:
    """LLVM IR text of these kernels, not optimised."""
    module = Module(target)
    for definition in kernels:
        module.add(definition)
    return module.text()


def compile_ir(text: str, target: Target, assembly: bool = False) -> bytes:
    """Optimise and assemble IR for ``target``: an object file, or assembly text to look at."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False  # kernels say what is a vector
    options.loop_interleaving = options.loop_unrolling = False  # and unroll by hand
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module).encode() if assembly else bytes(machine.emit_object(module))


def assembly(kernels: Sequence[KernelDef], target: Target) -> str:
    """What the CPU will run; tests count instructions in it."""
    return compile_ir(emit_module(kernels, target), target, assembly=True).decode()


def load_objects(objects: Sequence[bytes], target: Target) -> Loaded:
    """Link object files of this machine into this process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="small")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for data in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    _leave_compiler_on_disk()
    return Loaded(engine, target)


def _leave_compiler_on_disk() -> None:
    """Linking has pulled 40 MB of LLVM's code into memory that nothing runs again. Give those pages back: they are
    unchanged file pages, so whatever part is called once more (looking an address up) is read in again."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError, AttributeError):  # no /proc, no MADV_DONTNEED: the pages stay
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libllvmlite" in line and " r-xp " in line:
                start, end = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
                madvise(start, end - start, mmap.MADV_DONTNEED)


def jit(kernels: Sequence[KernelDef], target: Target | None = None) -> Loaded:
    """Build and load some kernels in this process, without the cache (tests)."""
    target = target or host_target()
    return load_objects([compile_ir(emit_module(kernels, target), target)], target)


# ---------------------------------------------------------------------------------------------------------------------
# The cache


def cache_dir() -> Path:
    """``$AI_ENGINE_CACHE/kernels`` or ``~/.cache/ai-engine/kernels``."""
    root = os.environ.get("AI_ENGINE_CACHE")
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ai-engine" / "kernels"


def cache_key(target: Target) -> str:
    """Names a build; equal keys mean equal machine code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    import llvmlite.binding as llvm

    facts = [msgspec.json.encode(target).decode(), llvmlite.__version__, str(llvm.llvm_version_info), str(abi.VERSION)]
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()


def pack_objects(objects: Sequence[bytes]) -> bytes:
    """Magic, one line of JSON {digest, sizes}, then the objects."""
    body = b"".join(objects)
    line = json.dumps({"digest": hashlib.sha256(body).hexdigest(), "sizes": [len(o) for o in objects]})
    return _MAGIC + line.encode() + b"\n" + body


def unpack_objects(data: bytes) -> list[bytes] | None:
    """The objects, or None when the file is not whole."""
    if not data.startswith(_MAGIC):
        return None
    line, newline, body = data[len(_MAGIC) :].partition(b"\n")
    try:
        facts = json.loads(line)
        sizes, digest = [int(n) for n in facts["sizes"]], facts["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    if not newline or sum(sizes) != len(body) or hashlib.sha256(body).hexdigest() != digest:
        return None
    objects, start = [], 0
    for size in sizes:
        objects.append(body[start : start + size])
        start += size
    return objects


def load(target: Target | None = None, progress: Progress | None = None) -> Loaded:
    """The kernels for ``target`` (default: this machine), from the cache or built now."""
    target = target or host_target()
    report = progress or no_progress
    path = cache_dir() / f"{target.name}-{cache_key(target)[:32]}.bin"
    objects = None
    with contextlib.suppress(OSError):  # not there, or not readable: built below
        objects = unpack_objects(path.read_bytes())
    if objects is None:
        objects = build_objects(target, report)
        _store(path, pack_objects(objects))
    report("load kernels", 1.0)
    return load_objects(objects, target)


def _store(path: Path, data: bytes) -> None:
    """Write whole or not at all; a cache that cannot be written costs the next start a build."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".build-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
        builds = sorted(path.parent.glob(f"{path.name.partition('-')[0]}-*.bin"), key=lambda p: p.stat().st_mtime)
        for old in builds[:-_KEPT_BUILDS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"kernel cache {path.parent} is not usable ({error}); kernels are built again next time",
                      RuntimeWarning, stacklevel=2)  # fmt: skip


def build_objects(target: Target, progress: Progress) -> list[bytes]:
    """Emit and compile every kernel in child processes, each one share of them."""
    parts = max(1, min(len(os.sched_getaffinity(0)), _MAX_PARTS))
    progress("build kernels", 0.0)
    children = []
    for part in range(parts):
        command = [sys.executable, "-m", "ai_engine.kernels.cpu.build", msgspec.json.encode(target).decode()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
        children.append(
            subprocess.Popen(
                [*command, str(part), str(parts)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            )
        )  # fmt: skip
    objects = []
    for part, child in enumerate(children):
        out, err = child.communicate()
        if child.returncode != 0:
            for other in children[part + 1 :]:
                other.kill()
                other.communicate()
            tail = "\n".join(err.decode(errors="replace").strip().splitlines()[-12:])
            raise EngineError(f"building the kernels for {target.name} failed (exit {child.returncode}):\n{tail}")
        objects.append(out)
        progress("build kernels", (part + 1) / parts)
    return objects


def main(argv: Sequence[str]) -> int:
    """``TARGET PART PARTS``: one share of the kernels, as an object file on standard output."""
    name, part, parts = argv[0], int(argv[1]), int(argv[2])
    target = TARGETS[name] if name in TARGETS else msgspec.json.decode(name.encode(), type=Target)
    share = definitions(target)[part::parts]
    sys.stdout.buffer.write(compile_ir(emit_module(share, target), target))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
