"""Guard: which network's mask of a volume is taken, decided without labels.

The candidates are the source model, the source model under the volume's own normalisation statistics and
half way to these, the adapted model, and the network half way between source and adapted. What is asked of
each is what no loss asked for: that its mask stays when the volume is zoomed, that it agrees with the masks
of the others, and that it is one body along the stack. The rules are in :func:`judge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from tesla_med.config.models import GuardConfig
from tesla_med.engine.between import between
from tesla_med.engine.postprocess import largest_of
from tesla_med.engine.prior import DEVIATION, OrganPrior, nearness
from tesla_med.engine.quality import OFFSET, SUPPORT, support
from tesla_med.engine.signals import (
    LACKING,
    ZOOMS,
    compared,
    lacking,
    stack,
    stack_shape,
    zoomed_mask,
)
from tesla_med.engine.wording import trusted_against
from tesla_med.models.base import Network, norm_layers, predicted_class
from tesla_med.models.normalisation import copied, running_statistics, statistics_distance
from tesla_med.prepare.fill import hidden
from tesla_med.tta.base import TTAMethod
from tesla_med.types import Verdict

MAX_SLICES = 64
UNEVEN = 0.05
"""Area change beyond a single rise and fall that costs the whole of ``shape_cost``."""
SURE = 4.0
"""Trust below which the source's head start grows."""
SHRINKAGE = 0.06
"""By how much the logarithm of the area of an adapted mask may fall before it costs trust."""
UNSTEADY = "the mask changes with the view and from model to model"
ASTRAY = "the mask lies, or is sized, as no organ of the training"
HALF = 0.5
"""Share of the way of the candidates in between."""
LABELS = {
    "source": "the source's mask",
    "own": "the source's mask under the volume's own statistics",
    "half": "the source's mask half way to the volume's own statistics",
    "part": "the mask of the network half way between source and adapted",
    "mixed": "the adapted network's mask half way to the source's statistics",
    "adapted": "the adapted mask",
}
VERDICTS = {
    "source": Verdict(0.0, ""),
    "own": Verdict(0.0, "", statistics=1.0),
    "half": Verdict(0.0, "", statistics=HALF),
    "part": Verdict(HALF, ""),
    "mixed": Verdict(1.0, "", statistics=HALF),
    "adapted": Verdict(1.0, ""),
}
"""What each candidate stands for, from the one that moves least to the one that moves most."""
UNMOVED = tuple(name for name, verdict in VERDICTS.items() if verdict.share == 0)
"""The candidates that have the weights of the source."""


