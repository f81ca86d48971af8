"""Undo the adaptation of a run: back to a case, to the source model, or in single cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tesla_med.actions.finished import task_of_run
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError, OutputError
from tesla_med.io.locks import output_lock
from tesla_med.reports.base import REPORTS, Reports, RunContext
from tesla_med.runs.folder import RunFolder
from tesla_med.runs.weights import go_back
from tesla_med.scoring.text import some
from tesla_med.tasks.base import ROLLED_BACK, Task


@dataclass(frozen=True)
class Rollback:
    """What was undone.

    Attributes:
        out: the run.
        kept: cases or tiles whose results are still as the run made them; those that failed have none.
        undone: those whose results this call made the source model's.
        weights: the weights that are current now; None where they are the source's.
        reports_failed: reports that could not be made anew, with the reason.
        back: all whose results are the source model's by this call or an earlier one.
    """

    out: Path
    kept: tuple[str, ...]
    undone: tuple[str, ...]
    weights: Path | None
    reports_failed: Mapping[str, str] = field(default_factory=dict)
    back: tuple[str, ...] = ()


def rollback(run: str | Path, to_case: int | str | None = None, *, cases: Sequence[str] = ()) -> Rollback:
    """Undo what a run adapted after its first ``to_case`` cases, or in single cases.

    The results of the later cases become those of the source model, their weights are removed, records
    and reports follow; ``checkpoints/adapted`` becomes the weights after the last case kept.

    Args:
        run: output folder of ``adapt``.
        to_case: number of cases to keep, counted in the order of the run, or ``source`` for none.
        cases: names of single cases to undo, instead of ``to_case``, where cases are independent.

    Raises:
        ConfigError: this kind of run cannot be rolled back, or both or neither of the two were given.
        OutputError: not a run, another run is writing there, no such case, a run whose cases were adapted to
            together and that is not to go back to the source, or a file that cannot be written.
    """
    if (to_case is None) == (not cases):
        raise ConfigError("give either --to-case N or --case NAME (which may be repeated)")
    folder = RunFolder(user_path(run))
    content = folder.read()
    settings = content["settings"]
    task = task_of_run(folder, settings)
    task.refuse({"rollback"})
    names = task.names(settings, folder)
    if to_case is None:
        return _single_cases_back(folder, content, task, names, list(dict.fromkeys(cases)))
    number = _number(to_case, len(names), folder.out)
    together = str(settings["protocol"]).endswith("M") and settings["reset"] != "case"
    if (together or not task.links) and 0 < number < len(names):
        raise OutputError(
            f"{folder.out}: there is no state after a single {task.unit}: all {len(names)} were adapted to "
            "together, or only the last weights are kept; use --to-case source"
        )
    with output_lock(folder.out):
        carries_on = settings["reset"] != "case"
        chained = carries_on and not together and task.links
        weights = go_back(folder, names, number) if chained else None
        if carries_on and number == 0:
            folder.remove_weights(folder.checkpoint("adapted"))
        where = f"case {number}" if number else "the source model"
        undone = _units_back(folder, task, names[number:], where)
        folder.states.clear()
        number = min(number, content.get("rolled_back", {}).get("to_case", number))
        broken = _rewrite(folder, content, task, names, undone, {"to_case": number})
        kept, back = _on_disk(folder, task, names)
    return Rollback(folder.out, kept, undone, weights, broken, back)


def _single_cases_back(
    folder: RunFolder, content: Mapping[str, Any], task: Task, names: Sequence[str], cases: Sequence[str]
) -> Rollback:
    """Give single cases the source model's results, where no other case depends on them."""
    task.refuse({"single"})
    settings = content["settings"]
    unknown = [name for name in cases if name not in names]
    if unknown:
        raise OutputError(
            f"{folder.out}: has no case {some(unknown, 10)}; it has {len(names)}: {some(names, 10)}"
        )
    if settings["reset"] != "case":
        raise OutputError(
            f"{folder.out}: its cases are not independent: under reset {settings['reset']} later ones build"
            " on earlier ones, so a single one cannot be undone; use --to-case N, which keeps the first N"
        )
    with output_lock(folder.out):
        undone = _units_back(folder, task, cases, "the source model")
        before = content.get("rolled_back", {}).get("cases", ())
        single = [name for name in names if name in {*before, *cases}]
        broken = _rewrite(folder, content, task, names, undone, {"cases": single})
        kept, back = _on_disk(folder, task, names)
    return Rollback(folder.out, kept, undone, None, broken, back)


def _number(to_case: int | str, count: int, out: Path) -> int:
    text = str(to_case).strip()
    if text == "source":
        return 0
    if not text.isdigit() or int(text) > count:
        raise OutputError(
            f"{out}: --to-case takes a number from 0 to {count} or 'source', got {text!r}; for a case by its"
            " name use --case"
        )
    return int(text)


def _units_back(folder: RunFolder, task: Task, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Give units the source model's results; return the items that changed."""
    undone: list[str] = []
    for name in names:
        found = folder.kept(name, task.result)
        if found is None:
            continue
        records, digest = found
        after = task.undo(folder, records, where)
        changed = [new.case for old, new in zip(records, after, strict=True) if new is not old]
        if changed:
            folder.keep(name, after, digest)
        undone += changed
    return tuple(undone)


def _on_disk(folder: RunFolder, task: Task, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the items whose results are as the run made them, and those that were rolled back."""
    records = folder.records(names, task.result)
    back = tuple(item.case for item in records if ROLLED_BACK in item.reason)
    made = (item for item in records if item.status != "failed" and ROLLED_BACK not in item.reason)
    return tuple(item.case for item in made), back


def _rewrite(
    folder: RunFolder,
    content: Mapping[str, Any],
    task: Task,
    names: Sequence[str],
    undone: Sequence[str],
    done: Mapping[str, Any],
) -> dict[str, str]:
    """Make reports and run.json anew from the records, and drop what cannot be made from them.

    Returns:
        Reports that could not be made, with the reason.
    """
    settings = content["settings"]
    manifest = {key: value for key, value in content.items() if key not in ("settings", "complete")}
    manifest["rolled_back"] = {
        **content.get("rolled_back", {}),
        **done,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    context = RunContext(
        *(folder.out, task.site, task.pipeline, settings["method"], settings["protocol"]),
        *(settings["seed"], settings["reset"]),
        manifest={key: value for key, value in manifest.items() if key != "cases"},
        notes=tuple(content.get("notes", ())),
        names=tuple(names),
        kind=task.result,
        item=task.item,
        counts=task.counts,
    )
    units = [folder.records([name], task.result) for name in names]
    every = (item for unit in units for item in unit)
    results = sorted(every, key=lambda item: names_first(item.case, names))
    reports = Reports()
    chosen = [name for name in (*task.always, *task.reports) if REPORTS.get(name).from_records]
    for name in dict.fromkeys((*task.always, *task.reports)):
        if name not in chosen:
            reports.renew(name, context, units, undone)
    with reports.started(chosen, context):
        for unit in units:
            reports.unit(unit, None)
        reports.finish(results)
    manifest["reports_failed"] = reports.failed
    known = task.account_again(content, results)
    folder.write_manifest(settings, manifest | known, complete=bool(content.get("complete")))
    return reports.failed


def names_first(case: str, names: Sequence[str]) -> tuple[int, str]:
    """Return where an item belongs: cases in the order of the run, tiles by name."""
    return (names.index(case), "") if case in names else (len(names), case)
