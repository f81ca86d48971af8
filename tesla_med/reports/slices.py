"""Every slice of a case as data of the page: the image, the outlines of the masks, the map of entropy.

Images are grey JPEG files, masks are paths of SVG, so that the browser superimposes and colours them; both
are text in one small script per case, ``report/slices/<case>.js``. A page that was opened as a file may load
scripts but no data, which is why it is a script.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import LabelClass
from tesla_med.io.files import write_text
from tesla_med.reports.drawing import data_uri
from tesla_med.reports.overlays import Plane, crop, display_window, layout
from tesla_med.scoring.metrics import dice
from tesla_med.types import CaseView

FOLDER = "slices"
ROLES = {"source": "#ff9d2e", "adapted": "#4cc3ff", "reference": "#d8ff5a"}
"""The masks that are superimposed, with the colours of their outlines."""
LONGEST = 512
"""Pixels of the longer side of a stored image, at most; outlines keep the grid of the case."""
MOST_EDGES = 6000
"""Pixel edges of a mask in a slice beyond which it is a picture: speckle has no readable outline."""
QUALITY = 82
LEVELS = 16
RAMP = ((40, 0, 80), (190, 40, 100), (255, 160, 40), (255, 250, 170))
"""Colours of the entropy from 0 to 1, evenly spaced."""
OPENING, CLOSING = "showSlices(", ");\n"


def draw_slices(
    view: CaseView, axis: int, classes: Sequence[LabelClass], indices: Iterable[int] | None = None
) -> dict[str, Any]:
    """Return what the page needs to show slices of a case.

    Args:
        view: the arrays.
        axis: array axis across which slices are cut.
        classes: the classes that are drawn.
        indices: numbers of the slices, from 0; default: all.

    Returns:
        JSON-able content: ``width`` and ``height`` of a slice in pixels, ``aspect`` of a pixel, ``crop``
        (left, top, width, height) about the foreground, ``letters`` (left, right, top, bottom), ``window``,
        ``count`` of slices in the volume, ``layers``, ``slices``: each with ``index``, ``image``, outlines
        by role and class, and where they exist ``entropy`` and ``dice`` by role.
    """
    plane = layout(view.affine, view.spacing, axis)
    low, high = display_window(view)
    masks = {"source": view.source_mask, "adapted": view.mask}
    if view.reference is not None:
        masks["reference"] = view.reference
    top, bottom, left, right = crop(view, plane)
    count = view.image.shape[axis]
    slices = []
    for index in range(count) if indices is None else indices:
        cut = {role: plane.cut(mask, index) for role, mask in masks.items()}
        content: dict[str, Any] = {"index": index, "image": _grey(plane.cut(view.image, index), low, high)}
        for role, mask in cut.items():
            content[role] = _outlines(mask, classes, role)
        if view.entropy is not None:
            content["entropy"] = _heat(plane.cut(view.entropy, index))
        if view.reference is not None:
            content["dice"] = _dice_of(cut, plane, index, view, classes)
        slices.append(content)
    return {
        "width": view.image.shape[plane.columns],
        "height": view.image.shape[plane.rows],
        "aspect": round(plane.aspect, 6),
        "crop": [left, top, right - left, bottom - top],
        "letters": list(plane.letters),
        "window": f"{low:.4g} to {high:.4g}",
        "count": count,
        "layers": [*masks, *(["entropy"] if view.entropy is not None else [])],
        "slices": slices,
    }


def reset_to_source(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return content of a case whose mask has become the source's: the maps of the adapted model go."""
    slices = []
    for item in content["slices"]:
        kept = {key: value for key, value in item.items() if key != "entropy"} | {"adapted": item["source"]}
        if "dice" in item:
            kept["dice"] = item["dice"] | {"adapted": item["dice"]["source"]}
        slices.append(kept)
    layers = [name for name in content["layers"] if name != "entropy"]
    return {**content, "layers": layers, "slices": slices}


# ------------------------------------------------------------ files


def file_of(report_folder: Path, case: str) -> Path:
    """Return the file of a case's slices."""
    return report_folder / FOLDER / f"{case}.js"


def address_of(case: str) -> str:
    """Return the address of a case's slices, relative to the page."""
    return quote(os.fsencode(f"{FOLDER}/{case}.js"))


