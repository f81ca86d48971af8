"""Generated multi-site prostate and spinal cord MRI with known truth.

Anatomy is drawn in mm in the patient frame (RAS+), each tissue gets its signal from the
contrast equation of the sequence, then coil sensitivity, blur, Rician noise and the
scanner's display scaling follow. Nothing is random but the given generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from tesla_med.demo.anatomy import (
    TISSUES,
    Array,
    Canvas,
    ScannerSettings,
    draw_cord,
    draw_prostate,
    tissue_signal,
)
from tesla_med.errors import ConfigError, OutputError
from tesla_med.registry import unknown_name

__all__ = ["TASKS", "TISSUES", "ScannerSettings", "Task", "make_case", "make_site", "preset", "tissue_signal"]

Task = Literal["prostate", "spinal_cord"]
TASKS: tuple[Task, ...] = ("prostate", "spinal_cord")

_PROSTATE = ScannerSettings()
_CORD = ScannerSettings(
    sequence="gradient_echo",
    repetition_time_ms=600.0,
    echo_time_ms=18.0,
    flip_angle_deg=30.0,
    field_of_view_mm=32.0,
    slice_thickness_mm=5.0,
    blur_mm=0.25,
    noise=0.03,
    orientation="RPI",
)
_CHANGES: dict[Task, dict[str, dict[str, Any]]] = {
    "prostate": {
        "source": {},
        "easy": {
            "echo_time_ms": 95.0,
            "noise": 0.025,
            "bias": 0.15,
            "intensity_scale": 600.0,
            "orientation": "RAS",
        },
        "hard": {
            "field_strength_t": 1.5,
            "repetition_time_ms": 2500.0,
            "echo_time_ms": 70.0,
            "field_of_view_mm": 138.0,
            "rectum_radius_mm": 12.5,
            "endorectal": 0.1,
            "flare": 1.6,
            "bias": 0.3,
            "blur_mm": 1.0,
            "noise": 0.035,
            "display_gamma": 1.05,
            "intensity_scale": 3000.0,
            "orientation": "LAS",
            "oblique_deg": 8.0,
        },
    },
    "spinal_cord": {
        "source": {},
        "easy": {"echo_time_ms": 17.0, "noise": 0.035, "bias": 0.15, "intensity_scale": 500.0},
        "hard": {
            "repetition_time_ms": 500.0,
            "echo_time_ms": 22.0,
            "flip_angle_deg": 35.0,
            "field_of_view_mm": 34.0,
            "flare": 1.0,
            "bias": 0.5,
            "blur_mm": 0.45,
            "noise": 0.06,
            "display_gamma": 0.85,
            "intensity_scale": 3000.0,
            "orientation": "LPS",
            "oblique_deg": 12.0,
        },
    },
}


def preset(task: Task, name: str = "source", *, shift: float | None = None) -> ScannerSettings:
    """Return the settings of a generated site.

    Args:
        task: ``"prostate"`` or ``"spinal_cord"``.
        name: ``"source"``, ``"easy"`` (a mild shift) or ``"hard"`` (contrast, coil, bias,
            noise, blur, orientation).
        shift: 0 to 1, how far from the source settings (0) to those of ``name`` (1).
            Numbers are interpolated, everything else switches above one half.

    Raises:
        ConfigError: unknown task or name, or a shift outside [0, 1].
    """
    if task not in _CHANGES:
        raise ConfigError(unknown_name("phantom task", task, list(TASKS)))
    if name not in _CHANGES[task]:
        raise ConfigError(unknown_name("phantom preset", name, list(_CHANGES[task])))
    base = (_PROSTATE if task == "prostate" else _CORD).model_dump()
    strength = 1.0 if shift is None else float(shift)
    if not 0 <= strength <= 1:
        raise ConfigError(f"phantom shift must lie in [0, 1], got {shift}")
    for key, value in _CHANGES[task][name].items():
        if isinstance(value, float):
            base[key] += strength * (value - base[key])
        elif strength > 0.5:
            base[key] = value
    return ScannerSettings.model_validate(base)


def make_case(
    task: Task,
    settings: ScannerSettings,
    generator: np.random.Generator,
    shape: tuple[int, int, int] | None = None,
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Generate one case.

    Args:
        task: what is imaged.
        settings: the scanner.
        generator: the only source of randomness.
        shape: (right, anterior, superior) grid size; by default ``matrix`` twice and ``slices``.

    Returns:
        image (I, J, K) int16 from 0 in the axis order of ``settings.orientation``; labels of the
        same shape, uint8 (prostate: 1; spinal cord: 1 white matter, 2 grey matter); affine (4, 4),
        voxel index to RAS+ mm.

    Raises:
        ConfigError: unknown task, or a grid with fewer than 16 in-plane voxels or no slice.
    """
    if task not in TASKS:
        raise ConfigError(unknown_name("phantom task", task, list(TASKS)))
    grid = shape or (settings.matrix, settings.matrix, settings.slices)
    if len(grid) != 3 or min(grid[:2]) < 16 or grid[2] < 1:
        raise ConfigError(f"phantom shape must be at least 16 x 16 x 1 voxels, got {grid}")
    canvas = Canvas(settings.model_copy(update={"slices": grid[2]}), grid, generator)
    labels = draw_prostate(canvas) if task == "prostate" else draw_cord(canvas)
    image = _acquire(canvas, task)
    affine = _affine(canvas, generator)
    return _reorient(image, labels, affine, settings.orientation)


