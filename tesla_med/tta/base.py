"""What every test-time adaptation method is.

A method sees images only: ``adapt(images)`` and ``predict(images)``, (N, C, H, W) in [0, 1].
References are read and compared elsewhere, after the mask is final.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.config.files import validate
from tesla_med.config.models import Protocol, Section
from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers, to_model_range
from tesla_med.models.normalisation import batch_statistics, evenly_spaced, kept_running_statistics
from tesla_med.registry import Registry
from tesla_med.tta._shared.teacher import average_over_views

if TYPE_CHECKING:
    from tesla_med.training.measure import SourceStatistics

Scalars = dict[str, Tensor | float]


class MethodParams(Section):
    """Parameters every method has: how the slices of a case or site are fed to it."""

    batch_slices: int | None = Field(16, ge=1, description="slices an update; null: all of a case")
    draw: Literal["ordered", "replacement"] = "ordered"
    updates_per_case: int | None = Field(
        None, ge=1, description="with draw: replacement, updates on each case"
    )
    epochs: int = Field(1, ge=1, description="passes over the slices")


@dataclass(frozen=True)
class MethodContext:
    """What a method is told about the run.

    Attributes:
        device: where it computes.
        seed: of all its generators.
        model_range: images in [0, 1] are mapped to this before the network.
        precision: ``bfloat16`` runs networks under autocast; losses stay in float32.
        predict_batch: slices a forward when predicting.
        cuda_graphs: on a CUDA device, capture repeated passes and replay them.
        statistics: moments of the source features, for methods of the Y protocols; None under N.
    """

    device: torch.device
    seed: int = 0
    model_range: tuple[float, float] = (-1.0, 1.0)
    precision: Literal["float32", "bfloat16"] = "float32"
    predict_batch: int = 16
    cuda_graphs: bool = True
    statistics: SourceStatistics | None = None


class TTAMethod(ABC):
    """A method with its model, its full state, and exact save, restore and reset.

    Args:
        model: network with source weights; the method keeps its own copy.
        params: checked parameters of ``Params``.
        context: device, seed and ranges.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    protocols: ClassVar[tuple[Protocol, ...]] = ("N-O", "N-M")
    adapts: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    """Whether the seed changes nothing."""
    one_network: ClassVar[bool] = True
    """Whether plain prediction by the deployed network repeats the method's own."""
    Params: ClassVar[type[MethodParams]] = MethodParams

    def __init__(self, model: Network, params: Any, context: MethodContext) -> None:
        self.params = params
        self.context = context
        self.model: Network = copy.deepcopy(model).to(context.device).eval()
        if context.device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.generator = torch.Generator()
        self.noise_generator = torch.Generator(device=context.device)
        self._seed_generators()
        self.steps = 0
        self.limit: int | None = None
        self.stitch_on_cpu = False
        self.setup()
        self._initial = self.state_dict()

    def _seed_generators(self) -> None:
        self.generator.manual_seed(self.context.seed)
        self.noise_generator.manual_seed(self.context.seed + 1)

    def setup(self) -> None:  # noqa: B027 - optional hook
        """Prepare parameters, optimisers and copies; called once, after the model is in place."""

    def use_less_memory(self, limit: int | None, *, stitch_on_cpu: bool = False) -> None:
        """Work on at most ``limit`` slices at once from now on; None: as the parameters say.

        Args:
            limit: of slices in a batch, 1 or more.
            stitch_on_cpu: bring each batch of probabilities to the CPU before the next is made.
        """
        self.limit = limit
        self.stitch_on_cpu = stitch_on_cpu

    def at_most(self, count: int) -> int:
        """Return ``count``, or the limit where memory is short."""
        return count if self.limit is None else min(count, self.limit)

    # ------------------------------------------------------------ adapting

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the batches of one pass over a case, as the parameters say.

        Args:
            images: (N, C, H, W) slices of one case.
        """
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

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:  # noqa: B027 - optional hook
        """Prepare a pass over the slices; ``batches`` may be iterated once, to look ahead."""

    @abstractmethod
    def adapt(self, images: Tensor) -> Scalars:
        """Update on one batch of slices and return scalars for the record.

        Args:
            images: (N, C, H, W) float32 in [0, 1].
        """

    @abstractmethod
    def predict(self, images: Tensor) -> Tensor:
        """Return class probabilities (N, L, H, W) float32 of all slices of one case.

        Args:
            images: (N, C, H, W) float32 in [0, 1].
        """

    @property
    def predictor(self) -> Network:
        """The network that predicts; its weights are what a checkpoint saves."""
        return self.model

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Give the network as it should be saved, so that plain prediction repeats the masks.

        Args:
            images: slices of the case that the weights are for, where they are for one case.
        """
        yield self.predictor

    def deployed_params(self, images: Tensor | None = None) -> dict[str, Any]:
        """Return the parameters of ``source`` with which the saved network repeats the masks.

        They differ from the defaults where the method's own parameters say ``predict_statistics: volume``
        and the network is not saved for one case, whose statistics would then be in it.
        """
        own = images is None and getattr(self.params, "predict_statistics", "running") == "volume"
        return {"statistics": "volume", "max_slices": self.params.max_slices} if own else {}

    def record(self) -> dict[str, float]:
        """Return slow-moving scalars worth a point a case (policy probabilities, ...)."""
        return {}

    def passes(self, slices: int) -> float:
        """Return about how many forward passes of one slice a case of ``slices`` costs."""
        return float(slices)

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return every module with state, by name."""
        return {"model": self.model}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return every optimiser, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return a deep copy of everything that the next mask depends on."""
        state = {
            "modules": {name: module.state_dict() for name, module in self.modules().items()},
            "optimizers": {name: item.state_dict() for name, item in self.optimizers().items()},
            "generators": [self.generator.get_state(), self.noise_generator.get_state()],
            "steps": self.steps,
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        state = copy.deepcopy(dict(state))
        for name, module in self.modules().items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers().items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.generator.set_state(state["generators"][0])
        self.noise_generator.set_state(state["generators"][1])
        self.steps = state["steps"]

    def reset(self) -> None:
        """Return to the source model: weights, buffers, optimisers, memories and generators."""
        self.load_state_dict(self._initial)

    # ------------------------------------------------------------ helpers

    @contextmanager
    def own_statistics(self, network: nn.Module, images: Tensor, limit: int) -> Iterator[None]:
        """Normalise by the statistics of a case's slices inside the block; the old ones come back.

        Args:
            network: its running statistics are replaced.
            images: (N, C, H, W) in [0, 1].
            limit: at most this many slices, evenly spaced, give the statistics.
        """
        with kept_running_statistics(network), torch.no_grad():
            with batch_statistics(network, momentum=1.0):
                self.logits(network, self.to_device(evenly_spaced(images, self.at_most(limit))))
            yield

    def to_device(self, images: Tensor) -> Tensor:
        """Return the images on the device of the method."""
        return images.to(self.context.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast block of the chosen precision."""
        if self.context.precision == "bfloat16":
            return torch.autocast(self.context.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return float32 logits (N, L, H, W) of images in [0, 1]."""
        inputs = to_model_range(images, self.context.model_range)
        if self.context.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with self.autocast():
            output: Tensor = model(inputs)
        return output.float()

    @torch.no_grad()
    def probabilities(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return probabilities in batches of ``predict_batch``, where the images are."""
        parts = []
        size = self.at_most(self.context.predict_batch)
        for start in range(0, images.shape[0], size):
            batch = self.to_device(images[start : start + size])
            part = self.logits(model, batch).softmax(dim=1)
            parts.append(part.cpu() if self.stitch_on_cpu else part)
        return torch.cat(parts).to(images.device)

    def view_mean(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the mean probabilities over ``predict_views`` weak views (Eq. 5), the same at every call."""
        p: Any = self.params
        return average_over_views(
            images,
            lambda view: self.probabilities(model, view),
            p.predict_views,
            scale=p.weak_scale,
            shift=p.weak_shift,
            flip=p.weak_flip,
        )


METHODS: Registry[type[TTAMethod]] = Registry("method", "tesla_med.tta")


def make_method(name: str, model: Network, params: Mapping[str, Any], context: MethodContext) -> TTAMethod:
    """Return the method called ``name`` with its parameters checked.

    Raises:
        ConfigError: unknown method or parameters that do not fit it.
        AdaptationError: the method cannot adapt this model.
    """
    method = METHODS.get(name)
    return method(model, check_params(name, params), context)


def check_params(name: str, params: Mapping[str, Any]) -> MethodParams:
    """Return the checked parameters of the method called ``name``.

    Raises:
        ConfigError: unknown method or parameters that do not fit it.
    """
    return validate(METHODS.get(name).Params, params, f"methods.{name}")


def require_norm_layers(model: nn.Module, method: str, *, affine: bool = False) -> None:
    """Refuse a model without batch norms that the method could adapt.

    Raises:
        AdaptationError: with the number of norm layers found and what to do.
    """
    layers = norm_layers(model)
    usable = [layer for layer in layers if layer.affine] if affine else layers
    if not usable:
        others = sum("Norm" in type(layer).__name__ for layer in model.modules())
        need = "batch-norm layers with affine parameters" if affine else "batch-norm layers"
        raise AdaptationError(
            f"method {method!r} adapts {need}, and the model has 0 ({others} norm layers of other kinds); "
            "use method 'tesla', or a network with batch normalisation (MONAI: norm: batch)"
        )
