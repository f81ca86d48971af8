"""The transforms that a MONAI bundle makes when its own code is run, without those that read an image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from tesla_med.config.bundle import READING
from tesla_med.errors import ConfigError
from tesla_med.prepare.trusted import run_key

_READERS = ("NibabelReader", "ITKReader", "PydicomReader", "NrrdReader")
_AS_READ: dict[str, tuple[Any, ...]] = {
    "affine_lps_to_ras": (True,),
    "reverse_indexing": (False,),
    "swap_ij": (True,),
    "index_order": ("F",),
    "channel_dim": (None, -1),
}
"""What readers of MONAI do unless told otherwise."""


def transforms_of(folder: str) -> tuple[Any, str]:
    """Return what a bundle does to an image that was read, in one, and the key of the image.

    Raises:
        ConfigError: images are read in another way than here, or a part resamples by itself.
        CheckpointError: the code cannot be run.
    """
    from monai.transforms import Compose

    found = run_key(folder, "preprocessing")
    whole = found if type(found) is Compose else Compose(found)
    kept, key = [], None
    for item in _flat(whole):
        if type(item).__name__ in READING and type(item).__module__.startswith("monai."):
            kept += _turning(item, folder)
            if type(item).__name__ == "LoadImaged" and key is None:
                key = _image(item.keys, folder)
        else:
            kept.append(item)
    composed = Compose(kept, map_items=whole.map_items, lazy=whole.lazy, overrides=whole.overrides)
    return composed, key or "image"


def _flat(composed: Any) -> Iterator[Any]:
    for item in composed.transforms:
        if type(item) is not type(composed):
            yield item
            continue
        if (item.lazy, item.overrides) != (composed.lazy, composed.overrides):
            raise ConfigError("preprocessing of the bundle: a Compose in another that resamples by itself")
        yield from _flat(item)


def _image(keys: Iterable[Any], folder: str) -> str:
    named = [str(key) for key in keys]
    others = [key for key in named if key not in ("label", "mask")]
    if "image" in named or len(others) != 1:
        if "image" not in named and others:
            raise ConfigError(f"{folder}: its preprocessing reads {', '.join(others)}; one image is expected")
        return "image"
    return others[0]


def _turning(item: Any, folder: str) -> list[Any]:
    """Return the transform that reading in another way comes to.

    Raises:
        ConfigError: it changes voxels.
    """
    from monai.transforms import Orientationd

    if type(item).__name__ == "EnsureChannelFirstd":
        _check(getattr(item, "adjuster", item), folder)
    if type(item).__name__ != "LoadImaged":
        return []
    loader = item._loader
    if str(getattr(loader.dtype, "__name__", loader.dtype)).removeprefix("torch.") != "float32":
        raise ConfigError(f"{folder}: its code reads images as {loader.dtype}; float32 is expected")
    for reader in loader.readers:
        if not type(reader).__module__.startswith("monai."):
            raise ConfigError(
                f"{folder}: its code reads images by {type(reader).__name__}, which is not known"
            )
        if type(reader).__name__ in _READERS:
            _check(reader, folder)
    if not any(getattr(reader, "as_closest_canonical", False) for reader in loader.readers):
        return []
    return [Orientationd(keys=item.keys, as_closest_canonical=True, allow_missing_keys=True)]


def _check(reader: Any, folder: str) -> None:
    for name, usual in _AS_READ.items():
        value = getattr(reader, name, usual[0])
        none = isinstance(value, float) and math.isnan(value)  # how readers keep "no_channel"
        if value not in usual and not none:
            raise ConfigError(
                f"{folder}: its code reads images with {name} = {value!r}, which is not done here"
            )
