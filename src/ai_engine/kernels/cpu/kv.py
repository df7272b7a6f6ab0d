"""The KV page: where a key and a value lie, as f16 or int8, and how a row is stored there.

Owns `KvElement` (how one number is kept), `KvLayout` (offsets in a page) and `emit_store` (a position's key and value
into their page). Does not own who has which page (the runtime's), the rotation before (elementwise.py) nor what is
computed from them (attention.py).

int8 keeps a key or a value of one head and position as head_dim codes and one f32 scale: scale = amax / 127, code =
round-half-even(x * (127 / amax)), so x is within scale / 2; both 0 where amax < 1e-30. A scale depends on its own
position and head alone, so neither chunking nor company changes a bit. NaN and infinities make the scale NaN: they show
in the logits, as with f16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ai_engine.kernels.cpu.lang import Array, Kernel, Target, Value
from ai_engine.ports.kernels import KvShape


@dataclass(frozen=True)
class KvElement:
    """How one number of a key or value is kept, and what follows for offsets in a head block, in bytes.

    Methods use only ``+``, ``*``, ``//`` and ``%`` (the latter two by ``lanes``, a power of two), so that they serve
    Python integers and values of the kernel language alike.
    """

    name: str
    nbytes: int
    has_scale: bool

    @property
    def suffix(self) -> str:
        """Of kernels' names."""
        return "_int8" if self.has_scale else ""

    def head_block_bytes(self, page_tokens: Any, head_dim: Any) -> Any:
        """Bytes of a head block; head block (layer, g) starts at ``(layer * kv_heads + g)`` times this in the page."""
        each = head_dim * (2 * self.nbytes)
        return page_tokens * (each + 8 if self.has_scale else each)

    def v_offset(self, token: Any, head_dim: Any) -> Any:
        """Of the value row of the page's ``token``-th position; its dims are contiguous."""
        return token * head_dim * self.nbytes

    def k_offset(self, token: Any, head_dim: Any, page_tokens: Any, lanes: int) -> Any:
        """Of dim 0 of the key of ``token``; dims are ``lanes * nbytes`` apart."""
        group = token // lanes
        return (page_tokens + group * lanes) * head_dim * self.nbytes + (token % lanes) * self.nbytes

    def v_scale_offset(self, token: Any, head_dim: Any, page_tokens: Any) -> Any:
        return page_tokens * head_dim * (2 * self.nbytes) + token * 4

    def k_scale_offset(self, token: Any, head_dim: Any, page_tokens: Any) -> Any:
        return self.v_scale_offset(token + page_tokens, head_dim, page_tokens)

    def load(self, k: Kernel, ptr: Value, lanes: int) -> Value:
        """f32 vector; without the scale."""
        return (k.load(ptr, "i8", lanes).sext("i32") if self.has_scale else k.load(ptr, "f16", lanes)).to_f32()


F16 = KvElement("f16", 2, False)
INT8 = KvElement("int8", 1, True)
ELEMENTS = {element.name: element for element in (F16, INT8)}


@dataclass(frozen=True)
class KvLayout:
    """Where things lie in a KV page; all offsets and strides are bytes.

    A page holds ``page_tokens`` consecutive positions of one sequence, all layers: for each layer, for each kv head,
    one *head block* of V [page_tokens][head_dim], then K [page_tokens / lanes][head_dim][lanes], then, of int8, the
    f32 scales of V [page_tokens] and K [page_tokens]. So one key vector register holds one dim of ``lanes``
    consecutive positions, and one value register ``lanes`` dims of one position. V stands first so that a
    whole-register load at the end of a V row stays within the head block.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    lanes: int
    element: KvElement

    @staticmethod
    def of(shape: KvShape, lanes: int) -> KvLayout:
        assert shape.page_tokens % 32 == 0, f"pages hold whole blocks of 32 positions, not {shape.page_tokens}"
        assert shape.head_dim % 8 == 0, shape
        element = ELEMENTS[shape.dtype]
        return KvLayout(shape.num_layers, shape.kv_heads, shape.head_dim, shape.page_tokens, lanes, element)

    @property
    def head_bytes(self) -> int:
        return int(self.element.head_block_bytes(self.page_tokens, self.head_dim))

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


def kv_lanes(target: Target) -> int:
    """Positions in one key register: KvLayout's ``lanes`` for a target."""
    return max(8, target.lanes)


def emit_store(
    k: Kernel, e: KvElement, block: Value, token: Value, key: Array, value: Array, head_dim: Value, page_tokens: Value
) -> None:
    """A position's key and value, f32[head_dim], into the head block at ``block``."""
    lanes = kv_lanes(k.target)
    keys = block + e.k_offset(token, head_dim, page_tokens, lanes)
    values = block + e.v_offset(token, head_dim)
    code = "i8" if e.has_scale else "f16"

    def store(x: Array, scale_at: Value, put: Any) -> None:
        if not e.has_scale:
            with k.loop(0, head_dim, 8) as i:
                put(i, x.load(i, 8).to_f16())
            return
        scale, inverse = _scale(k, x, head_dim)
        k.store(block + scale_at, scale)
        with k.loop(0, head_dim, 8) as i:
            put(i, k.round_i32(x.load(i, 8) * inverse).trunc("i8"))

    def put_key(i: Value, codes: Value) -> None:
        for lane in range(8):
            k.array(keys, code)[(i + lane) * lanes] = codes[lane]

    store(key, e.k_scale_offset(token, head_dim, page_tokens), put_key)
    store(value, e.v_scale_offset(token, head_dim, page_tokens), lambda i, codes: k.array(values, code).store(i, codes))


def _scale(k: Kernel, x: Array, head_dim: Value) -> tuple[Value, Value]:
    """(scale, 127 / amax) of a row."""
    amax, odd = k.var(k.f32(0, 8)), k.var(k.f32(0, 8))
    with k.loop(0, head_dim, 8) as i:
        here = x.load(i, 8)
        amax.v = k.max(k.abs(here), amax.v)
        odd.v = odd.v + here * 0.0  # NaN where anything is not finite
    top = k.reduce_max(amax.v)
    alive = top >= 1e-30
    scale = k.select(alive, top / 127.0, 0.0) + k.reduce_add(odd.v)
    return scale, k.select(alive, k.f32(127.0) / top, 0.0)
