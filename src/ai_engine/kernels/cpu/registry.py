"""Which variant of a kernel runs: today's constants, or what was measured to be faster on this very machine.

A variant is a set of run-time parameters (bytes of a work item, how far ahead to prefetch, the largest tile ...) that
decide who does what when, and never the order of an output's sums: every variant gives the same bits. So any table of
choices is safe, and a table can only be slow.

Owns the parameters, the named variants, the table of measurements beside the kernel cache and when it counts: same
machine, same number of threads, same kernels. Does not measure (ai_engine.bench.tune), nor use a parameter (matmul.py,
attention.py).
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ai_engine.kernels.cpu import build
from ai_engine.kernels.cpu.lang import Target, Value
from ai_engine.ports.hardware import Machine
from ai_engine.ports.model import DType

ROWS = {"few": 4, "some": 16, "many": 1 << 62}
"""Classes of steps by their rows, each with its most: reading memory decides, both do, arithmetic does."""

DEFAULTS: dict[str, dict[str, int]] = {
    "matmul": {"chunk_bytes": 256 << 10, "ahead_bytes": 8192, "span_tokens": 64, "tile_tokens": 16},
    "attention": {"items_per_thread": 8},
}
"""Parameters of each op. chunk_bytes: weights of a large work item, which stay in L2 while tokens pass over them;
ahead_bytes: prefetch distance; span_tokens: tokens of a work item at most (a multiple of 16); tile_tokens: tokens of
the largest tile; items_per_thread: a sequence with more tiles than this for each thread is not split over them."""

CANDIDATES: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "matmul": {
        "few": {"chunk_bytes": (64 << 10, 128 << 10, 512 << 10), "ahead_bytes": (2048, 4096, 16384)},
        "some": {
            "chunk_bytes": (64 << 10, 128 << 10, 512 << 10), "ahead_bytes": (2048, 4096, 16384), "tile_tokens": (4, 8),
        },
        "many": {
            "chunk_bytes": (64 << 10, 128 << 10, 512 << 10), "ahead_bytes": (2048, 4096, 16384), "tile_tokens": (4, 8),
            "span_tokens": (32, 128),
        },
    },
    "attention": {rows: {"items_per_thread": (2, 4, 16, 32)} for rows in ROWS},
}  # fmt: skip
"""What is worth measuring: each variant differs from the default in one parameter."""

FORMATS = {"matmul": tuple(dtype.value for dtype in DType), "attention": ("f16", "int8")}
SHAPES = {"matmul": ("layer", "head"), "attention": ("narrow", "wide")}
"""Of a matmul: a head has 16 times as many rows as columns. Of attention: wide heads have more than 128 dims."""


def matmul_shape(rows: int, cols: int) -> str:
    return "head" if rows >= 16 * cols else "layer"


def attention_shape(head_dim: int) -> str:
    return "wide" if head_dim > 128 else "narrow"


def variants(op: str, rows: str) -> dict[str, dict[str, int]]:
    """By name, as "chunk_bytes=65536"; "default" first."""
    found = {"default": DEFAULTS[op]}
    for name, values in CANDIDATES[op][rows].items():
        found |= {f"{name}={value}": DEFAULTS[op] | {name: value} for value in values}
    return found


def fields(op: str) -> dict[str, str]:
    """Of the kernel's argument record: each parameter for each class of rows."""
    return {f"{name}_{rows}": "i64" for rows in ROWS for name in DEFAULTS[op]}


def defaults(op: str) -> dict[str, int]:
    """Values of `fields` without measurements."""
    return {f"{name}_{rows}": value for rows in ROWS for name, value in DEFAULTS[op].items()}


def pick(args: object, name: str, rows: Value) -> Value:
    """In a kernel: the parameter for a step of ``rows`` rows."""
    k = rows.k
    few, some, many = (getattr(args, f"{name}_{of}") for of in ROWS)
    chosen: Value = k.select(rows <= ROWS["few"], few, k.select(rows <= ROWS["some"], some, many))
    return chosen


class Key(NamedTuple):
    """One choice."""

    op: str
    format: str
    shape: str
    rows: str

    @property
    def exists(self) -> bool:
        return (
            self.op in DEFAULTS
            and self.format in FORMATS[self.op]
            and self.shape in SHAPES[self.op]
            and self.rows in ROWS
        )


