"""Llama and what is built like it: Mistral, TinyLlama, SmolLM2.

Rope scaling lives in the tables (runtime/rope.py), the row order of GGUF files in the weights' parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ai_engine.ports.model import ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.models.common import ModelBuilder


def build(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    return ModelBuilder(config, tensors).pre_norm_layers()
