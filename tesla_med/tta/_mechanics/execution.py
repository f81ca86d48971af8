"""How the networks of a method are run: on which device, in which precision and in which batches.

Nothing in this module adapts a network, so a reader who wants to understand a method can skip it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tesla_med.augment import warp
from tesla_med.models.base import Network, norm_layers, to_model_range
from tesla_med.models.moments import SourceStatistics
from tesla_med.models.normalisation import (
    Statistics,
    batch_statistics,
    blend_running_statistics,
    copied,
    evenly_spaced,
    kept_running_statistics,
    mixed_with,
    running_statistics,
)
from tesla_med.tta._mechanics.fastest import Computing, Precision, fastest
from tesla_med.tta._mechanics.graphs import GraphPool
from tesla_med.tta._mechanics.patches import drawn_patches


@dataclass(frozen=True)
class MethodContext:
    """What a method is told about the run.

    Attributes:
        device: the device on which the method computes.
        seed: the seed of all its generators.
        model_range: images in [0, 1] are mapped to this range before they enter the network.
        precision: ``bfloat16`` runs networks under autocast; losses stay in float32. ``auto``: what is the
            fastest for this network on this device, with its layout, measured once.
        predict_batch: number of slices in one forward pass of a prediction.
        cuda_graphs: whether passes that repeat on a CUDA device are captured and replayed.
        statistics: moments of the source features, for methods of the Y protocols; None under N.
    """

    device: torch.device
    seed: int = 0
    model_range: tuple[float, float] = (-1.0, 1.0)
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    predict_batch: int = 16
    cuda_graphs: bool = True
    statistics: SourceStatistics | None = None


LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the rank of a convolution's weights."""


def layout_of(model: nn.Module) -> torch.memory_format | None:
    """Return the layout with the channels last for the weights of a network; None if it has no single one."""
    found = {LAYOUTS[item.dim()] for item in model.parameters() if item.dim() in LAYOUTS}
    return found.pop() if len(found) == 1 else None


