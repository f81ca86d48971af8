"""What the outputs of a MONAI bundle mean, by metadata.json and by what postprocessing does to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tesla_med.config.bundle import READING
from tesla_med.config.bundle_config import BundleConfig, dictionary_name
from tesla_med.config.bundle_painting import Painting, painting
from tesla_med.errors import CheckpointError

COLOURS = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#fdae6b", "#9ecae1", "#a1d99b", "#bcbddc")
_SILENT = frozenset(("Activationsd", "Invertd", "AsDiscreted", "SaveImaged", "EnsureTyped", "ToTensord"))
"""Steps of postprocessing that are read, or that change no mask."""
_EACH_BY_ITSELF = READING | frozenset(
    ("KeepLargestConnectedComponentd", "RemoveSmallObjectsd", "FillHolesd", "CastToTyped")
)
"""Steps that change where regions are, and not what they are called."""
_READ = frozenset(("Activationsd", "AsDiscreted", "Invertd"))
_MADE = ("names", "name", "output_key")
"""Arguments that name what a step makes of its keys."""
_Step = tuple[str, dict[str, Any]]


class Outputs:
    """Reads the meaning of inputs and outputs.

    Args:
        config: of the bundle.

    Attributes:
        notes: remarks on what the bundle does to masks and is not done here.
        nearest: whether the way back takes the nearest voxel, as MONAI's ``Invertd`` does unless told not to.
        painting: how overlapping regions become one mask, where the bundle says it.
    """

    def __init__(self, config: BundleConfig) -> None:
        self.config = config
        self.notes: list[str] = []
        self.nearest = False
        self.painting: Painting | None = None

    def of(self, which: str) -> dict[str, Any]:
        """Return what metadata.json says of the image (``inputs``) or of the prediction (``outputs``).

        Raises:
            CheckpointError: there are several.
        """
        every = self.config.metadata.get("network_data_format")
        found = every.get(which) if isinstance(every, dict) else None
        if not isinstance(found, dict) or not found:
            return {}
        usual = {"inputs": "image", "outputs": "pred"}[which]
        if len(found) > 1 and (usual not in found or which == "inputs"):
            raise CheckpointError(
                f"{self.config.folder}: metadata.json has the {which} {', '.join(found)}; networks of one "
                "image and one prediction are supported"
            )
        one = found.get(usual, next(iter(found.values())))
        return dict(one) if isinstance(one, dict) else {}

    def number(self, own: Any, said: Mapping[str, Any], key: str) -> int:
        """Return a number of channels: the network's own, which metadata.json must not contradict.

        Raises:
            CheckpointError: nothing says it, or the two differ.
        """
        other = said.get("num_channels")
        found = other if own is None else own
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise CheckpointError(
                f"{self.config.folder}: neither {key} of the network nor num_channels in metadata.json says "
                "how many channels there are"
            )
        if isinstance(other, int) and other != found:
            raise CheckpointError(
                f"{self.config.folder}: {key} of the network is {found}, but metadata.json has {other} "
                "channels; correct the one that is wrong"
            )
        return found

    def regions(self, count: int) -> bool:
        """Return whether outputs are overlapping regions; note what is done to masks and not done here.

        Raises:
            CheckpointError: the meaning of the outputs is unknown.
        """
        if self.config.place("postprocessing") is None:
            self.nearest = True
            self.notes.append(
                "the bundle has no postprocessing: the largest output counts, or of a single one what is "
                "above a half, and the way back is by the nearest voxel"
            )
            return count == 1
        left: list[tuple[str, str, Any]] = []
        steps = list(self._steps(left))
        self._way_back(steps)
        overlap = self._overlap(steps, left, count)
        if overlap and count > 1:
            left = self._painted(left, [name for name, _ in steps], count)
            if self.painting is None:
                self.notes.append(
                    "the model's outputs are overlapping regions; in the mask each is painted over those "
                    "before it, in the order of its channels, so one that lies inside of a later one is not "
                    "seen (model.params.order and classes change it)"
                )
        self.notes += [
            f"postprocessing of the bundle that is not done: {name}"
            if name
            else f"{where} of the bundle is not understood, and not done"
            for where, name, _ in left
        ]
        return count == 1 or overlap

    def _way_back(self, steps: list[_Step]) -> None:
        """Read how masks find their way back, by ``Invertd``."""
        names = [name for name, _ in steps]
        back = [values.get("nearest_interp", True) for name, values in steps if name == "Invertd"]
        self.nearest = any(back) if back else True
        if not back:
            self.notes.append(
                "the bundle's postprocessing has no Invertd for the prediction; the way back is by the "
                "nearest voxel"
            )
        elif not self.nearest and "AsDiscreted" in names[: names.index("Invertd")]:
            self.notes.append("the bundle resamples masks; here probabilities are, so edges may differ")

    def _overlap(self, steps: list[_Step], left: list[tuple[str, str, Any]], count: int) -> bool:
        """Return whether regions overlap by what is done to outputs.

        Raises:
            CheckpointError: the meaning of the outputs is unknown.
        """
        made = [values for name, values in steps if name == "Activationsd"]
        drawn = [values for name, values in steps if name == "AsDiscreted"]
        sigmoid, softmax = (any(item[key] for item in made) for key in ("sigmoid", "softmax"))
        argmax = any(item["argmax"] for item in drawn)
        limits = [item["threshold"] for item in drawn if item["threshold"] is not None]
        self.notes += [
            f"the bundle's threshold of {limit} is not used; a half is"
            for limit in limits
            if isinstance(limit, bool) or limit != 0.5
        ]
        if count == 1 and (softmax or argmax):
            raise CheckpointError(
                f"{self.config.file}: postprocessing has softmax or argmax, which say nothing of one output"
            )
        if not (sigmoid or softmax or argmax):
            self._unknown(left, drawn, count)
        elif softmax and not argmax:
            does = "compares each class with a threshold" if limits else "takes no argmax"
            self.notes.append(
                f"after softmax the bundle {does}; here the class with the largest probability is taken"
            )
        return sigmoid and not softmax and not argmax

    def _unknown(self, left: list[tuple[str, str, Any]], drawn: list[dict[str, Any]], count: int) -> None:
        """Note how outputs are taken that no step gives a meaning.

        Raises:
            CheckpointError: a step may give them one, and cannot be read.
        """
        hiding = [where for where, _, given in left if _of_prediction(given)]
        unread = "".join(f"; {where} is not read" for where in hiding[:3])
        if drawn or (hiding and count > 1):
            raise CheckpointError(
                f"{self.config.file}: postprocessing has neither softmax nor sigmoid nor argmax, so the "
                f"meaning of the outputs is unknown{unread}"
            )
        taken = "the largest output counts" if count > 1 else "what is above a half of a sigmoid counts"
        self.notes.append(f"postprocessing has neither softmax nor sigmoid nor argmax; {taken}")

    def _painted(
        self, left: list[tuple[str, str, Any]], names: list[str], count: int
    ) -> list[tuple[str, str, Any]]:
        """Read how overlapping regions are painted; return the steps that are not done.

        Raises:
            CheckpointError: a step may paint them, and cannot be read; another order gives other labels.
        """
        kept = []
        for where, name, given in left:
            keys = _keys(given.get("keys")) if isinstance(given, dict) else []
            if name in _EACH_BY_ITSELF or not _of_prediction(given):
                kept.append((where, name, given))
                continue
            found = None
            if name == "Lambdad" and self.painting is None and isinstance(given, dict):
                before = names[: names.index("Lambdad")]
                usual = set(given) <= {"keys", "func", "overwrite", "track_meta", "allow_missing_keys"}
                plain = keys == ["pred"] and given.get("overwrite", True) is True
                found = painting(given.get("func"), count) if usual and plain else None
                found = found if "AsDiscreted" in before else None
            if found is None:
                raise CheckpointError(
                    f"{self.config.file}: {where} ({name or 'not understood'}) may change the labels of "
                    f"{count} overlapping regions, and only a chain of torch.where(x[[channel]] > 0, value, "
                    "...) can be read. In a copy of the bundle take the step out: then each region is "
                    "painted over those before it, and --set model.params.order and classes say in which "
                    "order"
                )
            self.painting = found
        return kept

    def _steps(self, left: list[tuple[str, str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the steps of postprocessing with what counts of their arguments.

        Those that are not done are added to ``left``: key, name, and arguments as they are written.
        """
        config = self.config
        for where, node in config.transforms("postprocessing"):
            try:
                found = config.component(node, where)
            except CheckpointError:
                left.append((where, "", None))
                continue
            if found is None:
                continue
            name, given = dictionary_name(found[0]), found[1]
            if name not in _SILENT:
                left.append((where, name, given))
            keys = _keys(given.get("keys"))
            if name in _READ and keys and "pred" not in keys:
                continue
            if name == "Activationsd" and given.get("other") is not None:
                raise config.refused(f"{where}::other", given["other"], "expected softmax or sigmoid")
            wanted = {
                "Activationsd": ("sigmoid", "softmax"),
                "AsDiscreted": ("argmax", "threshold"),
                "Invertd": ("nearest_interp",) if "nearest_interp" in given else (),
            }
            read = {key: config.plain(given.get(key), f"{where}::{key}") for key in wanted.get(name, ())}
            single = {key: value for key, value in read.items() if not isinstance(value, list)}
            mine = keys.index("pred") if "pred" in keys else 0
            first = {
                key: next(iter(value[mine:] or value), None)
                for key, value in read.items()
                if isinstance(value, list)
            }
            yield name, single | first

    def classes(self, said: Mapping[str, Any], count: int, regions: bool) -> list[dict[str, Any]]:
        """Return the classes, background first.

        Raises:
            CheckpointError: names of another number of outputs, or nothing but background.
        """
        named = said.get("channel_def")
        named = named if isinstance(named, dict) else {}
        single = count == 1 and len(named) == 2  # background is named, but has no output
        if len(named) not in (0, count) and not single:
            raise CheckpointError(
                f"{self.config.folder}: the network has {count} outputs, but channel_def in metadata.json "
                f"names {', '.join(map(str, named.values()))}"
            )
        names = [str(named.get(str(index), f"class {index}")) for index in range(count)]
        if single:
            names = [str(named.get("1", "foreground"))]
        if not regions and named and "back" not in names[0].lower():
            self.notes.append(f"the first output, {names[0]!r}, is taken for the background")
        if regions and self.painting is None and count > 1 and "back" in names[0].lower():
            self.notes.append(
                f"the first region, {names[0]!r}, is painted like the others, with the value 1; those "
                "after it have the values from 2"
            )
        first, rest = ("background", names) if regions else (names[0], names[1:])
        if not rest:
            raise CheckpointError(f"{self.config.folder}: one class is nothing to segment")
        every = [
            {"value": index + 1, "name": name, "color": COLOURS[index % len(COLOURS)]}
            for index, name in enumerate(rest)
        ]
        if self.painting is not None:
            pairs = zip(self.painting.order, self.painting.values, strict=True)
            every = [every[channel] | {"value": value} for channel, value in pairs]
        return [{"value": 0, "name": first, "color": "#000000"}, *every]


def _of_prediction(given: Any) -> bool:
    """Return whether a step may change the prediction; unread ones may."""
    keys = _keys(given.get("keys")) if isinstance(given, dict) else []
    made = [key for name in _MADE for key in _keys(given.get(name))] if keys else []
    return not keys or "pred" in (*keys, *made)


def _keys(node: Any) -> list[str]:
    """Return the keys that a step changes; none where they are not plain."""
    every = node if isinstance(node, list) else [node]
    return every if all(isinstance(item, str) and item[:1] not in ("@", "$", "%") for item in every) else []
