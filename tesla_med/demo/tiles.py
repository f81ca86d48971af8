"""Generated H&E tiles of four tissue classes with controllable stain and scanner.

Tissue is drawn as concentrations of haematoxylin and eosin on a field given in micrometres; the stain turns
them into optical density and Beer-Lambert's law into light; then blur, noise, lamp and gamma of the scanner
follow. The stain vectors are those of Ruifrok and Johnston (2001), as in scikit-image. A tile depends on its
seed, class and number only, so two sites of one seed show the same tissue under two stains.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy import ndimage

from tesla_med.config.models import Section
from tesla_med.errors import ConfigError, OutputError
from tesla_med.registry import unknown_name

__all__ = ["FOLDERS", "TISSUE_CLASSES", "StainSettings", "concentrations", "make_tile", "make_tile_site"]

Array = npt.NDArray[np.float64]
TissueClass = Literal["tumour", "stroma", "lymphocytes", "mucosa"]
TISSUE_CLASSES: tuple[TissueClass, ...] = ("tumour", "stroma", "lymphocytes", "mucosa")
FOLDERS: dict[str, dict[TissueClass, str]] = {
    "kather19": {"tumour": "TUM", "stroma": "STR", "lymphocytes": "LYM", "mucosa": "NORM"},
    "kather16": {
        "tumour": "01_TUMOR",
        "stroma": "02_STROMA",
        "lymphocytes": "04_LYMPHO",
        "mucosa": "06_MUCOSA",
    },
}
"""Folder of each class, as in the two Kather sets."""

FIELD_UM = 112.0  # side of a tile, 224 pixels of 0.5 micrometres
STAINS: Array = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]])  # haematoxylin, eosin; R, G, B


class StainSettings(Section):
    """One laboratory's stain and one scanner's rendering of it.

    Strengths multiply concentrations. A mix of 0 leaves a stain's vector in optical density as published,
    1 puts the other's in its place; it changes the hue.
    """

    haematoxylin: float = Field(1.0, ge=0, le=4, description="strength of the stain of nuclei")
    eosin: float = Field(1.0, ge=0, le=4, description="strength of the stain of cytoplasm and fibres")
    haematoxylin_mix: float = Field(0.0, ge=0, le=1, description="eosin's share in haematoxylin's hue")
    eosin_mix: float = Field(0.0, ge=0, le=1, description="haematoxylin's share in eosin's hue")
    variation: float = Field(
        0.08, ge=0, le=1, description="standard deviation from tile to tile of the log of both strengths"
    )
    brightness: float = Field(0.97, gt=0, le=1, description="light where there is no tissue")
    gamma: float = Field(1.0, gt=0, le=4, description="exponent on the light; above 1 darkens")
    blur_um: float = Field(0.5, ge=0, description="standard deviation of the point spread")
    noise: float = Field(0.012, ge=0, description="standard deviation over the full range, each channel")

    @property
    def vectors(self) -> Array:
        """The stains' vectors, (2, 3): optical density of unit concentration in R, G and B."""
        haematoxylin, eosin = STAINS / np.linalg.norm(STAINS, axis=1, keepdims=True)
        mixed = np.stack(
            [
                (1 - self.haematoxylin_mix) * haematoxylin + self.haematoxylin_mix * eosin,
                (1 - self.eosin_mix) * eosin + self.eosin_mix * haematoxylin,
            ]
        )
        return cast(Array, mixed / np.linalg.norm(mixed, axis=1, keepdims=True))


_CHANGES: dict[str, dict[str, float]] = {
    "source": {},
    "easy": {"haematoxylin": 1.08, "eosin": 0.9, "brightness": 0.95, "gamma": 1.08, "blur_um": 0.6},
    "hard": {
        "haematoxylin": 0.85,
        "eosin": 1.3,
        "haematoxylin_mix": 0.2,
        "eosin_mix": 0.05,
        "brightness": 0.9,
        "gamma": 1.2,
        "blur_um": 0.9,
        "noise": 0.02,
    },
}


