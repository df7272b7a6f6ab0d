"""Writes a random-weight Llama of any size as GGUF, streaming, in a second or two per GB; for measurements only.

    python -m bench.random_model /path/to/big.gguf [--layers 24]

The defaults are a 1.5-billion-parameter model in the types that Q4_K_M files use. Blocks are random bytes with sane
scales, so the arithmetic is real and the text is noise.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.ports.model import BLOCK, SCALE_OFFSETS, DType, row_bytes

GGML_TYPE = {DType.F32: 0, DType.Q4_K: 12, DType.Q6_K: 14}
ALIGN = 32
CHUNK_ROWS = 4096


def tensors(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
    """Name, type and shape (rows, cols) of every tensor; types as Q4_K_M mixes them."""
    head_dim = hidden // heads
    yield "token_embd.weight", DType.Q4_K, (vocab, hidden)
    yield "output_norm.weight", DType.F32, (hidden,)
    yield "output.weight", DType.Q6_K, (vocab, hidden)
    for layer in range(layers):
        finer = DType.Q6_K if layer < layers // 8 or layer >= 7 * layers // 8 or layer % 3 == 2 else DType.Q4_K
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", DType.F32, (hidden,)
        yield blk + "attn_q.weight", DType.Q4_K, (heads * head_dim, hidden)
        yield blk + "attn_k.weight", DType.Q4_K, (kv_heads * head_dim, hidden)
        yield blk + "attn_v.weight", finer, (kv_heads * head_dim, hidden)
        yield blk + "attn_output.weight", DType.Q4_K, (hidden, heads * head_dim)
        yield blk + "ffn_norm.weight", DType.F32, (hidden,)
        yield blk + "ffn_gate.weight", DType.Q4_K, (ffn, hidden)
        yield blk + "ffn_up.weight", DType.Q4_K, (ffn, hidden)
        yield blk + "ffn_down.weight", finer, (hidden, ffn)


def metadata(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int) -> dict[str, Any]:
    byte_chars = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    byte_chars += [chr(256 + i) for i in range(256 - len(byte_chars))]
    words = [*byte_chars, "he"] + [f"<w{i}>" for i in range(vocab - 259)] + ["<|begin|>", "<|end|>"]
    return {
        "general.architecture": "llama",
        "general.name": "random-llama",
        "llama.embedding_length": hidden,
        "llama.block_count": layers,
        "llama.feed_forward_length": ffn,
        "llama.context_length": context,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * (vocab - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": vocab - 2,
        "tokenizer.ggml.eos_token_id": vocab - 1,
    }


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind = 8 if not value or isinstance(value[0], str) else 5
    items = b"".join(map(_string, value)) if kind == 8 else struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def _rows(dtype: DType, rows: int, cols: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    if dtype is DType.F32:
        return np.ones((rows, cols), np.float32).view(np.uint8)
    raw = rng.integers(0, 256, (rows, row_bytes(dtype, cols)), np.uint8)
    blocks = raw.reshape(rows, -1, BLOCK[dtype][1])
    scale = np.frombuffer(np.float16(0.02 / cols**0.5 / 8).tobytes(), np.uint8)
    for at in SCALE_OFFSETS[dtype]:
        blocks[:, :, at : at + 2] = scale
    return raw


def write(path: Path, *, hidden: int = 2048, layers: int = 24, heads: int = 16, kv_heads: int = 4, ffn: int = 8192,
          vocab: int = 32000, context: int = 16384, seed: int = 0) -> int:  # fmt: skip
    """Writes the file and returns the number of parameters."""
    rng = np.random.default_rng(seed)
    listed = list(tensors(hidden, layers, heads, kv_heads, ffn, vocab))
    keys = metadata(hidden, layers, heads, kv_heads, ffn, vocab, context)
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys)))
    for key, value in keys.items():
        head += _string(key) + _value(value)
    at = 0
    for name, dtype, shape in listed:
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", GGML_TYPE[dtype], at)
        nbytes = (shape[0] if len(shape) == 2 else 1) * row_bytes(dtype, shape[-1])
        at += nbytes + -nbytes % ALIGN
    head += bytes(-len(head) % ALIGN)
    with path.open("wb") as out:
        out.write(head)
        for _, dtype, shape in listed:
            rows = shape[0] if len(shape) == 2 else 1
            for first in range(0, rows, CHUNK_ROWS):
                out.write(_rows(dtype, min(CHUNK_ROWS, rows - first), shape[-1], rng).tobytes())
            out.write(bytes(-out.tell() % ALIGN))
    return sum(int(np.prod(shape)) for _, _, shape in listed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    count = write(args.path, layers=args.layers)
    sys.stdout.write(f"{args.path}: {count / 1e9:.2f} billion parameters, {args.path.stat().st_size / 1e6:.0f} MB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
