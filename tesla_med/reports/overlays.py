"""Pictures of masks on the image: source | adapted | reference, oriented and in true proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import LabelClass
from tesla_med.io.nifti import axis_directions
from tesla_med.scoring.grids import bounding_box
from tesla_med.types import CaseView, IntArray

LETTERS = (("R", "L"), ("A", "P"), ("S", "I"))  # positive and negative end of each RAS+ axis
BACKGROUND, INK = "#11161d", "#e8edf3"
PANEL_INCHES = 3.65
GAP_INCHES = 0.06
TITLE_INCHES = 0.3
TALLEST = 1.6  # height of a panel over its width
SMALLEST_VIEW = 0.3  # share of the field that is always shown


@dataclass(frozen=True)
class Plane:
    """How slices across one axis are laid out on the screen, in radiological display.

    The patient's right is on the left of the picture (anterior, for sagittal slices); anterior is
    at the top of axial slices, superior at the top of all others.

    Attributes:
        axis: array axis that runs from slice to slice.
        rows: array axis shown from top to bottom.
        columns: array axis shown from left to right.
        flip_rows: the array index falls from top to bottom.
        flip_columns: the array index falls from left to right.
        letters: patient directions at the left, right, top and bottom edge.
        aspect: height over width of one pixel.
    """

    axis: int
    rows: int
    columns: int
    flip_rows: bool
    flip_columns: bool
    letters: tuple[str, str, str, str]
    aspect: float

    def cut(self, array: npt.NDArray[Any], index: int) -> npt.NDArray[Any]:
        """Return slice ``index`` of an (I, J, K) array as (rows, columns) of the screen."""
        kept = np.moveaxis(array, self.axis, 0)[index]  # a view: np.take copies what is not in C's order
        plane: npt.NDArray[Any] = kept if self.rows < self.columns else kept.T
        return plane[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def layout(affine: npt.NDArray[np.float64], spacing: Sequence[float], axis: int) -> Plane:
    """Return how slices across array axis ``axis`` are shown."""
    directions = axis_directions(affine)
    across = directions[axis][0]
    world_column, world_row = (1, 2) if across == 0 else (0, 2) if across == 1 else (0, 1)
    array_axes = {world: index for index, (world, _) in enumerate(directions)}
    rows, columns = array_axes[world_row], array_axes[world_column]
    down = LETTERS[world_row][1]  # P, or I
    right = LETTERS[world_column][1]  # L, or P
    return Plane(
        axis=axis,
        rows=rows,
        columns=columns,
        flip_rows=not directions[rows][1],
        flip_columns=not directions[columns][1],
        letters=(LETTERS[world_column][0], right, LETTERS[world_row][0], down),
        aspect=float(spacing[rows] / spacing[columns]),
    )


def display_window(view: CaseView) -> tuple[float, float]:
    """Return the 1st and 99.5th percentile around the foreground, one window for the whole case.

    Bright parts far from the structure, such as near a coil, would leave the structure dark.
    """
    union = view.foreground
    box = bounding_box(union if union.any() else np.ones_like(union))
    margins = [(part.stop - part.start) // 2 + 1 for part in box]
    around = tuple(
        slice(max(0, part.start - margin), part.stop + margin)
        for part, margin in zip(box, margins, strict=True)
    )
    nearby = view.image[around].ravel()
    sampled = nearby[:: max(1, nearby.size // 500_000)]
    low, high = (float(value) for value in np.percentile(sampled, [1.0, 99.5]))
    return (low, high) if high > low else (low, low + 1.0)


def choose_slices(view: CaseView, axis: int, number: int) -> list[int]:
    """Return at most ``number`` slices with the most foreground, apart from each other, in order.

    Without any foreground it is the middle slice.
    """
    union = view.foreground
    areas = union.sum(axis=tuple(other for other in range(3) if other != axis))
    filled = np.flatnonzero(areas)
    if not filled.size:
        return [view.image.shape[axis] // 2]
    apart = max(1, int(filled.size // (number + 1)))
    chosen: list[int] = []
    for index in sorted(filled, key=lambda item: (-areas[item], item)):
        if len(chosen) < number and all(abs(index - other) >= apart for other in chosen):
            chosen.append(int(index))
    return sorted(chosen)


def panels(view: CaseView) -> dict[str, IntArray]:
    """Return the masks that are shown side by side, by title."""
    shown = {"source": view.source_mask, "adapted": view.mask}
    return shown if view.reference is None else shown | {"reference": view.reference}


def draw(
    view: CaseView,
    axis: int,
    index: int,
    classes: Sequence[LabelClass],
    shown: Mapping[str, IntArray] | None = None,
    window: tuple[float, float] | None = None,
) -> Any:
    """Draw slice ``index`` once for each mask, outlines in the colours of the classes.

    The outline of the reference is dashed white on the other panels. Every panel has the same
    display window and the same crop, which follows the foreground of the whole case.

    Args:
        view: the arrays.
        axis: array axis across which slices are cut.
        index: number of the slice, from 0.
        classes: the classes; value 0 is not drawn.
        shown: masks by name, a panel each, instead of source, adapted and reference.
        window: intensities shown black and white, instead of those of the case.

    Returns:
        A matplotlib figure with an Agg canvas.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import Affine2D

    plane = layout(view.affine, view.spacing, axis)
    top, bottom, left, right = crop(view, plane)
    shown = shown or panels(view)
    rows, columns = bottom - top, right - left
    step = PANEL_INCHES / columns * min(1.0, TALLEST * columns / (rows * plane.aspect))
    width, height = columns * step, rows * step * plane.aspect
    breadth, total = len(shown) * (PANEL_INCHES + GAP_INCHES) - GAP_INCHES, height + TITLE_INCHES
    figure = Figure(figsize=(breadth, total), dpi=100, facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, breadth), ylim=(0, total), autoscale_on=False)
    axes.set_axis_off()  # one for all panels, in inches: each takes as long as a panel
    low, high = window or display_window(view)
    picture = plane.cut(view.image, index)[top:bottom, left:right]
    drawn: dict[str, Any] = {"vmin": low, "vmax": high, "aspect": "auto", "interpolation": "bilinear"}
    text: dict[str, Any] = {"color": INK, "size": 10.5, "va": "top", "weight": "bold"}
    for number, (name, mask) in enumerate(shown.items()):
        start = number * (PANEL_INCHES + GAP_INCHES)
        edge = start + (PANEL_INCHES - width) / 2
        panel = Rectangle((edge, 0), width, height, transform=axes.transData)
        axes.imshow(picture, "gray", extent=(edge, edge + width, 0, height), **drawn)
        pixels = Affine2D().translate(0.5 - left, 0.5 - top).scale(step, -step * plane.aspect)
        placed = pixels.translate(edge, height) + axes.transData, panel
        if view.reference is not None and name != "reference":
            _outline(axes, plane.cut(view.reference, index), classes, *placed, reference=True)
        _outline(axes, plane.cut(mask, index), classes, *placed)
        _letters(axes, plane.letters, panel)
        axes.text(start + 0.005 * breadth, total - 0.08, name, **text)
    return figure


