"""Undo the adaptation of a run: back to a case, or to the source model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import OutputError
from tesla_med.io.files import atomic_path, output_lock
from tesla_med.reports.base import RunContext, make_reports
from tesla_med.runs.folder import RUN_FILE, RunFolder
from tesla_med.types import CaseResult, ClassScore

REPORTS = ("table", "calibration", "quality", "html")
"""What describes masks and can be made again from records alone."""


@dataclass(frozen=True)
class Rollback:
    """What was undone.

    Attributes:
        out: the run.
        kept: cases whose masks stay as they are.
        undone: cases whose masks are the source model's now.
        weights: the weights that are current now; None where they are the source's.
    """

    out: Path
    kept: tuple[str, ...]
    undone: tuple[str, ...]
    weights: Path | None


def rollback(run: str | Path, to_case: int | str) -> Rollback:
    """Undo what a run adapted after its first ``to_case`` cases.

    The masks of the later cases become those of the source model, their weights are removed, records
    and reports follow; ``checkpoints/adapted`` becomes the weights after the last case kept.

    Args:
        run: output folder of ``adapt``.
        to_case: number of cases to keep, counted in the order of the run, or ``source`` for none.

    Raises:
        OutputError: not a run, another run is writing there, no such case, a run of passes over the
            whole site that is not to go back to the source, or a file that cannot be written.
    """
    folder = RunFolder(Path(run))
    content = _read(folder)
    settings = content["settings"]
    names = [str(name) for name in settings["cases"]]
    number = _number(to_case, len(names), folder.out)
    together = str(settings["protocol"]).endswith("M") and settings["reset"] != "case"
    if together and 0 < number < len(names):
        raise OutputError(
            f"{folder.out}: under {settings['protocol']} all {len(names)} cases were adapted to together, "
            "so there is no state after a single case; use --to-case source"
        )
    context = _context(folder, content, number)
    with output_lock(folder.out):
        carries_on = settings["reset"] != "case"
        weights = _weights_back(folder, names, number) if carries_on and not together else None
        if carries_on and number == 0:
            _remove_weights(folder.checkpoint("adapted"))
        undone = tuple(name for name in names[number:] if _case_back(folder, name, number))
        folder.states.clear()
        results = [record for record in map(folder.record, names) if record is not None]
        _rewrite(folder, context, settings, results, complete=bool(content.get("complete")))
    return Rollback(folder.out, tuple(names[:number]), undone, weights)


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        content = json.loads((folder.out / RUN_FILE).read_text(encoding="utf-8"))
        settings = content["settings"]
        settings["cases"], settings["protocol"], settings["reset"]
    except (OSError, ValueError, KeyError, TypeError):
        raise OutputError(
            f"{folder.out}: not a run of tesla-med adapt ({RUN_FILE} is missing or cannot be read)"
        ) from None
    return dict(content)


def _number(to_case: int | str, count: int, out: Path) -> int:
    text = str(to_case).strip()
    if text == "source":
        return 0
    if not text.isdigit() or int(text) > count:
        raise OutputError(f"{out}: --to-case takes a number from 0 to {count} or 'source', got {text!r}")
    return int(text)


def _weights_back(folder: RunFolder, names: Sequence[str], number: int) -> Path | None:
    """Make the weights after the last case kept the current ones, and drop the later links."""
    links = [folder.after(name) for name in names]
    last = next((path for path in reversed(links[:number]) if path.is_file()), None)
    current = folder.checkpoint("adapted")
    if last is not None:
        for suffix in (".safetensors", ".json"):
            source, target = last.with_suffix(suffix), current.with_suffix(suffix)
            with atomic_path(target) as temporary:
                shutil.copyfile(source, temporary)
    for path in links[number:]:
        _remove_weights(path)
    return current if last is not None else None


def _remove_weights(path: Path) -> None:
    for item in (path, path.with_suffix(".json")):
        _remove(item)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be removed: {error.strerror or error}") from None


def _case_back(folder: RunFolder, name: str, number: int) -> bool:
    """Give a case the source model's mask and figures; return whether that changed anything."""
    record = folder.record(name)
    if record is None or record.status == "failed" or record.used == "source":
        return False
    with atomic_path(folder.mask(name)) as temporary:
        shutil.copyfile(folder.source_mask(name), temporary)
    for path in (folder.probs(name), folder.uncertainty(name)):
        _remove(path)
    _remove_weights(folder.checkpoint(name))
    where = f"case {number}" if number else "the source model"
    folder.keep(
        record.model_copy(
            update={
                "used": "source",
                "share": 0.0,
                "status": _status(record),
                "reason": f"rolled back to {where}",
                "entropy": record.entropy_source,
                "scores": tuple(map(_source_score, record.scores)),
                "calibration": _source_calibration(record.calibration),
            }
        )
    )
    return True


def _status(record: CaseResult) -> str:
    if record.status not in ("ok", "empty"):
        return record.status
    return "ok" if any(score.voxels_source for score in record.scores) else "empty"


def _source_score(score: ClassScore) -> ClassScore:
    """Return the figures of the source mask; its surface distances were never measured."""
    return score.model_copy(
        update={
            "dice": score.dice_source,
            "hd95_mm": None,
            "assd_mm": None,
            "volume_ml": score.volume_ml_source,
            "voxels": score.voxels_source,
            "predicted_dice": None,
            "predicted_low": None,
            "predicted_high": None,
        }
    )


def _source_calibration(counts: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if counts is None else {**counts, "adapted": counts["source"]}


def _context(folder: RunFolder, content: Mapping[str, Any], number: int) -> RunContext:
    settings = content["settings"]
    manifest = {key: value for key, value in content.items() if key not in ("settings", "cases")}
    manifest["rolled_back"] = {
        "to_case": number,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    try:
        site = SiteConfig.model_validate(settings["site"])
        pipeline = PipelineConfig.model_validate({**settings["pipeline"], "reports": REPORTS})
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise OutputError(f"{folder.out / RUN_FILE}: settings of another version ({problem})") from None
    return RunContext(
        out=folder.out,
        site=site,
        pipeline=pipeline,
        method=settings["method"],
        protocol=settings["protocol"],
        seed=settings["seed"],
        reset=settings["reset"],
        manifest=manifest,
        notes=tuple(content.get("notes", ())),
    )


def _rewrite(
    folder: RunFolder,
    context: RunContext,
    settings: Mapping[str, Any],
    results: Sequence[CaseResult],
    *,
    complete: bool,
) -> None:
    """Write reports and run.json anew from the records."""
    for report in make_reports(REPORTS, context):
        for result in results:
            report.case(result, None)
        report.finish(results)
    folder.write_manifest(settings, context.manifest, results, complete=complete)
