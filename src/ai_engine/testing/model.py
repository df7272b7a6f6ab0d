"""A model file of random weights for any ModelConfig. Owns no file; tensors are made when read, the same each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ai_engine.ports.model import DType, ModelConfig, TensorInfo, TokenizerData, row_bytes


def _shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "token_embd.weight", (c.vocab_size, c.hidden)
    yield "output_norm.weight", (c.hidden,)
    if not c.tied_head:
        yield "output.weight", (c.vocab_size, c.hidden)
    for layer in range(c.num_layers):
        blk = f"blk.{layer}."
        for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
            yield f"{blk}{name}.weight", (rows, c.hidden)
            if c.arch == "qwen2":
                yield f"{blk}{name}.bias", (rows,)
        yield blk + "attn_output.weight", (c.hidden, q_rows)
        yield blk + "ffn_gate.weight", (c.ffn, c.hidden)
        yield blk + "ffn_up.weight", (c.ffn, c.hidden)
        yield blk + "ffn_down.weight", (c.hidden, c.ffn)
        norms = {"attn_norm": c.hidden, "ffn_norm": c.hidden}
        if c.arch in ("qwen3", "gemma3"):
            norms |= {"attn_q_norm": c.head_dim, "attn_k_norm": c.head_dim}
        if c.arch == "gemma3":
            norms |= {"post_attention_norm": c.hidden, "post_ffw_norm": c.hidden}
        for name, size in norms.items():
            yield f"{blk}{name}.weight", (size,)


class RandomModel:
    """Implements ports.model.ModelFile. Matrices are normal with deviation cols ** -0.5 in ``dtype`` (F32, F16, BF16
    or Q8_0); vectors are F32: norms near 1, biases near 0."""

    def __init__(self, config: ModelConfig, *, dtype: DType = DType.F32, seed: int = 0) -> None:
        assert dtype in (DType.F32, DType.F16, DType.BF16, DType.Q8_0), dtype
        self._config = config
        self._seed = seed
        self._tensors: dict[str, TensorInfo] = {}
        for name, shape in _shapes(config):
            kind = dtype if len(shape) == 2 else DType.F32
            rows = shape[0] if len(shape) == 2 else 1
            self._tensors[name] = TensorInfo(name, kind, shape, rows * row_bytes(kind, shape[-1]))

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {"general.architecture": self._config.arch, "general.name": self._config.name}

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._tensors.values())

    def tokenizer(self) -> TokenizerData:
        tokens = [f"<0x{i:02X}>" for i in range(min(256, self._config.vocab_size))]
        tokens += [f"<t{i}>" for i in range(len(tokens), self._config.vocab_size)]
        return TokenizerData(kind="llama", tokens=tokens, scores=[0.0] * len(tokens), eos_ids=[len(tokens) - 1])

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor before it is stored, f32 of its shape."""
        info = self._tensors[name]
        rng = np.random.default_rng([self._seed, crc32(name.encode())])
        noise = rng.standard_normal(info.shape, dtype=np.float32)
        if len(info.shape) == 2:
            return noise * np.float32(info.shape[1] ** -0.5)
        return noise * np.float32(0.02) + np.float32(name.endswith("norm.weight"))

    def read(self, name: str, row_start: int = 0, row_end: int | None = None) -> npt.NDArray[np.uint8]:
        info = self._tensors[name]
        return _store(np.atleast_2d(self.values(name))[row_start:row_end], info.dtype)

    def drop(self, name: str) -> None:
        assert name in self._tensors, name

    def close(self) -> None:
        return


def _store(x: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.uint8]:
    rows, cols = x.shape
    if dtype is DType.F32:
        return np.ascontiguousarray(x).view(np.uint8)
    if dtype is DType.F16:
        return x.astype(np.float16).view(np.uint8)
    if dtype is DType.BF16:
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = x.reshape(rows, cols // 32, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    quants = np.clip(np.rint(blocks / divisor), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=-1).reshape(rows, -1)
