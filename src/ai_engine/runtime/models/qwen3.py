"""Qwen3: the plain decoder with an RMS norm of each q and k head before rope."""

from __future__ import annotations

from collections.abc import Mapping

from ai_engine.ports.model import ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.models.common import ModelBuilder


def build(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    return ModelBuilder(config, tensors).pre_norm_layers(qk_norm=True)
