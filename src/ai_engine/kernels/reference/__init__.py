"""The reference implementation of the kernels port: NumPy, obviously right, slow."""

from __future__ import annotations

from ai_engine.kernels.reference.backend import ReferenceKernels

__all__ = ["ReferenceKernels"]