class Execution:
    """Runs networks on behalf of a method, within the memory that is available.

    Args:
        params: the parameters of the method, which say how slices are batched.
        context: device, precision and seed.

    Attributes:
        computing: precision and layout of the networks.
        generator: generator on the CPU, for every draw except noise fields.
        noise_generator: generator on the device, for noise fields.
        limit: the largest number of slices in a batch while memory is short, otherwise None.
        stitch_on_cpu: whether each batch of probabilities is moved to the CPU before the next is made.
        pixel_weight: (N, *spatial) of the batch that is learned from: 1 where a pixel counts, 0 where there
            is fill, at which no loss may look; None where all count. Set by the driver for each batch.
    """

    def __init__(self, params: Any, context: MethodContext) -> None:
        self.params = params
        self.context = context
        self.generator = torch.Generator()
        self.noise_generator = torch.Generator(device=context.device)
        self.generator.manual_seed(context.seed)
        self.noise_generator.manual_seed(context.seed + 1)
        self.limit: int | None = None
        self.stitch_on_cpu = False
        self.pixel_weight: Tensor | None = None
        usual: Precision = "float32" if context.precision == "auto" else context.precision
        self.computing = Computing(usual, channels_last=context.device.type == "cuda")

    def placed(self, model: Network) -> Network:
        """Return a copy of ``model`` on the device, in eval mode."""
        self._set_computing(model)
        own = copy.deepcopy(model).to(self.context.device).eval()
        layout = layout_of(own) if self.computing.channels_last else None
        return own if layout is None else own.to(memory_format=layout)

    def _set_computing(self, model: Network) -> None:
        """Measure how the network computes fastest, if the context asks for it."""
        if self.context.precision != "auto":
            return
        first = next((item for item in model.parameters() if item.dim() == 4), None)
        if first is not None:  # else there is no network of slices
            self.computing = fastest(model, first.shape[1], self.context.device)

    def to_device(self, images: Tensor) -> Tensor:
        """Return the images on the device."""
        return images.to(self.context.device, non_blocking=True)

    def weight_in(self, theta: Tensor) -> Tensor | None:
        """Return ``pixel_weight`` in the frame of views of the batch, (N, 2, 3); None where all count."""
        if self.pixel_weight is None:
            return None
        whole = self.to_device(self.pixel_weight)[:, None]
        return warp.to_view(whole, theta.detach())[:, 0]

    # ------------------------------------------------------------ memory

    def use_less_memory(self, limit: int | None, *, stitch_on_cpu: bool = False) -> None:
        """Work on at most ``limit`` slices at once from now on, or as the parameters say if it is None.

        CUDA graphs hold memory, so there are none while there is a limit.

        Args:
            limit: the largest number of slices in a batch, 1 or more.
            stitch_on_cpu: whether to move each batch of probabilities to the CPU before the next is made.
        """
        changed = (self.limit is None) != (limit is None)
        self.limit = limit
        self.stitch_on_cpu = stitch_on_cpu
        if changed:
            self.make_passes()

    def make_passes(self) -> None:
        """Make the passes that updates repeat, after ``setup`` and whenever a memory limit comes or goes."""

    def graph_pool(self) -> GraphPool:
        """Return a new pool of CUDA graphs, which captures none where they are not wanted."""
        return GraphPool(self.context.cuda_graphs and self.limit is None)

    def at_most(self, count: int) -> int:
        """Return ``count``, or the limit if memory is short and the limit is smaller."""
        return count if self.limit is None else min(count, self.limit)

    # ------------------------------------------------------------ batches

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the batches of one pass over a case, as the parameters say.

        Args:
            images: (N, C, H, W) slices of one case.
        """
        patch = self.patch
        if patch is not None:
            found = self.centres(images)
            spots = None if found is None else found.nonzero().cpu()
            size = self.at_most(self.params.batch_slices or images.shape[0])
            for _ in range(self.updates(images.shape[0])):
                yield drawn_patches(images, patch, size, spots, self.generator)
            return
        count = images.shape[0]
        size = self.at_most(count if self.params.batch_slices is None else self.params.batch_slices)
        if self.params.draw == "replacement":
            updates = self.params.updates_per_case or -(-count // size)
            for _ in range(updates):
                index = torch.randint(count, (size,), generator=self.generator)
                yield images[index.to(images.device, non_blocking=True)]
        else:
            for start in range(0, count, size):
                yield images[start : start + size]

    @property
    def patch(self) -> tuple[int, ...] | None:
        """Size of what is learned from at once; None: whole images."""
        return None

    def centres(self, images: Tensor) -> Tensor | None:
        """Return where the foreground is, (N, *spatial) bool, for patches; None: nowhere in particular."""
        return None

    def updates(self, slices: int) -> int:
        """Return how many batches one pass over a case of ``slices`` slices has."""
        drawn: int | None = self.params.updates_per_case if self.params.draw == "replacement" else None
        return drawn or -(-slices // self.at_most(self.params.batch_slices or slices))

    def slices_seen(self, slices: int) -> int:
        """Return how many slices the updates of one pass over a case of ``slices`` slices see."""
        batch = self.params.batch_slices or slices
        drawn: int = batch * (self.params.updates_per_case or -(-slices // batch))
        return slices if self.params.draw == "ordered" else drawn

    # ------------------------------------------------------------ forward passes

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast block of the chosen precision."""
        if self.computing.precision == "bfloat16":
            return torch.autocast(self.context.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def logits(self, model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return the float32 logits (N, L, *spatial) of (N, C, H, W) images in [0, 1] on the device."""
        inputs = to_model_range(images, self.context.model_range)
        if self.computing.channels_last:
            inputs = inputs.contiguous(memory_format=LAYOUTS[inputs.dim()])
        with self.autocast():
            output: Tensor = model(inputs)
        return output.float()

    @torch.no_grad()
    def probabilities(self, model: Network, images: Tensor) -> Tensor:
        """Return the probabilities (N, L, *spatial), on the device of the images.

        Args:
            model: the network that predicts.
            images: (N, C, H, W) in [0, 1], of any number; they are split into batches of ``predict_batch``.
        """
        parts = []
        size = self.at_most(self.context.predict_batch)
        for start in range(0, images.shape[0], size):
            batch = self.to_device(images[start : start + size])
            part = self.logits(model.whole, batch).softmax(dim=1)
            parts.append(part.cpu() if self.stitch_on_cpu else part)
        return torch.cat(parts).to(images.device)

    @contextmanager
    def own_statistics(
        self,
        network: nn.Module,
        images: Tensor,
        limit: int,
        share: float = 1.0,
        rest: Statistics | None = None,
    ) -> Iterator[None]:
        """Normalise by the statistics of a case's own slices inside the block; the old ones come back.

        Args:
            network: the network whose running statistics are replaced.
            images: (N, C, H, W) slices of the case, in [0, 1].
            limit: the largest number of slices, evenly spaced, from which statistics are taken.
            share: of the case's statistics; the rest is the old ones', in [0, 1].
            rest: with ``share``, what the case's statistics are mixed with in every layer while they are
                taken, in place of the old ones, with which they are mixed at the end.
        """
        if not norm_layers(network):
            yield
            return
        before = (rest or copied(running_statistics(network))) if share < 1.0 else []
        chosen = evenly_spaced(images, limit)
        with kept_running_statistics(network), torch.no_grad():
            parts = torch.split(chosen, self.at_most(len(chosen)))  # several where memory is short
            seen = 0
            for part in parts:
                seen += len(part)
                mixture = nullcontext() if rest is None or share == 1.0 else mixed_with(network, rest, share)
                with batch_statistics(network, momentum=len(part) / seen), mixture:
                    self.logits(network, self.to_device(part))
            if share < 1.0:
                blend_running_statistics(network, before, share)
            yield