def every_key() -> Iterator[Key]:
    """Every choice there is."""
    for op in DEFAULTS:
        for format in FORMATS[op]:
            for shape in SHAPES[op]:
                yield from (Key(op, format, shape, rows) for rows in ROWS)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured for a key. ``gain``: how many times as fast as the default the best other variant was, with the
    ends of its interval; ``noise``: the same for the default beside itself. ``variant`` is what that led to."""

    key: Key
    variant: str
    best: str
    gain: tuple[float, float, float]
    noise: tuple[float, float, float]
    rounds: int
    when: str


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: entries count on the machine and for the kernels that they were measured with."""

    machine: str
    kernels: str
    entries: list[Entry]

    @property
    def problem(self) -> str:
        """Why entries mean nothing here, or ""."""
        for entry in self.entries:
            if not entry.key.exists or entry.variant not in variants(entry.key.op, entry.key.rows):
                return f"no variant {entry.variant!r} of {' '.join(entry.key)}"
        return ""


class Registry:
    """Choices by key; without an entry, the default."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.entries = {entry.key: entry for entry in entries}

    def values(self, op: str, format: str, shape: str) -> dict[str, int]:
        """Values of `fields` for one kernel call."""
        found: dict[str, int] = {}
        for rows in ROWS:
            entry = self.entries.get(Key(op, format, shape, rows))
            chosen = variants(op, rows)[entry.variant if entry else "default"]
            found |= {f"{name}_{rows}": value for name, value in chosen.items()}
        return found


class Forced(Registry):
    """These parameters whatever is asked for: tests and measurements."""

    def __init__(self, parameters: Mapping[str, int]) -> None:
        super().__init__()
        self._parameters = parameters

    def values(self, op: str, format: str, shape: str) -> dict[str, int]:
        return {f"{name}_{rows}": self._parameters.get(name, v) for rows in ROWS for name, v in DEFAULTS[op].items()}


# ---------------------------------------------------------------------------------------------------------------------
# The table on disk


def machine_text(machine: Machine, threads: int) -> str:
    """What a measurement depends on beside the kernels."""
    caches = "/".join(
        str(size >> 10) for size in (machine.cache_l1d_bytes, machine.cache_l2_bytes, machine.cache_l3_bytes)
    )
    return f"{machine.cpu_name}, {machine.cores} cores, caches {caches} KiB, {threads} threads"


def table_path(target: Target, threads: int) -> Path:
    """Each number of threads has its own: a server of another number does not set the table aside."""
    return build.cache_dir() / f"{target.name}-{threads}-variants.json"


def load(target: Target, machine: Machine, threads: int) -> Registry:
    """The choices measured here for these kernels. A table that is damaged, or of another machine or other kernels, is
    left aside with a notice."""
    path = table_path(target, threads)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Registry()
    except OSError as error:
        return _aside(path, f"cannot be read ({error})")
    try:
        table = msgspec.json.decode(data, type=Table)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _aside(path, f"is damaged ({error})")
    here = machine_text(machine, threads)
    if table.machine != here:
        return _aside(path, f"is of another machine ({table.machine}; this is {here})")
    if table.kernels != build.cache_key(target):
        return _aside(path, "is of other kernels than this version's")
    if table.problem:
        return _aside(path, f"is damaged ({table.problem})")
    return Registry(table.entries)


def _aside(path: Path, what: str) -> Registry:
    warnings.warn(
        f"the table of kernel variants {path} {what}; defaults are used: run `ai-engine bench tune`, or delete it",
        RuntimeWarning, stacklevel=3,
    )  # fmt: skip
    return Registry()


def store(registry: Registry, target: Target, machine: Machine, threads: int) -> Path:
    """Write the table, whole or not at all. OSError where that cannot be."""
    path = table_path(target, threads)
    entries = sorted(registry.entries.values(), key=lambda entry: entry.key)
    table = Table(machine=machine_text(machine, threads), kernels=build.cache_key(target), entries=entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".variants-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(table), indent=1))
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
    return path
