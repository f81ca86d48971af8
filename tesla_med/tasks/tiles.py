"""Tiles: pictures of tissue in a stream, a batch goes through the network, one class per tile comes out.

Tiles come in an order drawn by the seed, because folders are sorted by class and a batch of one class would
be no batch of the site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import Protocol, Reset, SiteConfig
from tesla_med.engine.stages import stage
from tesla_med.errors import ConfigError, DataError, OutputError
from tesla_med.io.cases import site_folder
from tesla_med.io.files import digest_of
from tesla_med.io.predictions import read_rows
from tesla_med.io.tiles import TileSet, find_tiles, read_tile, reading
from tesla_med.records import Predicted, TileResult
from tesla_med.runs.folder import DONE_FOLDER, RunFolder
from tesla_med.scoring.tables import TABLE
from tesla_med.tasks.base import ROLLED_BACK, TASKS, Task
from tesla_med.types import Check, ItemEstimate, Items, Progress, Ref, Status, Unit, Used

if TYPE_CHECKING:
    from tesla_med.engine.outcome import Outcome
    from tesla_med.prepare.tiles import TileBatch
    from tesla_med.scoring.calibration import CalibrationCounts
    from tesla_med.scoring.tables import TileEvaluation
    from tesla_med.tasks.labelled import LabelledSource

Probs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Which tiles of a set belong to a unit."""

    tiles: TileSet
    positions: tuple[int, ...]


def _paths(part: Part) -> list[Path]:
    return [part.tiles.paths[position] for position in part.positions]


@dataclass(frozen=True)
class Predictions:
    """Probabilities of the tiles of a unit that could be read, and which model they are of."""

    source: Probs
    adapted: Probs
    used: Used
    status: Status
    reason: str


