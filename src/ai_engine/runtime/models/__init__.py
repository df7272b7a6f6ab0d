"""Which architectures run, and how to get the graph of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ai_engine.ports.errors import UnsupportedModel
from ai_engine.ports.model import ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.models import gemma3, llama, qwen2, qwen3

Builder = Callable[[ModelConfig, Mapping[str, TensorInfo]], Graph]

BUILDERS: Final[dict[str, Builder]] = {
    "llama": llama.build,
    "gemma3": gemma3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def build_graph(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    """The model's graph at stage "model". Raises UnsupportedModel for an architecture or a size that we do not run."""
    builder = BUILDERS.get(config.arch)
    if builder is None:
        raise UnsupportedModel(
            f"architecture {config.arch!r} is not supported; supported: {', '.join(sorted(BUILDERS))}"
        )
    if config.rope_dim != config.head_dim:
        raise UnsupportedModel(
            f"{config.name}: rope turns {config.rope_dim} of the {config.head_dim} dims of a head; only whole heads run"
        )
    return builder(config, tensors)
