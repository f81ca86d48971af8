"""What the page shows: the cases of runs, worst first, and the volumes of each as NIfTI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.actions.finished import task_of_run
from tesla_med.config.models import LabelClass, PipelineConfig, SiteConfig
from tesla_med.engine.quality import needs_review
from tesla_med.errors import DataError, OutputError
from tesla_med.io.cases import find_cases
from tesla_med.io.files import sha256
from tesla_med.io.nifti import encode_nifti, grid_header
from tesla_med.io.pseudonyms import KeyFile
from tesla_med.io.references import read_reference
from tesla_med.io.volumes import read_case
from tesla_med.records import CaseResult
from tesla_med.runs.decisions import (
    Choice,
    Decision,
    decided,
    outcome,
    read_decisions,
    save_decision,
    standing,
)
from tesla_med.runs.folder import RUN_FILE, RunFolder
from tesla_med.types import Case

LAYERS = ("image", "adapted", "source", "reference", "entropy")


@dataclass(frozen=True)
class Entry:
    """One mask to be looked at.

    Attributes:
        key: number in the list.
        title: of the run where there are several, and the name of the case.
        folder: of the run.
        result: record of the case.
        case: its files among the volumes; None where they were not found.
        site: of the run.
        pipeline: of the run.
    """

    key: int
    title: str
    folder: RunFolder
    result: CaseResult
    case: Case | None
    site: SiteConfig
    pipeline: PipelineConfig

    @property
    def mask(self) -> Path:
        """File of the mask."""
        return self.folder.mask(self.result.case)

    def paths(self) -> dict[str, Path]:
        """Return the files of the run that are shown as they are, by layer."""
        name = self.result.case
        found = {
            "adapted": self.mask,
            "source": self.folder.source_mask(name),
            "entropy": self.folder.uncertainty(name),
        }
        return {layer: path for layer, path in found.items() if path.is_file()}

    def layers(self) -> tuple[str, ...]:
        """Return the layers that there are, in their order."""
        there = {*self.paths()}
        if self.case is not None:
            there |= {"image"} | ({"reference"} if self.case.labelled else set())
        return tuple(layer for layer in LAYERS if layer in there)


class Content:
    """The runs below a folder.

    Args:
        out: output folder of ``adapt``, or a folder with several below it.
        volumes: folder of the images.
        reviewer: name under which decisions are saved.
        key: file that says which case of a run with replaced names is which; None: that of this user.

    Raises:
        OutputError: there is no finished run.
        DataError: no image of a run is among the volumes.
    """

    def __init__(self, out: Path, volumes: Path, reviewer: str, key: Path | None = None) -> None:
        self.reviewer, self._key = reviewer, key
        self.root = out
        runs = [out] if (out / RUN_FILE).is_file() else sorted(path.parent for path in out.rglob(RUN_FILE))
        if not runs:
            raise OutputError(f"{out}: holds no run of tesla-med adapt ({RUN_FILE} is missing)")
        self._found: dict[str, dict[str, Case]] = {}
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for run in runs:
            found += self._of_run(run, volumes, several=len(runs) > 1)
        found.sort(key=lambda item: item[0])
        self.entries = [Entry(key=index, **about) for index, (_, about) in enumerate(found)]
        self._volume = lru_cache(maxsize=4)(self._read)

    def _of_run(
        self, run: Path, volumes: Path, *, several: bool
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        folder = RunFolder(run)
        content = folder.read()
        task = task_of_run(folder, content["settings"])
        task.refuse({"review"})
        names = task.names(content["settings"], folder)
        cases = self._cases(volumes, task.site, task.pipeline.channels)
        if content["settings"].get("anonymised"):
            known = KeyFile(self._key)
            entries = {name: known.find(task.site.id, name) for name in cases}
            cases = {entry.pseudonym: cases[name] for name, entry in entries.items() if entry is not None}
        if names and not set(names) & set(cases):
            hint = (
                "; give the key file of the run with --key" if content["settings"].get("anonymised") else ""
            )
            raise DataError(f"{volumes}: holds none of the images of {run}, such as {names[0]}{hint}")
        rows = []
        for result in folder.records(names, CaseResult):
            if result.status == "failed":
                continue
            where = f"{run.relative_to(self.root).as_posix()}: " if several else ""
            about = {"title": f"{where}{result.case}", "folder": folder, "result": result}
            about |= {"case": cases.get(result.case), "site": task.site, "pipeline": task.pipeline}
            rows.append((_worst_first(result, task.pipeline), about))
        return rows

    def _cases(self, volumes: Path, site: SiteConfig, channels: int) -> dict[str, Case]:
        """Return the cases of a site by name; a folder is searched once, however many runs it has."""
        key = f"{channels} {site.model_dump_json()}"
        if key not in self._found:
            cases = find_cases(volumes, site, (), channels).cases
            self._found[key] = {case.name: case for case in cases}
        return self._found[key]

    # ------------------------------------------------------------ the list

    def listed(self) -> dict[str, Any]:
        """Return what the page knows of all cases."""
        decisions = {entry.folder.out: read_decisions(entry.folder.out) for entry in self.entries}
        return {
            "reviewer": self.reviewer,
            "cases": [self._told(entry, decisions[entry.folder.out]) for entry in self.entries],
        }

    def _told(self, entry: Entry, decisions: list[Decision]) -> dict[str, Any]:
        mask = _hash_of(entry.mask)
        result, found = entry.result, standing(decisions, entry.result.case, mask)
        agreed, text = outcome(list(found.values()))
        own = found.get(self.reviewer)
        return {
            "key": entry.key,
            "title": entry.title,
            "mask_sha256": mask,
            "status": result.status,
            "used": result.used,
            "trusted": result.trusted,
            "reason": "; ".join((result.reason, *result.notes)).strip("; "),
            "predicted_dice": result.predicted_dice,
            "scores": [_score(item) for item in result.scores],
            "layers": list(entry.layers()),
            "classes": [_class(item) for item in entry.pipeline.classes],
            "outcome": agreed,
            "outcome_text": text,
            "decision": None if own is None else own.decision,
            "comment": "" if own is None else own.comment,
        }

    def decide(self, key: int, choice: Choice, comment: str, mask_sha256: str) -> dict[str, Any]:
        """Save a decision on a case, and return what the page knows of it then.

        Args:
            key: of the case.
            choice: what was decided.
            comment: in words.
            mask_sha256: of the mask that was shown.

        Raises:
            OutputError: the mask is another one by now, or the decision cannot be saved.
        """
        entry = self.entries[key]
        if mask_sha256 != _hash_of(entry.mask):
            raise OutputError(f"{entry.title}: the mask has changed since it was shown; reload the page")
        made = decided(entry.result.case, choice, comment, self.reviewer, mask_sha256)
        save_decision(entry.folder.out, made)
        return self._told(entry, read_decisions(entry.folder.out))

    # ------------------------------------------------------------ volumes

    def volume(self, key: int, layer: str) -> bytes:
        """Return a layer of a case as NIfTI, compressed or not, on the grid of its image.

        Raises:
            DataError: the layer is not there, or cannot be read.
        """
        entry = self.entries[key]
        if layer not in entry.layers():
            raise DataError(f"{entry.title}: has no layer {layer!r}; it has {', '.join(entry.layers())}")
        path = entry.paths().get(layer)
        if path is not None:
            return path.read_bytes()
        found: bytes = self._volume(key, layer)
        return found

    def _read(self, key: int, layer: str) -> bytes:
        entry = self.entries[key]
        assert entry.case is not None  # noqa: S101 - the layer is there
        volume = read_case(entry.case, entry.site)
        array: Any = volume.array[0]
        if layer == "reference":
            values = read_reference(entry.case, entry.site.files, volume, entry.pipeline.values)
            array = np.where(values < 0, 0, values).astype(np.uint16)
        return encode_nifti(array, grid_header(volume.affine), compressed=False)


def _hash_of(mask: Path) -> str:
    """Return the hash of a mask, "" where it is gone."""
    return sha256(mask) if mask.is_file() else ""


def _worst_first(result: CaseResult, pipeline: PipelineConfig) -> tuple[Any, ...]:
    """Sort key: masks that nobody trusts, then by the predicted Dice; those without one last."""
    known = result.predicted_dice
    review = needs_review(result, pipeline.quality)
    return (result.trusted is not False, not review, 2.0 if known is None else known, result.case)


def _score(item: Any) -> Mapping[str, Any]:
    return {
        "label": item.label,
        "name": item.name,
        "predicted_dice": item.predicted_dice,
        "predicted_low": item.predicted_low,
        "predicted_high": item.predicted_high,
        "dice": item.dice,
        "dice_source": item.dice_source,
    }


def _class(item: LabelClass) -> Mapping[str, Any]:
    return {"value": item.value, "name": item.name, "color": item.color}
