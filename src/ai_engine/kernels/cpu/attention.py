"""The KV page layout and the attention kernel.

Owns where a key and a value lie in a page, and causal softmax attention over pages. Does not own who has which page (the
runtime's), nor the rotation and storing of k and v (elementwise's ``rope_store``, which asks this file for addresses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ai_engine.ports.kernels import KvShape

ELEMENT_BYTES = 2  # f16


@dataclass(frozen=True)
class KvLayout:
    """Where things lie in a KV page; all offsets and strides are bytes.

    A page holds ``page_tokens`` consecutive positions of one sequence, all layers: for each layer, for each kv head,
    one *head block* of V f16[page_tokens][head_dim] and then K f16[page_tokens / lanes][head_dim][lanes]. So one key
    vector register holds one dim of ``lanes`` consecutive positions, and one value register ``lanes`` dims of one
    position. V stands first so that a whole-register load at the end of a V row stays within the head block.

    Everything but ``lanes`` and ``ELEMENT_BYTES`` may be a run-time value in a kernel: the methods below are static
    and use only ``+``, ``*``, ``//`` and ``%`` (the latter two by ``lanes``, a power of two), so that they serve
    Python integers and values of the kernel language alike.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    lanes: int

    @staticmethod
    def of(shape: KvShape, lanes: int) -> KvLayout:
        assert shape.dtype == "f16", shape
        assert shape.page_tokens % 32 == 0, f"pages hold whole blocks of 32 positions, not {shape.page_tokens}"
        assert shape.head_dim % 8 == 0, shape
        return KvLayout(shape.num_layers, shape.kv_heads, shape.head_dim, shape.page_tokens, lanes)

    @property
    def head_bytes(self) -> int:
        return self.head_block_bytes(self.page_tokens, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @staticmethod
    def head_block_bytes(page_tokens: Any, head_dim: Any) -> Any:
        """Bytes of a head block; head block (layer, g) starts at ``(layer * kv_heads + g)`` times this in the page."""
        return page_tokens * head_dim * (2 * ELEMENT_BYTES)

    @staticmethod
    def v_offset(token: Any, head_dim: Any) -> Any:
        """Offset in the head block of the value row of the page's ``token``-th position; its dims are contiguous."""
        return token * head_dim * ELEMENT_BYTES

    @staticmethod
    def k_offset(token: Any, head_dim: Any, page_tokens: Any, lanes: int) -> Any:
        """Offset in the head block of dim 0 of the key of ``token``; dims are ``lanes * ELEMENT_BYTES`` apart."""
        group = token // lanes
        return (page_tokens + group * lanes) * head_dim * ELEMENT_BYTES + (token % lanes) * ELEMENT_BYTES
