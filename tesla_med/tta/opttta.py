"""OptTTA: learned test-time augmentation of a frozen network (Tomar et al., MIDL 2022).

A sub-policy consists of ``policy_size`` of seven operations. Their magnitudes are learned on random slices of
a volume by steps down

    mean of  - sum_k p_k log p_k  +  norm_weight * distance  +  marginal_weight * sum_k m_k log m_k,

where p are the predictions on augmented slices, m is their mean, and the distance is that between the inputs
of the normalisation layers and the statistics that these remember from the source. On the first volume every
sub-policy is learned, and the ``keep`` sub-policies with the smallest loss stay; on later volumes these are
learned further. A prediction is the mean over randomly augmented views of the kept sub-policies, warped back.
The network itself is frozen.

This was written from the description in the paper alone; the code of its authors has not been used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.errors import AdaptationError
from tesla_med.tta._mechanics.patches import drawn_patches
from tesla_med.tta._shared.opttta_views import OPERATIONS, apply_draw, draw_views, norm_distance
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class OptTTAParams(MethodParams):
    """Parameters of OptTTA; defaults are its authors'."""

    batch_slices: int | None = Field(
        16, ge=1, description="slices drawn for a step; null: as many as there are"
    )
    draw: Literal["ordered", "replacement"] = "replacement"
    learning_rate: float = Field(0.01, ge=0, description="of AdamW, for the magnitudes")
    policy_size: int = Field(5, ge=2, le=len(OPERATIONS), description="operations in a sub-policy")
    first_steps: int = Field(1000, ge=1, description="for every sub-policy on the first volume")
    later_steps: int = Field(100, ge=1, description="for every kept sub-policy on a later volume")
    keep: int = Field(3, ge=1, description="sub-policies kept after the first volume")
    views: int = Field(128, ge=1, description="views that a prediction averages, of each kept sub-policy")
    norm_weight: float = Field(0.1, ge=0, description="of the distance to the source's norm statistics")
    marginal_weight: float = Field(0.1, ge=0, description="of the class-marginal term")