class Guard:
    """Judge the masks of each volume.

    Args:
        config: thresholds.
        source: the ``source`` method.
        method: the method that adapts.
        largest: whether masks will keep their largest component only; they are judged as they will be.
        steadiness: the consistency of the source model with the reduced and with the enlarged slices of its
            own training, in [0, 1], to which those of a volume are relative; default: 1.
        prior: where the organ lay in the training; None: nobody knows.

    Attributes:
        start: the ``source`` method from whose network those in between are made: the source's, or, with
            corrected cases, the one to which updates on these led.
    """

    def __init__(
        self,
        config: GuardConfig,
        source: TTAMethod,
        method: TTAMethod,
        *,
        largest: bool = False,
        steadiness: tuple[float, float] = (1.0, 1.0),
        prior: OrganPrior | None = None,
    ) -> None:
        self.config, self.prior = config, prior
        self.steadiness = steadiness
        self.largest = largest
        self.source = self.start = source
        self.method = method
        statistics = ("own", "half", "mixed") if norm_layers(source.model) else ()
        possible = ("source", *statistics, "part", "adapted")
        self.candidates = tuple(name for name in possible if name in config.candidates)

    @torch.no_grad()
    def judge(self, images: Tensor, source: Tensor, adapted: Tensor, fill: Tensor | None = None) -> Verdict:
        """Return which network to take for one volume.

        Args:
            images: (N, C, H, W) in [0, 1], its slices in order.
            source: (N, L, H, W) probabilities of the source model.
            adapted: (N, L, H, W) probabilities of the adapted one.
            fill: (N, H, W) bool, pixels where no mask has foreground; None for nowhere.
        """
        signals, masks = self.look(images, source, adapted, fill)
        verdict = judge(signals, self.config)
        taken = candidate_of(verdict)
        near = nearness(signals, taken, self.config.farthest)
        supports = supports_of(masks, taken, source.shape[1], self.steadiness, near)
        return replace(verdict, signals=verdict.signals | supports)

    def look(
        self, images: Tensor, source: Tensor, adapted: Tensor, fill: Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return what is known without labels, and the masks it was seen in.

        Returns:
            The signals by name (see ``docs/concepts/guard.md``), and class indices (N, H, W) by candidate,
            those of a zoomed volume under ``name@zoom``.
        """
        given = {"source": source, "adapted": adapted}
        signals: dict[str, float] = {"weights_moved": self._moved(), "statistics_distance": 0.0}
        masks: dict[str, Tensor] = {}
        before = copied(running_statistics(self.start.model))
        for name in self.candidates:
            with self.deployed(images, VERDICTS[name]) as network:
                if name == "own":
                    now = running_statistics(self.start.model)
                    signals["statistics_distance"] = statistics_distance(before, now)
                probs = given.get(name)
                if probs is None:
                    probs = self.method.probabilities(network, images)
                masks[name] = stack(predicted_class(probs))
                for zoom in ZOOMS:
                    masks[f"{name}@{zoom}"] = zoomed_mask(self.method, network, images, zoom)
        masks = {name: hidden(mask, fill) for name, mask in masks.items()}
        signals |= {
            f"{key}_{name}": value
            for name in ("source", "adapted")
            for key, value in stack_shape(masks[name] > 0).items()
        }
        if self.largest:
            masks = {name: largest_of(mask) for name, mask in masks.items()}
        found = compared(masks, self.candidates, source.shape[1], self.steadiness)
        found |= lacking(masks, self.candidates, UNMOVED, source.shape[1])
        found |= {} if self.prior is None else self.prior.deviations(masks, self.candidates)
        if fill is not None:  # the field is what was measured
            field = max(1.0 - float(fill.float().mean()), 1.0 / fill.numel())
            found |= {key: value / field for key, value in found.items() if key.startswith("foreground_")}
        return signals | found, masks

    def passes(self, slices: int) -> float:
        """Return the single-slice forward passes that judging a case of ``slices`` slices takes, about.

        Source and adapted are predicted already; of the one that is taken a further prediction may be needed.
        """
        whole = slices * (len(self.candidates) * (1.0 + sum(zoom**2 for zoom in ZOOMS)) - 1.0)
        return whole + min(slices, MAX_SLICES) * (len(self.candidates) - 1)

    def _moved(self) -> float:
        """Return the distance of the adapted weights from the source's, relative to their norm."""
        pairs = zip(self.method.predictor.parameters(), self.source.model.parameters(), strict=True)
        moved = torch.stack([torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs])
        change, norm = moved.double().sum(dim=0).tolist()
        return float((change / max(norm, 1e-12)) ** 0.5)

    @torch.no_grad()
    def probabilities(self, images: Tensor, verdict: Verdict) -> Tensor:
        """Return probabilities (N, L, H, W) of the network that a verdict stands for."""
        with self.deployed(images, verdict) as network:
            result: Tensor = self.method.probabilities(network, images)
        return result

    @contextmanager
    def deployed(self, images: Tensor, verdict: Verdict) -> Iterator[Network]:
        """Give the network that a verdict on a volume stands for."""
        if verdict.statistics > 0 and verdict.share == 1.0:
            network, rest = self.method.predictor, copied(running_statistics(self.start.model))
            with self.method.own_statistics(network, images, MAX_SLICES, verdict.statistics, rest):
                yield network
        elif verdict.statistics > 0:
            network = self.start.model
            with self.start.own_statistics(network, images, MAX_SLICES, verdict.statistics):
                yield network
        elif verdict.used == "source":
            with self.source.deployed(images) as network:
                yield network
        else:
            whole = verdict.share == 1.0
            with self.method.deployed(images) as network:
                step = nullcontext() if whole else between(network, self.start.model, verdict.share)
                with step:
                    yield network


def candidate_of(verdict: Verdict) -> str:
    """Return the name of the candidate that a verdict takes."""
    found = (verdict.share, verdict.statistics)
    return next(name for name, item in VERDICTS.items() if (item.share, item.statistics) == found)


# ---------------------------------------------------------------- signals


def supports_of(
    masks: Mapping[str, Tensor],
    taken: str,
    classes: int,
    steadiness: tuple[float, float] = (1.0, 1.0),
    near: float = 1.0,
) -> dict[str, float]:
    """Return ``near`` times the support of every foreground class of a candidate's mask that has one."""
    others = [masks[name] for name in witnesses(taken, [name for name in masks if "@" not in name])]
    smaller, larger = (masks[f"{taken}@{zoom}"] for zoom in ZOOMS)
    found = {
        SUPPORT.format(index): support(masks[taken], others, larger, smaller, index, steadiness)
        for index in range(1, classes)
    }
    return {name: near * value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------- the verdict


def judge(signals: Mapping[str, float], config: GuardConfig) -> Verdict:
    """Return the verdict that follows from the signals.

    1. A candidate is refused whose mask is empty while another's is not, which lacks a class that all of the
       source's weights find (see :func:`~tesla_med.engine.signals.lacking`), which fills more of the field
       than ``largest_foreground``, which narrows to less than ``narrowest`` between two parts of the stack
       while another does not, which lies more than ``farthest`` standard deviations from where the organ
       lay in the training while another does not, or which no other mask supports: a Dice of at least
       ``unsupported`` with one of the others. The limits are the same for the source and the adapted mask,
       and for masks that are too small, too large or elsewhere. If the adapted mask is refused, adaptation
       has collapsed.
    2. Of the others the one with the largest trust is taken: the sum of -ln(1.02 - consistency) and
       -ln(1.02 - agreement), with the mean agreement with all others (for a network without batch norm
       that of source and adapted mask, for all alike), less at most ``shape_cost`` where the area changes
       more than by a single rise and fall. The source's mask has a head start, which grows by ``doubt``
       where no mask is trusted much: there a difference says little. It counts as much as the others
       agree with the source's mask on average, so that a mask that is like no other does not win by it.
       So does ``shrink_cost``, of an adapted mask that is smaller than all of the source's weights.
       Unless it is refused only masks of ``config.least`` trust can take its place.
    3. Where every candidate is refused, or the best is supported too little, nothing can be trusted. The
       most consistent of those that are neither empty nor too large is taken, and the verdict says so.
    """
    signals = dict(signals)
    names: list[str] = [
        name for name in VERDICTS if name in config.candidates and f"consistency_{name}" in signals
    ]
    refused = {name: text for name in names if (text := _refusal(name, names, signals, config))}
    trust = {name: _trust(name, names, signals, config.shape_cost) for name in names}
    signals |= {f"trust_{name}": value for name, value in trust.items()}
    collapsed = "adapted" in refused
    if len(refused) == len(names):
        usable = [name for name in names if _size_fits(name, names, signals, config)] or ["source"]
        best = max(usable, key=lambda name: signals[f"consistency_{name}"])
        text = f"nothing is trustworthy here: no two masks agree; {LABELS[best]} is the most consistent"
        collapsed &= best != "adapted"
        return _verdict(best, text, signals, collapsed=collapsed, trusted=False)
    left = [name for name in names if name not in refused]
    highest = max(trust[name] for name in left)
    if "source" in trust:
        agreements = _agreements("source", names, signals)
        worth = sum(agreements) / len(agreements)
        trust["source"] += worth * (config.head_start + config.doubt * max(SURE - highest, 0.0))
        for name, lost in _shrinkages(left, signals).items():
            trust[name] -= config.shrink_cost * worth * lost
    if "source" in left:  # where little is known it may be better to leave the mask alone
        left = [name for name in left if name == "source" or trust[name] >= config.least(names)]
    best = max(left, key=lambda name: trust[name])
    supported = _support(best, names, signals) >= config.least_support
    trusted = supported and not _far(best, signals, config)
    reason = _reason(best, refused, trust, "" if trusted else UNSTEADY if not supported else ASTRAY)
    return _verdict(best, reason, signals, collapsed=collapsed, trusted=trusted)


def _verdict(name: str, reason: str, signals: dict[str, float], *, collapsed: bool, trusted: bool) -> Verdict:
    return replace(VERDICTS[name], reason=reason, signals=signals, collapsed=collapsed, trusted=trusted)


def _reason(best: str, refused: Mapping[str, str], trust: Mapping[str, float], doubts: str) -> str:
    parts = [f"nothing is trustworthy here: {doubts}"] if doubts else []
    if "adapted" in refused:
        parts.append(f"{LABELS['adapted']} {refused['adapted']}; {LABELS[best]} is taken")
    elif best != "adapted":
        parts.append(f"{LABELS[best]} {trusted_against(trust[best], trust['adapted'], 'the adapted one')}")
    elif "source" in refused:
        parts.append(f"{LABELS['source']} {refused['source']}")
    return "; ".join(parts)


def _size_fits(name: str, names: list[str], signals: Mapping[str, float], config: GuardConfig) -> bool:
    any_found = any(signals[f"foreground_{other}"] > 0 for other in names)
    share = signals[f"foreground_{name}"]
    whole = signals.get(LACKING.format(name), 0.0) == 0 and (share > 0 or not any_found)
    return whole and share <= config.largest_foreground


def _refusal(name: str, names: list[str], signals: Mapping[str, float], config: GuardConfig) -> str:
    """Return why a candidate is refused, as the rest of a sentence; empty if it is not."""
    share = signals[f"foreground_{name}"]
    if not _size_fits(name, names, signals, config):
        if share > config.largest_foreground:
            return f"fills {100 * share:.0f} % of the field"
        return "is empty and others are not" if share == 0 else "lacks a structure that the source's have"
    narrow = {other: signals.get(f"narrowing_{other}", 1.0) for other in names}
    if narrow[name] < config.narrowest and any(_one_body(other, narrow, signals, config) for other in names):
        return f"is of two parts along the stack (narrows to {100 * narrow[name]:.0f} %)"
    if _far(name, signals, config) and any(
        not _far(other, signals, config) and signals[f"foreground_{other}"] > 0 for other in names
    ):
        return "lies, or is sized, as no organ of the training"
    best = max(_agreements(name, names, signals))
    if _three(names) and name != "part":  # which lies between the two, and so says nothing for either
        best = signals["agreement_source_adapted"]
    if best < config.unsupported:
        return f"agrees with no other (Dice {best:.2f} at best)"
    return ""


def _far(name: str, signals: Mapping[str, float], config: GuardConfig) -> bool:
    return signals.get(DEVIATION.format(name), 0.0) > config.farthest


def _one_body(
    name: str, narrow: Mapping[str, float], signals: Mapping[str, float], config: GuardConfig
) -> bool:
    return narrow[name] >= config.narrowest and signals[f"foreground_{name}"] > 0


def _agreements(name: str, names: Sequence[str], signals: Mapping[str, float]) -> list[float]:
    """Return the agreement of one candidate with each of the others that can speak for it."""
    found = (
        signals.get(f"agreement_{name}_{other}", signals.get(f"agreement_{other}_{name}"))
        for other in witnesses(name, names)
    )
    return [value for value in found if value is not None]


def witnesses(name: str, names: Sequence[str]) -> list[str]:
    """Return the candidates whose agreement counts for one: all others, if there are enough, but ``part``.

    Its mask is near those of source and adapted by its making, which says nothing for them.
    """
    enough = any(VERDICTS[other].statistics > 0 for other in names)
    return [other for other in names if other != name and not (enough and other == "part")]


def _three(names: Sequence[str]) -> bool:
    """Whether there are only the masks of source and adapted network, and of the one in between."""
    return set(names) == {"source", "part", "adapted"}


def _trust(name: str, names: list[str], signals: Mapping[str, float], shape_cost: float) -> float:
    if _three(names):
        mean = signals["agreement_source_adapted"]
    else:
        agreements = _agreements(name, names, signals)
        mean = sum(agreements) / len(agreements)
    uneven = min(max(signals.get(f"area_change_{name}", 1.0) - 1.0, 0.0) / UNEVEN, 1.0)
    steady = -math.log(OFFSET - signals[f"consistency_{name}"])
    return steady - math.log(OFFSET - mean) - shape_cost * uneven


def _shrinkages(names: Sequence[str], signals: Mapping[str, float]) -> dict[str, float]:
    """Return how far, beyond ``SHRINKAGE``, areas of moved weights fall below all others, in logarithms.

    Nothing is said where the source's mask is refused or empty.
    """
    areas = {name: area for name in names if (area := signals[f"foreground_{name}"]) > 0}
    if "source" not in areas:
        return {}
    least = min(area for name, area in areas.items() if VERDICTS[name].share == 0)
    ratios = {name: least / area for name, area in areas.items() if VERDICTS[name].share > 0}
    return {name: max(math.log(ratio) - SHRINKAGE, 0.0) for name, ratio in ratios.items()}


def _support(name: str, names: list[str], signals: Mapping[str, float]) -> float:
    return 0.5 * (signals[f"consistency_{name}"] + max(_agreements(name, names, signals)))
