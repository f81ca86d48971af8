"""The phantoms' anatomy and signal: tissues, scanner settings, shapes on a grid in mm."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from tesla_med.config.models import Section
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name

Array = npt.NDArray[np.float64]

# proton density (0 to 1), T1, T2 and T2* in ms at 3 T
TISSUES: dict[str, tuple[float, float, float, float]] = {
    "air": (0.01, 1000.0, 50.0, 10.0),
    "fat": (0.92, 380.0, 88.0, 35.0),
    "muscle": (0.80, 1400.0, 35.0, 25.0),
    "cortical_bone": (0.15, 800.0, 15.0, 4.0),
    "marrow": (0.75, 500.0, 80.0, 14.0),
    "urine": (1.00, 3500.0, 700.0, 350.0),
    "rectal_wall": (0.85, 1200.0, 60.0, 35.0),
    "transition_zone": (0.85, 1500.0, 88.0, 48.0),
    "peripheral_zone": (0.92, 1700.0, 135.0, 65.0),
    "capsule": (0.70, 1300.0, 40.0, 28.0),
    "csf": (1.00, 4000.0, 1200.0, 400.0),
    "white_matter": (0.70, 900.0, 70.0, 42.0),
    "grey_matter": (0.84, 1100.0, 78.0, 56.0),
}


class ScannerSettings(Section):
    """One site's scanner and protocol, in physical units.

    ``endorectal`` is the share of the signal received by a coil in the rectum (prostate
    only; 0 is none): its sensitivity falls off with distance. ``noise`` is the standard
    deviation of each complex channel over the brightest tissue's signal.
    """

    sequence: Literal["spin_echo", "gradient_echo"] = "spin_echo"
    field_strength_t: float = Field(3.0, gt=0)
    repetition_time_ms: float = Field(4000.0, gt=0)
    echo_time_ms: float = Field(100.0, ge=0)
    flip_angle_deg: float = Field(90.0, gt=0, le=180)
    field_of_view_mm: float = Field(150.0, gt=0)
    matrix: int = Field(64, ge=16)
    slices: int = Field(10, ge=1)
    slice_thickness_mm: float = Field(3.6, gt=0)
    rectum_radius_mm: float = Field(10.0, gt=0)
    endorectal: float = Field(0.0, ge=0, le=1)
    flare: float = Field(
        0.0, ge=0, description="extra sensitivity at the edge nearest a surface coil (1: twice the signal)"
    )
    bias: float = Field(0.1, ge=0, description="amplitude of the smooth log sensitivity")
    blur_mm: float = Field(0.8, ge=0, description="standard deviation of the in-plane point spread")
    noise: float = Field(0.02, ge=0)
    display_gamma: float = Field(1.0, gt=0)
    intensity_scale: float = Field(1000.0, ge=50, le=30000, description="value of the 99.5th percentile")
    orientation: str = Field("LPS", pattern=r"^[LRAPSI]{3}$", description="axis codes of the file")
    oblique_deg: float = Field(0.0, gt=-45, lt=45, description="tilt of the stack about left-right")

    @field_validator("orientation")
    @classmethod
    def _one_of_each(cls, value: str) -> str:
        if sorted("LR".find(c) >= 0 or 2 * ("AP".find(c) >= 0) for c in value) != [0, 1, 2]:
            raise ValueError("needs one letter of each pair L/R, A/P, S/I")
        return value


def tissue_signal(tissue: str, settings: ScannerSettings) -> float:
    """Return the signal of ``tissue`` (0 to 1) from the sequence's contrast equation.

    Spin echo: PD (1 - exp(-TR/T1)) exp(-TE/T2). Spoiled gradient echo:
    PD sin(a) (1 - E1) / (1 - cos(a) E1) exp(-TE/T2*), E1 = exp(-TR/T1). T1 grows with the
    cube root of the field strength, T2* shrinks with its square root.

    Raises:
        ConfigError: unknown tissue.
    """
    if tissue not in TISSUES:
        raise ConfigError(unknown_name("tissue", tissue, list(TISSUES)))
    density, t1, t2, t2_star = TISSUES[tissue]
    ratio = settings.field_strength_t / 3.0
    recovery = float(np.exp(-settings.repetition_time_ms / (t1 * ratio ** (1 / 3))))
    if settings.sequence == "spin_echo":
        return float(density * (1 - recovery) * np.exp(-settings.echo_time_ms / t2))
    angle = np.deg2rad(settings.flip_angle_deg)
    decay = np.exp(-settings.echo_time_ms * np.sqrt(ratio) / t2_star)
    return float(density * np.sin(angle) * (1 - recovery) / (1 - np.cos(angle) * recovery) * decay)


class Canvas:
    """Signal on the grid, painted structure by structure with partial volume at the edges."""

    def __init__(
        self, settings: ScannerSettings, shape: tuple[int, int, int], rng: np.random.Generator
    ) -> None:
        self.settings, self.rng, self.shape = settings, rng, shape
        self.pixel = settings.field_of_view_mm / max(shape[0], shape[1])
        steps = (self.pixel, self.pixel, settings.slice_thickness_mm)
        axes = [(np.arange(n) - (n - 1) / 2) * step for n, step in zip(shape, steps, strict=True)]
        # named as in the patient frame: right, anterior, superior, mm from the stack's centre
        self.right, self.anterior, self.superior = np.meshgrid(*axes, indexing="ij", sparse=True)
        self.signal: Array = np.zeros(shape)

    def paint(self, tissue: str, distance: Array, texture: float = 0.04, cover: float = 1.0) -> None:
        """Paint where ``distance`` (mm, negative inside) says; ``texture`` is relative."""
        weight = cover * np.clip(0.5 - distance / self.pixel, 0.0, 1.0)
        value = tissue_signal(tissue, self.settings) * (1 + self.smooth(4.0 * self.pixel, texture))
        self.signal += weight * (value - self.signal)

    def smooth(self, scale_mm: float, amplitude: float) -> Array:
        """Return a smooth random field, standard deviation ``amplitude``."""
        coarse = [max(2, int(np.ceil(n * self.pixel / scale_mm)) + 1) for n in self.shape[:2]]
        field = self.rng.standard_normal((*coarse, self.shape[2]))
        rows = _linear_weights(coarse[0], self.shape[0])
        columns = _linear_weights(coarse[1], self.shape[1])
        return cast(Array, amplitude * np.einsum("ia,abk,jb->ijk", rows, field, columns, optimize=True))

    def ellipse(
        self, centre: tuple[Any, Any], half: tuple[Any, Any], wobble: float = 0.0, power: float = 2.0
    ) -> Array:
        """Return the signed distance (mm, approximate) to a wobbly in-plane super-ellipse."""
        right, anterior = self.right - centre[0], self.anterior - centre[1]
        tiny = 1e-6
        reach = (np.abs(right / half[0]) ** power + np.abs(anterior / half[1]) ** power) ** (1 / power)
        if wobble:
            angle = np.arctan2(anterior / half[1], right / half[0])
            slope = self.superior / 30.0
            for order in (2, 3, 4):
                phase, size = self.rng.uniform(0, 2 * np.pi), self.rng.normal(0, wobble / order)
                reach = reach / (1 + size * np.cos(order * angle + phase + slope))
        length = np.sqrt(right**2 + anterior**2)
        return cast(Array, length * (1 - 1 / np.maximum(reach, tiny)) + tiny)

    def rod(self, start: tuple[Any, Any], end: tuple[Any, Any], radius: float) -> Array:
        """Return the distance (mm) to a rounded in-plane bar from ``start`` to ``end``."""
        along = (end[0] - start[0], end[1] - start[1])
        right, anterior = self.right - start[0], self.anterior - start[1]
        share = np.clip((right * along[0] + anterior * along[1]) / (along[0] ** 2 + along[1] ** 2), 0, 1)
        gap = np.hypot(right - share * along[0], anterior - share * along[1])
        return cast(Array, gap - radius + np.zeros(self.shape))


def _linear_weights(coarse: int, fine: int) -> Array:
    position = np.linspace(0, coarse - 1, fine)[:, None]
    return cast(Array, np.clip(1 - np.abs(position - np.arange(coarse)[None]), 0, 1))


def draw_prostate(canvas: Canvas) -> npt.NDArray[np.uint8]:
    """Paint a male pelvis on ``canvas`` and return the labels: (I, J, K) uint8, 1 is prostate."""
    rng, tall = canvas.rng, canvas.superior
    reach = canvas.settings.slices * canvas.settings.slice_thickness_mm
    middle = (rng.normal(0, 3.0), rng.normal(4.0, 3.0))
    half = (rng.uniform(19, 28), rng.uniform(14, 20), rng.uniform(0.36, 0.46) * reach)
    rectum = canvas.settings.rectum_radius_mm * rng.uniform(0.85, 1.15)
    back = middle[1] - half[1] - rectum + 1.0
    _draw_pelvis(canvas, middle, half[0])
    full = middle[1] + 6 + (tall - half[2]) * 0.3
    bladder = np.sqrt(np.clip((tall - 0.8 * half[2]) / 12, 0, 1))
    canvas.paint("urine", canvas.ellipse((middle[0], full), (26 * bladder + 0.1, 17 * bladder + 0.1)), 0.01)
    waist = np.sqrt(np.clip(1 - ((tall + rng.normal(0, 1.5)) / half[2]) ** 2, 0, 1))
    size = (half[0] * waist + 1e-3, half[1] * waist + 1e-3)
    gland = canvas.ellipse(middle, size, wobble=0.06, power=2.3)
    canvas.paint("capsule", gland - 1.2, cover=0.7)
    canvas.paint("peripheral_zone", gland, 0.10)
    share = rng.uniform(0.62, 0.8)
    inner = (middle[0], middle[1] + half[1] * (1 - share) * 0.8)
    core = canvas.ellipse(inner, (size[0] * share, size[1] * share), wobble=0.05)
    canvas.paint("transition_zone", np.maximum(core, gland + 0.5), 0.16)
    wall = canvas.ellipse((middle[0], back), (rectum * 1.1, rectum), wobble=0.04)
    canvas.paint("rectal_wall", np.maximum(wall, -gland))
    canvas.paint("air", np.maximum(wall + 2.5, -gland), 0.5)
    inside = (gland < 0) & (waist > 0.25)
    return cast(npt.NDArray[np.uint8], inside.astype(np.uint8))


def _draw_pelvis(canvas: Canvas, middle: tuple[float, float], width: float) -> None:
    rng = canvas.rng
    shift = rng.normal(0, 2.0)
    canvas.paint("fat", canvas.ellipse((0, 0), (175, 108), power=2.5), 0.06)
    for side in (-1, 1):
        gluteus = (side * 70, -72 + shift)
        canvas.paint("muscle", canvas.ellipse(gluteus, (48, 24), wobble=0.05), 0.08)
        head = (side * (90 + shift), 12)
        canvas.paint("cortical_bone", canvas.ellipse(head, (27, 27)) - 1.5)
        canvas.paint("marrow", canvas.ellipse(head, (26, 26)), 0.06)
        outer = side * (width + 33 + shift)
        canvas.paint("cortical_bone", canvas.rod((outer, 32), (outer * 0.95, -30), 8.0))
        canvas.paint("marrow", canvas.rod((outer, 32), (outer * 0.95, -30), 6.0), 0.08)
        inner = side * (width + 19 + 0.4 * shift)
        canvas.paint("muscle", canvas.rod((inner * 0.8, 38), (inner, -24), 7.5), 0.08)
        levator = side * (width + 5)
        canvas.paint("muscle", canvas.rod((levator, 8), (levator * 0.5, -38), 2.5), 0.08)
        pubis = (side * 16, 62 + shift)
        canvas.paint("cortical_bone", canvas.rod(pubis, (side * 48, 50), 9.0))
        canvas.paint("marrow", canvas.rod(pubis, (side * 48, 50), 7.0), 0.08)
    canvas.paint("cortical_bone", canvas.rod((-7, -78 + shift), (7, -78 + shift), 6.0))
    canvas.paint("marrow", canvas.rod((-6, -78 + shift), (6, -78 + shift), 4.5), 0.06)


def draw_cord(canvas: Canvas) -> npt.NDArray[np.uint8]:
    """Paint a cervical spine on ``canvas``; labels (I, J, K) uint8: 1 white, 2 grey matter."""
    rng, tall = canvas.rng, canvas.superior / 25.0
    centre = (
        rng.normal(0, 1.0) + rng.normal(0, 0.4) * tall,
        rng.normal(0, 1.2) + rng.normal(0, 0.6) * tall + rng.normal(0, 0.3) * tall**2,
    )
    scale = rng.uniform(0.9, 1.12)
    swell = scale * (1 + 0.06 * np.sin(2.0 * tall + rng.uniform(0, 6.28)))
    _draw_spine(canvas, centre)
    canvas.paint("csf", canvas.ellipse(centre, (9.2 * scale, 7.4 * scale), wobble=0.04), 0.03)
    cord = canvas.ellipse(centre, (6.4 * swell, 4.5 * swell * rng.uniform(0.92, 1.08)), wobble=0.02)
    canvas.paint("white_matter", cord, 0.05)
    grey = _butterfly(canvas, centre, swell * rng.uniform(0.95, 1.08))
    canvas.paint("grey_matter", grey, 0.04)
    labels = (cord < 0).astype(np.uint8)
    labels[grey < 0] = 2
    return labels


def _draw_spine(canvas: Canvas, centre: tuple[Any, Any]) -> None:
    canvas.paint("muscle", canvas.ellipse((0, 0), (60, 60)), 0.10)
    right, anterior = centre
    for side in (-1, 1):
        gap = (right + side * 9, anterior - 20)
        canvas.paint("fat", canvas.rod(gap, (right + side * 20, anterior - 12), 1.2), 0.05, cover=0.7)
        lamina = ((right + side * 11.5, anterior - 2), (right, anterior - 11.5))
        canvas.paint("cortical_bone", canvas.rod(*lamina, radius=2.6), 0.2)
        canvas.paint("marrow", canvas.rod(*lamina, radius=1.4), 0.1)
        vessel = (right + side * 13.5, anterior + 4.5)
        canvas.paint("csf", canvas.ellipse(vessel, (1.8, 1.8)), cover=0.6)
    spinous = ((right, anterior - 12), (right, anterior - 19))
    canvas.paint("cortical_bone", canvas.rod(*spinous, radius=2.4), 0.2)
    body = (right, anterior + 15)
    canvas.paint("cortical_bone", canvas.ellipse(body, (10.5, 7.5), power=3.0))
    canvas.paint("marrow", canvas.ellipse(body, (9.5, 6.5), power=3.0), 0.08)


def _butterfly(canvas: Canvas, centre: tuple[Any, Any], size: Any) -> Array:
    def at(right: float, anterior: float) -> tuple[Any, Any]:
        return (centre[0] + right * size, centre[1] + anterior * size)

    parts = [canvas.rod(at(-1.6, 0.0), at(1.6, 0.0), 0.55)]
    for side in (-1, 1):
        parts.append(canvas.rod(at(side * 1.5, 0.2), at(side * 2.5, 1.5), 1.05))
        parts.append(canvas.rod(at(side * 1.5, 0.0), at(side * 2.9, -2.5), 0.62))
    return cast(Array, np.minimum.reduce(parts))
