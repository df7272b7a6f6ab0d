"""The kernel registry: tables that count and tables that do not; who wins a measurement. That every variant gives the
same bits is tested with each kernel (test_matmul.py, test_attention.py)."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ai_engine.bench import tune
from ai_engine.hardware.machine import read_machine
from ai_engine.kernels.cpu import build, matmul, registry
from ai_engine.kernels.cpu.lang import AVX2, TARGETS
from ai_engine.kernels.cpu.registry import Entry, Key, Registry
from ai_engine.ports.hardware import Machine

MACHINE = Machine(
    cpu_name="A CPU", cpu_features=(), cores=2, quota_cores=2.0, memory_total_bytes=0, memory_available_bytes=0
)


def test_variants_differ_from_the_default_in_one_parameter() -> None:
    for op, rows in itertools.product(registry.DEFAULTS, registry.ROWS):
        named = registry.variants(op, rows)
        assert named.pop("default") == registry.DEFAULTS[op]
        assert len(named) >= 3
        for name, values in named.items():
            changed = {n: v for n, v in values.items() if v != registry.DEFAULTS[op][n]}
            assert name == "".join(f"{n}={v}" for n, v in changed.items())
            assert values.get("span_tokens", 16) % 16 == 0
            assert values.get("tile_tokens", 4) >= matmul.MIN_LARGEST


# --- the table -------------------------------------------------------------------------------------------------------


KEY = Key("matmul", "Q4_1", "layer", "few")
ENTRY = Entry(
    key=KEY, variant="ahead_bytes=4096", best="ahead_bytes=4096", gain=(1.1, 1.08, 1.12), noise=(1.0, 0.99, 1.01),
    rounds=15, when="2026-12-01",
)  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path))
    return registry.store(Registry([ENTRY]), AVX2, MACHINE, 2)


def test_a_table_is_found_again_and_chooses(table: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices = registry.load(AVX2, MACHINE, 2)
    assert choices.entries == {KEY: ENTRY}
    assert choices.values("matmul", "Q4_1", "layer") == registry.defaults("matmul") | {"ahead_bytes_few": 4096}
    for other in (("Q4_0", "layer"), ("Q4_1", "head")):
        assert choices.values("matmul", *other) == registry.defaults("matmul")
    assert choices.values("attention", "f16", "wide") == registry.defaults("attention")


def test_without_a_table_constants_and_no_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path / "none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.load(AVX2, MACHINE, 2).entries == {}


def test_a_stale_table_is_left_aside_with_a_notice(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"cpu_name": "Another"}, {"cache_l2_bytes": 1 << 20}, {"cores": 4}):
        with pytest.warns(RuntimeWarning, match="of another machine .* bench tune"):
            assert registry.load(AVX2, msgspec.structs.replace(MACHINE, **change), 2).entries == {}
    monkeypatch.setattr(build, "cache_key", lambda target: "another source")
    with pytest.warns(RuntimeWarning, match="of other kernels"):
        assert registry.load(AVX2, MACHINE, 2).entries == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"}", b""), (b'"ahead_bytes=4096"', b'"ahead_bytes=3"'), (b'"Q4_1"', b'"Q9_9"'), (b'"layer"', b"7"),
     (b'"few"', b'"none"'), (b'"matmul"', b'"sample"'), (b"A CPU", b"\xff"), (b'"rounds"', b'"round"')],
)  # fmt: skip
def test_a_damaged_table_is_left_aside_with_a_notice(table: Path, old: bytes, new: bytes) -> None:
    data = table.read_bytes()
    assert old in data
    table.write_bytes(data.replace(old, new))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert registry.load(AVX2, MACHINE, 2).entries == {}


def test_other_targets_and_threads_have_tables_of_their_own(table: Path) -> None:
    assert registry.load(AVX2, MACHINE, 1).entries == {}
    table.rename(registry.table_path(AVX2, 1))  # a copy under a wrong name is found out
    with pytest.warns(RuntimeWarning, match="2 threads; this is .* 1 threads"):
        assert registry.load(AVX2, MACHINE, 1).entries == {}
    assert registry.load(TARGETS["avx512"], MACHINE, 2).entries == {}


# --- measuring -------------------------------------------------------------------------------------------------------


def seconds(**factors: float) -> dict[str, list[float]]:
    """Fifteen rounds of a machine that drifts: each variant's time is ``factor`` times the default's, to 1 %."""
    rng = np.random.default_rng(1)
    drift = 1 + np.linspace(0, 0.3, 15)
    return {
        name.replace("__", "="): (drift * factor * rng.uniform(0.995, 1.005, 15)).tolist()
        for name, factor in {"default": 1.0, "a__1": 1.0, "b__2": 1.0, **factors}.items()
    } | {tune.AGAIN: (drift * rng.uniform(0.995, 1.005, 15)).tolist()}


def test_a_clear_winner_is_chosen_and_others_are_not() -> None:
    won = tune.choose(KEY, seconds(a__1=0.9, b__2=0.95), "today")
    assert (won.variant, won.best) == ("a=1", "a=1")
    assert won.gain[0] == pytest.approx(1 / 0.9, rel=0.01)
    for same in (seconds(), seconds(a__1=0.99), seconds(a__1=1.2, b__2=1.1)):
        kept = tune.choose(KEY, same, "today")
        assert kept.variant == "default"
        assert "did not win" in tune.why(kept)


def test_no_choice_where_the_default_differs_from_itself_as_much() -> None:
    noisy = seconds(a__1=0.95)
    rng = np.random.default_rng(2)
    noisy[tune.AGAIN] = [s * rng.uniform(0.7, 1.3) for s in noisy["default"]]
    assert tune.choose(KEY, noisy, "today").variant == "default"


def test_a_table_of_this_machine_is_used_by_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ai_engine import app
    from ai_engine.config import EngineConfig
    from ai_engine.kernels.cpu.backend import CpuKernels

    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path))
    registry.store(Registry([ENTRY]), build.host_target(), read_machine(), 1)
    kernels = app.build_kernels(EngineConfig(threads=1))
    assert isinstance(kernels, CpuKernels)
    try:
        assert kernels.choices.entries == {KEY: ENTRY}
    finally:
        kernels.close()
