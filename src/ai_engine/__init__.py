"""ai_engine: an inference platform whose every layer can be looked through, measured and replaced.

Public names are imported on first use, so that ``import ai_engine`` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ai_engine.version import __version__ as __version__

if TYPE_CHECKING:
    from ai_engine.llm import LLM as LLM
    from ai_engine.ports.sampling import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from ai_engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from ai_engine.ports.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'ai_engine' has no attribute {name!r}")
