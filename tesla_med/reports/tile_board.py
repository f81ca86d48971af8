"""``tensorboard/`` of a run on tiles: losses, running accuracy, error and entropy, final figures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tesla_med.config.models import PipelineConfig
from tesla_med.io.tiles import UNLABELLED
from tesla_med.reports.tensorboard import FOLDER
from tesla_med.scoring.score import normalised_entropy
from tesla_med.tta.base import TTAMethod

Probs = npt.NDArray[np.float32]
FIGURES = ("accuracy", "error", "mean_class_accuracy", "ece", "brier", "nll")


class TileBoard:
    """Events for TensorBoard; without a folder every call does nothing.

    Losses have the number of the update as their step, from 0; what is told of a batch has the number of
    tiles seen so far.

    Args:
        out: the run's output folder, or None.
        pipeline: names the classes.
        title: what the run is, in words.
    """

    def __init__(self, out: Path | None, pipeline: PipelineConfig, title: str = "") -> None:
        self._order = {value: place for place, value in enumerate(pipeline.values)}
        self._classes = [item.name for item in pipeline.classes]
        self._updates = self._tiles = self._labelled = 0
        self._right = {"source": 0, "adapted": 0}
        self._writer: Any = None
        if out is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(out / FOLDER))
            self._writer.add_text("run", title, 0)

    def told(self, scalars: Mapping[str, Any], method: TTAMethod) -> dict[str, Any]:
        """Write the losses of one update and what the method records of itself; return the losses."""
        if self._writer is not None:
            for tag, value in {**scalars, **method.record()}.items():
                self._writer.add_scalar(tag, float(torch.as_tensor(value).float()), self._updates)
            self._updates += 1
        return dict(scalars)

    def batch(self, before: Probs, after: Probs, labels: npt.NDArray[np.int64]) -> None:
        """Write entropy of a batch, and accuracy and error of all labelled tiles so far.

        Args:
            before: (N, L) probabilities of the source model.
            after: (N, L) of the method.
            labels: (N,) class values, ``UNLABELLED`` where there is none.
        """
        if self._writer is None or not len(labels):
            return
        self._tiles += len(labels)
        known = labels != UNLABELLED
        index = np.array([self._order[int(value)] for value in labels[known]], np.int64)
        self._labelled += len(index)
        for name, probs in (("source", before), ("adapted", after)):
            entropy = float(normalised_entropy(probs.T).mean())
            self._writer.add_scalar(f"entropy/{name}", entropy, self._tiles)
            if not self._labelled:
                continue
            self._right[name] += int((probs[known].argmax(axis=1) == index).sum())
            accuracy = self._right[name] / self._labelled
            self._writer.add_scalar(f"running/accuracy_{name}", accuracy, self._tiles)
            self._writer.add_scalar(f"running/error_{name}", 1.0 - accuracy, self._tiles)

    def finish(self, figures: Mapping[str, Any], pictures: Mapping[str, Path]) -> list[Path]:
        """Write the final figures and pictures, close, and return the event files.

        Args:
            figures: those of :func:`tesla_med.tasks.tile_runs.tile_figures`; empty without labels.
            pictures: tag -> PNG file.
        """
        if self._writer is None:
            return []
        for name, values in figures.items():
            for key in FIGURES:
                if values[key] is not None:
                    self._writer.add_scalar(f"final/{key}_{name}", values[key], self._tiles)
            for title, share in zip(self._classes, values["accuracy_by_class"], strict=True):
                if share is not None:
                    self._writer.add_scalar(f"final/accuracy_{name}/{title}", share, self._tiles)
        for tag, path in pictures.items():
            self._writer.add_image(tag, _pixels(path.read_bytes()), self._tiles, dataformats="HWC")
        self.close()
        return sorted(Path(self._writer.log_dir).glob("events.out.tfevents.*"))

    def close(self) -> None:
        """Close the event file; may be called twice."""
        if self._writer is not None:
            self._writer.close()


def _pixels(content: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