def stain_preset(name: str = "source", *, shift: float = 1.0) -> StainSettings:
    """Return the settings of a generated site of tiles.

    Args:
        name: ``"source"``, ``"easy"`` (hardly another stain) or ``"hard"`` (strong eosin, another hue of
            haematoxylin, dark, blurred and noisy).
        shift: 0 to 1, how far from the source settings (0) to those of ``name`` (1).

    Raises:
        ConfigError: unknown name, or a shift outside [0, 1].
    """
    if name not in _CHANGES:
        raise ConfigError(unknown_name("stain preset", name, list(_CHANGES)))
    if not 0 <= shift <= 1:
        raise ConfigError(f"stain shift must lie in [0, 1], got {shift}")
    base = StainSettings().model_dump()
    for key, value in _CHANGES[name].items():
        base[key] += shift * (value - base[key])
    return StainSettings.model_validate(base)


# ------------------------------------------------------------ tissue


class _Field:
    """Concentrations of both stains on a square field, painted structure by structure."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size, self.rng = size, rng
        self.pixel = FIELD_UM / size
        steps = (np.arange(size) + 0.5) * self.pixel
        self.y, self.x = np.meshgrid(steps, steps, indexing="ij")
        self.haematoxylin: Array = np.zeros((size, size))
        self.eosin: Array = np.zeros((size, size))

    def smooth(self, scale_um: float) -> Array:
        """Return a random field of mean 0 and standard deviation 1 with details of ``scale_um``."""
        values = ndimage.gaussian_filter(
            self.rng.standard_normal((self.size, self.size)), scale_um / self.pixel, mode="wrap"
        )
        return cast(Array, (values - values.mean()) / max(float(values.std()), 1e-9))

    def centres(self, spacing_um: float, keep: float = 1.0) -> Array:
        """Return (n, 2) centres (y, x) in µm about ``spacing_um`` apart, a share ``keep`` of them."""
        down = np.arange(-2 * spacing_um, FIELD_UM + spacing_um, 0.87 * spacing_um)
        right = np.arange(-2 * spacing_um, FIELD_UM + spacing_um, spacing_um)
        rows, columns = np.meshgrid(down, right, indexing="ij")
        columns = columns + spacing_um / 2 * (np.arange(len(down)) % 2)[:, None]
        points = np.stack([rows.ravel(), columns.ravel()], axis=1)
        points = points + self.rng.uniform(0, spacing_um, 2)
        points = points + self.rng.uniform(-0.32, 0.32, points.shape) * spacing_um
        return cast(Array, points[self.rng.random(len(points)) < keep])

    def cover(self, centre: Array, long_um: float, short_um: float, angle: float) -> tuple[Any, Array]:
        """Return the window of an ellipse and how far each of its pixels lies inside, 0 to 1."""
        reach = int(np.ceil((long_um + self.pixel) / self.pixel))
        row, column = (int(np.floor(value / self.pixel)) for value in centre)
        window = (
            slice(max(row - reach, 0), max(row + reach + 1, 0)),
            slice(max(column - reach, 0), max(column + reach + 1, 0)),
        )
        down, right = self.y[window] - centre[0], self.x[window] - centre[1]
        along = down * np.sin(angle) + right * np.cos(angle)
        across = down * np.cos(angle) - right * np.sin(angle)
        radius = np.hypot(along / long_um, across / short_um)
        return window, np.clip((1 - radius) * short_um / self.pixel + 0.5, 0, 1)

    def nucleus(self, centre: Array, long_um: float, short_um: float, angle: float, strength: float) -> None:
        """Put a nucleus over what is there: haematoxylin instead of most of the eosin."""
        window, cover = self.cover(centre, long_um, short_um, angle)
        below = self.haematoxylin[window]
        self.haematoxylin[window] = np.maximum(below, cover * strength)
        self.eosin[window] *= 1 - 0.5 * cover

    def clear(self, centre: Array, long_um: float, short_um: float, angle: float, left: float) -> None:
        """Thin both stains inside an ellipse to the share ``left``: a vacuole or a lumen."""
        window, cover = self.cover(centre, long_um, short_um, angle)
        self.haematoxylin[window] *= 1 - (1 - left) * cover
        self.eosin[window] *= 1 - (1 - left) * cover

    def lymphocytes(self, keep: float, spacing_um: float = 6.6) -> None:
        """Scatter small round dark nuclei."""
        for centre in self.centres(spacing_um, keep):
            radius = self.rng.uniform(2.5, 3.4)
            self.nucleus(
                centre,
                radius,
                radius * self.rng.uniform(0.85, 1),
                self._angle(),
                self.rng.uniform(0.75, 1.05),
            )

    def fibres(self, strength: float) -> float:
        """Lay wavy fibres of eosin in one main direction and return it, in radians."""
        angle = self._angle()
        across = self.y * np.cos(angle) - self.x * np.sin(angle) + 5.0 * self.smooth(18.0)
        period = self.rng.uniform(5.5, 8.5)
        waves = 0.5 + 0.5 * np.sin(2 * np.pi * across / period + self.rng.uniform(0, 6.3))
        self.eosin += strength * (0.45 + 0.55 * waves * (1 + 0.25 * self.smooth(6.0)))
        return angle

    def _angle(self) -> float:
        return float(self.rng.uniform(0, np.pi))


def _tumour(field: _Field) -> None:
    """Crowded, large, uneven nuclei in little cytoplasm, with slit-like lumina."""
    rng = field.rng
    field.eosin += 0.32 + 0.06 * field.smooth(8.0)
    field.haematoxylin += 0.12
    for centre in field.centres(rng.uniform(9.5, 12.0), 0.93):
        long_um = rng.uniform(4.2, 6.8)
        field.nucleus(
            centre, long_um, long_um * rng.uniform(0.55, 0.95), field._angle(), rng.uniform(0.4, 0.85)
        )
    for centre in field.centres(55.0, 0.4):
        field.clear(centre, rng.uniform(7, 14), rng.uniform(3, 6), field._angle(), 0.1)
    field.lymphocytes(rng.uniform(0, 0.04))


def _stroma(field: _Field) -> None:
    """Wavy fibres with few spindle nuclei along them."""
    rng = field.rng
    angle = field.fibres(0.62)
    field.haematoxylin += 0.04
    for centre in field.centres(rng.uniform(15, 22), 0.7):
        field.nucleus(
            centre,
            rng.uniform(5, 8),
            rng.uniform(1.3, 2.2),
            -angle + rng.normal(0, 0.25),
            rng.uniform(0.5, 0.85),
        )
    field.lymphocytes(rng.uniform(0, 0.12))


def _lymphocytes(field: _Field) -> None:
    """Small round dark nuclei side by side, with hardly any cytoplasm."""
    field.eosin += 0.22 + 0.05 * field.smooth(7.0)
    field.lymphocytes(field.rng.uniform(0.6, 0.95))


def _mucosa(field: _Field) -> None:
    """Round glands: a lumen, pale goblet cells, a ring of nuclei at the base; loose tissue between."""
    rng = field.rng
    field.eosin += 0.3 + 0.06 * field.smooth(6.0)
    field.haematoxylin += 0.05
    field.lymphocytes(rng.uniform(0.08, 0.3), 8.0)
    for centre in field.centres(rng.uniform(50, 62)):
        _gland(field, centre, rng.uniform(20, 26))


def _gland(field: _Field, centre: Array, radius: float) -> None:
    rng = field.rng
    stretch, turn = rng.uniform(0.8, 1.0), field._angle()
    window, cover = field.cover(centre, radius, radius * stretch, turn)
    field.haematoxylin[window] *= 1 - cover
    field.eosin[window] = (1 - cover) * field.eosin[window] + 0.3 * cover
    cells = int(2 * np.pi * radius / 7.5)
    along, across = np.array([np.sin(turn), np.cos(turn)]), np.array([np.cos(turn), -np.sin(turn)])
    for step in range(cells):
        angle = 2 * np.pi * (step + rng.uniform(-0.2, 0.2)) / cells
        outwards = np.cos(angle) * along + stretch * np.sin(angle) * across
        facing = float(np.arctan2(outwards[0], outwards[1]))
        field.clear(centre + 0.6 * radius * outwards, 5.0, 2.8, facing, rng.uniform(0.15, 0.5))
        field.nucleus(centre + 0.89 * radius * outwards, 3.4, 2.1, facing, rng.uniform(0.55, 0.85))
    field.clear(centre, 0.24 * radius, 0.2 * radius, turn, 0.05)


_DRAW = {"tumour": _tumour, "stroma": _stroma, "lymphocytes": _lymphocytes, "mucosa": _mucosa}


def concentrations(tissue: TissueClass, generator: np.random.Generator, size: int = 224) -> Array:
    """Draw one tile of tissue, before any stain setting.

    Args:
        tissue: the class.
        generator: the only source of randomness.
        size: pixels a side; the field stays 112 µm.

    Returns:
        (size, size, 2) concentrations of haematoxylin and eosin, >= 0, in units of optical density.

    Raises:
        ConfigError: unknown class, or fewer than 16 pixels.
    """
    if tissue not in _DRAW:
        raise ConfigError(unknown_name("tissue class", tissue, list(TISSUE_CLASSES)))
    if size < 16:
        raise ConfigError(f"generated tiles must have at least 16 pixels per side, got {size}")
    field = _Field(size, generator)
    _DRAW[tissue](field)
    field.haematoxylin *= 1 + 0.12 * field.smooth(2.0)
    return np.stack([field.haematoxylin, field.eosin], axis=-1).clip(0)


# ------------------------------------------------------------ stain and scanner


def render(amounts: Array, settings: StainSettings, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return the picture of concentrations under a stain and a scanner.

    Beer-Lambert: light = brightness * 10 ** -(concentrations @ vectors), in each channel.

    Args:
        amounts: (H, W, 2) as from :func:`concentrations`.
        settings: the stain and the scanner.
        generator: of the variation from tile to tile and of the noise.

    Returns:
        (H, W, 3) RGB, uint8.
    """
    strength = np.array([settings.haematoxylin, settings.eosin])
    strength = strength * np.exp(settings.variation * generator.standard_normal(2))
    light = settings.brightness * 10.0 ** -((amounts * strength) @ settings.vectors)
    blur = settings.blur_um * amounts.shape[1] / FIELD_UM
    if blur > 0:
        light = ndimage.gaussian_filter(light, (blur, blur, 0), mode="nearest")
    shown = light**settings.gamma + settings.noise * generator.standard_normal(light.shape)
    return cast("npt.NDArray[np.uint8]", (255 * shown.clip(0, 1)).round().astype(np.uint8))


