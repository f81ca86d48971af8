"""The state of a training: network, optimiser, schedule, generator; one step; save and take up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from tesla_med.config.differences import differences
from tesla_med.config.models import PipelineConfig
from tesla_med.errors import CheckpointError, TeslaMedError
from tesla_med.io.files import atomic_path
from tesla_med.models.base import Network, build_model, to_model_range
from tesla_med.tasks.labelled import LabelledSource, Part

Tensors = tuple[Tensor, ...] | list[Tensor]
VALIDATION_SEED = 20
LONGEST_MEMORY = 0.999
"""Share of the old weights in a step of their moving average, once that many steps are behind."""


class TrainingRun:
    """The training state: network and its moving average, optimiser, schedule, generator, best result so far.

    Attributes:
        model: the network that learns.
        averaged: the moving average of its weights and statistics, which is validated and kept.
    """

    def __init__(
        self, pipeline: PipelineConfig, data: LabelledSource, device: torch.device, seed: int
    ) -> None:
        self.pipeline, self.data, self.device = pipeline, data, device
        self.generator = torch.Generator().manual_seed(seed)
        self.model: Network = build_model(pipeline).to(device)
        cuda = device.type == "cuda"
        if cuda:
            self.model = self.model.to(memory_format=torch.channels_last)
        self._average = AveragedModel(self.model, multi_avg_fn=self._move, use_buffers=True)
        train = pipeline.train
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            weight_decay=train.weight_decay,
            fused=cuda or None,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _rate(step, train.steps)
        )
        self.loss = data.loss()
        self.step, self.best, self.best_varied, self.best_step = 0, -1.0, -1.0, 0

    @property
    def averaged(self) -> Network:
        """The network with averaged weights."""
        return cast("Network", self._average.module)

    def advance(self, part: Part) -> Tensor:
        """Take one step and return its loss, on the device, so that nothing waits for it."""
        config = self.pipeline.train
        self.model.train()
        images, labels = part.draw(config.batch_size, self.generator)
        images, labels = self._placed(images), self._placed(labels)
        images, labels = self.data.vary(images, labels, config.augment, self.generator)
        with self._autocast():
            logits = self.model(self._input(images))
        loss: Tensor = self.loss(logits.float(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        self._average.update_parameters(self.model)
        self.step += 1
        return loss.detach()

    def _move(self, averages: Tensors, values: Tensors, _: Any) -> None:
        """Move averages towards values; their memory grows with the steps behind, up to LONGEST_MEMORY."""
        memory = min(LONGEST_MEMORY, (1 + self.step) / (10 + self.step))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, values, 1.0 - memory)
        else:
            torch._foreach_copy_(averages, values)

    def _placed(self, values: Tensor) -> Tensor:
        if self.device.type == "cuda" and values.device.type == "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _input(self, images: Tensor) -> Tensor:
        ranged = to_model_range(images, self.pipeline.preprocessing.model_range)
        cuda = self.device.type == "cuda" and ranged.dim() == 4
        return ranged.contiguous(memory_format=torch.channels_last) if cuda else ranged

    def _autocast(self) -> torch.autocast:
        reduced = self.pipeline.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=reduced)

    @torch.no_grad()
    def validate(self, part: Part, *, varied: bool = False) -> float:
        """Return the headline metric of the averaged network on the items of a part, in [0, 1].

        Args:
            part: the items.
            varied: change their intensities as the training augmentation does, every time in the same way.
        """
        self.averaged.eval()
        if not varied:
            return part.score(self._predict)
        generator = torch.Generator().manual_seed(VALIDATION_SEED)
        family = self.pipeline.train.augment

        def predict(images: Tensor) -> Tensor:
            parts = torch.split(images, self.pipeline.predict_batch)
            changed = [self.data.restyle(part.to(self.device), family, generator) for part in parts]
            return self._predict(torch.cat(changed))

        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(VALIDATION_SEED)  # of the noise
            return part.score(predict)

    def _predict(self, images: Tensor) -> Tensor:
        parts = []
        for batch in torch.split(images, self.pipeline.predict_batch):
            inputs = self._input(batch.to(self.device))
            with self._autocast():
                parts.append(self.averaged(inputs))
        return torch.cat(parts)

    def save(self, path: Path, settings: str) -> None:
        """Write everything that a resumed training needs; loads with ``weights_only``."""
        state = {
            "settings": settings,
            "step": self.step,
            "best": self.best,
            "best_varied": self.best_varied,
            "best_step": self.best_step,
            "model": self.model.state_dict(),
            "average": self._average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
            "global_generator": torch.get_rng_state(),
            "device_generator": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        with atomic_path(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path, settings: str) -> None:
        """Take up the state in ``path``.

        Raises:
            CheckpointError: damaged, or made with other settings; the first difference is named.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            before = str(state["settings"])
            if before != settings:
                changed = "; ".join(differences(json.loads(before), json.loads(settings)))
                raise CheckpointError(
                    f"{path}: cannot resume with other settings: {changed}; "
                    "use the earlier settings, or --overwrite to start again"
                )
            self.model.load_state_dict(state["model"])
            self._average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.generator.set_state(state["generator"])
            torch.set_rng_state(state["global_generator"])
            if self.device.type == "cuda" and state["device_generator"] is not None:
                torch.cuda.set_rng_state(state["device_generator"], self.device)
            self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
            self.best_varied = state["best_varied"]
        except CheckpointError:
            raise
        except Exception as error:  # torch raises many kinds on damaged files
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{path}: not a training state ({text}); use --overwrite") from None


def _rate(step: int, steps: int) -> float:
    """Return the share of the learning rate at ``step``: short linear warm-up, then a cosine to 0."""
    warm_up = max(1, min(100, steps // 20))
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


def check_finite(losses: Sequence[float], step: int) -> None:
    """Check the losses of the last steps, of which ``step`` was the last.

    Raises:
        TeslaMedError: one is not finite.
    """
    for index, value in enumerate(losses):
        if not math.isfinite(value):
            raise TeslaMedError(
                f"training diverged: the loss is {value} at step {step - len(losses) + index + 1}; "
                "lower train.learning_rate or set precision to float32"
            )
