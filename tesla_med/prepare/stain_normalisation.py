"""Stain normalisation of H&E tiles (Macenko et al., ISBI 2009), which leaves alone what it cannot do.

The two stains of a tile are the extreme directions of its optical densities; their concentrations are
scaled to those of a reference and mixed again by its stains. On white, grey or single-stain tiles these
directions are noise, and the result would be colours that nobody stained, or no number at all. Such a tile
is returned as it came, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError

Array = npt.NDArray[np.float64]

REFERENCE = np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]])
"""Absorptions of haematoxylin and eosin in (red, green, blue), of the reference published with the method."""
REFERENCE_HELD = np.array([1.9705, 1.0308])
"""Concentrations of both below which 99 % of the reference's tissue lies, optical density, base e."""

TISSUE_DENSITY = 0.15
"""A pixel is tissue if all of its channels are denser (beta of the paper)."""
TISSUE_SHARE = 0.02
"""Of a tile, at least."""
TISSUE_PIXELS = 64
TAIL = 1.0
"""Per cent of the directions left out at either end (alpha of the paper)."""
SMALLEST_ANGLE = 10.0
"""Degrees between two directions that can be two stains; those of the reference are 22 apart."""
LARGEST_ANGLE = 30.0
"""Largest angle, in degrees, between a stain and the reference stain that it is identified with."""
LARGEST_FACTOR = 4.0
"""Largest change of a concentration, either way."""


@dataclass(frozen=True)
class Normalised:
    """A tile after normalisation.

    Attributes:
        array: (3, H, W) float32 in [0, 1]; the tile as it came where ``reason`` says why.
        reason: why nothing was done, None where it was.
    """

    array: npt.NDArray[np.float32]
    reason: str | None = None


class _RefusedError(Exception):
    """A tile whose stains cannot be told."""


def normalise_stains(tile: npt.NDArray[np.float32]) -> Normalised:
    """Bring the stains of a tile to those of the reference, or leave it as it is and say why.

    Args:
        tile: (3, H, W) RGB in [0, 1], white as no stain, of any size.

    Returns:
        Finite values in [0, 1] in any case.

    Raises:
        DataError: another shape, or values that are not finite.
    """
    if tile.ndim != 3 or tile.shape[0] != 3 or tile.size == 0:
        raise DataError(f"stains are normalised on RGB (3, H, W); got the shape {tile.shape}")
    if not np.isfinite(tile).all():
        raise DataError("stains are normalised on finite values; this tile has NaN or infinite ones")
    density = -np.log(np.clip(tile.reshape(3, -1).astype(np.float64), 1 / 255, 1.0))
    try:
        tissue = density[:, (density > TISSUE_DENSITY).all(axis=0)]
        _check_tissue(tissue, density.shape[1])
        stains = _stains(tissue)
        factors = _factors(stains, tissue)
    except _RefusedError as reason:
        return Normalised(tile, f"stains not normalised: {reason}")
    held = np.linalg.lstsq(stains.T, density, rcond=None)[0] * factors[:, None]
    mixed = np.exp(-REFERENCE.T @ held).clip(0.0, 1.0)
    return Normalised(mixed.reshape(tile.shape).astype(np.float32))


def _check_tissue(tissue: Array, pixels: int) -> None:
    count = tissue.shape[1]
    if count < max(TISSUE_PIXELS, TISSUE_SHARE * pixels):
        raise _RefusedError(f"tissue in {count} of {pixels} pixels, too few to determine the stains")


def _stains(tissue: Array) -> Array:
    """Return the unit absorptions of haematoxylin and eosin in rows, (2, 3).

    Args:
        tissue: (3, n) optical densities.

    Raises:
        _RefusedError: there are no two stains, or they are not these.
    """
    _, vectors = np.linalg.eigh(np.cov(tissue))
    plane = vectors[:, [2, 1]] * np.where(vectors[:, [2, 1]].sum(axis=0) < 0, -1.0, 1.0)
    angles = np.arctan2(*(plane.T @ tissue)[::-1])
    ends = np.percentile(angles, [TAIL, 100.0 - TAIL])
    ends_of_plane = (plane @ np.stack([np.cos(ends), np.sin(ends)])).T
    reference = REFERENCE / np.linalg.norm(REFERENCE, axis=1, keepdims=True)
    found: Array = ends_of_plane[np.argsort(-ends_of_plane[:, 0])]  # haematoxylin takes up more red
    apart = _degrees(found[0] @ found[1])
    if apart < SMALLEST_ANGLE:
        raise _RefusedError(f"its colours are of one stain (directions {apart:.0f} degrees apart)")
    away = max(_degrees(one @ other) for one, other in zip(found, reference, strict=True))
    if away > LARGEST_ANGLE:
        raise _RefusedError(f"its colours are not those of haematoxylin and eosin ({away:.0f} degrees away)")
    return found


def _factors(stains: Array, tissue: Array) -> Array:
    """Return by what the concentrations (2,) are multiplied; _RefusedError where that is far from 1."""
    held = np.percentile(np.linalg.lstsq(stains.T, tissue, rcond=None)[0], 99, axis=1)
    if (held <= 0).any():
        raise _RefusedError("one of its stains has no concentration")
    factors: Array = REFERENCE_HELD / held
    if factors.max() > LARGEST_FACTOR or factors.min() < 1 / LARGEST_FACTOR:
        worst = factors[np.abs(np.log(factors)).argmax()]
        raise _RefusedError(f"a stain would change by a factor of {worst:.2g}")
    return factors


def _degrees(cosine: float) -> float:
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))
