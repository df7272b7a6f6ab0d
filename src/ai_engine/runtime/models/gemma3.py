"""Gemma 3 (text): norms before and after each block, q and k norms, GELU, and two rope tables."""

from __future__ import annotations

from collections.abc import Mapping

from ai_engine.ports.model import ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.models.common import ModelBuilder


def build(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    b = ModelBuilder(config, tensors)
    x = b.embed()
    for b.layer in range(config.num_layers):
        table = "rope" if config.is_global(b.layer) or config.rope_base_local is None else "rope_local"
        h = b.attention(b.norm(x, "attn_norm"), qk_norm=True, rope_table=table)
        x = b.add(x, b.norm(h, "post_attention_norm"))
        h = b.feed_forward(b.norm(x, "ffn_norm"), "gelu_tanh")
        x = b.add(x, b.norm(h, "post_ffw_norm"))
    return b.head(x)
