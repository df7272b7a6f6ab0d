"""Tiny random models of every architecture: the engine against transformers' float32 logits, safetensors and GGUF.

Also every quantised type inside a whole model, against the float64 forward of its dequantised weights, and equal bits
whatever the chunk size and the number of threads. The reference itself is checked first, and so is that each feature
of a model shows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.golden import engine, tiny_gguf
from tests.golden.reference import Config, Reference, config_from_gguf

F32 = NDArray[np.float32]

NAMES = sorted(folder.name for folder in tiny_gguf.TINY.iterdir() if folder.is_dir())
GGUF_NAMES = [name for name in NAMES if name != "gemma3-layer-types"]  # GGUF cannot say these layer_types

KERNELS: list[engine.KernelsName] = ["cpu", "reference"]

TOLERANCE = 1e-3
"""Absolute, on logits with a standard deviation of 1. K and V rounded to float16 cost up to half of it."""


def golden(name: str) -> tuple[list[int], F32]:
    with np.load(tiny_gguf.TINY / name / "golden.npz") as arrays:
        ids: list[int] = arrays["input_ids"].tolist()
        logits: F32 = arrays["logits"]
    assert 0.9 < logits.std() < 1.1
    return ids, logits


def reference_logits(name: str, **changes: Any) -> NDArray[np.float64]:
    """The float64 forward of a tiny model; `changes` replace fields of its Config."""
    folder = tiny_gguf.TINY / name
    hf = tiny_gguf.read_config(folder)
    config: Config = dataclasses.replace(tiny_gguf.config_from_hf(hf), **changes)
    reference = Reference(config, tiny_gguf.tensors_from_hf(hf, tiny_gguf.read_safetensors(folder)))
    return reference.logits(reference.hidden(golden(name)[0]))


def test_every_architecture_is_there() -> None:
    kinds = {tiny_gguf.read_config(tiny_gguf.TINY / name)["model_type"] for name in NAMES}
    assert kinds == {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}


@pytest.mark.parametrize("name", NAMES)
def test_reference_agrees_with_transformers(name: str) -> None:
    assert np.abs(reference_logits(name) - golden(name)[1]).max() < 2e-5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-tied", {"rope_interleaved": False}),
        ("llama3-rope", {"rope_base": 10000.0}),
        ("mistral-window", {"window": 25}),
        ("mistral-window", {"window": None}),
        ("qwen2-tied", {"rope_interleaved": True}),
        ("qwen3-untied", {"rope_base": 500000.0}),
        ("gemma3-bf16", {"rope_base": 10000.0}),
        ("gemma3-bf16", {"rope_base_local": 1000000.0}),
        ("gemma3-bf16", {"local_layers": (True,) * 7}),
        ("gemma3-bf16", {"window": 23}),
        ("gemma3-layer-types", {"local_layers": ()}),
        ("gemma3-bf16", {"architecture": "qwen3"}),
    ],
)
def test_a_wrong_model_is_found_out(name: str, changes: dict[str, Any]) -> None:
    """What an engine could get wrong moves the logits by far more than the tolerance."""
    assert np.abs(reference_logits(name, **changes) - golden(name)[1]).max() > 20 * TOLERANCE


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_safetensors(name: str, kernels: engine.KernelsName) -> None:
    ids, expected = golden(name)
    got = engine.teacher_forced_logits(tiny_gguf.TINY / name, ids, kernels=kernels)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", GGUF_NAMES)
def test_gguf(name: str, kernels: engine.KernelsName, tmp_path: Path) -> None:
    ids, expected = golden(name)
    tiny_gguf.write_tiny(name, tmp_path / "model.gguf")
    got = engine.teacher_forced_logits(tmp_path / "model.gguf", ids, kernels=kernels)
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_equal_bits_in_any_chunks_and_threads(name: str) -> None:
    ids, _ = golden(name)
    path = tiny_gguf.TINY / name
    expected = engine.teacher_forced_logits(path, ids, threads=1, chunk=512)
    for threads, chunk in ((1, 1), (2, 7), (2, 13), (2, 512)):
        got = engine.teacher_forced_logits(path, ids, threads=threads, chunk=chunk)
        assert np.array_equal(got, expected), (threads, chunk)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("type_name", list(tiny_gguf.TYPES))
def test_stored_types(type_name: str, architecture: str, kernels: engine.KernelsName, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf.write_random(path, type_name, architecture)
    file = tiny_gguf.read_gguf(path)
    assert file.tensors["blk.0.ffn_down.weight"].type_name == type_name
    ids = np.random.default_rng(1).integers(0, 301, 41).tolist()
    reference = Reference(config_from_gguf(file.metadata), file.tensors)
    expected = reference.logits(reference.hidden(ids))
    error = engine.teacher_forced_logits(path, ids, chunk=17, kernels=kernels) - expected
    # Activations rounded to 8 bits per 32 cost 1 to 2.5 % of the spread; a scale, minimum or bit in the wrong place
    # costs 20 % and more.
    share = 0.001 if type_name in ("F32", "F16", "BF16") else 0.04
    assert np.sqrt(np.mean(error**2)) < share * expected.std()
