"""The float64 forward pass that the engine and llama.cpp are both measured against.

Owns the arithmetic of llama, mistral, qwen2, qwen3 and gemma3 written out plainly in NumPy, and the comparison of two
rows of logits. It takes a `Config` and a mapping from GGUF tensor names to float arrays with rows = outputs, and
knows nothing of files, kernels or caches. Only the output head is worked in pieces, as Gemma's has 262,144 rows.

Conventions are GGUF's: a norm's weight multiplies as stored (Gemma's 1 + w is already folded in), and llama's q and k
rows are permuted so that rope turns neighbouring pairs (2i, 2i+1); the other architectures turn the halves (i, i +
d/2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


class Matrix(Protocol):
    """A weight of shape [rows, columns] whose rows can be read in pieces; a plain array is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, key: Any, /) -> Any: ...


Weights = Mapping[str, Matrix]


@dataclass(frozen=True)
class Config:
    """What the forward pass needs to know about a model."""

    architecture: str  # llama (mistral too), qwen2, qwen3, gemma3
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_base: float
    rope_base_local: float = 10000.0  # for the layers with a window (gemma3)
    rope_interleaved: bool = False  # pairs (2i, 2i+1) instead of (i, i + d/2)
    rope_linear_factor: float = 1.0  # positions of the global layers are divided by it
    window: int | None = None  # a position sees itself and the window - 1 before it
    local_layers: tuple[bool, ...] = ()  # which layers have the window; () means all or none, as `window` says
    query_scale: float | None = None  # None: 1/sqrt(head_dim)

    def is_local(self, layer: int) -> bool:
        if self.window is None:
            return False
        return self.local_layers[layer] if self.local_layers else True


