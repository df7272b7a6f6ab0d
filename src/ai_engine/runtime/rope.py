"""Tables of rotation angles, one per way of turning that the model has, computed in float64.

Owns the frequency rules (base, linear and llama3 scaling, the per-dimension factors of a ``rope_freqs`` tensor). Does
not rotate: kernels do.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ai_engine.ports.kernels import F32
from ai_engine.ports.model import ModelConfig, ModelFile, RopeScaling
from ai_engine.runtime.weights import vector_f32

F64 = npt.NDArray[np.float64]


def frequencies(base: float, dim: int) -> F64:
    """base^(-2i/dim), the angle per position of pair i (Su et al., RoFormer, 2021)."""
    result: F64 = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return result


def scaled(freq: F64, scaling: RopeScaling) -> F64:
    """Linear: all angles divided. llama3: long waves are divided, short ones kept, those between blended."""
    if scaling.kind == "linear":
        return freq / scaling.factor
    wavelen = 2 * math.pi / freq
    turns = scaling.original_context / wavelen
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if high != low else (turns >= high).astype(np.float64)
    result: F64 = freq * ((1 - blend) / scaling.factor + blend)
    return result


def table(freq: F64, max_context: int) -> F32:
    """f32[max_context, dim/2, 2] of (cos, sin)."""
    angle = np.arange(max_context, dtype=np.float64)[:, None] * freq
    out = np.empty((*angle.shape, 2), np.float32)
    out[..., 0], out[..., 1] = np.cos(angle), np.sin(angle)
    return out


def rope_tables(config: ModelConfig, file: ModelFile, max_context: int) -> dict[str, F32]:
    """ "rope", and "rope_local" for models whose sliding layers turn differently."""
    freq = frequencies(config.rope_base, config.rope_dim)
    if config.rope_scaling is not None:
        freq = scaled(freq, config.rope_scaling)
    if "rope_freqs.weight" in file.tensors:
        freq = freq / vector_f32(file, "rope_freqs.weight").astype(np.float64)
    tables = {"rope": table(freq, max_context)}
    if config.rope_base_local is not None:
        tables["rope_local"] = table(frequencies(config.rope_base_local, config.rope_dim), max_context)
    return tables
