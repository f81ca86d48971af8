"""What a MONAI bundle says of its network, its preprocessing and its classes, as content of a pipeline.

Nothing of the bundle is run: configurations are read as data (see ``bundle_files``), and what is not on the
lists of ``bundle`` is refused by its key. A mask made with a step left out would look right and be wrong.
With ``trust`` the parts that cannot be read are left to MONAI, which runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesla_med.config import bundle as lists
from tesla_med.config.bundle_files import (
    BundleConfig,
    bundle_folder,
    dictionary_name,
    weights_notes,
    weights_of,
)
from tesla_med.config.bundle_outputs import Outputs
from tesla_med.config.licences import terms_of
from tesla_med.errors import CheckpointError

_DIMENSIONS = {"FlexibleUNet": 2, "FlexUNet": 2}
"""``spatial_dims`` where a network has another default than 3."""
_INFERERS = {"SlidingWindowInferer", "SlidingWindowInfererAdapt", "SliceInferer"}
_WINDOW = ("overlap", "mode", "sigma_scale", "padding_mode", "cval", "sw_batch_size")
_ELSEWHERE = frozenset(
    ("device", "sw_device", "progress", "cache_roi_weight_map", "cpu_thresh", "buffer_steps", "buffer_dim")
)
"""Arguments of inferers that change no result."""
_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype", "anti_aliasing")


def read_bundle(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Return what a bundle says, as content of a pipeline.

    Args:
        path: the bundle, or a file in its ``models/``.
        trust: parts that need the bundle's own code are left to MONAI.

    Raises:
        CheckpointError: a file cannot be read, or holds what is not supported; key and content are named.
    """
    return _Reader(path, trust).content()


def bundle_notes(path: Path) -> tuple[str, ...]:
    """Return remarks on a bundle: its licence, and what of it is not done as it says."""
    reader = _Reader(path, trust=True)
    reader.content()
    config = reader.config
    return (
        *weights_notes(path),
        *reader.outputs.notes,
        *terms_of(config.folder, config.metadata, {"copyright": "copyright"}, "bundle"),
    )