def to_array(figure: Any) -> npt.NDArray[np.uint8]:
    """Return the figure as (height, width, 3) uint8."""
    figure.canvas.draw()
    pixels: npt.NDArray[np.uint8] = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    return pixels


def crop(view: CaseView, plane: Plane) -> tuple[int, int, int, int]:
    """Return first and last + 1 row and column of a square in mm about the foreground."""
    shape = view.image.shape
    union = view.foreground
    box = bounding_box(union if union.any() else np.ones_like(union))
    ends = []
    steps = view.spacing[plane.rows], view.spacing[plane.columns]
    spans = [(plane.rows, plane.flip_rows, steps[0]), (plane.columns, plane.flip_columns, steps[1])]
    field = max(shape[axis] * step for axis, _, step in spans)
    extent = max((box[axis].stop - box[axis].start) * step for axis, _, step in spans)
    side = max(1.7 * extent, SMALLEST_VIEW * field)
    for axis, flipped, step in spans:
        size, half = shape[axis], side / step / 2
        middle = (box[axis].start + box[axis].stop) / 2
        middle = min(max(middle, half), size - half) if 2 * half < size else size / 2
        first, last = max(0, round(middle - half)), min(size, round(middle + half))
        ends += [size - last, size - first] if flipped else [first, last]
    return ends[0], ends[1], ends[2], ends[3]


def _outline(
    axes: Any,
    labels: IntArray,
    classes: Sequence[LabelClass],
    place: Any,
    panel: Any,
    reference: bool = False,
) -> None:
    from matplotlib.collections import LineCollection
    from skimage.measure import find_contours

    style: dict[str, Any] = {"linewidths": 1.9}
    if reference:
        style = {"linewidths": 1.1, "linestyles": [(0, (3, 2))], "colors": "white", "alpha": 0.9}
    for item in classes:
        if item.value == 0 or not (labels == item.value).any():
            continue
        padded = np.pad((labels == item.value).astype(np.float32), 1)  # closes outlines at the edge
        lines = [contour[:, ::-1] - 1 for contour in find_contours(padded, 0.5)]
        # one artist for all: a speckled mask has thousands of outlines
        drawn = LineCollection(lines, **{"colors": item.color, "transform": place, **style})
        axes.add_collection(drawn, autolim=False)
        drawn.set_clip_path(panel)  # the axes set their own


def _letters(axes: Any, letters: tuple[str, str, str, str], panel: Any) -> None:
    from matplotlib.patheffects import withStroke

    positions = ((0.02, 0.5), (0.98, 0.5), (0.5, 0.97), (0.5, 0.03))
    sides = (("left", "center"), ("right", "center"), ("center", "top"), ("center", "bottom"))
    for letter, (across, up), (horizontal, vertical) in zip(letters, positions, sides, strict=True):
        axes.text(
            across,
            up,
            letter,
            transform=panel.get_transform(),  # of the unit square to the panel
            ha=horizontal,
            va=vertical,
            color="#ffd166",
            size=10,
            weight="bold",
            path_effects=[withStroke(linewidth=2.5, foreground="black")],  # seen on bright tissue too
        )
