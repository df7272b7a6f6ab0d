"""Row order at load: what lies in the arena is the file's rows, reordered and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from ai_engine.kernels.reference.backend import ReferenceKernels
from ai_engine.ports.kernels import U8
from ai_engine.ports.model import DType, ModelConfig, RopeScaling
from ai_engine.runtime import weights as loader
from ai_engine.runtime.ir import Part, Weight
from ai_engine.runtime.models import build_graph
from ai_engine.runtime.passes import compile_graph
from ai_engine.runtime.rope import frequencies, scaled, table
from ai_engine.runtime.weights import arena_offsets, load_weights, row_order, vector_f32
from ai_engine.testing.model import RandomModel
from tests.unit.runtime.support import config


def test_rope_rows_become_halves() -> None:
    weight = Weight("w", DType.F32, 12, 4, (Part("a", 8, 4), Part("b", 4)))
    which, rows = row_order(weight)
    assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 0, 1, 2, 3]
    assert which.tolist() == [0] * 8 + [1] * 4


def test_gate_and_up_rows_alternate_in_runs() -> None:
    weight = Weight("w", DType.F32, 8, 4, (Part("gate", 4), Part("up", 4)), interleave=2)
    which, rows = row_order(weight)
    assert rows.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert which.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


class Recording(RandomModel):
    """Notes what is read and dropped."""

    def __init__(self, model: ModelConfig, dtype: DType) -> None:
        super().__init__(model, dtype=dtype)
        self.dropped: list[str] = []
        self.largest = 0

    def read(self, name: str, row_start: int = 0, row_end: int | None = None) -> U8:
        raw = super().read(name, row_start, row_end)
        self.largest = max(self.largest, raw.nbytes)
        return raw

    def drop(self, name: str) -> None:
        self.dropped.append(name)


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.BF16])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_load(dtype: DType, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", chunk_bytes)
    model = config(arch="qwen2", norm_offset=1.0)
    file, kernels = Recording(model, dtype), ReferenceKernels()
    graph = compile_graph(build_graph(model, file.tensors))
    offsets, total = arena_offsets(graph.weights, kernels.packed_bytes)
    assert all(offset % loader.ALIGN_BYTES == 0 for offset in offsets.values())
    seen: list[float] = []
    loaded = load_weights(graph.weights, file, kernels, np.zeros(total, np.uint8), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert set(file.dropped) == set(file.tensors)
    for name, weight in graph.weights.items():
        spec, packed = loaded[name]
        assert spec == weight.spec
        which, rows = row_order(weight)
        if weight.rows == 1:
            parts = [vector_f32(file, part.tensor) for part in weight.parts]
            expected = np.array([parts[w][r] for w, r in zip(which, rows, strict=True)]) + np.float32(weight.offset)
            assert np.array_equal(packed.view(np.float32), expected)
            assert weight.offset == (1.0 if "norm" in name else 0.0)
        else:
            raws = [file.read(part.tensor) for part in weight.parts]
            expected = np.stack([raws[w][r] for w, r in zip(which, rows, strict=True)])
            assert np.array_equal(packed.reshape(weight.rows, -1), expected)


def test_rope_scaling() -> None:
    freq = frequencies(10000.0, 8)
    assert np.allclose(freq, [1, 0.1, 0.01, 0.001])
    assert np.allclose(scaled(freq, RopeScaling(kind="linear", factor=4.0)), freq / 4)
    llama3 = scaled(freq, RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_context=1024))  # fmt: skip
    assert np.allclose(llama3[:2], freq[:2]), "short waves stay"
    assert np.isclose(llama3[3], freq[3] / 8), "long waves are stretched"
    assert freq[2] / 8 < llama3[2] < freq[2]


def test_rope_table_is_exact_far_out() -> None:
    angles = table(frequencies(10000.0, 4), 100_001)[100_000]
    exact = 100_000 * np.array([1.0, 0.01])
    assert np.allclose(angles, np.stack([np.cos(exact), np.sin(exact)], -1), atol=1e-7)