def _acquire(canvas: Canvas, task: Task) -> npt.NDArray[np.int16]:
    settings, rng = canvas.settings, canvas.rng
    brightest = float(np.percentile(canvas.signal, 99.5))
    signal = canvas.signal / brightest * _sensitivity(canvas, task)
    blur = settings.blur_mm / canvas.pixel
    if blur > 0:
        signal = ndimage.gaussian_filter(signal, (blur, blur, 0), mode="nearest")
    real = signal + settings.noise * rng.standard_normal(canvas.shape)
    imaginary = settings.noise * rng.standard_normal(canvas.shape)
    magnitude = np.hypot(real, imaginary)
    top = max(float(np.percentile(magnitude, 99.5)), 1e-6)
    shown = (magnitude / top) ** settings.display_gamma * settings.intensity_scale
    return np.clip(np.rint(shown), 0, 32767).astype(np.int16)


def _sensitivity(canvas: Canvas, task: Task) -> Array:
    """Return the receive sensitivity: a smooth polynomial and what coils near the body add."""
    settings, rng = canvas.settings, canvas.rng
    half = settings.field_of_view_mm / 2
    right, anterior = canvas.right / half, canvas.anterior / half
    superior = canvas.superior / max(float(np.abs(canvas.superior).max()), 1.0)
    terms = [right, anterior, superior, right * anterior, right**2 - 0.33, anterior**2 - 0.33]
    weights = rng.standard_normal(len(terms))
    weights /= np.linalg.norm(weights)
    field = np.zeros(canvas.shape)
    for weight, term in zip(weights, terms, strict=True):
        field = field + weight * term
    sensitivity = np.exp(settings.bias * field)
    if settings.flare > 0:  # a coil on the belly (prostate) or the neck (cord): a narrow bright rim
        gap = half + (-canvas.anterior if task == "prostate" else canvas.anterior)
        sensitivity = sensitivity * (1 + settings.flare * np.exp(-0.5 * (gap / (0.16 * half)) ** 2))
    if settings.endorectal > 0:
        gap = np.hypot(canvas.right, canvas.anterior + 15 + settings.rectum_radius_mm)
        near = 2.6 / (1 + (gap / 22.0) ** 2)
        sensitivity = sensitivity * ((1 - settings.endorectal) + settings.endorectal * near)
    return cast(Array, sensitivity)


