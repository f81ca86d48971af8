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
from tesla_med.config.bundle_config import BundleConfig
from tesla_med.config.bundle_evaluator import evaluator_notes
from tesla_med.config.bundle_files import bundle_folder, weights_notes, weights_of
from tesla_med.config.bundle_outputs import Outputs
from tesla_med.config.bundle_steps import steps_of
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
        *evaluator_notes(config),
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
        network, own = ({}, False) if script else self._or_code("network", self._network)
        window, sliding = self._or_code("inferer", self._inferer)
        arguments = network.get("arguments", {})
        inputs, outputs = self.outputs.of("inputs"), self.outputs.of("outputs")
        channels = self.outputs.number(arguments.get("in_channels"), inputs, "in_channels")
        count = self.outputs.number(arguments.get("out_channels"), outputs, "out_channels")
        regions = self.outputs.regions(count)
        steps, prepared = self._or_code("preprocessing", lambda: steps_of(self.config))
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
        key, node = config.place("network") or ("network_def", None)
        found = config.component(node, key)
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
        where, node = config.place("inferer") or ("inferer", None)
        found = None if node is None else config.component(node, where)
        if found is None or found[0] == "SimpleInferer":
            return {}
        name, given = found
        if name not in _INFERERS:
            raise config.refused(where, name, "expected SlidingWindowInferer, SliceInferer or SimpleInferer")
        unknown = set(given) - {*_WINDOW, *_ELSEWHERE, "roi_size", "spatial_dim"}
        if unknown:
            raise config.refused(where, sorted(unknown), "arguments that are not known")
        values = {
            key: config.plain(value, f"{where}::{key}")
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
            if not all(side is None or isinstance(side, int) for side in roi):
                raise self.config.refused("inferer::roi_size", roi, "whole numbers are expected")
            sizes = [side if side is not None and side > 0 else None for side in roi]
            if len(sizes) != axes:
                raise self.config.refused("inferer::roi_size", roi, f"expected {axes} sizes")
            window["roi"] = sizes
        return int(axes)

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
