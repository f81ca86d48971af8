"""Read what experts drew for a case and combine its layers into one label image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tesla_med.config.models import Files, MaskLayer
from tesla_med.errors import DataError
from tesla_med.io.volumes import read_mask_of
from tesla_med.types import BoolArray, Case, IntArray, Volume

IGNORED = -1
"""Stands for voxels of a reference that are not scored."""


def read_reference(case: Case, site_files: Files, volume: Volume, classes: Sequence[int]) -> IntArray:
    """Read every mask layer of a case and combine them as the site says.

    Args:
        case: the case; needs a file for every layer.
        site_files: what the layers' values mean, and how layers are combined.
        volume: the case's image, whose grid every layer must share.
        classes: label values that may occur.

    Returns:
        Label values (I, J, K) int32 in file order; ``IGNORED`` where a layer says that a voxel is not scored.

    Raises:
        DataError: a layer without file, an unreadable file, or a value without meaning.
        GeometryError: a layer on another grid.
    """
    if not case.masks or len(case.masks) != len(site_files.masks):
        raise DataError(f"case {case.name}: the site names no reference masks for it")
    missing = [layer.where for layer, path in zip(site_files.masks, case.masks, strict=True) if path is None]
    if missing:
        raise DataError(f"case {case.name}: no reference file for {case.image} matches {', '.join(missing)}")
    ignored = np.zeros(volume.shape, np.bool_)
    layers = [
        _read_layer(path, layer, volume, case, ignored)
        for layer, path in zip(site_files.masks, case.masks, strict=True)
        if path is not None
    ]
    result = _vote(layers) if site_files.combine == "majority" else _paint(layers)
    if ignored.any():
        result[ignored] = IGNORED
    unknown = sorted(set(np.unique(result).tolist()) - {IGNORED, *classes})
    if unknown:
        raise DataError(
            f"case {case.name}: reference holds label {_list(unknown)}, expected only {_list(classes)}; "
            f"map it with 'values', or leave its voxels out with 'ignore', in the site's files.masks "
            f"(read: {', '.join(map(str, case.masks))})"
        )
    return result


def read_region_mask(case: Case, volume: Volume) -> BoolArray:
    """Read the mask that the region of interest is taken from: (I, J, K), true where it is above 0.

    Raises:
        DataError: the case has no such file, or it cannot be read.
        GeometryError: it is on another grid.
    """
    if case.region_mask is None:
        raise DataError(
            f"case {case.name}: the site's region comes from a mask, but there is none for {case.image}; "
            "add the file, or choose another region: --set site.region.kind=square or point"
        )
    return np.asarray(read_mask_of(case.region_mask, volume, case.name) > 0)


def _read_layer(path: Path, layer: MaskLayer, volume: Volume, case: Case, ignored: BoolArray) -> IntArray:
    """Return the labels of a layer, 0 where its voxels are ignored, which are noted in ``ignored``."""
    mask = read_mask_of(path, volume, case.name)
    if layer.ignore:
        left_out = np.isin(mask, layer.ignore)
        ignored |= left_out
        mask = np.where(left_out, 0, mask).astype(np.int32)
    if layer.write is not None:
        _check_written(mask, f"case {case.name}: {path}", layer)
        return np.where(mask > 0, layer.write, 0).astype(np.int32)
    if layer.values is None:
        return np.array(mask)
    present, inverse = np.unique(mask, return_inverse=True)
    known = {0, *layer.values} if layer.ignore else set(layer.values)
    unknown = [value for value in present.tolist() if value not in known]
    if unknown:
        raise DataError(
            f"case {case.name}: {path} holds value {_list(unknown)}, the site knows {_list(layer.values)}; "
            f"add it to 'values' of the mask pattern {layer.pattern}, or to 'ignore': it is then not scored"
        )
    mapped = np.array([layer.values.get(value, 0) for value in present.tolist()], np.int32)
    return np.asarray(mapped[inverse].reshape(mask.shape))


def _check_written(mask: IntArray, name: str, layer: MaskLayer) -> None:
    """Check that what ``write`` paints is one thing: a value, or zones 1 to n.

    Raises:
        DataError: it is something else; the first value that does not belong is named.
    """
    present = [value for value in np.unique(mask).tolist() if value]
    if len(present) < 2 or present == list(range(1, len(present) + 1)):
        return
    strange = [value for place, value in enumerate(present, 1) if value != place]
    rest = [value for value in present if value not in strange] or [0]
    raise DataError(
        f"{name} holds value {_list(strange)} beside {_list(rest)};"
        f" 'write' paints a file with one value, or with zones 1 to n; say what it means with 'values' of the"
        f" mask pattern {layer.pattern}, or leave it out of the scores with 'ignore: [{strange[0]}]'"
    )


def _paint(layers: Sequence[IntArray]) -> IntArray:
    result = np.array(layers[0])
    for layer in layers[1:]:
        np.copyto(result, layer, where=layer > 0)
    return result


def _vote(layers: Sequence[IntArray]) -> IntArray:
    """Return the label most layers give a voxel; background where no label has most votes."""
    import SimpleITK as sitk  # noqa: N813 - its usual name

    # The filter's memory grows with the largest label, so labels are numbered first.
    labels = np.unique(np.concatenate([np.unique(layer) for layer in layers] + [np.zeros(1, np.int32)]))
    images = [sitk.GetImageFromArray(np.searchsorted(labels, layer).astype(np.uint16)) for layer in layers]
    voted = sitk.GetArrayFromImage(sitk.LabelVoting(images, 0))
    return np.asarray(labels[voted].astype(np.int32))


def _list(values: Sequence[int] | dict[int, int]) -> str:
    return ", ".join(str(value) for value in list(values)[:10])