def _affine(canvas: Canvas, rng: np.random.Generator) -> Array:
    """Return the RAS voxel-to-mm matrix: tilted about left-right, centred near the origin."""
    angle = np.deg2rad(canvas.settings.oblique_deg)
    cosine, sine = np.cos(angle), np.sin(angle)
    rotation = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    steps = np.array([canvas.pixel, canvas.pixel, canvas.settings.slice_thickness_mm])
    affine = np.eye(4)
    affine[:3, :3] = rotation * steps
    middle = (np.array(canvas.shape) - 1) / 2
    affine[:3, 3] = rng.normal(0, 10, 3) - affine[:3, :3] @ middle
    return affine


def _reorient(
    image: npt.NDArray[np.int16], labels: npt.NDArray[np.uint8], affine: Array, codes: str
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8], Array]:
    """Turn RAS arrays into the axis order ``codes``; world positions stay."""
    axes = [("LR".find(c) >= 0 and "LR") or ("AP".find(c) >= 0 and "PA") or "IS" for c in codes]
    order = [["LR", "PA", "IS"].index(pair) for pair in axes]
    turned = affine.copy()
    turned[:3, :3] = affine[:3, :3][:, order]
    flips = tuple(
        position for position, (c, pair) in enumerate(zip(codes, axes, strict=True)) if c == pair[0]
    )
    image, labels = image.transpose(order), labels.transpose(order)
    for position in flips:
        turned[:3, 3] += turned[:3, position] * (image.shape[position] - 1)
        turned[:3, position] *= -1
    image, labels = np.flip(image, flips), np.flip(labels, flips)
    return np.ascontiguousarray(image), np.ascontiguousarray(labels), turned


def make_site(
    folder: Path,
    task: Task,
    settings: ScannerSettings,
    n: int,
    seed: int,
    names: Sequence[str] | None = None,
) -> list[Path]:
    """Write ``n`` generated cases into ``folder`` under the file names of the real sites.

    Prostate: ``CaseNN.nii.gz`` and ``CaseNN_segmentation.nii.gz``. Spinal cord:
    ``sub-NN_T2starw.nii.gz`` with ``_T2starw_seg-manual`` (whole cord, 0 and 1) and
    ``_T2starw_gmseg-manual`` (grey matter). Images are int16, masks uint8.

    Args:
        folder: made if it does not exist; must hold none of the files.
        task: what is imaged.
        settings: the scanner.
        n: number of cases.
        seed: the same seed gives the same cases; case k does not depend on ``n``.
        names: stems to use instead of ``Case00`` or ``sub-01`` and so on.

    Returns:
        The image files.

    Raises:
        ConfigError: fewer than one case, or not one distinct name per case.
        OutputError: a file exists already.
    """
    from tesla_med.io.volumes import save_image

    if names is None:
        names = [f"Case{i:02d}" if task == "prostate" else f"sub-{i + 1:02d}" for i in range(n)]
    if n < 1 or len(names) != n or len(set(names)) != n:
        raise ConfigError(f"phantom site needs one distinct name per case: {n} cases, names {list(names)}")
    ending = ".nii.gz" if task == "prostate" else "_T2starw.nii.gz"
    images = [folder / f"{name}{ending}" for name in names]
    taken = [path.name for path in images if path.exists()]
    if taken:
        raise OutputError(f"{folder}: holds {', '.join(taken)} already; choose an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for index, path in enumerate(images):
        image, labels, affine = make_case(task, settings, np.random.default_rng([seed, index]))
        save_image(path, image, affine, dtype=np.int16)
        stem = path.name.removesuffix(".nii.gz")
        layers = (
            {"_segmentation": labels}
            if task == "prostate"
            else {"_seg-manual": labels > 0, "_gmseg-manual": labels == 2}
        )
        for suffix, layer in layers.items():
            mask = folder / f"{stem}{suffix}.nii.gz"
            save_image(mask, layer.astype(np.uint8), affine, dtype=np.uint8)
    return images
