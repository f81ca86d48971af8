"""OptTTA: learned test-time augmentation of a frozen network (Tomar et al., MIDL 2022).

A sub-policy consists of ``policy_size`` of seven operations. What it learns on random slices of a volume, the
bias and the range of its operations of style, the width of its blur and the size of its crop, is found by
steps down

    entropy_weight * mean of - sum_k p_k log p_k  +  norm_weight * distance  -  nuclear_weight / 2 * norm,

where p are the predictions on augmented slices, the distance is that between the inputs of the normalisation
layers and the statistics that these remember from the source, summed over layers, and the norm is the nuclear
norm of a slice's predictions, which is large where they are certain and diverse. On the first volume every
sub-policy is learned, and the ``keep`` sub-policies with the smallest loss stay, with the state of their
optimisers; on later volumes these are learned further. A prediction is the mean over randomly augmented views
of the kept sub-policies, warped back. The network itself is frozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.errors import AdaptationError
from tesla_med.tta._mechanics.patches import drawn_patches
from tesla_med.tta._shared.opttta_views import (
    LEARNED,
    OPERATIONS,
    SubPolicy,
    apply_draw,
    bright_slices,
    draw_views,
    norm_distance,
    nuclear_norm,
)
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class OptTTAParams(MethodParams):
    """Parameters of OptTTA; defaults are its authors', with their whole budget of steps and views."""

    batch_slices: int | None = Field(
        12, ge=1, description="slices drawn for a step; null: as many as there are"
    )
    draw: Literal["ordered", "replacement"] = "replacement"
    learning_rate: float = Field(1e-3, ge=0, description="of AdamW, for what a sub-policy learns")
    weight_decay: float = Field(1e-4, ge=0, description="of AdamW")
    clip_norm: float | None = Field(1.0, gt=0, description="of the gradient of a sub-policy")
    policy_size: int = Field(5, ge=3, le=len(OPERATIONS), description="operations in a sub-policy")
    first_steps: int = Field(1000, ge=1, description="for every sub-policy on the first volume")
    later_steps: int = Field(100, ge=1, description="for every kept sub-policy on a later volume")
    keep: int = Field(3, ge=1, description="sub-policies kept after the first volume")
    views: int = Field(128, ge=1, description="views that a prediction averages, of each kept sub-policy")
    entropy_weight: float = Field(100.0, ge=0, description="of the mean entropy of a pixel")
    norm_weight: float = Field(1.0, ge=0, description="of the distance to the source's norm statistics")
    nuclear_weight: float = Field(1.0, ge=0, description="of half the nuclear norm of the predictions")