def make_tile(
    tissue: TissueClass, settings: StainSettings, generator: np.random.Generator, size: int = 224
) -> npt.NDArray[np.uint8]:
    """Generate one tile, (size, size, 3) RGB uint8; see :func:`concentrations` and :func:`render`."""
    return render(concentrations(tissue, generator, size), settings, generator)


def make_tile_site(
    folder: Path,
    settings: StainSettings,
    count: int,
    *,
    seed: int = 0,
    size: int = 224,
    folders: Mapping[TissueClass, str] | None = None,
) -> list[Path]:
    """Write ``count`` generated tiles of each class as PNG, one folder per class.

    Args:
        folder: made if it does not exist; must hold none of the class folders.
        settings: the stain and the scanner.
        count: tiles per class.
        seed: of the tissue; tile k of a class does not depend on ``count``, nor its tissue on ``settings``.
        size: pixels a side, at least 16.
        folders: class -> folder name; default: those of kather19 (TUM, STR, LYM, NORM).

    Returns:
        The files, by class.

    Raises:
        ConfigError: fewer than one tile, or not one distinct folder for each class.
        OutputError: a class folder exists already.
    """
    from PIL import Image

    names = dict(FOLDERS["kather19"] if folders is None else folders)
    if set(names) != set(TISSUE_CLASSES) or len(set(names.values())) != len(names):
        raise ConfigError(
            f"generated tiles need one distinct folder for each of {', '.join(TISSUE_CLASSES)}; got {names}"
        )
    if count < 1:
        raise ConfigError(f"generated tiles: expected at least one per class, got {count}")
    taken = [name for name in names.values() if (folder / name).exists()]
    if taken:
        raise OutputError(f"{folder}: holds {', '.join(taken)} already; choose an empty folder")
    paths = []
    for tissue in TISSUE_CLASSES:
        tissue_folder = folder / names[tissue]
        tissue_folder.mkdir(parents=True)
        for index in range(count):
            generator = np.random.default_rng([seed, zlib.crc32(tissue.encode()), index])
            picture = Image.fromarray(make_tile(tissue, settings, generator, size))
            path = tissue_folder / f"{tissue}-{index:04d}.png"
            try:
                picture.save(path, format="PNG")
            except OSError as error:
                raise OutputError(f"{path}: cannot be written: {error}") from None
            paths.append(path)
    return paths