class SubPolicies(nn.Module):
    """All sets of ``size`` operations, in order, each with its own magnitudes (raw, before a sigmoid)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.members = tuple(itertools.combinations(OPERATIONS, size))
        self.raw = nn.Parameter(torch.zeros(len(self.members), len(OPERATIONS)), requires_grad=False)

    def __len__(self) -> int:
        return len(self.members)


@METHODS.register("opttta")
class OptTTA(TTAMethod):
    """Learned augmentation of the input of a frozen network; see the module's docstring.

    Attributes:
        policies: all sub-policies with their magnitudes.
        kept: indices of the sub-policies that predict, the best one first; empty before the first volume.
    """

    name = "opttta"
    summary = "averages the predictions of the frozen network over learned augmentations"
    citation = "Tomar et al., OptTTA: Learnable Test-Time Augmentation for Source-Free Adaptation, MIDL 2022"
    protocols = ("N-O", "N-M")
    one_network: ClassVar[bool] = False
    Params = OptTTAParams

    def setup(self) -> None:
        """Freeze the network and make the sub-policies.

        Raises:
            AdaptationError: the model classifies tiles, which do not come in volumes.
        """
        if self.model.task != "segmentation":
            raise AdaptationError(
                f"method 'opttta' searches augmentations volume by volume, and this model is for "
                f"{self.model.task}, whose tiles do not belong to volumes; use method 'tesla'"
            )
        self.model.requires_grad_(False)
        self.policies = SubPolicies(self.params.policy_size).to(self.context.device)
        self.kept: tuple[int, ...] = ()

    # ------------------------------------------------------------ adapting

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield all slices of a case at once, since every step draws its own, with replacement."""
        if self.params.draw == "ordered":
            yield from super().batches(images)
        else:
            yield images

    def updates(self, slices: int) -> int:
        """Return how many batches a pass has: one, unless they are taken in order."""
        return super().updates(slices) if self.params.draw == "ordered" else 1

    def adapt(self, images: Tensor) -> Scalars:
        """Learn magnitudes on the (N, C, H, W) slices of a volume; on the first one, choose sub-policies."""
        p: OptTTAParams = self.params
        candidates = self.kept or tuple(range(len(self.policies)))
        steps = p.later_steps if self.kept else p.first_steps
        found = torch.stack([self._learn(index, images, steps) for index in candidates])
        if not self.kept:
            order = torch.argsort(found[:, 0], stable=True)[: p.keep].tolist()
            self.kept = tuple(candidates[index] for index in order)
            found = found[order]
        self.steps += steps * len(candidates)
        total, entropy, distance, marginal = found.mean(dim=0)
        return {
            "loss/total": total,
            "loss/entropy": entropy,
            "loss/norm_statistics": distance,
            "loss/class_marginal": marginal,
        }

    def _learn(self, index: int, images: Tensor, steps: int) -> Tensor:
        """Learn the magnitudes of one sub-policy and return its mean losses over the last tenth of steps.

        Returns:
            (4,): the total, the entropy, the distance of the norm statistics and the class marginal.
        """
        p: OptTTAParams = self.params
        count = len(images)
        size = self.at_most(count if p.batch_slices is None else p.batch_slices)
        raw = self.policies.raw[index].detach().clone().requires_grad_(True)
        optimizer = torch.optim.AdamW([raw], lr=p.learning_rate)
        last: list[Tensor] = []
        for step in range(steps):
            batch, weight = self._drawn(images, size)
            terms = self._objective(index, raw, batch, weight)
            optimizer.zero_grad(set_to_none=True)
            terms[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step >= steps - max(1, steps // 10):
                last.append(terms.detach())
        self.policies.raw[index].copy_(raw.detach())
        return torch.stack(last).mean(dim=0)

    def _drawn(self, images: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Return ``size`` random slices or patches, on the device, and the weight of their pixels."""
        if self.patch is not None and images.shape[2:] != self.patch:
            return self.to_device(drawn_patches(images, self.patch, size, None, self.generator)), None
        drawn = torch.randint(len(images), (size,), generator=self.generator).to(images.device)
        weight = None if self.pixel_weight is None else self.to_device(self.pixel_weight[drawn])
        return self.to_device(images[drawn]), weight

    def _objective(self, index: int, raw: Tensor, images: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the objective of one batch and its three terms, (4,), with a gradient in ``raw`` (7,).

        ``weight`` is (N, *spatial), of the pixels of the images, None for all ones.
        """
        p: OptTTAParams = self.params
        draw = draw_views(len(images), self.generator, self.context.device)
        view = apply_draw(images, self.policies.members[index], raw.sigmoid(), draw)
        with norm_distance(self.model) as distances:
            logits = self.logits(self.model, view.images)
        seen = None if weight is None else warp.to_view(weight[:, None], view.theta.detach())[:, 0]
        entropy = -losses.negative_entropy(logits.softmax(dim=1), seen).mean()
        distance = torch.stack(distances).mean() if distances else torch.zeros_like(entropy)
        marginal = losses.class_marginal(logits, pixel_weight=seen)
        total = entropy + p.norm_weight * distance + p.marginal_weight * marginal
        return torch.stack([total, entropy, distance, marginal])

    # ------------------------------------------------------------ predicting

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the mean probabilities (N, L, *spatial) over views; before any search, the network's own."""
        if not self.kept:
            return self.probabilities(self.model, images)
        parts = torch.split(images, self.at_most(self.context.predict_batch))
        return torch.cat([self._mean_over_views(part) for part in parts])

    def _mean_over_views(self, images: Tensor) -> Tensor:
        """Return the mean over views of a few slices, with as many views at once as fit into a batch."""
        size = self.at_most(self.context.predict_batch)
        at_once = max(1, size // len(images))
        several = self.to_device(images)
        total: Tensor | None = None
        for index in self.kept:
            for start in range(0, self.params.views, at_once):
                count = min(at_once, self.params.views - start)
                probs = self._view(index, several.repeat(count, *[1] * (several.dim() - 1)))
                probs = probs.view(count, len(images), *probs.shape[1:]).sum(dim=0)
                total = probs if total is None else total + probs
        assert total is not None  # noqa: S101 - there is a sub-policy and a view
        result = warp.normalise(total)
        return result.cpu() if self.stitch_on_cpu else result.to(images.device)

    def _view(self, index: int, images: Tensor) -> Tensor:
        """Return the probabilities of one view per image, warped back."""
        draw = draw_views(len(images), self.generator, self.context.device)
        magnitudes = self.policies.raw[index].sigmoid()
        view = apply_draw(images, self.policies.members[index], magnitudes, draw)
        return warp.from_view(self.logits(self.model.whole, view.images).softmax(dim=1), view.theta)

    def record(self) -> dict[str, float]:
        """Return for each operation the share of kept sub-policies with it and its mean magnitude in them."""
        result: dict[str, float] = {}
        magnitudes = self.policies.raw.sigmoid().cpu()
        for position, name in enumerate(OPERATIONS):
            users = [index for index in self.kept if name in self.policies.members[index]]
            result[f"policy/kept/{name}"] = len(users) / max(len(self.kept), 1)
            values = [float(magnitudes[index, position]) for index in users]
            result[f"policy/magnitude/{name}"] = sum(values) / max(len(values), 1)
        return result

    def learning_passes(self, slices: int) -> float:
        """Return the forward passes of the updates, of the whole search while nothing has been chosen."""
        p: OptTTAParams = self.params
        learned = p.later_steps * len(self.kept) if self.kept else p.first_steps * len(self.policies)
        return float(p.epochs * learned * (p.batch_slices or slices) * 3)

    def predicting_passes(self, slices: int) -> float:
        """Return the forward passes of a prediction, with every view."""
        return float(self.params.views * min(self.params.keep, len(self.policies)) * slices)

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the frozen network and the sub-policies."""
        return {"model": self.model, "policies": self.policies}

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and which sub-policies are kept, the best one first."""
        return super().state_dict() | {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.kept = tuple(state["kept"])
