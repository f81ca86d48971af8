"""Guard: how far each volume may move away from the source model, decided without labels.

Three masks of a volume are compared: the source model's, the source model's under the volume's own
normalisation statistics, and the adapted one. From their agreement, the entropy of the models and the
health of the adapted mask follows the share of the way from source to adapted that is taken: none, a
part (weights and statistics in between), or all. The rules are in :meth:`Guard.judge`, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tesla_med import losses
from tesla_med.config.models import GuardConfig
from tesla_med.engine.quality import GAMMAS, SUPPORT, class_agreement, support
from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import copied, running_statistics
from tesla_med.tta.base import TTAMethod
from tesla_med.types import Used, Verdict

MAX_SLICES = 64


class Guard:
    """Judge the adapted mask of each volume against the source model.

    Args:
        config: thresholds.
        source: the ``source`` method.
        method: the method that adapts.
    """

    def __init__(self, config: GuardConfig, source: TTAMethod, method: TTAMethod) -> None:
        self.config = config
        self.source = source
        self.method = method
        self._normalised = bool(norm_layers(source.model))

    @torch.no_grad()
    def judge(self, images: Tensor, source: Tensor, adapted: Tensor) -> Verdict:
        """Return how far to go for one volume.

        Args:
            images: (N, C, H, W) in [0, 1], its slices in order.
            source: (N, L, H, W) probabilities of the source model.
            adapted: (N, L, H, W) probabilities of the adapted one.
        """
        signals, masks = self.look(images, source, adapted)
        verdict = judge(signals, self.config)
        supports = self._supports(images, masks, verdict.used, source.shape[1])
        return replace(verdict, signals=signals | supports)

    def look(
        self, images: Tensor, source: Tensor, adapted: Tensor
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return what is known without labels (see ``docs/concepts/guard.md``), and the masks (N, H, W)."""
        own, distance = self._own(images)
        masks = {"source": source.argmax(1), "own": own.argmax(1), "adapted": adapted.argmax(1)}
        union = torch.stack([mask > 0 for mask in masks.values()]).any(dim=0)
        classes = source.shape[1]
        result = {
            "agreement_source_adapted": agreement(masks["source"], masks["adapted"], classes),
            "agreement_source_own": agreement(masks["source"], masks["own"], classes),
            "agreement_own_adapted": agreement(masks["own"], masks["adapted"], classes),
        }
        for name, probs in (("source", source), ("own", own), ("adapted", adapted)):
            result[f"entropy_{name}"] = region_entropy(probs, union)
            result[f"foreground_{name}"] = float((masks[name] > 0).float().mean())
        for name in ("source", "adapted"):
            result |= {f"{key}_{name}": value for key, value in stack_shape(masks[name] > 0).items()}
        result["statistics_distance"] = distance
        result["weights_moved"] = self._moved()
        return result, masks

    def _supports(
        self, images: Tensor, masks: dict[str, Tensor], used: Used, classes: int
    ) -> dict[str, float]:
        """Return the support of every foreground class that has one (see ``tesla_med.engine.quality``)."""
        with self.method.deployed(images) as network:
            changed = [self.method.probabilities(network, images**gamma).argmax(1) for gamma in GAMMAS]
        contrasts = [(masks["adapted"], mask) for mask in changed]
        taken = "source" if used == "source" else "adapted"
        others = [mask for name, mask in masks.items() if name != taken]
        found = {
            SUPPORT.format(index): support(masks[taken], others, contrasts, index)
            for index in range(1, classes)
        }
        return {name: value for name, value in found.items() if value is not None}

    def _own(self, images: Tensor) -> tuple[Tensor, float]:
        """Return the source model's probabilities under the volume's statistics, and their distance."""
        network = self.source.model
        if not self._normalised:
            return self.source.predict(images), 0.0
        before = copied(running_statistics(network))
        with self.source.own_statistics(network, images, MAX_SLICES):
            distance = statistics_distance(before, running_statistics(network))
            return self.source.probabilities(network, images), distance

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
        if verdict.statistics:
            with self.source.own_statistics(self.source.model, images, MAX_SLICES):
                yield self.source.model
            return
        with self.method.deployed(images) as network, between(network, self.source.model, verdict.share):
            yield network


def judge(signals: dict[str, float], config: GuardConfig) -> Verdict:
    """Return the verdict that follows from the signals; the first rule that holds decides.

    1. The adapted mask has collapsed (nothing left, or more than ``largest_foreground``): source.
    2. The source model found next to nothing of what the other two agree on: adapted. This is what
       a hard site looks like; the source's certainty means nothing there.
    3. The volume's own normalisation statistics leave the mask as it is: no shift, source.
    4. Those statistics make the source model less certain: they are not what this volume is to be
       normalised by, and adaptation started from there. Source.
    5. The adapted model is hardly more certain than the source model: it went astray. Source; or, where
       the own statistics alone make the source model much more certain, the source with these.
    6. The adapted mask is close to the source's: the gain is small and so may be the loss. A part of
       the way keeps most of either; how much depends on how far the entropy fell.
    7. Else: adapted.
    """
    signals = dict(signals)
    found = _collapsed(signals, config) or _missed(signals, config) or _unhelpful(signals, config)
    if found is not None:
        return found
    close = signals["agreement_source_adapted"]
    if close < config.close:
        return Verdict(1.0, "", signals=signals)
    fall = 1.0 - _relative_entropy(signals, "adapted")
    part = config.large_step if fall >= config.certain else config.small_step
    text = f"the adapted mask is close to the source's (Dice {close:.3f}): {100 * part:.0f} % of the way"
    return Verdict(part, text, signals=signals)


