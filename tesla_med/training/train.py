"""Train a source model on labelled sites; save weights, card, statistics and the state to go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig, TrainConfig
from tesla_med.config.paths import user_path
from tesla_med.config.request import check_seed
from tesla_med.config.resolve import source_sites
from tesla_med.engine.prior import OrganPrior, as_extra, fitted
from tesla_med.errors import OutputError
from tesla_med.io.files import write_json
from tesla_med.io.locks import in_folder, output_lock
from tesla_med.models.base import build_model, default_device
from tesla_med.models.checkpoint import (
    SOURCE_DICE,
    STEADINESS,
    load_state,
    make_card,
    read_card,
    read_state,
    save_checkpoint,
    versions,
)
from tesla_med.models.statistics import make_statistics_card, save_statistics, statistics_path
from tesla_med.tasks.base import task_of
from tesla_med.tasks.labelled import LabelledSource, Part
from tesla_med.tasks.subjects import BY_FOLDER
from tesla_med.training.interrupt import held_interrupt
from tesla_med.training.loop import TrainingRun, check_finite
from tesla_med.training.measure import intensities, measure, steadiness
from tesla_med.types import Progress

WEIGHTS = "source.safetensors"
FEW, FEW_SHARE = 3, 0.5
"""Fewer cases than this are held out for a share of the steps only: they score coarsely and teach much."""
TOLD_EVERY = 20
"""Steps after which losses are fetched from the device, checked and written."""
STATE = "last.pt"
OWN_FILES = (
    WEIGHTS,
    "source.json",
    "source.statistics.safetensors",
    "source.statistics.json",
    STATE,
    "train.json",
)


@dataclass(frozen=True)
class TrainResult:
    """Where a trained source model is and how good it is.

    Attributes:
        weights: the weights of the best validation (.safetensors), card beside them.
        statistics: the source feature statistics.
        metric: name of the headline metric: dice (3-D, per case, on the model's grid) or accuracy.
        validation: its value, in [0, 1].
        best_step: the step of the weights.
        validation_step: the step it was measured at: that of the weights, unless held-out cases were
            trained on too from then on.
        steps: steps trained in all.
        seconds: time of this call.
        training_cases: names of the cases or tiles trained on from the first step.
        validation_cases: names of those held out, to the end or up to ``validation_step``; empty where
            there were few subjects or no fraction, and then the metric is that of the training cases.
        left_out: cases or tiles that were not trained on, or not as a whole, with the reason.
    """

    weights: Path
    statistics: Path
    metric: str
    validation: float
    best_step: int
    validation_step: int
    steps: int
    seconds: float
    training_cases: tuple[str, ...]
    validation_cases: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def validation_dice(self) -> float:
        """The headline metric of a segmentation model."""
        return self.validation


def train_source(
    pipeline: str | PipelineConfig,
    sites: str | SiteConfig | Sequence[str | SiteConfig],
    volumes: str | Path,
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    extra: dict[str, Any] | None = None,
) -> TrainResult:
    """Train the pipeline's network on every labelled case or tile of ``sites``.

    Cases and tiles are split by subject, slices drawn with the pipeline's share of foreground, the loss is
    Dice + cross-entropy; tiles are drawn one by one, the loss is cross-entropy. The optimiser is
    AdamW with a short warm-up and a cosine schedule. ``OUT`` receives
    ``source.safetensors`` (best validation) with its card, the source statistics,
    ``last.pt``, ``train.json`` and ``tensorboard/``.

    Args:
        pipeline: name, YAML path or loaded configuration: classes, preprocessing, network and training.
        sites: where the labelled cases come from: ids, YAML paths or loaded configurations.
        volumes: the folder that holds them.
        out: a new or empty folder, unless ``resume`` or ``overwrite``.
        seed: of weights, split, draws and augmentation; a whole number of 0 or above.
        device: ``auto``, ``cpu`` or ``cuda``.
        resume: go on from ``last.pt`` exactly as if never stopped; start if there is none.
        overwrite: replace an earlier training in ``out``.
        progress: called with (stage, done, total).
        extra: remarks kept in the card and in ``train.json``.

    Raises:
        OutputError: ``out`` holds something else, or both or neither of the two flags fit.
        CheckpointError: the state to resume from is damaged or has other settings.
        ConfigError: unknown pipeline, site or model, wrong parameters, a seed that is none, or the device is
            not available.
        DataError: no labelled case, or a file that cannot be used.
        TeslaMedError: the loss is no longer finite.
    """
    start = time.perf_counter()
    check_seed(seed)
    config, given = source_sites(pipeline, sites)
    pipeline, out = _scaled(config), user_path(out)
    target = default_device(device)
    _check_folder(out, resume, overwrite)
    with _own_randomness(target, seed):
        build_model(pipeline)  # wrong parameters are found before anything is read or replaced
    task = task_of(pipeline)(given[0], pipeline)
    data = task.labelled(given, user_path(volumes), progress)
    with output_lock(out):
        if overwrite:
            _remove_own(out)
        return _train(pipeline, given, data, out, seed, target, resume, progress, extra or {}, start)


def _train(
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    data: LabelledSource,
    out: Path,
    seed: int,
    device: torch.device,
    resume: bool,
    progress: Progress | None,
    extra: dict[str, Any],
    start: float,
) -> TrainResult:
    training, held = data.split(pipeline.train.validation_fraction, torch.Generator().manual_seed(seed))
    settings = _settings(pipeline, data, seed)
    with _own_randomness(device, seed):
        run = TrainingRun(pipeline, data, device, seed)
        if resume and (out / STATE).is_file():
            run.load(out / STATE, settings)
        names = tuple(site.id for site in sites)
        card = make_card(pipeline, names, {"seed": seed, **extra}, data.acquisition)
        joins = joined_after(pipeline.train, held)
        seen = data.every() if joins < pipeline.train.steps else training
        _fit(run, training, held, seen, joins, out, settings, card, progress)
    load_state(run.model, read_state(out / WEIGHTS), out / WEIGHTS)
    if pipeline.task == "segmentation":
        steady = steadiness(run.model, held if held.names else training, pipeline)
        _remember(out / WEIGHTS, run.best, steady, fitted(seen.masks()))
    statistics = measure(run.model, seen, pipeline, seed, progress)
    target = statistics_path(out / WEIGHTS)
    count = len(seen.names), seen.images
    known = intensities(seen, pipeline)
    about = make_statistics_card(out / WEIGHTS, pipeline, seen.sites, *count, statistics, seed, known)
    save_statistics(target, statistics, about)
    result = TrainResult(
        weights=out / WEIGHTS,
        statistics=target,
        metric=data.metric,
        validation=run.best,
        best_step=run.best_step,
        validation_step=min(run.best_step, joins),
        steps=run.step,
        seconds=time.perf_counter() - start,
        training_cases=training.names,
        validation_cases=held.names,
        left_out=tuple(data.left_out),
    )
    write_json(out / "train.json", _record(result, settings, str(device), data, extra))
    return result


def _remember(weights: Path, dice: float, steady: tuple[float, float], prior: OrganPrior | None) -> None:
    """Add to the card how good and steady masks are on the images of the training, and where the organ is."""
    card = read_card(weights)
    assert card is not None  # noqa: S101 - it was written with the weights
    extra = {**card.extra, SOURCE_DICE: float(dice), STEADINESS: list(steady), **as_extra(prior)}
    write_json(weights.with_suffix(".json"), card.model_copy(update={"extra": extra}).model_dump(mode="json"))


def _scaled(pipeline: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with the intensity scaling that is trained on, which the card will remember."""
    if pipeline.train.intensity is None:
        return pipeline
    scaled = pipeline.preprocessing.model_copy(update={"intensity": pipeline.train.intensity})
    return pipeline.model_copy(update={"preprocessing": scaled})


def _check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise OutputError("give either resume or overwrite, not both")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: expected a folder, found a file; choose another output folder")
    used = any(item.name != "tensorboard" for item in in_folder(out))
    known = used and any((out / name).exists() for name in OWN_FILES)
    if used and not known:
        raise OutputError(
            f"{out}: the folder holds other files but no training; choose another output folder"
        )
    if known and not (resume or overwrite):
        raise OutputError(
            f"{out}: holds an earlier training; use --resume to continue it, or --overwrite to replace it"
        )


def _remove_own(out: Path) -> None:
    for name in OWN_FILES:
        (out / name).unlink(missing_ok=True)
    for events in (out / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators (weights, dropout) and put the caller's states back after."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def joined_after(config: TrainConfig, held: Part) -> int:
    """Return the step after which held-out items are trained on too; that of the end: never."""
    share = config.held_out_for
    if share is None:
        share = FEW_SHARE if len(held.names) < FEW else 1.0
    return max(1, round(share * config.steps)) if held.names else config.steps


def _fit(
    run: TrainingRun,
    training: Part,
    held: Part,
    seen: Part,
    joins: int,
    out: Path,
    settings: str,
    card: Any,
    progress: Progress | None,
) -> None:
    """Train; keep the averaged weights that are best on varied held-out items, the later of equals.

    Without held-out items the last weights are kept. After step ``joins`` items are drawn from ``seen``.
    Where held-out items join the training, their score is that of the moment before, and the last average is
    kept. An interrupt is heard after the step that it falls into; the state is saved first.
    """
    config = run.pipeline.train
    kept: list[tuple[Tensor, float]] = []
    with _events(out, run.step) as writer, held_interrupt() as interrupted:
        while run.step < config.steps:
            rate = float(run.schedule.get_last_lr()[0])
            part = training if run.step < joins else seen
            kept.append((run.advance(part), rate))
            last = run.step == config.steps
            due = last or run.step == joins or run.step % config.validate_every == 0
            stopped = interrupted() and not last
            if due or stopped or len(kept) == TOLD_EVERY:
                _tell(writer, kept, run.step)
                kept = []
            if due and run.step <= joins and (held.names or last):
                validation = held if held.names else training
                score, varied = run.validate(validation), run.validate(validation, varied=True)
                writer.add_scalar(f"validation/{run.data.metric}", score, run.step)
                writer.add_scalar(f"validation/{run.data.metric}_varied", varied, run.step)
                if varied >= run.best_varied or run.step == joins < config.steps:
                    run.best, run.best_varied, run.best_step = score, varied, run.step
                    save_checkpoint(out / WEIGHTS, run.averaged, card)
            elif last:
                run.best_step = run.step
                save_checkpoint(out / WEIGHTS, run.averaged, card)
            if due or stopped:
                run.save(out / STATE, settings)
            if progress:
                progress("train", run.step, config.steps)
            if stopped:
                raise KeyboardInterrupt


@contextmanager
def _events(out: Path, step: int) -> Iterator[Any]:
    """Give a writer of TensorBoard events that goes on after ``step``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
    try:
        yield writer
    finally:
        with suppress(OSError):
            writer.close()


def _tell(writer: Any, kept: Sequence[tuple[Tensor, float]], step: int) -> None:
    """Write the losses and rates of the last steps, of which ``step`` was the last, in one transfer."""
    losses = torch.stack([loss for loss, _ in kept]).tolist()
    check_finite(losses, step)
    for back, (loss, (_, rate)) in enumerate(zip(losses, kept, strict=True), 1 - len(kept)):
        writer.add_scalar("train/loss", loss, step + back)
        writer.add_scalar("train/learning_rate", rate, step + back)


def _settings(pipeline: PipelineConfig, data: LabelledSource, seed: int) -> str:
    """Return what must agree for a resumed training to be the same one, as JSON."""
    kept = ("name", "classes", "channels", "preprocessing", "model", "train", "precision")
    return json.dumps(
        {
            "seed": seed,
            "pipeline": pipeline.model_dump(mode="json", include=set(kept)),
            "cases": list(data.shapes),
            **({"split_by": told} if (told := _told_otherwise(data)) else {}),
        },
        sort_keys=True,
    )


def _told_otherwise(data: LabelledSource) -> dict[str, str]:
    """Return by what items are split where it is not their own names, as it always was before."""
    return {site: by for site, by in data.split_by.items() if BY_FOLDER in by or by.startswith("site.")}


def _validated_on(result: TrainResult) -> str:
    """Return in words what was scored."""
    if not result.validation_cases:
        return "training cases"
    joined = result.validation_step < result.best_step
    return "held-out cases, before they were trained on too" if joined else "held-out cases"


def _record(
    result: TrainResult, settings: str, device: str, data: LabelledSource, extra: dict[str, Any]
) -> dict[str, Any]:
    return {
        "weights": result.weights.name,
        "statistics": result.statistics.name,
        f"validation_{result.metric}": result.validation,
        "validated_on": _validated_on(result),
        "best_step": result.best_step,
        "validation_step": result.validation_step,
        "steps": result.steps,
        "seconds": result.seconds,
        "device": device,
        "training_cases": list(result.training_cases),
        "validation_cases": list(result.validation_cases),
        "split_by": dict(data.split_by),
        "left_out": list(result.left_out),
        "settings": json.loads(settings),
        "extra": extra,
        "versions": versions(),
    }
