"""The constants that define a draw to the bit, shared by the sampler kernel and the NumPy reference.

Owns numbers only: what is done with them stands in ``reference/ops.py`` (``integer_weights``, ``choose``,
``draw_bits``), and in sample.py as instructions. They lie in this package as they are part of the machine code, so that
the kernel cache's key covers them.
"""

from __future__ import annotations

import numpy as np

GREEDY_BELOW = np.float32(1e-5)
"""A temperature below this is greedy: nothing but the best token would have any weight."""

WEIGHT_ONE = 1 << 30
"""The integer weight of the best token; a token's weight is round(WEIGHT_ONE * exp((z - z_max) / temperature))."""

LOG2_E = np.float32(1.4426950408889634)
MIN_EXPONENT = np.float32(-22.0)
"""exp of this rounds to weight 0."""

EXP2_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        1.0,
        0.6931472028550958,
        0.24022647913627654,
        0.05550332471041447,
        0.00961843735761781,
        0.0013398874452673548,
        0.000153533620049722,
    )
)
"""2**f on [-1/2, 1/2], lowest power first (minimax, 2e-9); the first is exactly 1, so that the best token weighs
WEIGHT_ONE."""

GOLDEN = 0x9E3779B97F4A7C15
"""The increment of splitmix64."""