@TASKS.register("classification")
class Tiles(Task):
    """Classes of H&E tiles."""

    unit: ClassVar[str] = "batch"
    item: ClassVar[str] = "tile"
    metric: ClassVar[str] = "accuracy"
    background: ClassVar[bool] = True
    honours: ClassVar = frozenset(("rollback",))
    instead: ClassVar[Mapping[str, str]] = {
        "probs": "predictions.csv holds the probabilities of every tile",
        "uncertainty": "predictions.csv holds the entropy of every tile",
        "reset-case": "the state is not reset for single tiles; use site or never",
        "single": "a tile shares its batch's state; use rollback --to-case source",
        "keep-largest": "it applies to masks only; leave it out",
        **dict.fromkeys(("guard", "recalibrate"), "it compares masks; leave it out"),
        "watch": "what is learned of a batch of tiles depends on those before it; use adapt",
        "empty": "it applies to empty masks only; leave it out",
        "ignore": "leave the label of a tile empty instead",
        "values": "name the classes in the table or the CSV of labels instead",
        "classes": "predictions.csv names the classes",
        "figures": "they show volumes; leave them out of a table of tiles",
        **dict.fromkeys(("export", "review"), "predictions.csv is their result"),
    }
    smallest_batch: ClassVar[int] = 8  # fewer have neither statistics nor a class marginal
    joins: ClassVar[bool] = False
    seeded: ClassVar[bool] = True
    keep_every: ClassVar[float] = 60.0
    ahead: ClassVar[int] = 2
    reports: ClassVar = ("calibration", "confusion", "contact_sheet", "tensorboard", "html")
    always: ClassVar = ("predictions",)
    result: ClassVar[Any] = TileResult

    def prepare(self) -> None:
        """Check that the pipeline says how large tiles are, and takes RGB.

        Raises:
            ConfigError: it does not.
        """
        if self.pipeline.channels != 3:
            name = self.pipeline.name
            count = self.pipeline.channels
            raise ConfigError(f"pipeline {name!r}: tiles are read as RGB, so channels must be 3, not {count}")
        size = self.pipeline.preprocessing.size
        if size is None:
            raise ConfigError(
                f"pipeline {self.pipeline.name!r}: preprocessing.size must say how large tiles are"
            )
        self.size = size
        self._demands = reading(self.pipeline.preprocessing)
        self.class_names = {item.value: item.name for item in self.pipeline.classes}
        self.order = {item.name: position for position, item in enumerate(self.pipeline.classes)}

    # ------------------------------------------------------------ from files to batches

    def find(self, volumes: Path, others: Sequence[SiteConfig]) -> Items:
        """Return the tiles of the site; see :func:`tesla_med.io.tiles.find_tiles`."""
        tiles = find_tiles(site_folder(volumes, self.site), self.site.tiles)
        skipped = tuple((tiles.folder, f"{count} x {reason}") for reason, count in tiles.skipped.items())
        return Items(tiles.folder, tuple(tiles.names), skipped, tiles)

    def refs(self, items: Items, seed: int, size: int) -> Sequence[Ref]:
        """Return batches of ``size`` tiles in an order drawn by the seed; a rest of a few joins the last."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(items.names), generator=generator).tolist()
        parts = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        if len(parts) > 1 and len(parts[-1]) < min(self.smallest_batch, size):
            parts[-2:] = [parts[-2] + parts[-1]]
        return [
            Ref(f"batch-{number:06d}", tuple(items.names[at] for at in part), Part(items.content, part))
            for number, part in enumerate(parts)
        ]

    def load(self, ref: Ref) -> Unit:
        """Read a batch; tiles that cannot be read are left out of it, with the reason."""
        from tesla_med.prepare.tiles import load_batch

        part: Part = ref.content
        with stage("read"):
            batch = load_batch(part.positions, part.tiles, self.size, **self._demands)
        names = dict(zip(part.positions, ref.items, strict=True))
        failed = {names[position]: reason for position, reason in batch.failed.items()}
        images = batch.images if len(batch.index) else None
        return Unit(ref, images, batch, digest_of(_paths(part)), failed=failed)

    def check(self, ref: Ref) -> Check:
        """Read one tile and say what it is."""
        (position,), (name,) = ref.content.positions, ref.items
        tiles: TileSet = ref.content.tiles
        label = self.class_names.get(int(tiles.labels[position]))
        labels = None if label is None else (label,)
        from tesla_med.prepare.tiles import tissue_share

        try:
            picture = read_tile(tiles.paths[position], self._demands["least_side"])
        except DataError as error:
            return Check(name, None, None, labels, (str(error),))
        share = tissue_share(picture.array)
        problems = (self._blank(share),) if share < self._demands["least_tissue"] else ()
        return Check(name, picture.array.shape[1:], None, labels, problems, picture.notes)

    def _blank(self, share: float) -> str:
        least = self._demands["least_tissue"]
        return f"blank: {100 * share:.1f} % of its pixels show tissue, less than {100 * least:g} %"

    def expected(self, ref: Ref, unit: Unit | None, problem: str) -> list[ItemEstimate]:
        """Return the size of every tile of a batch as the network sees it, or why it cannot be read."""
        failed, notes = ({}, {}) if unit is None else (unit.failed, unit.content.notes)
        labels = (int(ref.content.tiles.labels[position]) for position in ref.content.positions)
        return [
            ItemEstimate(
                *(name, self.size, 1, label in self.class_names, problem or failed.get(name, "")),
                notes=notes.get(position, ()),
            )
            for name, label, position in zip(ref.items, labels, ref.content.positions, strict=True)
        ]

    def overview(self, items: Items) -> dict[str, Any]:
        """Return the number of tiles of each class, and what was left out."""
        labels, known = items.content.labels, self.class_names
        return {
            "tiles": len(items.names),
            "by_class": {name: int((labels == value).sum()) for value, name in known.items()},
            "unlabelled": sum(int(value) not in known for value in labels),
            "skipped": items.content.skipped,
        }

    # ------------------------------------------------------------ from probabilities to classes

    def finish(self, folder: RunFolder, unit: Unit, outcome: Outcome | None) -> Predictions:
        """Take the probabilities to the CPU; they are written with the records of the unit."""
        if outcome is None:
            nothing = np.zeros((0, len(self.pipeline.classes)), np.float32)
            return Predictions(nothing, nothing, "source", "ok", "")
        source, adapted = (
            np.asarray(probs.detach().float().cpu().numpy(), np.float32)
            for probs in (outcome.source, outcome.probs)
        )
        verdict = outcome.verdict
        status: Status = "collapsed" if verdict.collapsed else "ok"
        return Predictions(source, adapted, verdict.used, status, verdict.reason)

    def score(self, unit: Unit, finished: Predictions) -> list[TileResult]:
        """Compare the predicted classes with the labels, in the order of the unit."""
        part: Part = unit.ref.content
        batch: TileBatch = unit.content
        rows = {int(position): row for row, position in enumerate(batch.index)}
        results = []
        for position, name in zip(part.positions, unit.ref.items, strict=True):
            label = self.class_names.get(int(part.tiles.labels[position]), "")
            share = batch.tissue.get(position)
            if share is not None and position in batch.blank:
                results.append(TileResult(name, "blank", "source", self._blank(share), label, tissue=share))
                continue
            if position not in rows:
                reason = unit.failed[name]
                results.append(TileResult(name, "failed", "source", reason, label))
                continue
            before, after = finished.source[rows[position]], finished.adapted[rows[position]]
            results.append(
                TileResult(
                    case=name,
                    status=finished.status,
                    used=finished.used,
                    reason=finished.reason,
                    label=label,
                    probs=after,
                    probs_source=before,
                    correct=self._correct(after, label),
                    correct_source=self._correct(before, label),
                    notes=batch.notes.get(position, ()),
                    tissue=share,
                )
            )
        return results

    def _correct(self, probs: Probs, label: str) -> bool | None:
        return None if not label else int(probs.argmax()) == self.order[label]

    def failed(self, ref: Ref, reason: str) -> list[TileResult]:
        """Return the records of a batch that could not be predicted."""
        part: Part = ref.content
        return [
            TileResult(
                name, "failed", "source", reason, self.class_names.get(int(part.tiles.labels[position]), "")
            )
            for position, name in zip(part.positions, ref.items, strict=True)
        ]

    # ------------------------------------------------------------ resuming and going back

    def intact(self, folder: RunFolder, ref: Ref, records: Sequence[Any], digest: str) -> bool:
        """Whether the records are of these tiles, and their files are still the same."""
        return [item.case for item in records] == list(ref.items) and digest == digest_of(_paths(ref.content))

    def undo(self, folder: RunFolder, records: Sequence[Any], where: str) -> list[TileResult]:
        """Give tiles the source model's probabilities."""
        return [
            record
            if record.probs is None or record.used == "source"
            else replace(
                record,
                used="source",
                reason=f"{ROLLED_BACK} {where}",
                probs=record.probs_source,
                correct=record.correct_source,
            )
            for record in records
        ]

    def reset_for(self, protocol: Protocol) -> Reset:
        """Return when the state of a method starts afresh: the state is not reset for single tiles."""
        return self.pipeline.reset.get(protocol, "site")

    def settings(self, items: Items) -> dict[str, Any]:
        """Return the number of tiles."""
        return {"tiles": len(items.names)}

    def names(self, settings: Mapping[str, Any], folder: RunFolder) -> tuple[str, ...]:
        """Return the batches that have records, in order.

        Raises:
            OutputError: there are none: the run is of a version that kept no records of tiles.
        """
        found = tuple(sorted(path.stem for path in (folder.out / DONE_FOLDER).glob("batch-*.json")))
        if not found:
            raise OutputError(f"{folder.out}: holds no records of its tiles; run it again with --overwrite")
        return found

    def predicted(self, results: Sequence[Any]) -> Predicted:
        """Return how many tiles each model gives each class."""
        from tesla_med.scoring.predicted import predicted_tiles

        return predicted_tiles(results, self.pipeline)

    def account_again(self, content: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Return the predicted classes: all else is the same, whichever model classified the tiles."""
        return self.counted(results)

    def account(self, items: Items, results: Sequence[Any]) -> dict[str, Any]:
        """Return what run.json says of the tiles: what was left out, read with remarks or not read."""
        remarks = Counter(text for item in results for text in item.notes)
        failed = {item.case: item.reason for item in results if item.status == "failed"}
        return {
            "order": "batches in an order drawn by the seed",
            "skipped": items.content.skipped,
            "tiles_read_with_remarks": dict(remarks),
            "failed": dict(sorted(failed.items())),
            "blank": sum(item.status == "blank" for item in results),
            "diverged": sum(item.status == "collapsed" for item in results),
            **self.counted(results),
        }

    def counts(self, results: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return the calibration counts of all labelled tiles."""
        from tesla_med.scoring.classes import class_counts

        counted = class_counts(results, self.pipeline)
        return [] if counted is None else [counted]

    def rows(self, folder: RunFolder) -> Iterator[dict[str, Any]]:
        """Yield one row per tile of ``predictions.csv``.

        Yields:
            ``right`` and ``right_source`` are 1.0 or 0.0, None where the tile has no label or no prediction;
            ``status`` is ok, unscored, blank or failed.
        """
        for row in read_rows(folder.out / TABLE):
            label, predicted, before = row["label"], row["prediction"], row["source_prediction"]
            kept = row.get("status") or ("failed" if not predicted else "ok")
            status = kept if kept in ("failed", "blank") else "ok" if label else "unscored"
            scored = status == "ok"
            yield {
                "case": row["tile"],
                "label": label or None,
                "prediction": predicted or None,
                "source_prediction": before or None,
                "right": float(label == predicted) if scored else None,
                "right_source": float(label == before) if scored else None,
                "status": status,
            }

    def _labelled_probs(self, folder: RunFolder) -> tuple[Probs, npt.NDArray[np.int64]]:
        """Return (N, L) probabilities and (N,) class indices of the labelled tiles of a run, by name.

        They come from the records; of a run that kept none, from the rounded figures of its table.
        """
        names = sorted(path.stem for path in (folder.out / DONE_FOLDER).glob("batch-*.json"))
        records = [
            item for item in folder.records(names, TileResult) if item.label and item.probs is not None
        ]
        records.sort(key=lambda item: str(item.case))
        rows = [(item.probs, self.order[item.label]) for item in records]
        if not names:
            columns = [f"p_{item.name}" for item in self.pipeline.classes]
            kept = (row for row in read_rows(folder.out / TABLE) if row["prediction"] and row["label"])
            rows = [
                (np.array([float(row[name]) for name in columns], np.float32), self.order[row["label"]])
                for row in kept
            ]
        probs = np.array([row[0] for row in rows], np.float32).reshape(len(rows), len(self.pipeline.classes))
        return probs, np.array([row[1] for row in rows], np.int64)

    def recount(self, items: Items, runs: Mapping[Any, RunFolder]) -> Iterator[dict[Any, CalibrationCounts]]:
        """Yield the counts of all labelled tiles, from the table of each run."""
        from tesla_med.scoring.calibration import count_predicted

        found = {}
        for key, folder in runs.items():
            probs, index = self._labelled_probs(folder)
            if len(index):
                found[key] = count_predicted(probs.T, index, self.pipeline.report.bins)
        yield found

    @classmethod
    def recognises(cls, predictions: Path) -> bool:
        """Whether it is a CSV file, or the output folder of a run on tiles."""
        from tesla_med.scoring.tables import is_tile_table

        return is_tile_table(predictions)

    @classmethod
    def evaluate(cls, predictions: Path, references: Path | None, **options: Any) -> TileEvaluation:
        """Score a table of predictions; see :func:`tesla_med.scoring.tables.evaluate_tiles`."""
        from tesla_med.scoring.tables import evaluate_tiles

        return evaluate_tiles(predictions, references, out=options["out"], strict=options["strict"])

    def labelled(
        self, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None = None
    ) -> LabelledSource:
        """Return every labelled tile of the sites."""
        from tesla_med.tasks.labelled_tiles import load_tiles

        return load_tiles(self.pipeline, sites, volumes, progress)
