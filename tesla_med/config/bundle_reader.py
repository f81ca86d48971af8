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
from tesla_med.config.bundle_files import TRUST, BundleConfig, bundle_folder, weights_of
from tesla_med.errors import CheckpointError

COLOURS = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#fdae6b", "#9ecae1", "#a1d99b", "#bcbddc")
_DIMENSIONS = {"FlexibleUNet": 2, "FlexUNet": 2}
"""``spatial_dims`` where a network has another default than 3."""
_INFERERS = {"SlidingWindowInferer", "SlidingWindowInfererAdapt", "SliceInferer"}
_WINDOW = ("overlap", "mode", "sigma_scale", "padding_mode", "cval", "sw_batch_size")
_ELSEWHERE = frozenset(
    ("device", "sw_device", "progress", "cache_roi_weight_map", "cpu_thresh", "buffer_steps", "buffer_dim")
)
"""Arguments of inferers that change no result."""
_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype", "anti_aliasing")
_SILENT = frozenset(("Activationsd", "Invertd", "AsDiscreted", "SaveImaged", "EnsureTyped", "ToTensord"))
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "docs/LICENSE", "docs/license.txt", "docs/LICENSE.txt")


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
    return (*reader.notes, *_terms(reader.config))


def _terms(config: BundleConfig) -> list[str]:
    found = []
    held = config.metadata.get("copyright")
    if isinstance(held, str) and held.strip():
        found.append(f"copyright of the model: {held.strip()[:200]}")
    for name in _LICENCES:
        file = config.folder / name
        if file.is_file():
            lines = [line.strip() for line in file.read_text("utf-8", errors="replace").splitlines()]
            text = next((line for line in lines if line), "")
            found.append(f"licence of the model ({name} of its bundle): {text[:200]}")
            break
    return found


