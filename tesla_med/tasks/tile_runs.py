"""Adapt a tile classifier to one site: tiles in, predictions.csv and figures out.

Tiles come as a stream in an order drawn by the seed, because folders are sorted by class and a batch of one
class would be no batch of the site. Methods see images only; labels are compared at the end.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tesla_med.adapt import Carry
from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.engine.memory import LEAST_TILES, free_device_memory, with_less_memory
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.cases import site_folder
from tesla_med.io.files import atomic_path, output_lock, sha256, write_json
from tesla_med.io.tiles import UNLABELLED, TileBatch, TileSet, find_tiles, stream
from tesla_med.models.base import default_device
from tesla_med.models.checkpoint import make_card, save_checkpoint, versions
from tesla_med.models.loading import load_model
from tesla_med.plan import NOT_A_DEVICE, choose_protocol, device_name, resolve
from tesla_med.reports.tile_board import TileBoard
from tesla_med.runs.folder import RUN_FILE, RunFolder
from tesla_med.scoring import calibration
from tesla_med.scoring.score import normalised_entropy
from tesla_med.training.measure import statistics_for
from tesla_med.tta.base import METHODS, MethodContext, TTAMethod, make_method
from tesla_med.types import Progress

log = logging.getLogger(__name__)
Probs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TileResult:
    """Outcome of a run on tiles.

    Attributes:
        out: the output folder.
        tiles: how many were classified.
        failed: name -> reason of those that could not be read.
        accuracy: share that is right, None without labels.
        accuracy_source: the same of the unadapted model.
        files: what was written.
        notes: remarks that hold for the whole run.
    """

    out: Path
    tiles: int
    failed: dict[str, str]
    accuracy: float | None
    accuracy_source: float | None
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def adapt_tiles(
    site: str | SiteConfig,
    volumes: str | Path,
    *,
    weights: str | Path | None = None,
    statistics: str | Path | None = None,
    pipeline: str | PipelineConfig | None = None,
    method: str | None = None,
    protocol: Protocol | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    reset: Reset | None = None,
    resume: bool = False,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    carry: Carry | None = None,
) -> TileResult:
    """Adapt a tile classifier to a site and write its predictions.

    Under N-O each batch of the stream is adapted to and predicted as it comes; under N-M several passes
    over all tiles come first.

    Args:
        site: id, ``pipeline/id``, YAML path, or a loaded configuration.
        volumes: folder of tiles, with a sub-folder a class or without labels.
        weights: source weights; default: the site's.
        statistics: source feature statistics, for the Y protocols only; default: beside the weights.
        pipeline: name, YAML path or loaded configuration, of a classification task.
        method: default: the pipeline's.
        protocol: N-O, N-M, Y-O or Y-M; default: the pipeline's, or its counterpart that the method has.
        out: output folder; default ``runs/<site>/<method>-<protocol>``.
        seed: of the order and of every generator.
        device: auto, cpu or cuda.
        reset: ``site`` or ``never``; tiles are no cases to restart for. Default: the pipeline's.
        resume: leave a finished run of the same settings as it is; do an interrupted one again from its first
            tile, which gives the same predictions, since the seed decides.
        overwrite: replace an earlier run.
        overrides: ``key=value`` texts over the pipeline, ``site.key=value`` over the site.
        progress: called as the work goes on.
        carry: the method starts from its state, and leaves its own there.

    Raises:
        ConfigError: site, pipeline, method or an override is wrong.
        DataError: no tiles, or none of them can be read.
        CheckpointError: weights missing, unreadable, or of another architecture or task.
        AdaptationError: the method cannot adapt this model.
        OutputError: the output folder cannot be used.
    """
    free_device_memory()
    run = _TileRun(
        site, Path(volumes), weights, statistics, pipeline, method, protocol, seed, device, reset, overrides
    )
    target = (
        Path(out) if out is not None else Path("runs") / run.site.id / f"{run.method_name}-{run.protocol}"
    )
    folder = RunFolder(target)
    inputs = (run.tiles.folder, run.weights)
    settings = run.settings()
    folder.check(settings, resume=resume, overwrite=overwrite, inputs=inputs)
    with output_lock(target):
        if resume and folder.complete():
            return _finished(target)
        again = resume and (target / RUN_FILE).exists()
        folder.prepare(settings, resume=False, overwrite=overwrite or again)
        folder.write_manifest(settings, {"notice": NOT_A_DEVICE}, [], complete=False)
        run.board = run.make_board(target)
        try:
            return run.execute(folder, progress or (lambda *_: None), carry)
        finally:
            run.board.close()


def list_tiles(site: str | SiteConfig, volumes: str | Path, **options: Any) -> dict[str, Any]:
    """Return what :func:`adapt_tiles` would do with the same arguments, and write nothing.

    Returns:
        ``site``, ``folder``, ``tiles``, ``by_class`` (class name -> tiles), ``unlabelled``, ``skipped``
        (reason -> files or folders), ``method``, ``protocol``, ``batches`` and ``batch_size``.

    Raises:
        TeslaMedError: as :func:`adapt_tiles`, but for the output folder.
    """
    get = options.get
    run = _TileRun(
        site,
        Path(volumes),
        get("weights"),
        get("statistics"),
        get("pipeline"),
        get("method"),
        get("protocol"),
        get("seed", 0),
        get("device", "auto"),
        get("reset"),
        get("overrides", ()),
    )
    method = run.make(run.method_name)
    size = method.params.batch_slices or run.pipeline.predict_batch
    return {
        "site": run.site.id,
        "folder": str(run.tiles.folder),
        "tiles": len(run.tiles.paths),
        "by_class": {item.name: int((run.tiles.labels == item.value).sum()) for item in run.pipeline.classes},
        "unlabelled": int((run.tiles.labels == UNLABELLED).sum()),
        "skipped": run.tiles.skipped,
        "method": run.method_name,
        "protocol": str(run.protocol),
        "batches": -(-len(run.tiles.paths) // size),
        "batch_size": size,
    }


def _finished(out: Path) -> TileResult:
    """Return the outcome of a run that was finished earlier."""
    record = json.loads((out / RUN_FILE).read_text(encoding="utf-8"))
    metrics = out / "report" / "metrics.json"
    figures = json.loads(metrics.read_text(encoding="utf-8"))
    accuracy = {name: figures.get(name, {}).get("accuracy") for name in ("adapted", "source")}
    return TileResult(
        out,
        figures["tiles"],
        record["failed"],
        accuracy["adapted"],
        accuracy["source"],
        (out / "predictions.csv", metrics),
        tuple(record["notes"]),
    )


class _TileRun:
    """One run on tiles."""

    def __init__(
        self,
        site: str | SiteConfig,
        volumes: Path,
        weights: str | Path | None,
        statistics: str | Path | None,
        pipeline: str | PipelineConfig | None,
        method: str | None,
        protocol: Protocol | None,
        seed: int,
        device: str,
        reset: Reset | None,
        overrides: Sequence[str],
    ) -> None:
        self.device, self.seed = default_device(device), seed
        self.site, config = resolve(site, pipeline, tuple(overrides), weights)
        if config.task != "classification":
            raise ConfigError(f"pipeline {config.name!r} is for {config.task}; tiles need a classification")
        if config.preprocessing.size is None:
            raise ConfigError(f"pipeline {config.name!r}: preprocessing.size must say how large tiles are")
        self.method_name = method or config.method
        self.protocol: Protocol = choose_protocol(self.method_name, protocol, config.protocol)
        self.reset: Reset = reset or config.reset.get(self.protocol, "site")
        if self.reset == "case":
            raise ConfigError("--reset case: a tile is no case to restart for; use site or never")
        self.tiles = find_tiles(site_folder(volumes, self.site), self.site.tiles)
        given = weights or self.site.weights
        if given is None:
            raise ConfigError(f"site {self.site.id} names no weights; give them with --weights")
        self.weights = Path(given)
        loaded = load_model(self.weights, config, tuple(overrides))
        self.pipeline, self.model, self.card = loaded.pipeline, loaded.model, loaded.card
        self.weights_sha256 = sha256(self.weights)
        self.statistics = statistics_for(
            self.protocol, self.weights, self.weights_sha256, self.pipeline, statistics
        )
        self.notes = loaded.warnings
        for text in loaded.warnings:
            log.warning("%s", text)
        self.failed: dict[int, str] = {}
        self.remarks: Counter[str] = Counter()
        self.board = TileBoard(None, self.pipeline)
        self.seen: list[npt.NDArray[np.int64]] = []
        self.largest: int | None = None  # batch to learn from, once memory has run out

    def settings(self) -> dict[str, Any]:
        """Return what makes the run what it is."""
        return {
            "site": self.site.model_dump(mode="json"),
            "pipeline": self.pipeline.model_dump(mode="json", exclude={"reports"}),
            "method": self.method_name,
            "protocol": self.protocol,
            "reset": self.reset,
            "seed": self.seed,
            "device": self.device.type,
            "weights_sha256": self.weights_sha256,
            "statistics_sha256": None if self.statistics is None else self.statistics.sha256,
            "tiles": len(self.tiles.paths),
        }

    def make_board(self, out: Path) -> TileBoard:
        """Return where curves go: nowhere unless the pipeline's reports name TensorBoard."""
        words = (self.site.id, self.site.institution, self.method_name, self.protocol, f"seed {self.seed}")
        wanted = "tensorboard" in self.pipeline.reports
        return TileBoard(out if wanted else None, self.pipeline, ", ".join(words))

    def make(self, name: str) -> TTAMethod:
        """Return a method on its own copy of the source model."""
        context = MethodContext(
            device=self.device,
            seed=self.seed,
            model_range=self.pipeline.preprocessing.model_range,
            precision=self.pipeline.precision,
            predict_batch=self.pipeline.predict_batch,
            cuda_graphs=self.pipeline.cuda_graphs,
            statistics=None if self.statistics is None else self.statistics.moments,
        )
        needed = self.card.extra.get("predict", {}) if self.card is not None and name == "source" else {}
        params = {**needed, **self.pipeline.method_params(name, self.protocol)}
        return make_method(name, self.model, params, context)

    def execute(self, folder: RunFolder, progress: Progress, carry: Carry | None = None) -> TileResult:
        """Classify every tile, write everything; ``carry`` gives the method a state and takes its own."""
        start = time.perf_counter()
        source = self.make("source")
        method = source if self.method_name == "source" else self.make(self.method_name)
        if carry is not None and carry.state is not None:
            method.load_state_dict(carry.state)
        order = torch.randperm(
            len(self.tiles.paths), generator=torch.Generator().manual_seed(self.seed)
        ).tolist()
        classes = len(self.pipeline.classes)
        before = np.full((len(order), classes), np.nan, np.float32)
        after = before.copy()
        finite = self._passes(method, order, progress)
        done = 0
        for batch in self._batches(order, method):
            if len(batch.index):
                images = batch.images
                before[batch.index] = self._classified(source, images).cpu().numpy()
                own = finite and method is not source
                probs = self._predicted(method, images) if own else None
                finite = finite and (probs is not None or method is source)
                after[batch.index] = before[batch.index] if probs is None else probs
                self.seen.append(batch.index)
            done += len(batch.index) + len(batch.failed)
            progress("tiles", done, len(order))
        if not finite:
            self.notes = (*self.notes, "adaptation gave values that are not finite; source predictions kept")
        if np.isnan(after).all():
            raise DataError(f"{self.tiles.folder}: none of its {len(order)} tiles can be read")
        if method.adapts and finite:
            self._save(folder, method)
        if carry is not None:
            carry.state = method.state_dict()
        return self._write(folder, before, after, time.perf_counter() - start)

    def _batches(self, order: list[int], method: TTAMethod) -> Iterator[TileBatch]:
        preprocessing = self.pipeline.preprocessing
        assert preprocessing.size is not None  # noqa: S101 - checked at the start
        size = method.params.batch_slices or self.pipeline.predict_batch
        normalise = preprocessing.stain_normalisation
        for batch in stream(self.tiles, order, size, preprocessing.size, normalise=normalise):
            new = {place: reason for place, reason in batch.failed.items() if place not in self.failed}
            for reason in new.values():
                log.warning("%s", reason)
            self.failed.update(batch.failed)
            self.remarks.update(text for notes in batch.notes.values() for text in notes)
            yield batch

    def _passes(self, method: TTAMethod, order: list[int], progress: Progress) -> bool:
        """Under M pass over all tiles as often as the method says; return whether all was finite."""
        if self.protocol.endswith("O") or not method.adapts:
            return True

        def images() -> Iterator[Tensor]:
            for batch in self._batches(order, method):
                if len(batch.index):
                    yield batch.images

        for epoch in range(method.params.epochs):
            progress("passes over the site", epoch, method.params.epochs)
            method.start_epoch(epoch, images())
            for batch in images():
                if not self._learned(method, batch):
                    method.reset()
                    return False
        self.remarks.clear()  # they come again with the predictions
        return True

    def _predicted(self, method: TTAMethod, images: Tensor) -> Probs | None:
        """Return probabilities of a batch, adapted to first under O; None where they are not finite."""
        if self.protocol.endswith("O") and method.adapts and not self._adapted(method, images):
            method.reset()
            return None
        probs: Probs = self._classified(method, images).cpu().numpy()
        return probs if np.isfinite(probs).all() else None

    def _adapted(self, method: TTAMethod, images: Tensor) -> bool:
        """Pass over one batch, which is to tiles what a case is to slices; return whether all was finite."""
        images = method.to_device(images)
        for epoch in range(method.params.epochs):
            method.start_epoch(epoch, [images])
            if not self._learned(method, images):
                return False
        return True

    def _learned(self, method: TTAMethod, images: Tensor) -> bool:
        """Learn from a batch, in smaller ones once memory has run out; return whether all was finite."""
        before = method.state_dict()
        most = min(len(images), self.largest or len(images))

        def work() -> bool:
            size = method.at_most(most)
            if method.limit is not None:
                self.largest = method.limit
            parts = images.tensor_split(-(-len(images) // size))
            return all(_finite(self.board.told(method.adapt(part), method)) for part in parts)

        def restore() -> None:
            method.load_state_dict(before)

        finite, done = with_less_memory(work, restore, (method,), most, least=LEAST_TILES, noun="tile")
        if done:
            self.notes = (*self.notes, done)
        return finite

    def _classified(self, method: TTAMethod, images: Tensor) -> Tensor:
        """Return the probabilities of a batch, predicted in smaller parts where memory runs out."""
        state = method.generator.get_state(), method.noise_generator.get_state()

        def restore() -> None:
            method.generator.set_state(state[0])
            method.noise_generator.set_state(state[1])

        most = min(len(images), method.context.predict_batch)
        probs, _ = with_less_memory(lambda: method.predict(images), restore, (method,), most, noun="tile")
        return probs

    def _save(self, folder: RunFolder, method: TTAMethod) -> None:
        needed = method.deployed_params(None)
        if needed:  # a batch's own statistics: batches must be as large to repeat the predictions
            needed["batch_slices"] = method.params.batch_slices
        extra = {
            "adapted_to": self.site.id,
            "method": self.method_name,
            "protocol": self.protocol,
            "seed": self.seed,
            "updates": method.steps,
            "source_sha256": self.weights_sha256,
            "predict": needed,
        }
        sites = self.card.training_sites if self.card is not None else ()
        with method.deployed(None) as network:
            save_checkpoint(folder.checkpoint("adapted"), network, make_card(self.pipeline, sites, extra))

    def _write(self, folder: RunFolder, before: Probs, after: Probs, seconds: float) -> TileResult:
        table = folder.out / "predictions.csv"
        values = np.array(self.pipeline.values)
        write_predictions(table, self.tiles, self.pipeline, before, after)
        kept = ~np.isnan(after).any(axis=1)
        scored = kept & (self.tiles.labels != UNLABELLED)
        figures = tile_figures(before[scored], after[scored], self.tiles.labels[scored], self.pipeline)
        metrics = folder.out / "report" / "metrics.json"
        failed = {self.tiles.names[place]: reason for place, reason in sorted(self.failed.items())}
        counts = {"tiles": int(kept.sum()), "labelled": int(scored.sum()), "failed": len(failed)}
        write_json(metrics, counts | {"classes": values.tolist()} | figures)
        pictures: list[Path] = []
        if "html" in self.pipeline.reports:
            pictures = self._pictures(folder, before[scored], after[scored], scored, figures, after)
        shown = {path.stem: path for path in pictures if path.suffix == ".png"}
        for index in self.seen:  # labels are looked at when every prediction is final
            self.board.batch(before[index], after[index], self.tiles.labels[index])
        files = [table, metrics, *pictures, *self.board.finish(figures, shown)]
        manifest = {
            "notice": NOT_A_DEVICE,
            "terms": self.site.terms,
            "versions": versions(),
            "device": device_name(self.device),
            "weights": self.weights.name,
            "weights_sha256": self.weights_sha256,
            "statistics": None if self.statistics is None else self.statistics.record(),
            "seed": self.seed,
            "method": {"name": self.method_name, "citation": METHODS.get(self.method_name).citation},
            "protocol": self.protocol,
            "reset": self.reset,
            "skipped": self.tiles.skipped,
            "notes": list(self.notes),
            "tiles_read_with_remarks": dict(self.remarks),
            "failed": failed,
            "seconds": round(seconds, 2),
        }
        folder.write_manifest(self.settings(), manifest, [], complete=True)
        accuracy = figures.get("adapted", {}).get("accuracy")
        return TileResult(
            folder.out,
            int(kept.sum()),
            failed,
            accuracy,
            figures.get("source", {}).get("accuracy"),
            tuple(files),
            self.notes,
        )

    def _pictures(
        self,
        folder: RunFolder,
        before: Probs,
        after: Probs,
        scored: npt.NDArray[np.bool_],
        figures: dict[str, Any],
        every: Probs,
    ) -> list[Path]:
        from tesla_med.reports.tile_report import confusion_png, contact_sheet, write_html

        pictures = {"uncertain.png": contact_sheet(self.tiles, every, self.pipeline)}
        if scored.any():
            from tesla_med.reports.calibration import reliability_png

            pictures["confusion.png"] = confusion_png(figures, self.pipeline)
            drawn = reliability_png(
                _calibrated(before, after, self.tiles.labels[scored], self.pipeline), self.pipeline
            )
            if drawn is not None:
                pictures["reliability.png"] = drawn
        written = []
        for name, content in pictures.items():
            with atomic_path(folder.out / "report" / name) as temporary:
                temporary.write_bytes(content)
            written.append(folder.out / "report" / name)
        page = folder.out / "report" / "report.html"
        write_html(
            page, self.site, self.pipeline, self.method_name, self.protocol, figures, pictures, self.remarks
        )
        return [*written, page]


def _finite(scalars: dict[str, Any]) -> bool:
    return all(bool(torch.isfinite(torch.as_tensor(value)).all()) for value in scalars.values())


def write_predictions(
    path: Path, tiles: TileSet, pipeline: PipelineConfig, before: Probs, after: Probs
) -> None:
    """Write one row a tile in the order of names; unreadable tiles have no figures.

    Columns: tile, label, prediction, source_prediction, entropy, and p_<class> for each class.
    """
    names = {item.value: item.name for item in pipeline.classes}
    classes = [item.name for item in pipeline.classes]
    entropy = normalised_entropy(np.nan_to_num(after, nan=1.0 / len(classes)).T)
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        probabilities = [f"p_{name}" for name in classes]
        writer.writerow(["tile", "label", "prediction", "source_prediction", "entropy", *probabilities])
        for place, name in enumerate(tiles.names):
            label = names.get(int(tiles.labels[place]), "")
            if np.isnan(after[place]).any():
                writer.writerow([name, label, "", "", "", *[""] * len(classes)])
                continue
            taken = [classes[int(probs[place].argmax())] for probs in (after, before)]
            figures = [f"{value:.6f}" for value in after[place]]
            writer.writerow([name, label, *taken, f"{entropy[place]:.6f}", *figures])


def tile_figures(
    before: Probs, after: Probs, labels: npt.NDArray[np.int64], pipeline: PipelineConfig
) -> dict[str, Any]:
    """Return accuracy, by class and mean over classes, confusion and calibration, of source and adapted.

    Args:
        before: (N, L) of the source model.
        after: (N, L) of the method.
        labels: (N,) class values.
        pipeline: names the classes.

    Returns:
        ``source`` and ``adapted``, each with ``accuracy``, ``error``, ``accuracy_by_class``,
        ``mean_class_accuracy``, ``confusion`` (rows are labels), ``ece``, ``brier``, ``nll`` and ``bins``;
        empty without labels.
    """
    if not len(labels):
        return {}
    index = _indices(labels, pipeline)
    summary = _calibrated(before, after, labels, pipeline)
    found: dict[str, Any] = {}
    for name, probs in (("source", before), ("adapted", after)):
        winners = probs.argmax(axis=1)
        classes = probs.shape[1]
        confusion = np.zeros((classes, classes), int)
        np.add.at(confusion, (index, winners), 1)
        rows = confusion.sum(axis=1)
        by_class = [int(confusion[k, k]) / int(rows[k]) if rows[k] else None for k in range(classes)]
        known = [value for value in by_class if value is not None]
        accuracy = float((winners == index).mean())
        every = summary["region"][name]["all"]
        found[name] = {
            "accuracy": accuracy,
            "error": 1.0 - accuracy,
            "accuracy_by_class": by_class,
            "mean_class_accuracy": sum(known) / len(known),
            "confusion": confusion.tolist(),
            **{key: every[key] for key in ("ece", "brier", "nll", "bins")},
        }
    return found


def _indices(labels: npt.NDArray[np.int64], pipeline: PipelineConfig) -> npt.NDArray[np.int64]:
    order = {value: place for place, value in enumerate(pipeline.values)}
    return np.array([order[int(value)] for value in labels], np.int64)


def _calibrated(
    before: Probs, after: Probs, labels: npt.NDArray[np.int64], pipeline: PipelineConfig
) -> dict[str, Any]:
    """Return :func:`tesla_med.scoring.calibration.summarise`; a tile counts as a voxel."""
    shape = (before.shape[1], len(labels), 1, 1)
    index = _indices(labels, pipeline).astype(np.int32).reshape(shape[1:])
    region = np.ones(shape[1:], bool)
    counts = calibration.count_case(
        np.ascontiguousarray(before.T).reshape(shape),
        np.ascontiguousarray(after.T).reshape(shape),
        index,
        region,
        pipeline.values,
        pipeline.report.bins,
    )
    return calibration.summarise(calibration.merge([counts]), [])


def png_of(figure: Any) -> bytes:
    """Return a matplotlib figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


__all__ = ["TileResult", "adapt_tiles"]