def write_slices(path: Path, content: Mapping[str, Any]) -> None:
    """Write the slices of a case.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(path, OPENING + json.dumps(content, separators=(",", ":"), allow_nan=False) + CLOSING)


def read_slices(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_slices` wrote; None where there is no such file, or none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text.removeprefix(OPENING).removesuffix(CLOSING))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "slices" in content else None


# ------------------------------------------------------------ pictures of one slice


def _grey(image: npt.NDArray[np.float32], low: float, high: float) -> str:
    from PIL import Image

    scaled = np.clip((np.nan_to_num(image) - low) * (255.0 / (high - low)), 0, 255).astype(np.uint8)
    return data_uri(_saved(_small(Image.fromarray(scaled)), "JPEG", quality=QUALITY), "image/jpeg")


def _heat(entropy: npt.NDArray[np.float32]) -> str:
    """Return a picture of the entropy, the more transparent the lower."""
    from PIL import Image

    levels = np.clip(np.nan_to_num(entropy) * (LEVELS - 1) + 0.5, 0, LEVELS - 1).astype(np.uint8)
    places = np.linspace(0, len(RAMP) - 1, LEVELS)
    colours = np.stack(
        [np.interp(places, range(len(RAMP)), part) for part in zip(*RAMP, strict=True)], axis=1
    )
    picture = _small(Image.fromarray(levels))
    picture.putpalette(colours.astype(np.uint8).ravel().tolist())
    alpha = bytes(int(230 * (level / (LEVELS - 1)) ** 0.7) for level in range(LEVELS))
    return data_uri(_saved(picture, "PNG", transparency=alpha, bits=4), "image/png")


def _small(picture: Any) -> Any:
    from PIL import Image

    factor = LONGEST / max(picture.size)
    if factor >= 1:
        return picture
    return picture.resize([max(1, round(side * factor)) for side in picture.size], Image.Resampling.BOX)


def _saved(picture: Any, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format=kind, **options)
    return stream.getvalue()


def _dice_of(
    cut: Mapping[str, npt.NDArray[Any]],
    plane: Plane,
    index: int,
    view: CaseView,
    classes: Sequence[LabelClass],
) -> dict[str, str]:
    """Return the Dice of the slice alone, of every class, by role."""
    ignored = None if view.ignored is None else plane.cut(view.ignored, index)

    def one(mask: npt.NDArray[Any], value: int) -> str:
        hit = mask == value if ignored is None else (mask == value) & ~ignored
        score = dice(cut["reference"] == value, hit)
        return "n/a" if score is None else f"{score:.2f}"

    return {
        role: " / ".join(one(cut[role], item.value) for item in classes) for role in ("source", "adapted")
    }


# ------------------------------------------------------------ outlines


def _outlines(mask: npt.NDArray[Any], classes: Sequence[LabelClass], role: str) -> dict[str, str]:
    """Return the outline of every class in a slice by its value: a path in half pixels, or a picture."""
    found = {}
    for item in classes:
        hit = mask == item.value
        rows, columns = np.flatnonzero(hit.any(axis=1)), np.flatnonzero(hit.any(axis=0))
        if not rows.size:
            continue
        box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        part = np.pad(hit[box], 1)  # closes outlines at the edge
        edges = int((part[1:] != part[:-1]).sum() + (part[:, 1:] != part[:, :-1]).sum())
        found[str(item.value)] = (
            _stencil(hit, ROLES[role]) if edges > MOST_EDGES else _path(part, int(rows[0]), int(columns[0]))
        )
    return found


def _path(part: npt.NDArray[np.bool_], top: int, left: int) -> str:
    """Return the outlines of a padded mask as one path; its units are half pixels of the slice."""
    from skimage.measure import find_contours

    words = []
    for contour in find_contours(part.astype(np.float32), 0.5):
        # the first pixel of the mask is at 1 in the padded mask; its middle is at half a pixel
        points = np.rint(2 * contour[:, ::-1]).astype(int) + np.array([2 * left - 1, 2 * top - 1])
        steps = np.diff(points, axis=0)
        turns = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
        kept = points[[0, *turns]]
        moves = " ".join(f"{across} {down}" for across, down in np.diff(kept, axis=0).tolist())
        words.append(f"M{kept[0][0]} {kept[0][1]}l{moves}z".replace(" -", "-"))
    return "".join(words)


def _stencil(hit: npt.NDArray[np.bool_], color: str) -> str:
    """Return a mask as a picture of one colour, for masks that have no outline worth drawing."""
    from PIL import Image

    picture = Image.fromarray(hit.astype(np.uint8))
    picture.putpalette([0, 0, 0, *bytes.fromhex(color[1:])])
    return data_uri(_saved(picture, "PNG", transparency=bytes([0, 150]), bits=1), "image/png")


def encoded_size(content: Mapping[str, Any]) -> int:
    """Return about how many bytes slices take in a page."""
    return sum(
        len(part)
        for item in content["slices"]
        for value in item.values()
        for part in (value.values() if isinstance(value, Mapping) else [value])
        if isinstance(part, str)
    )
