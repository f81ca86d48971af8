"""The contract of a test-time adaptation method.

A method is given images only, (N, C, H, W) in [0, 1]. References are read and compared elsewhere, once the
mask is final. How a method's networks are run (device, precision, batches, memory) is inherited from
:class:`Execution` and need not be known to understand a method.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.config.files import validate
from tesla_med.config.models import Protocol, Section
from tesla_med.errors import ConfigError
from tesla_med.models.base import Network, predicted_class
from tesla_med.models.normalisation import (
    Statistics,
    batch_statistics,
    blend_running_statistics,
    kept_running_statistics,
    mixed_with,
)
from tesla_med.registry import Registry
from tesla_med.tta._mechanics.execution import Execution
from tesla_med.tta._mechanics.execution import MethodContext as MethodContext
from tesla_med.tta._mechanics.parameters import require_norm_layers as require_norm_layers

Scalars = dict[str, Tensor | float]
"""What an update reports, by name."""
RESTART_SEEDS = 1_000_003
"""What the seeds of two runs on one case differ by."""


class MethodParams(Section):
    """Parameters that every method has: how the slices of a case or a site are fed to it."""

    batch_slices: int | None = Field(16, ge=1, description="slices per update; null: all slices of a case")
    draw: Literal["ordered", "replacement"] = "ordered"
    updates_per_case: int | None = Field(
        None, ge=1, description="with draw: replacement, number of updates per case"
    )
    epochs: int = Field(1, ge=1, description="passes over the slices")


class TTAMethod(Execution, ABC):
    """A method: how it adapts, how it predicts, and its full state.

    A subclass must define :meth:`adapt`. By default the adapted ``model`` predicts.

    Args:
        model: network with source weights; the method keeps its own copy.
        params: checked parameters, an instance of ``Params``.
        context: device, seed and ranges.

    Attributes:
        model: the method's copy of the network.
        steps: number of updates so far.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    protocols: ClassVar[tuple[Protocol, ...]] = ("N-O", "N-M")
    adapts: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    """Whether the result does not depend on the seed."""
    one_network: ClassVar[bool] = True
    """Whether plain prediction with the deployed network repeats the method's own."""
    binary_regions: ClassVar[bool] = False
    """Whether overlapping regions are learned each by itself, not as classes that exclude each other."""
    Params: ClassVar[type[MethodParams]] = MethodParams

    def __init__(self, model: Network, params: Any, context: MethodContext) -> None:
        super().__init__(params, context)
        self.model = self.placed(model)
        self.model.apart = self.model.regions and self.binary_regions
        self.steps = 0
        self.setup()
        self.make_passes()
        self.start_here()

    @classmethod
    def joins(cls, params: Any) -> bool:
        """Whether several processes can learn from one site together; see ``_mechanics/ranks.py``."""
        return False

    def setup(self) -> None:
        """Prepare parameters, optimisers and copies; called once, when the model is in place."""

    # ------------------------------------------------------------ adapting

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Prepare a pass over the slices; ``batches`` may be iterated over once, to look ahead."""

    @abstractmethod
    def adapt(self, images: Tensor) -> Scalars:
        """Update on one batch of slices and return scalars for the record.

        Args:
            images: (N, C, H, W) float32 in [0, 1].
        """

    def labelled_pass(self, optimizer: str) -> Callable[[Tensor], Tensor] | None:
        """Return what maps labelled images (N, C, *spatial) in [0, 1] to logits (N, L, *spatial) for a loss.

        Their gradient reaches what the optimiser updates. None where it updates no network, but a policy.

        Args:
            optimizer: its name in :meth:`optimizers`.
        """
        network = self.updated_network(optimizer)
        return None if network is None else partial(self._labelled_logits, network)

    def updated_network(self, optimizer: str) -> Network | None:
        """Return the network that an optimiser updates, by its name; None where it updates none."""
        groups = self.optimizers()[optimizer].param_groups
        updated = {id(item) for group in groups for item in group["params"]}
        found = (
            module
            for module in self.modules().values()
            if isinstance(module, Network) and any(id(item) in updated for item in module.parameters())
        )
        return next(found, None)

    def _labelled_logits(self, network: Network, images: Tensor) -> Tensor:
        """Return logits under the statistics of the images, as in updates; running ones stay as they are."""
        share, rest = self._mixture
        mixture = nullcontext() if rest is None else mixed_with(network, rest, share)
        apart, network.apart = network.apart, False  # labels are of classes
        try:
            with batch_statistics(network, momentum=None), mixture:
                return self.logits(network, images)
        finally:
            network.apart = apart

    @property
    def patch(self) -> tuple[int, ...] | None:
        """Size of the patches that are learned from, as the network says."""
        return self.model.patch

    def centres(self, images: Tensor) -> Tensor | None:
        """Return where the predicting network finds foreground."""
        return predicted_class(self.probabilities(self.predictor, images)) > 0

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of a case's own normalisation statistics that may be chosen for it; empty: no choice."""
        return ()

    @property
    def restarts(self) -> int:
        """How often to learn from a case, of which the steadiest run is kept; from tiles always once."""
        masks = self.model.task == "segmentation"
        return int(getattr(self.params, "restarts", 1)) if masks else 1

    def draw_anew(self, number: int) -> None:
        """Draw otherwise than before from now on, in the same way for the same number."""
        seed = self.context.seed + RESTART_SEEDS * number
        self.generator.manual_seed(seed)
        self.noise_generator.manual_seed(seed + 1)

    def use_share(self, share: float) -> None:
        """Normalise by one of ``shares`` from now on; a method without them has nothing to do."""

    # ------------------------------------------------------------ predicting

    @property
    def predictor(self) -> Network:
        """The network that predicts; its weights are what a checkpoint saves."""
        return self.model

    def predict(self, images: Tensor) -> Tensor:
        """Return the class probabilities (N, L, *spatial) of all slices of one case, float32.

        Args:
            images: (N, C, H, W) float32 in [0, 1].
        """
        with self.deployed(images) as network:
            return self.probabilities(network, images)

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Provide the network as it should be saved, so that plain prediction with it repeats the masks.

        Args:
            images: slices of the case that the weights are for, if they are for a single case. Inside the
                block the network has their statistics, if predictions use those of each case.
        """
        if not self._case_statistics:
            yield self.predictor
            return
        share, rest = self._mixture
        if images is not None:
            with self.own_statistics(self.predictor, images, self.params.max_slices, share, rest):
                yield self.predictor
            return
        with kept_running_statistics(self.predictor):  # what those of a case will be mixed with
            if rest is not None:
                blend_running_statistics(self.predictor, rest, 0.0)
            yield self.predictor

    def deployed_params(self, images: Tensor | None = None) -> dict[str, Any]:
        """Return the parameters of ``source`` with which the saved network repeats the masks.

        They are the defaults unless predictions use the statistics of each case and the network, which is
        saved for no particular case, cannot hold them.
        """
        if images is not None or not self._case_statistics:
            return {}
        params = {"statistics": "volume", "max_slices": self.params.max_slices}
        share, rest = self._mixture
        return params if rest is None else params | {"statistics_share": share}

    @property
    def _case_statistics(self) -> bool:
        """Whether the parameters ask for predictions normalised by the statistics of each case."""
        return getattr(self.params, "predict_statistics", "running") == "volume"

    @property
    def _mixture(self) -> tuple[float, Statistics | None]:
        """The share of a case's statistics in predictions, and what they are mixed with if it is not 1."""
        return 1.0, None

    def record(self) -> dict[str, float]:
        """Return slowly changing scalars to be recorded once per case, such as policy probabilities."""
        return {}

    def passes_per_update(self) -> float:
        """Return the forward passes that an update costs per slice; a backward pass counts as two."""
        return 0

    def learning_passes(self, slices: int) -> float:
        """Return the single-slice forward passes that the updates on a case of ``slices`` slices cost."""
        return float(self.params.epochs * self.slices_seen(slices) * self.passes_per_update())

    def predicting_passes(self, slices: int) -> float:
        """Return the single-slice forward passes of a prediction."""
        return float((slices if self._case_statistics else 0) + slices)

    def passes(self, slices: int) -> float:
        """Return the approximate number of single-slice forward passes for a case of ``slices`` slices."""
        return self.learning_passes(slices) + self.predicting_passes(slices)

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return every module that has state, by name."""
        return {"model": self.model}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return every optimiser, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return a deep copy of everything that the next mask depends on."""
        state: dict[str, Any] = {
            "modules": {name: module.state_dict() for name, module in self.modules().items()},
            "optimizers": {name: item.state_dict() for name, item in self.optimizers().items()},
            "generators": [self.generator.get_state(), self.noise_generator.get_state()],
            "steps": self.steps,
        }
        return {key: _cloned(value) for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        for name, module in self.modules().items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers().items():
            optimizer.load_state_dict(_cloned(state["optimizers"][name]))
        self.generator.set_state(state["generators"][0])
        self.noise_generator.set_state(state["generators"][1])
        self.steps = state["steps"]

    def start_here(self) -> None:
        """Let a reset return to the present state."""
        self._initial = self.state_dict()

    def reset(self) -> None:
        """Return to the source model: weights, buffers, optimisers, memories and generators."""
        self.load_state_dict(self._initial)


def fetch(steps: Sequence[Scalars]) -> list[dict[str, float]]:
    """Return the scalars of some updates, which all have the same names, in one transfer from the device."""
    names = list(steps[0])
    rows = [[torch.as_tensor(step[name]).float().reshape(()) for name in names] for step in steps]
    table = torch.stack([torch.stack(row) for row in rows]).cpu()
    return [dict(zip(names, values, strict=True)) for values in table.tolist()]


def _cloned(state: Any) -> Any:
    """Return a state of nested mappings and sequences with every tensor cloned; much faster than deepcopy."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _cloned(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_cloned(value) for value in state)
    return copy.deepcopy(state)


METHODS: Registry[type[TTAMethod]] = Registry("method", "tesla_med.tta", "tesla_med.methods")


def make_method(name: str, model: Network, params: Mapping[str, Any], context: MethodContext) -> TTAMethod:
    """Return the method called ``name``, with its parameters checked.

    Raises:
        ConfigError: the method is unknown, or the parameters do not fit it.
        AdaptationError: the method cannot adapt this model.
    """
    return METHODS.get(name)(model, check_params(name, params), context)


def check_params(name: str, params: Mapping[str, Any]) -> MethodParams:
    """Return the checked parameters of the method called ``name``.

    Raises:
        ConfigError: the method is unknown, or the parameters do not fit it.
    """
    return validate(METHODS.get(name).Params, params, f"methods.{name}")


def choose_protocol(method: str, asked: Protocol | None, default: Protocol) -> Protocol:
    """Return the protocol of a run.

    Args:
        method: name of a method.
        asked: what the user said; None: the pipeline's, or where the method has only the other of N and Y,
            that with the same number of passes.
        default: the pipeline's.

    Raises:
        ConfigError: the method is not there, or does not have the protocol.
    """
    known = METHODS.get(method).protocols
    wanted = asked or default
    if asked is None and wanted not in known:
        wanted = next((item for item in known if item[-1] == default[-1]), wanted)
    if wanted not in known:
        raise ConfigError(f"method {method!r} has no protocol {wanted!r}. Known: {', '.join(known)}.")
    return wanted