class _Reader:
    """Reads one bundle."""

    def __init__(self, path: Path, trust: bool) -> None:
        folder = bundle_folder(path)
        assert folder is not None  # noqa: S101 - it was recognised as one
        self.path, self.trust = path, trust
        self.config = BundleConfig(folder)
        self.outputs = Outputs(self.config)

    def content(self) -> dict[str, Any]:
        script = weights_of(self.path).suffix == ".ts"
        network, own = ({}, False) if script else self._or_code("network_def", self._network)
        window, sliding = self._or_code("inferer", self._inferer)
        arguments = network.get("arguments", {})
        inputs, outputs = self.outputs.of("inputs"), self.outputs.of("outputs")
        channels = self.outputs.number(arguments.get("in_channels"), inputs, "in_channels")
        count = self.outputs.number(arguments.get("out_channels"), outputs, "out_channels")
        regions = self.outputs.regions(count)
        steps, prepared = self._or_code("preprocessing", self._steps)
        axes = self._axes(network, window, inputs)
        slices = window.pop("spatial_dim", None)
        if axes == 2 and slices is None and not sliding:
            raise CheckpointError(
                f"{self.config.file}: a network of two dimensions without SliceInferer: images of two "
                "dimensions are not supported for bundles, only slices of volumes"
            )
        code = str(self.config.folder.resolve())
        params: dict[str, Any] = {"axes": axes, "regions": regions, "roi": None, **window}
        if script:
            params["script"] = str(weights_of(self.path).resolve())
        elif own:
            params["code"] = code
        else:
            params |= {"class_name": network["class_name"], "arguments": network["arguments"]}
        if sliding:
            params |= {"code_of_inferer": code}
        if self.outputs.painting is not None:
            params["order"] = self.outputs.painting.order
        preparing: dict[str, Any] = {
            "steps": steps or [],
            "slices": slices,
            "nearest": self.outputs.nearest,
        }
        if prepared:
            preparing["code"] = code
        return {
            "classes": self.outputs.classes(outputs, count, regions),
            "regions": regions,
            "channels": channels,
            "preprocessing": {"model_range": self._range(steps or [], inputs), "bundle": preparing},
            "model": {"name": "bundle", "params": params},
        }

    def _or_code(self, key: str, read: Any) -> tuple[Any, bool]:
        """Return what can be read of a part, and whether it is left to MONAI."""
        try:
            return read(), False
        except CheckpointError:
            if not self.trust:
                raise
            return {}, True

    # ------------------------------------------------------------ network and inference

    def _network(self) -> dict[str, Any]:
        config = self.config
        key = "network_def" if "network_def" in config.content else "network"
        if "network" in config.content:  # what MONAI runs: the same, moved to a device and no more
            config.component(config.content["network"], "network")
        found = config.component(config.content.get(key), key)
        if found is None:
            raise CheckpointError(f"{config.file}: {key} is switched off")
        name, given = found
        if name not in lists.NETWORKS:
            raise config.refused(
                key, name, f"a network that is not on the list, {', '.join(sorted(lists.NETWORKS))}"
            )
        unused = {"pretrained", "progress"}  # of weights that would be downloaded, and replaced
        arguments = {
            name: config.plain(value, f"{key}::{name}") for name, value in given.items() if name not in unused
        }
        if name == "SwinUNETR":
            arguments.pop("img_size", None)  # MONAI before 1.5 checked sizes by it
        if "dimensions" in arguments:  # MONAI before 0.9
            arguments["spatial_dims"] = arguments.pop("dimensions")
        if name != "AHNet":
            arguments.setdefault("spatial_dims", _DIMENSIONS.get(name, 3))
        return {"class_name": name, "arguments": arguments}

    def _inferer(self) -> dict[str, Any]:
        config = self.config
        if "inferer" not in config.content:
            return {}
        found = config.component(config.content["inferer"], "inferer")
        if found is None or found[0] == "SimpleInferer":
            return {}
        name, given = found
        if name not in _INFERERS:
            raise config.refused(
                "inferer", name, "expected SlidingWindowInferer, SliceInferer or SimpleInferer"
            )
        unknown = set(given) - {*_WINDOW, *_ELSEWHERE, "roi_size", "spatial_dim"}
        if unknown:
            raise config.refused("inferer", sorted(unknown), "arguments that are not known")
        values = {
            key: config.plain(value, f"inferer::{key}")
            for key, value in given.items()
            if key not in _ELSEWHERE
        }
        roi = values.pop("roi_size", None)
        window = {key: values[key] for key in _WINDOW if key in values}
        if isinstance(window.get("mode"), str):
            window["mode"] = window["mode"].lower()
        if name == "SliceInferer":
            window["spatial_dim"] = values.get("spatial_dim", 0)
        return window | {"roi": roi if isinstance(roi, list) else [roi]}

    def _axes(self, network: Mapping[str, Any], window: dict[str, Any], inputs: Mapping[str, Any]) -> int:
        shape = inputs.get("spatial_shape")
        known = len(shape) if isinstance(shape, list) else 3
        axes = network.get("arguments", {}).get("spatial_dims", known)
        if "spatial_dim" in window:
            axes = 2
        if axes not in (2, 3):
            raise CheckpointError(f"{self.config.file}: a network of {axes} dimensions; expected 2 or 3")
        roi = window.get("roi")
        if roi is not None:
            roi = roi * axes if len(roi) == 1 else roi
            sizes = [side if isinstance(side, int) and side > 0 else None for side in roi]
            if len(sizes) != axes:
                raise self.config.refused("inferer::roi_size", roi, f"expected {axes} sizes")
            window["roi"] = sizes
        return int(axes)

    # ------------------------------------------------------------ preprocessing

    def _steps(self) -> list[dict[str, Any]]:
        config = self.config
        steps = []
        for index, node in enumerate(self.config.transforms("preprocessing")):
            where = f"preprocessing::transforms::{index}"
            found = config.component(node, where)
            if found is not None:
                step = self._step(dictionary_name(found[0]), found[1], where)
                steps += [step] if step is not None else []
        return steps

    def _step(self, name: str, given: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        config = self.config
        if name in lists.READING:
            return None
        keys = config.plain(given.get("keys", []), f"{where}::keys")
        keys = keys if isinstance(keys, list) else [keys]
        if not keys or (len(keys) > 1 and "image" not in keys):
            raise config.refused(f"{where}::keys", keys, "expected the image")
        image = "image" if "image" in keys else keys[0]
        if image in ("label", "mask", "pred"):
            return None
        if name not in lists.TRANSFORMS:
            raise config.refused(where, name, "a transform that is not on the list")
        unused = {"keys", "allow_missing_keys", "device", "track_meta", "source_key", "data_type"}
        unused |= {"start_coord_key", "end_coord_key", "wrap_sequence"}
        arguments: dict[str, Any] = {}
        for key, node in given.items():
            if key in unused:
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

    def _range(self, steps: list[dict[str, Any]], inputs: Mapping[str, Any]) -> tuple[float, float]:
        """Return where intensities lie after the steps; nothing is clipped to it."""
        found: tuple[Any, Any] | None = None
        for step in steps:
            name, given = step["name"], step["arguments"]
            if name == "NormalizeIntensityd":
                found = lists.Z_RANGE
            elif name == "ScaleIntensityd":
                found = (given.get("minv", 0.0), given.get("maxv", 1.0))
                found = found if given.get("factor") is None else None
            elif name in ("ScaleIntensityRanged", "ScaleIntensityRangePercentilesd"):
                found = (given.get("b_min", 0.0), given.get("b_max", 1.0))
            elif name == "HistogramNormalized":
                found = (given.get("min", 0), given.get("max", 255))
        if found is None:
            value = inputs.get("value_range")
            found = (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else (0.0, 1.0)
        low, high = found
        if not all(isinstance(item, int | float) for item in (low, high)) or not low < high:
            return (0.0, 1.0)
        return (float(low), float(high))