@METHODS.register("opttta")
class OptTTA(TTAMethod):
    """Learned augmentation of the input of a frozen network; see the module's docstring.

    Attributes:
        policies: all sub-policies, in order, each with what it has learned.
        kept: indices of the sub-policies that predict, the best one first; empty before the first volume.
    """

    name = "opttta"
    summary = "averages the predictions of the frozen network over learned augmentations"
    citation = "Tomar et al., OptTTA: Learnable Test-Time Augmentation for Source-Free Adaptation, MIDL 2022"
    protocols = ("N-O", "N-M")
    one_network: ClassVar[bool] = False
    Params = OptTTAParams

    def setup(self) -> None:
        """Freeze the network, and make the sub-policies and their optimisers.

        Raises:
            AdaptationError: the model classifies tiles, which do not come in volumes.
        """
        if self.model.task != "segmentation":
            raise AdaptationError(
                f"method 'opttta' searches augmentations volume by volume, and this model is for "
                f"{self.model.task}, whose tiles do not belong to volumes; use method 'tesla'"
            )
        p: OptTTAParams = self.params
        self.model.requires_grad_(False)
        sets = itertools.combinations(OPERATIONS, p.policy_size)
        channels = input_channels(self.model)
        made = nn.ModuleList(SubPolicy(members, channels) for members in sets)
        self.policies = made.to(self.context.device)
        self._optimizers = [
            torch.optim.AdamW(policy.parameters(), lr=p.learning_rate, weight_decay=p.weight_decay)
            for policy in self.policies
        ]
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
        """Learn on the (N, C, H, W) slices of a volume; on the first one, choose sub-policies."""
        p: OptTTAParams = self.params
        candidates = self.kept or tuple(range(len(self.policies)))
        steps = p.later_steps if self.kept else p.first_steps
        bright = bright_slices(images)
        found = torch.stack([self.learn(index, images, bright, steps) for index in candidates])
        if not self.kept:
            self.choose(found)
            found = found[list(self.kept)]
        self.steps += steps * len(candidates)
        total, entropy, distance, norm = found.mean(dim=0)
        return {
            "loss/total": total,
            "loss/entropy": entropy,
            "loss/norm_statistics": distance,
            "loss/nuclear_norm": norm,
        }

    def choose(self, found: Tensor) -> None:
        """Keep the sub-policies with the smallest totals, by what :meth:`learn` returned of all, (P, 4)."""
        self.kept = tuple(torch.argsort(found[:, 0], stable=True)[: self.params.keep].tolist())

    def learn(self, index: int, images: Tensor, bright: Tensor, steps: int) -> Tensor:
        """Take steps on one sub-policy and return its mean losses over the last tenth of them.

        Args:
            index: of the sub-policy.
            images: (N, C, *spatial) of the volume.
            bright: (n,) indices of the slices that are learned from.
            steps: number of steps.

        Returns:
            (4,): the total, the entropy, the distance of the norm statistics and the nuclear norm.
        """
        p: OptTTAParams = self.params
        size = self.at_most(len(images) if p.batch_slices is None else p.batch_slices)
        learned, optimizer = list(self.policies[index].parameters()), self._optimizers[index]
        last: list[Tensor] = []
        for step in range(steps):
            terms = self._objective(index, *self._drawn(images, bright, size))
            optimizer.zero_grad(set_to_none=True)
            terms[0].backward()  # type: ignore[no-untyped-call]
            if p.clip_norm is not None:
                nn.utils.clip_grad_norm_(learned, p.clip_norm)
            optimizer.step()
            if step >= steps - max(1, steps // 10):
                last.append(terms.detach())
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(last).mean(dim=0)

    def _drawn(self, images: Tensor, bright: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Return ``size`` random slices or patches, on the device, and the weight of their pixels."""
        if self.patch is not None and images.shape[2:] != self.patch:
            several = images[bright.to(images.device)]
            return self.to_device(drawn_patches(several, self.patch, size, None, self.generator)), None
        drawn = bright[torch.randint(len(bright), (size,), generator=self.generator)].to(images.device)
        weight = None if self.pixel_weight is None else self.to_device(self.pixel_weight[drawn])
        return self.to_device(images[drawn]), weight

    def _objective(self, index: int, images: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the objective of one batch and its three terms, (4,), with a gradient in the sub-policy.

        ``weight`` is (N, *spatial), of the pixels of the images, None for all ones.
        """
        p: OptTTAParams = self.params
        draw = draw_views(len(images), self.generator, self.context.device)
        view = apply_draw(images, self._policy(index), draw)
        with norm_distance(self.model) as distances:
            logits = self.logits(self.model, view.images)
        seen = None if weight is None else warp.to_view(weight[:, None], view.theta.detach())[:, 0]
        entropy = losses.entropy(logits, seen)
        distance = torch.stack(distances).sum() if distances else torch.zeros_like(entropy)
        norm = nuclear_norm(logits.softmax(dim=1), seen)
        total = p.entropy_weight * entropy + p.norm_weight * distance - 0.5 * p.nuclear_weight * norm
        return torch.stack([total, entropy, distance, norm])

    def labelled_pass(self, optimizer: str) -> Callable[[Tensor], Tensor]:
        """Return what maps labelled images to logits through a view of a sub-policy, warped back."""
        return partial(self._labelled_view, int(optimizer.removeprefix("policy_")))

    def _labelled_view(self, index: int, images: Tensor) -> Tensor:
        draw = draw_views(len(images), self.generator, self.context.device)
        view = apply_draw(images, self._policy(index), draw)
        return warp.from_view(self.logits(self.model, view.images), view.theta)

    def _policy(self, index: int) -> SubPolicy:
        policy = self.policies[index]
        assert isinstance(policy, SubPolicy)  # noqa: S101 - a list of them was made
        return policy

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
        """Return the probabilities of one view per image: of logits warped back, 0 where it did not look."""
        draw = draw_views(len(images), self.generator, self.context.device)
        view = apply_draw(images, self._policy(index), draw)
        return warp.from_view(self.logits(self.model.whole, view.images), view.theta).softmax(dim=1)

    def record(self) -> dict[str, float]:
        """Return the share of kept sub-policies with each operation, and the means of what they learned."""
        kept = [self._policy(index) for index in self.kept]
        result = {
            f"policy/kept/{name}": sum(name in policy.members for policy in kept) / max(len(kept), 1)
            for name in OPERATIONS
        }
        learned = [policy.summary() for policy in kept]
        for name in LEARNED:
            values = [found[name] for found in learned if name in found]
            result[f"policy/{name}"] = sum(values) / max(len(values), 1)
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

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimiser of each sub-policy."""
        return {f"policy_{index}": item for index, item in enumerate(self._optimizers)}

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and which sub-policies are kept, the best one first."""
        return super().state_dict() | {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.kept = tuple(state["kept"])


def input_channels(model: nn.Module) -> int:
    """Return the channels of the images that a network takes, by its first convolution; 1 if it has none."""
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d))
    return next((layer.in_channels for layer in layers), 1)