def _collapsed(signals: dict[str, float], config: GuardConfig) -> Verdict | None:
    if signals["foreground_adapted"] == 0 and signals["foreground_source"] > 0:
        return Verdict(0.0, "the adapted mask is empty and the source's is not", True, signals)
    if signals["foreground_adapted"] > config.largest_foreground:
        share = f"{100 * signals['foreground_adapted']:.0f} %"
        return Verdict(0.0, f"the adapted mask fills {share} of the field", True, signals)
    return None


def _missed(signals: dict[str, float], config: GuardConfig) -> Verdict | None:
    close = signals["agreement_source_adapted"]
    little = signals["foreground_source"] < config.missed_foreground * signals["foreground_adapted"]
    if not little or close >= config.unrelated:
        return None
    if signals["agreement_own_adapted"] < config.unsupported:
        text = f"source, own-statistics and adapted masks do not agree (Dice {close:.2f})"
        return Verdict(0.0, text, True, signals)
    return Verdict(1.0, "the source model misses most of what adaptation finds", signals=signals)


def _unhelpful(signals: dict[str, float], config: GuardConfig) -> Verdict | None:
    same = signals["agreement_source_own"]
    if signals["statistics_distance"] > 0 and same >= config.no_shift:
        text = f"no shift: the volume's own normalisation statistics give the same mask (Dice {same:.3f})"
        return Verdict(0.0, text, signals=signals)
    own = _relative_entropy(signals, "own")
    if signals["statistics_distance"] > 0 and own >= config.misfit:
        text = f"the volume's own normalisation statistics do not fit (entropy {own:.2f} times the source's)"
        return Verdict(0.0, text, signals=signals)
    if 1.0 - _relative_entropy(signals, "adapted") >= config.least_fall:
        return None
    text = "the adapted model is hardly more certain than the source model"
    if signals["statistics_distance"] > 0 and own <= config.statistics_only:
        text += f"; with the volume's own statistics it is (entropy {own:.2f} times the source's)"
        return Verdict(0.0, text, signals=signals, statistics=True)
    return Verdict(0.0, text, signals=signals)


def _relative_entropy(signals: dict[str, float], name: str) -> float:
    """Return a model's entropy over the union of the masks as a multiple of the source model's."""
    return signals[f"entropy_{name}"] / max(signals["entropy_source"], 1e-12)


def agreement(first: Tensor, second: Tensor, classes: int) -> float:
    """Return the mean Dice over foreground classes of two (N, H, W) index masks; 1 where both are empty."""
    values = [class_agreement(first, second, index) for index in range(1, classes)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 1.0


def region_entropy(probs: Tensor, region: Tensor) -> float:
    """Return the mean normalised entropy of (N, L, H, W) in a (N, H, W) region; 0 where it is empty."""
    if not bool(region.any()):
        return 0.0
    return float(losses.normalised_entropy(probs)[region].mean())


def stack_shape(mask: Tensor) -> dict[str, float]:
    """Return how a (N, H, W) foreground looks as a body.

    Returns:
        ``components``: their number, faces, edges or corners touching; ``largest_component``: share of
        the foreground in the largest; ``area_change``: sum of the absolute changes of area from slice to
        slice over twice the largest area (1 for a single rise and fall); ``centroid_jump``: mean move of the
        centroid between neighbouring slices, in fields of view.
    """
    import numpy as np
    from scipy import ndimage

    volume = mask.cpu().numpy()
    result = {"components": 0.0, "largest_component": 0.0, "area_change": 0.0, "centroid_jump": 0.0}
    if not volume.any():
        return result
    labels, count = ndimage.label(volume, structure=np.ones((3, 3, 3)))
    sizes = np.bincount(labels.ravel())[1:]
    areas = volume.sum(axis=(1, 2)).astype(float)
    filled = np.flatnonzero(areas)
    centres = np.array([ndimage.center_of_mass(volume[index]) for index in filled]) / volume.shape[1:]
    steps = np.linalg.norm(np.diff(centres, axis=0), axis=1)[np.diff(filled) == 1]
    padded = np.concatenate([[0.0], areas, [0.0]])
    return {
        "components": float(count),
        "largest_component": float(sizes.max() / sizes.sum()),
        "area_change": float(np.abs(np.diff(padded)).sum() / (2.0 * areas.max())),
        "centroid_jump": float(steps.mean()) if len(steps) else 0.0,
    }


def statistics_distance(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> float:
    """Return the symmetric KL divergence of two normal distributions a channel, mean over all layers."""
    values = []
    for (mean, variance), (mean_other, variance_other) in zip(first, second, strict=True):
        one, two = variance.clamp_min(1e-8), variance_other.clamp_min(1e-8)
        spread = 0.5 * (one / two + two / one - 2.0)
        shift = 0.5 * (mean - mean_other).square() * (1.0 / one + 1.0 / two)
        values.append((spread + shift).clamp_max(1e3).mean())
    return float(torch.stack(values).mean()) if values else 0.0


@contextmanager
def between(network: nn.Module, source: nn.Module, share: float) -> Iterator[None]:
    """Put a network at ``share`` of the way from ``source`` inside the block; afterwards it is as before.

    Args:
        network: moved in place: floating-point parameters and buffers.
        source: of the same structure.
        share: 0 gives the source, 1 the network itself.
    """
    ours = [*network.parameters(), *network.buffers()]
    theirs = [*source.parameters(), *source.buffers()]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.is_floating_point()]
    kept = [a.detach().clone() for a, _ in pairs]
    try:
        with torch.no_grad():
            for (a, b), old in zip(pairs, kept, strict=True):
                a.copy_(torch.lerp(b.to(old), old, share))
        yield
    finally:
        with torch.no_grad():
            for (a, _), old in zip(pairs, kept, strict=True):
                a.copy_(old)
