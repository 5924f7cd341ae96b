"""Matrices in MXFP4, the format of gpt-oss: FP4 numbers with one scale per block of 32.

A number is e2m1 (a sign, two bits of exponent, one of mantissa); a byte holds two, the lower half
first. A scale is e8m0, a power of two (OCP Microscaling Formats 1.0, sections 5.3 and 5.4).
"""

import numpy as np
from jaxtyping import Float, UInt8

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of a matrix's two tensors
HOLDS = "BF16"  # narrowest file dtype that represents every number exactly
PAIRS = 16  # bytes of a block
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([sign * size for sign in (1, -1) for size in _SIZES], np.float32)
_BOTH = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1)  # by byte
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def plain_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape [X, I, O] of matrices in blocks [X, O, G, 16]; None if scales don't fit."""
    if len(blocks) != 4 or blocks[3] != PAIRS or scales != blocks[:3]:
        return None
    experts, columns, groups, _ = blocks
    return experts, 2 * PAIRS * groups, columns


def dequantise(
    blocks: UInt8[np.ndarray, "X O G 16"], scales: UInt8[np.ndarray, "X O G"]
) -> Float[np.ndarray, "X I O"]:
    """Return the matrices of a layer's experts; a scale of 255 means NaN."""
    numbers = _BOTH[blocks].reshape(*scales.shape, -1) * _POWERS[scales][..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
