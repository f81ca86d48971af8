"""The learned augmentation policy over a run as one picture: operations against updates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

PREFIX = "policy/"
VALUES = "policy/values"
"""Tag of the events that hold what the picture is drawn from; no dashboard shows it."""
PICTURE = "policy/heat_map"
PLUGIN = "tesla_med"
MOST_COLUMNS = 240
"""Columns of the picture, at most; each is the mean of its updates."""
FEWEST_UPDATES = 16
"""Updates before which no picture is drawn while a run goes on."""


class PolicyHistory:
    """What was told of the policy, update by update: ``policy/<kind>/<operation>``.

    Attributes:
        steps: number of every update, in the order in which it was told.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._tags: list[tuple[str, ...]] = []
        self._values: list[npt.NDArray[np.float32]] = []
        self._drawn_at = 0

    def take(self, step: int, scalars: Mapping[str, float]) -> tuple[dict[str, float], Any | None]:
        """Keep what belongs to the picture.

        Args:
            step: number of the update.
            scalars: values by tag.

        Returns:
            The other values, and the summary that keeps those of the picture in the events; None without any.
        """
        tags = tuple(tag for tag in scalars if _belongs(tag))
        if not tags:
            return dict(scalars), None
        self._keep(step, tags, np.array([scalars[tag] for tag in tags], np.float32))
        return {tag: value for tag, value in scalars.items() if tag not in tags}, self._summary()

    def take_again(self, event: Any) -> None:
        """Keep what an event of an earlier attempt holds, if it is of the policy."""
        for value in event.summary.value:
            if value.tag == VALUES:
                tags = tuple(json.loads(value.metadata.plugin_data.content))
                self._keep(event.step, tags, np.array(value.tensor.float_val, np.float32))

    def _keep(self, step: int, tags: tuple[str, ...], values: npt.NDArray[np.float32]) -> None:
        same = self._tags and self._tags[-1] == tags
        self.steps.append(step)
        self._tags.append(self._tags[-1] if same else tags)
        self._values.append(values)

    def _summary(self) -> Any:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT

        values, content = self._values[-1], json.dumps(self._tags[-1]).encode()
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(values))])
        tensor = TensorProto(dtype=DT_FLOAT, float_val=values.tolist(), tensor_shape=shape)
        plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=content)
        metadata = SummaryMetadata(plugin_data=plugin)
        return Summary(value=[Summary.Value(tag=VALUES, tensor=tensor, metadata=metadata)])

    def due(self) -> bool:
        """Whether twice as many updates are known as at the last picture: a run has a few pictures only."""
        return len(self.steps) >= max(FEWEST_UPDATES, 2 * self._drawn_at)

    def changed(self) -> bool:
        """Whether updates are known that no picture shows yet."""
        return len(self.steps) > self._drawn_at

    def picture(self) -> Any:
        """Return the heat map, (H, W, 3) uint8: a panel per kind, a row per operation, time to the right."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._drawn_at = len(self.steps)
        kinds = self._tables()
        rows = [len(names) for names, _ in kinds.values()]
        figure = Figure(figsize=(9, 1 + 0.24 * sum(rows) + 0.6 * len(rows)), dpi=100, layout="constrained")
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        ends = min(self.steps) - 0.5, max(self.steps) + 0.5
        for axes, (kind, (names, table)) in zip(panels, kinds.items(), strict=True):
            colours, lowest, highest, remark = _scale(kind, table)
            extent = (*ends, len(names) - 0.5, -0.5)
            options = {"aspect": "auto", "interpolation": "nearest", "extent": extent}
            shown = axes.imshow(table, colours, vmin=lowest, vmax=highest, **options)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.set_title(kind + remark, fontsize=10, loc="left")
            figure.colorbar(shown, ax=axes, pad=0.01, fraction=0.03)
        panels[-1].set_xlabel("update")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _tables(self) -> dict[str, tuple[list[str], npt.NDArray[np.float32]]]:
        """Return operations, and their values over at most ``MOST_COLUMNS`` columns, by kind."""
        every = list(dict.fromkeys(tag for tags in dict.fromkeys(self._tags) for tag in tags))
        place = {tag: number for number, tag in enumerate(every)}
        known = np.full((len(self.steps), len(every)), np.nan, np.float32)
        for row, (tags, values) in enumerate(zip(self._tags, self._values, strict=True)):
            known[row, [place[tag] for tag in tags]] = values
        known = known[np.argsort(self.steps, kind="stable")]
        ends = np.linspace(0, len(known), min(len(known), MOST_COLUMNS) + 1).round().astype(int)
        parts = [known[start:end] for start, end in pairwise(ends)]
        columns = np.stack([_mean(part) for part in parts], axis=1)
        found: dict[str, tuple[list[str], Any]] = {}
        for kind in dict.fromkeys(_kind(tag) for tag in every):
            own = [tag for tag in every if _kind(tag) == kind]
            found[kind] = [_operation(tag) for tag in own], columns[[place[tag] for tag in own]]
        return found


def _scale(kind: str, table: npt.NDArray[np.float32]) -> tuple[str, float, float, str]:
    """Return colours, the values at their two ends, and what is said of them.

    Magnitudes lie between 0 and 1. All else, such as probabilities, is told by how far it has moved from the
    mean at the start, on a scale that is never narrower than a tenth of that mean to either side.
    """
    if kind == "magnitude":
        return "viridis", 0.0, 1.0, ""
    middle = float(np.nanmean(table[:, 0]))
    reach = max(float(np.nanmax(np.abs(table - middle))), 0.1 * abs(middle), 1e-6)
    return "coolwarm", middle - reach, middle + reach, " (grey: the mean at the start)"


def _mean(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the mean over updates of what is known, NaN where nothing is."""
    count = np.isfinite(part).sum(axis=0)
    mean: npt.NDArray[np.float32] = np.nansum(part, axis=0) / np.where(count, count, np.nan)
    return mean


def _belongs(tag: str) -> bool:
    return tag.startswith(PREFIX) and tag.count("/") == 2


def _kind(tag: str) -> str:
    return tag.split("/")[1]


def _operation(tag: str) -> str:
    return tag.split("/")[2]