class _Reader:
    """Reads one bundle."""

    def __init__(self, path: Path, trust: bool) -> None:
        folder = bundle_folder(path)
        assert folder is not None  # noqa: S101 - it was recognised as one
        self.path, self.trust = path, trust
        self.config = BundleConfig(folder)
        self.notes: list[str] = []

    def content(self) -> dict[str, Any]:
        script = weights_of(self.path).suffix == ".ts"
        network, own = ({}, False) if script else self._or_code("network_def", self._network)
        window, sliding = self._or_code("inferer", self._inferer)
        inputs, outputs = self._format("inputs"), self._format("outputs")
        if inputs["type"] == "multi":
            raise CheckpointError(f"{self.config.file}: networks of more than one input are not supported")
        channels = self._number(network, "in_channels", inputs)
        count = self._number(network, "out_channels", outputs)
        regions = self._regions(count)
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
        preparing: dict[str, Any] = {"steps": steps or [], "slices": slices}
        if prepared:
            preparing["code"] = code
        return {
            "classes": self._classes(outputs, count, regions),
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
        for index, node in enumerate(self._transforms("preprocessing")):
            where = f"preprocessing::transforms::{index}"
            found = config.component(node, where)
            if found is not None:
                step = self._step(_dictionary(found[0]), found[1], where)
                steps += [step] if step is not None else []
        return steps

    def _transforms(self, key: str) -> list[Any]:
        """Return the transforms of a key as they are written: of a ``Compose``, of a list, or one."""
        config = self.config
        node = config.followed(config.content.get(key), key)
        if node is None:
            raise config.refused(key, node, "it is missing")
        if isinstance(node, dict) and str(node.get("_target_", "")).rpartition(".")[2] == "Compose":
            if config.plain(node.get("lazy", False), f"{key}::lazy"):
                raise config.refused(f"{key}::lazy", node["lazy"], "resampling all at once is not supported")
            node = config.followed(node.get("transforms", []), f"{key}::transforms")
        return node if isinstance(node, list) else [node]

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

    # ------------------------------------------------------------ classes

    def _format(self, which: str) -> dict[str, Any]:
        """Return what metadata.json says of the image or of the prediction."""
        every = self.config.metadata.get("network_data_format")
        found = every.get(which) if isinstance(every, dict) else None
        if not isinstance(found, dict) or not found:
            return {"type": ""}
        usual = {"inputs": "image", "outputs": "pred"}[which]
        if usual not in found and len(found) > 1:
            raise CheckpointError(
                f"{self.config.folder}: metadata.json has the {which} {', '.join(found)} and none is "
                f"{usual!r}; networks of one image and one prediction are supported"
            )
        one = found.get(usual, next(iter(found.values())))
        several = which == "inputs" and len(found) > 1
        return {
            "type": "",
            **(one if isinstance(one, dict) else {}),
            **({"type": "multi"} if several else {}),
        }

    def _number(self, network: Mapping[str, Any], key: str, said: Mapping[str, Any]) -> int:
        """Return a number of channels: the network's, which metadata.json must not contradict."""
        own, other = network.get("arguments", {}).get(key), said.get("num_channels")
        found = other if own is None else own
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise CheckpointError(
                f"{self.config.folder}: neither {key} of the network nor num_channels in metadata.json says "
                "how many channels there are"
            )
        if isinstance(other, int) and other != found:
            raise CheckpointError(
                f"{self.config.folder}: {key} of the network is {found}, but metadata.json has {other} channels"
            )
        return found

    def _regions(self, count: int) -> bool:
        """Return whether outputs are overlapping regions; note what is done to masks and not done here."""
        config, order = self.config, []
        sigmoid, softmax, argmax = False, False, None
        if "postprocessing" not in config.content:
            return count == 1
        for index, node in enumerate(self._transforms("postprocessing")):
            where = f"postprocessing::transforms::{index}"
            try:
                found = config.component(node, where)
            except CheckpointError:
                self.notes.append(f"{where} of the bundle is not understood, and not done")
                continue
            if found is None:
                continue
            name, given = _dictionary(found[0]), found[1]
            order.append(name)
            if name == "Activationsd":
                if given.get("other") is not None:
                    raise config.refused(f"{where}::other", given["other"], "expected softmax or sigmoid")
                sigmoid = sigmoid or _any(config.plain(given.get("sigmoid", False), f"{where}::sigmoid"))
                softmax = softmax or _any(config.plain(given.get("softmax", False), f"{where}::softmax"))
            elif name == "AsDiscreted":
                argmax = _any(config.plain(given.get("argmax", False), f"{where}::argmax"))
                limit = config.plain(given.get("threshold"), f"{where}::threshold")
                if limit not in (None, [None], 0.5, [0.5], [None, None]):
                    self.notes.append(f"the bundle's threshold of {limit} is not used; a half is")
            elif name not in _SILENT:
                self.notes.append(f"postprocessing of the bundle that is not done: {name}")
        if "Invertd" in order and "AsDiscreted" in order[: order.index("Invertd")]:
            self.notes.append("the bundle resamples masks; here probabilities are, so edges may differ")
        if not sigmoid and not softmax and argmax is False:
            raise CheckpointError(
                f"{config.file}: postprocessing has neither softmax nor sigmoid nor argmax, so the meaning of "
                "the outputs is unknown"
            )
        if sigmoid and count > 1 and not argmax:
            self.notes.append(
                "the model's outputs are overlapping regions; in the mask a later one is painted over those "
                "before it, in the order of its channels"
            )
        return count == 1 or (sigmoid and not softmax and not argmax)

    def _classes(self, outputs: Mapping[str, Any], count: int, regions: bool) -> list[dict[str, Any]]:
        named = outputs.get("channel_def")
        named = named if isinstance(named, dict) else {}
        names = [str(named.get(str(index), f"class {index}")) for index in range(count)]
        if len(named) not in (0, count) and not (count == 1 and len(named) == 2):
            raise CheckpointError(
                f"{self.config.folder}: the network has {count} outputs, but channel_def in metadata.json "
                f"names {', '.join(map(str, named.values()))}"
            )
        if count == 1 and len(named) == 2:  # background is named, but has no output
            names = [str(named.get("1", "foreground"))]
        if not regions and named and "back" not in names[0].lower():
            self.notes.append(f"the first output, {names[0]!r}, is taken for the background")
        first = "background" if regions else names[0]
        rest = names if regions else names[1:]
        found = [{"value": 0, "name": first, "color": "#000000"}]
        for index, name in enumerate(rest):
            found.append({"value": index + 1, "name": name, "color": COLOURS[index % len(COLOURS)]})
        if len(found) < 2:
            raise CheckpointError(f"{self.config.folder}: one class is nothing to segment; {TRUST}")
        return found


def _dictionary(name: str) -> str:
    """Return the usual name of a dictionary transform: ``SpacingD`` and ``SpacingDict`` are ``Spacingd``."""
    if name.endswith("Dict"):
        return f"{name.removesuffix('Dict')}d"
    return f"{name[:-1]}d" if name.endswith("D") else name


def _any(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)
