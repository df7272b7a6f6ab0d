"""The formula of every op of the catalog (ports/kernels.py), in NumPy.

Owns what each op means; every other implementation is measured against it. Owns no memory: arrays in, arrays out, no
pages, no programs (backend.py). Everything but sampling is computed in float64 and returned as float32. Sampling is
defined to the bit, so that every implementation draws the same token: see ``choose``.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu.draw import EXP2_COEFFICIENTS, GOLDEN, GREEDY_BELOW, LOG2_E, MIN_EXPONENT, WEIGHT_ONE
from ai_engine.ports.sampling import MAX_LOGPROBS

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


def _f64(x: npt.NDArray[np.generic]) -> F64:
    return np.asarray(x, dtype=np.float64)


def _f32(x: npt.NDArray[np.generic]) -> F32:
    with np.errstate(over="ignore"):  # an overflow is an infinity, as on the machine
        return np.asarray(x, dtype=np.float32)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    wide = _f64(x)
    return _f32(wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps) * _f64(weight))


def rms_norm_add(y: F32, x: F32, weight: F32, eps: float) -> F32:
    """x + rms_norm(y)."""
    return _f32(_f64(x) + _f64(rms_norm(y, weight, eps)))


def matmul(x: F32, weight: F32, bias: F32 | None = None, out: F32 | None = None) -> F32:
    """x W^T (+ bias) (+ out): x [T, K], W [N, K]. Float64 sums; W is widened a few thousand rows at a time."""
    result = np.empty((x.shape[0], weight.shape[0]), np.float64)
    wide = _f64(x)
    for start in range(0, weight.shape[0], 4096):
        part = slice(start, start + 4096)
        result[:, part] = wide @ _f64(weight[part]).T
    if bias is not None:
        result += _f64(bias)
    if out is not None:
        result += _f64(out)
    return _f32(result)


def add(a: F32, b: F32) -> F32:
    return a + b


def embed(table: F32, scale: float) -> F32:
    """Rows already chosen by token id, times scale."""
    return _f32(_f64(table) * scale)


def rope(x: F32, table: F32) -> F32:
    """Rotate the pairs (i, i + n) of the leading 2n dims: x [T, heads, head_dim], table [T, n, 2] of (cos, sin)."""
    n = table.shape[1]
    cos, sin = _f64(table[:, None, :, 0]), _f64(table[:, None, :, 1])
    first, second = _f64(x[..., :n]), _f64(x[..., n : 2 * n])
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin, _f64(x[..., 2 * n :])], axis=-1)
    return _f32(rotated)


def attention(q: F32, k: F32, v: F32, positions: I32, scale: float, window: int = 0, first_key: int = 0) -> F32:
    """softmax(scale q K^T) V of one sequence: q [n, H, hd] at ``positions``; k, v [L, G, hd] from ``first_key`` on.

    A row sees keys at positions <= its own and, with a window w > 0, > its own - w.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    keys = first_key + np.arange(length)
    visible = np.asarray(keys[None, :] <= positions[:, None])
    if window > 0:
        visible &= keys[None, :] > positions[:, None] - window
    out = np.empty(q.shape, np.float64)
    for head in range(heads):
        g = head // (heads // kv_heads)
        scores = np.where(visible, scale * (_f64(q[:, head]) @ _f64(k[:, g]).T), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ _f64(v[:, g])
    return _f32(out.reshape(n, -1))


def quantize_kv(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Keys or values [..., head_dim] as int8 codes and one scale per row: scale = amax / 127, in float32 throughout.

    Both are 0 where amax < 1e-30; the scale is NaN where anything is not finite.
    """
    amax = np.abs(x).max(axis=-1)
    alive = (amax >= np.float32(1e-30)) & np.isfinite(amax)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=alive)
    scale = np.where(np.isfinite(amax), np.where(alive, amax / np.float32(127), np.float32(0)), np.float32(np.nan))
    with np.errstate(invalid="ignore"):
        q = np.where(alive[..., None], np.rint(x * inverse[..., None]), np.float32(0)).astype(np.int8)
    return q, np.asarray(scale, np.float32)


def silu(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1.0 + np.exp(-x)))


def gelu_tanh(x: F64) -> F64:
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))


def glu(x: F32, act: str, interleave: int) -> F32:
    """act(gate) * up of x [T, 2F]: halves (interleave 0), or gate and up alternate in runs of ``interleave``."""
    rows = x.shape[0]
    half = x.shape[1] // 2
    run = interleave or half
    pairs = _f64(x).reshape(rows, half // run, 2, run)  # a step that keeps no logits row has none here
    function = {"silu": silu, "gelu_tanh": gelu_tanh}[act]
    return _f32((function(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(rows, half))


# --- sampling: defined to the bit ------------------------------------------------------------------------------------

U64_MAX = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64_MAX
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64_MAX
    return x ^ (x >> 31)


def draw_bits(seed: int, position: int) -> int:
    """The 64 random bits of a draw: output number ``position`` of a splitmix64 generator in state mix64(seed + G)."""
    state = mix64((seed + GOLDEN) & U64_MAX)
    return mix64((state + (position + 1) * GOLDEN) & U64_MAX)


def integer_weights(z: F32, z_max: np.float32, temperature: np.float32) -> I64:
    """WEIGHT_ONE * exp((z - z_max) / temperature), rounded to an integer in [0, WEIGHT_ONE].

    Every step is one float32 operation without fused multiply-add, so every implementation gets the same integers.
    """
    one = np.float32(1)
    inverse = one / temperature
    u = np.maximum((z - z_max) * inverse, MIN_EXPONENT)
    t = u * LOG2_E
    n = np.floor(t + np.float32(0.5))
    f = t - n
    p = np.full_like(f, EXP2_COEFFICIENTS[-1])
    for c in EXP2_COEFFICIENTS[-2::-1]:
        p = p * f + c
    scaled = np.ldexp(p, n.astype(np.int32) + 30)
    return np.asarray((scaled + np.float32(0.5)).astype(np.int64))


def adjust(
    logits: F32,
    bias_token: I32,
    bias_value: F32,
    history_token: I32,
    history_count: I32,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
    mask: U32 | None,
) -> F32:
    """logits + bias, then penalties, then the mask; float32 throughout. Tokens within a list are distinct."""
    z = logits.copy()
    z[bias_token] = z[bias_token] + bias_value
    seen = z[history_token]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    in_output = history_count > 0
    z[history_token] = np.where(in_output, (seen - presence) - frequency * history_count.astype(np.float32), seen)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: z.size].astype(bool)
        z = np.where(allowed, z, np.float32(-np.inf))
    return z


def choose(
    z: F32,
    temperature: np.float32,
    top_k: int,
    top_p: np.float32,
    min_p: np.float32,
    seed: int,
    position: int,
) -> int:
    """The token drawn from adjusted logits; -1 where there is none to draw.

    Greedy takes the largest z, the lowest id where several are equal. Otherwise every token gets an integer weight
    and the order is (weight falling, id rising). ``top_k`` keeps the first k; ``top_p`` keeps a token while the sum of
    the weights before it is < top_p * (sum of what top_k kept), and always the first; ``min_p`` keeps weights
    >= min_p * WEIGHT_ONE. Then r = floor(draw_bits * total / 2**64) with the total of the kept weights, and the token
    drawn is the first by id whose running sum of kept weights exceeds r. All of it is integer arithmetic, so no order
    of summation matters.
    """
    z_max = z.max()
    if not np.isfinite(z_max):
        return -1
    if temperature < GREEDY_BELOW:
        return int(np.argmax(z))
    with np.errstate(over="ignore", invalid="ignore"):
        weights = integer_weights(z, z_max, temperature)
    order = np.lexsort((np.arange(z.size), -weights))
    if 0 < top_k < z.size:
        order = order[:top_k]
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        need = max(1, math.ceil(float(top_p) * float(weights[order].sum())))
        order = order[before < need]
    if min_p > 0:
        order = order[weights[order] >= math.ceil(float(min_p) * WEIGHT_ONE)]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    running = np.cumsum(kept)
    r = (draw_bits(seed, position) * int(running[-1])) >> 64
    return int(np.searchsorted(running, r, side="right"))


def logprobs(logits: F32, tokens: I32) -> F32:
    """log softmax of one row at ``tokens``."""
    wide = _f64(logits)
    top = wide.max()
    return _f32(wide[tokens] - top - math.log(np.exp(wide - top).sum()))


def best(logits: F32, count: int) -> I32:
    """The ``count`` best tokens of a row: largest logit first, lowest id first among equals; none that is -inf."""
    order = np.argsort(-logits, kind="stable")[:count]
    return order[logits[order] > -np.inf].astype(np.int32)


NO_TOKEN = -1
"""Reported for a row with no answer (a NaN or +infinite logit, or nothing allowed), and in unused ``top_token``s."""


def sample_row(
    logits: F32,
    *,
    bias_token: I32,
    bias_value: F32,
    history_token: I32,
    history_count: I32,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
    mask: U32 | None,
    temperature: np.float32,
    top_k: int,
    top_p: np.float32,
    min_p: np.float32,
    seed: int,
    position: int,
    forced: int,
    num_top: int,
) -> tuple[int, float, I32, F32]:
    """(token, logprob, top_token[MAX_LOGPROBS], top_logprob[MAX_LOGPROBS]) of one row of logits.

    A NaN or +inf anywhere in the row flags it: token NO_TOKEN. Logprobs are 0 where they were not asked for.
    """
    top_token, top_logprob = np.full(MAX_LOGPROBS, NO_TOKEN, np.int32), np.zeros(MAX_LOGPROBS, np.float32)
    if np.isnan(logits).any() or np.isposinf(logits).any() or np.isneginf(logits).all():
        return NO_TOKEN, 0.0, top_token, top_logprob
    if forced >= 0:
        token = forced
    else:
        z = adjust(logits, bias_token, bias_value, history_token, history_count, repetition, presence, frequency, mask)
        token = choose(z, temperature, top_k, top_p, min_p, seed, position)
    if num_top < 0 or token < 0:
        return token, 0.0, top_token, top_logprob
    first = best(logits, min(num_top, MAX_LOGPROBS))
    top_token[: first.size], top_logprob[: first.size] = first, logprobs(logits, first)
    return token, float(logprobs(logits, np.array([token], np.int32))[0]), top_token, top_logprob
