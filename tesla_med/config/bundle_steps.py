"""The preprocessing of a MONAI bundle as steps for one image, read without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tesla_med.config import bundle as lists
from tesla_med.config.bundle_config import BundleConfig, dictionary_name

_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype", "anti_aliasing")
_OTHERS = ("label", "mask", "pred")
"""Keys that are never the image."""
_UNUSED = frozenset(
    (
        *("keys", "allow_missing_keys", "device", "track_meta", "source_key", "data_type"),
        *("start_coord_key", "end_coord_key", "wrap_sequence"),
    )
)


def steps_of(config: BundleConfig) -> list[dict[str, Any]]:
    """Return the steps, names with arguments.

    Raises:
        CheckpointError: one is not on the lists, or does something that is not done here.
    """
    found = []
    for where, node in config.transforms("preprocessing"):
        component = config.component(node, where)
        if component is not None:
            found.append((where, dictionary_name(component[0]), component[1]))
    keys = [(where, name, _keys(config, given, where)) for where, name, given in found]
    image = _image(config, keys)
    steps = []
    for (where, name, given), (*_, named) in zip(found, keys, strict=True):
        if not named and name not in lists.READING:
            raise config.refused(f"{where}::keys", named, "expected the image")
        step = _step(config, name, given, where, named, image)
        steps += [step] if step is not None else []
    return steps


def _keys(config: BundleConfig, given: Mapping[str, Any], where: str) -> list[str]:
    keys = config.plain(given.get("keys", []), f"{where}::keys")
    keys = keys if isinstance(keys, list) else [keys]
    if not all(isinstance(key, str) for key in keys):
        raise config.refused(f"{where}::keys", keys, "texts are expected")
    return keys


def _image(config: BundleConfig, steps: Iterable[tuple[str, str, list[str]]]) -> str:
    """Return the key of the image: ``image``, or the one that is read, or the only one.

    Raises:
        CheckpointError: there are several.
    """
    steps = list(steps)
    read = [item for item in steps if item[1] == "LoadImaged"]
    for some in (read, steps):
        named = dict.fromkeys(key for *_, keys in some for key in keys if key not in _OTHERS)
        if "image" in named:
            return "image"
        if len(named) > 1:
            raise config.refused(f"{some[0][0]}::keys", list(named), "expected the image")
        if named:
            return next(iter(named))
    return "image"


def _step(
    config: BundleConfig, name: str, given: Mapping[str, Any], where: str, keys: list[str], image: str
) -> dict[str, Any] | None:
    """Return a step of the image; None where it does nothing to it."""
    if name in lists.READING:
        return _reading(config, name, given, where) if image in keys or not keys else None
    if image not in keys and (name in lists.TRANSFORMS or set(keys) <= set(_OTHERS)):
        return None
    if name not in lists.TRANSFORMS:
        raise config.refused(where, name, "a transform that is not on the list")
    source = config.plain(given.get("source_key", image), f"{where}::source_key")
    if name == "CropForegroundd" and source != image:
        raise config.refused(f"{where}::source_key", source, f"expected the image, {image!r}")
    arguments: dict[str, Any] = {}
    for key, node in given.items():
        if key in _UNUSED:
            continue
        value = config.plain(node, f"{where}::{key}")
        if key in _PER_KEY and isinstance(value, list) and len(value) == len(keys):
            value = value[keys.index(image)]
        if key == "lazy":
            if value:
                raise config.refused(f"{where}::lazy", value, "resampling all at once is not supported")
            continue
        if isinstance(value, dict) and not (key == "select_fn" and set(value) == {"above"}):
            raise config.refused(f"{where}::{key}", node, "a number, a text or a list is expected")
        arguments[key] = value
    return {"name": name, "arguments": arguments}


# ------------------------------------------------------------ reading

_READERS = ("nibabelreader", "itkreader", "pydicomreader", "nrrdreader")
_FLOAT = ("float32", "float")
_SAME: dict[str, dict[str, tuple[Any, ...]]] = {
    "LoadImaged": {
        "dtype": _FLOAT,
        "as_closest_canonical": (False, True),
        "affine_lps_to_ras": (True,),
        "reverse_indexing": (False,),
        "swap_ij": (True,),
        "index_order": ("F",),
        "channel_dim": (None, -1, "no_channel"),
        "squeeze_non_spatial_dims": (False, True),
        "series_name": ("",),
        "fname_regex": ("",),
        "label_dict": (None,),
    },
    "EnsureChannelFirstd": {"channel_dim": (None, -1, "no_channel")},
    "AsChannelFirstd": {"channel_dim": (-1,)},
    "ToTensord": {"dtype": (None, *_FLOAT)},
}
"""Arguments of transforms that read, with the values that change nothing."""
_HARMLESS = frozenset(
    (
        *("keys", "reader", "meta_keys", "meta_key_postfix", "overwriting", "image_only", "strict_check"),
        *(
            "ensure_channel_first",
            "simple_keys",
            "prune_meta_pattern",
            "prune_meta_sep",
            "allow_missing_keys",
        ),
        *("expanduser", "series_meta", "prune_metadata", "to_gpu", "device", "wrap_sequence", "track_meta"),
    )
)


def _reading(config: BundleConfig, name: str, given: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the step that reading an image in another way comes to; None where it changes nothing.

    Raises:
        CheckpointError: an argument changes what is read.
    """
    known = _SAME.get(name)
    if known is None:
        return None
    found: dict[str, Any] = {}
    for key, node in given.items():
        if key in _HARMLESS:
            continue
        value = config.plain(node, f"{where}::{key}")
        if key not in known or not any(value == item and type(value) is type(item) for item in known[key]):
            raise config.refused(f"{where}::{key}", value, "it changes how images are read")
        found[key] = value
    reader = given.get("reader")
    for index, item in enumerate(reader if isinstance(reader, list) else [reader]):
        if _canonical(config, item, f"{where}::reader::{index}"):
            found["as_closest_canonical"] = True
    if not found.get("as_closest_canonical"):
        return None
    return {"name": "Orientationd", "arguments": {"as_closest_canonical": True}}


def _canonical(config: BundleConfig, node: Any, where: str) -> bool:
    """Return whether a reader turns images; refuse it where it reads other voxels."""
    if node is None:
        return False
    node = config.followed(node, where)
    if isinstance(node, dict):
        component = config.component(node, where)
        if component is None or component[0].lower() not in _READERS:
            raise config.refused(where, node, "a reader that is not known")
        return _reading(config, "LoadImaged", component[1], where) is not None
    named = str(node).removeprefix("monai.data.").removeprefix("image_reader.").lower()
    if named not in _READERS:
        raise config.refused(where, node, "a reader that is not known")
    return False
