"""Choice of the scaling to [0, 1] of each volume, without labels.

What a network expects of its input is written in its normalisation statistics: a volume whose brightest
voxels are a coil, scaled by its smallest and largest value, is dark, and its statistics are far from those
of the training. Of the scalings that a pipeline names, the one with the nearest statistics is taken, and
that of the training unless another is much nearer. Networks without batch norm have no such record. For
them it counts whether the mask stays when the slices are zoomed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tesla_med.config.models import ScalingChoice
from tesla_med.engine.memory import attempts
from tesla_med.engine.signals import ZOOMS, consistency, zoomed_mask
from tesla_med.models.base import norm_layers, predicted_class
from tesla_med.models.normalisation import copied, evenly_spaced, running_statistics, statistics_distance
from tesla_med.prepare.fill import hidden
from tesla_med.tta.base import TTAMethod
from tesla_med.types import Scaling, Unit

TRAINED = "trained"


class Chooser:
    """Choose the scaling of each unit, once.

    Args:
        config: thresholds.
        source: the ``source`` method.
    """

    def __init__(self, config: ScalingChoice, source: TTAMethod) -> None:
        self.config = config
        self.source = source
        self._chosen: dict[str, Scaling] = {}

    def __call__(self, unit: Unit) -> Unit:
        """Return the unit with the images of the scaling that is taken; the others are dropped."""
        if unit.images is None or not unit.scalings:
            return unit
        found = self._chosen.get(unit.ref.name)
        if found is None:
            found = self._chosen[unit.ref.name] = self._attempted(
                {TRAINED: unit.images, **unit.scalings}, unit.fill
            )
        images = unit.scalings[found.name] if found.name else unit.images
        return replace(unit, images=images, scalings={}, scaling=found)

    def passes(self, slices: int) -> float:
        """Return the single-slice forward passes that a choice takes where nothing is unusual."""
        views = sum(zoom**2 for zoom in ZOOMS)
        each = 1 + len(self.config.candidates) if norm_layers(self.source.model) else 1 + views
        return each * min(slices, self.config.slices)

    def _attempted(self, images: Mapping[str, Tensor], fill: Tensor | None) -> Scaling:
        """Return the choice, made with fewer slices at once where memory runs out."""
        slices = min(len(images[TRAINED]), self.config.slices)
        for attempt in attempts((self.source,), lambda: None, slices):
            with attempt:
                return self.choose(images, fill)
        raise AssertionError("the last attempt raises")  # for the type checker

    @torch.no_grad()
    def choose(self, images: Mapping[str, Tensor], fill: Tensor | None = None) -> Scaling:
        """Return the choice among the images (N, C, H, W) of one volume, by scaling, the training's first.

        No mask has foreground in ``fill``, (N, H, W).
        """
        few = {
            name: self.source.to_device(evenly_spaced(item, self.config.slices))
            for name, item in images.items()
        }
        if norm_layers(self.source.model):
            return nearest({name: self._distance(item) for name, item in few.items()}, self.config)
        unmeasured = None if fill is None else evenly_spaced(fill, self.config.slices)
        trained = self._steadiness(few[TRAINED], unmeasured)
        if trained >= self.config.unsteady:
            return Scaling("", "", {f"scaling_consistency_{TRAINED}": trained})
        return steadiest(
            {name: self._steadiness(item, unmeasured) for name, item in few.items()}, self.config
        )

    def _distance(self, images: Tensor) -> float:
        before = copied(running_statistics(self.source.model))
        with self.source.own_statistics(self.source.model, images, self.config.slices):
            return statistics_distance(before, running_statistics(self.source.model))

    def _steadiness(self, images: Tensor, fill: Tensor | None) -> float:
        network = self.source.model
        probs = self.source.probabilities(network, images)
        views = [hidden(zoomed_mask(self.source, network, images, zoom), fill) for zoom in ZOOMS]
        return consistency(hidden(predicted_class(probs), fill), views, probs.shape[1])


def nearest(distances: Mapping[str, float], config: ScalingChoice) -> Scaling:
    """Return the scaling whose statistics are nearest to the network's, by ``shifted`` and ``gain``."""
    signals = {f"scaling_distance_{name}": value for name, value in distances.items()}
    trained = distances[TRAINED]
    best = min(distances, key=lambda name: distances[name])
    if best == TRAINED or trained <= config.shifted or distances[best] >= config.gain * trained:
        return Scaling("", "", signals)
    text = (
        f"scaled by {best}, not as in training, because the network's normalisation statistics fit better "
        f"(distance {distances[best]:.2f} instead of {trained:.2f})"
    )
    return Scaling(best, text, signals)


def steadiest(consistencies: Mapping[str, float], config: ScalingChoice) -> Scaling:
    """Return the scaling whose mask stays best when slices are zoomed, by ``steadier``."""
    signals = {f"scaling_consistency_{name}": value for name, value in consistencies.items()}
    trained = consistencies[TRAINED]
    best = max(consistencies, key=lambda name: consistencies[name])
    if consistencies[best] < trained + config.steadier:
        return Scaling("", "", signals)
    text = (
        f"scaled by {best}, not as in training, because the mask then stays when the slices are zoomed "
        f"(Dice {consistencies[best]:.2f} instead of {trained:.2f})"
    )
    return Scaling(best, text, signals)