def config_from_gguf(metadata: Mapping[str, Any]) -> Config:
    """The `Config` of a GGUF file's key-value pairs."""
    arch = str(metadata["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise KeyError(f"{arch}.{key}")
        return value

    num_layers, hidden, num_heads = (
        int(get("block_count")),
        int(get("embedding_length")),
        int(get("attention.head_count")),
    )
    window = int(get("attention.sliding_window", 0)) or None
    local: tuple[bool, ...] = ()
    if arch == "gemma3":  # five layers with a window, then one without
        local = tuple(layer % 6 != 5 for layer in range(num_layers))
    elif arch != "llama":
        window = None
    head_dim = int(get("attention.key_length", hidden // num_heads))
    factor = float(get("rope.scaling.factor", 1.0)) if get("rope.scaling.type", "none") == "linear" else 1.0
    return Config(
        architecture=arch,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_base=float(get("rope.freq_base", 1000000.0 if arch == "gemma3" else 10000.0)),
        rope_interleaved=arch == "llama",
        rope_linear_factor=factor,
        window=window,
        local_layers=local,
    )


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    out: F64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return out


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: F64 = e / e.sum(axis=-1, keepdims=True)
    return out


def silu(x: F64) -> F64:
    out: F64 = x / (1.0 + np.exp(-x))
    return out


def gelu_tanh(x: F64) -> F64:
    out: F64 = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return out


def rope(x: F64, positions: F64, base: float, interleaved: bool, divisors: F64 | None) -> F64:
    """Turns each pair of x [n, heads, d] by position * base^(-2i/d) / divisors[i]."""
    half = x.shape[-1] // 2
    frequency = base ** (-np.arange(half, dtype=np.float64) / half)
    if divisors is not None:
        frequency = frequency / divisors
    angle = positions[:, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = np.empty_like(x)
    a, b = first * cos - second * sin, first * sin + second * cos
    if interleaved:
        out[..., 0::2], out[..., 1::2] = a, b
    else:
        out[..., :half], out[..., half:] = a, b
    return out


def attention(q: F64, k: F64, v: F64, scale: float, window: int | None) -> F64:
    """Causal attention of q [n, heads, d] over k, v [n, kv_heads, d]; heads share k and v in groups."""
    n, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    out = np.empty_like(q)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T * scale
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, head // group]
    return out


class Reference:
    """A model's forward pass over whole token sequences."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    def _weight(self, name: str) -> F64:
        return np.asarray(self.weights[name][:], dtype=np.float64)

    def _linear(self, x: F64, name: str) -> F64:
        out: F64 = x @ self._weight(f"{name}.weight").T
        if f"{name}.bias" in self.weights:
            out = out + self._weight(f"{name}.bias")
        return out

    def _norm(self, x: F64, name: str) -> F64:
        return rms_norm(x, self._weight(f"{name}.weight"), self.config.norm_eps)

    def hidden(self, ids: NDArray[np.integer[Any]] | list[int]) -> F64:
        """The normed last hidden states [n, hidden] of a sequence that starts at position 0."""
        c = self.config
        gemma = c.architecture == "gemma3"
        embedding = self.weights["token_embd.weight"]
        x: F64 = np.stack([np.asarray(embedding[int(i)], dtype=np.float64) for i in ids])
        if gemma:
            x = x * math.sqrt(c.hidden)
        n = x.shape[0]
        positions = np.arange(n, dtype=np.float64)
        divisors = self._weight("rope_freqs.weight") if "rope_freqs.weight" in self.weights else None
        scale = c.query_scale if c.query_scale is not None else 1.0 / math.sqrt(c.head_dim)

        for layer in range(c.num_layers):
            block = f"blk.{layer}"
            local = c.is_local(layer)

            h = self._norm(x, f"{block}.attn_norm")
            q = self._linear(h, f"{block}.attn_q").reshape(n, c.num_heads, c.head_dim)
            k = self._linear(h, f"{block}.attn_k").reshape(n, c.num_kv_heads, c.head_dim)
            v = self._linear(h, f"{block}.attn_v").reshape(n, c.num_kv_heads, c.head_dim)
            if c.architecture in ("qwen3", "gemma3"):
                q, k = self._norm(q, f"{block}.attn_q_norm"), self._norm(k, f"{block}.attn_k_norm")
            base = c.rope_base_local if gemma and local else c.rope_base
            at = positions if local else positions / c.rope_linear_factor
            q = rope(q, at, base, c.rope_interleaved, divisors)
            k = rope(k, at, base, c.rope_interleaved, divisors)
            h = attention(q, k, v, scale, c.window if local else None).reshape(n, -1)
            h = self._linear(h, f"{block}.attn_output")
            x = x + (self._norm(h, f"{block}.post_attention_norm") if gemma else h)

            h = self._norm(x, f"{block}.ffn_norm")
            gate = self._linear(h, f"{block}.ffn_gate")
            h = (gelu_tanh(gate) if gemma else silu(gate)) * self._linear(h, f"{block}.ffn_up")
            h = self._linear(h, f"{block}.ffn_down")
            x = x + (self._norm(h, f"{block}.post_ffw_norm") if gemma else h)

        return self._norm(x, "output_norm")

    def logits(self, hidden: F64, rows_at_once: int = 16384) -> F64:
        """The logits [n, vocab] of normed hidden states; the head is read `rows_at_once` rows at a time."""
        head = self.weights["output.weight" if "output.weight" in self.weights else "token_embd.weight"]
        vocab = head.shape[0]
        out = np.empty((hidden.shape[0], vocab), dtype=np.float64)
        for start in range(0, vocab, rows_at_once):
            rows = np.asarray(head[start : start + rows_at_once], dtype=np.float64)
            out[:, start : start + rows.shape[0]] = hidden @ rows.T
        return out

    def logits_in_batches(self, hidden: F64, positions_at_once: int = 64) -> Iterator[tuple[slice, F64]]:
        """Yields (which positions, their logits), so that a long document's logits are never all in memory."""
        for start in range(0, hidden.shape[0], positions_at_once):
            part = slice(start, min(start + positions_at_once, hidden.shape[0]))
            yield part, self.logits(hidden[part])


def log_softmax(x: F64) -> F64:
    shifted = x - x.max(axis=-1, keepdims=True)
    out: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def kl_divergence(reference: NDArray[Any], other: NDArray[Any]) -> F64:
    """KL(reference || other) in nats at temperature 1 for each row of two arrays of logits."""
    p = log_softmax(np.asarray(reference, dtype=np.float64))
    out: F64 = np.sum(np.exp(p) * (p - log_softmax(np.asarray(other, dtype=np.float64))), axis=-1)
    return out


def top1(logits: NDArray[Any]) -> NDArray[np.int32]:
    """The most likely id of each row; the lowest one where several are equal."""
    out: NDArray[np.int32] = np.argmax(logits, axis=-1).astype(np.int32)
    return out
