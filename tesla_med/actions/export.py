"""Give finished masks to other programs, in their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tesla_med.actions.finished import task_of_run
from tesla_med.config.models import SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError, DataError, GeometryError, OutputError
from tesla_med.exports.base import EXPORTS, NOTICE, Export, Finished
from tesla_med.io.cases import site_folder
from tesla_med.io.dicom import dicom_files
from tesla_med.io.files import sha256, write_json
from tesla_med.io.locks import output_lock
from tesla_med.io.pseudonyms import KEY_ALONE, KeyFile
from tesla_med.io.walk import EXPORT_FILE
from tesla_med.runs.decisions import outcome, read_decisions, standing
from tesla_med.runs.folder import EXPORTS_FOLDER, RunFolder
from tesla_med.scoring.text import some
from tesla_med.tasks.base import Task
from tesla_med.types import Progress


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        out: the folder of the export.
        files: in it, in the order of the cases.
        cases: that were exported.
        skipped: cases that were not, with the reason.
        unverified: cases whose DICOM series is not the input of the run, byte for byte, so that only their
            grids speak for it.
        key: file that says which case is which, where names were replaced.
        untrusted: cases of which the run says that nothing found for them is trustworthy.
    """

    out: Path
    files: tuple[Path, ...]
    cases: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    key: Path | None = None
    untrusted: tuple[str, ...] = ()


def export(
    run: str | Path,
    form: str,
    *,
    out: str | Path | None = None,
    dicom: str | Path | None = None,
    cases: Sequence[str] = (),
    accepted: bool = False,
    anonymise: bool = False,
    key: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Write the masks of a run in another format.

    Args:
        run: output folder of ``adapt``.
        form: name of a format: ``tesla_med.exports``.
        out: where to; None: ``export/<form>`` in the run.
        dicom: folder of DICOM series that the masks belong to, ``<dicom>/<case>`` for each, or the series
            itself for a single case; a folder in it that is named after the site comes first, as in
            ``adapt``. Needed by formats that refer to them.
        cases: names of those to export; none: all that have a mask.
        accepted: export only what reviewers agreed to (``review.csv``): the mask where it was accepted, the
            source's where that was to be taken instead.
        anonymise: replace the names of cases by pseudonyms, as of a run that was anonymised they are already.
        key: file that says which is which, not to be handed on; None: that of this user.
        overwrite: replace an earlier export there.
        progress: called with stage, cases done and cases in all.

    Raises:
        ConfigError: an unknown format, one that is not installed, or a key file inside ``out``.
        OutputError: not a finished run, no such case, or ``out`` holds something else.
        DataError: no case could be exported.
    """
    writer = EXPORTS.get(form)()
    writer.check()
    if writer.needs_series and dicom is None:
        raise ConfigError(
            f"export to {form} needs --dicom, the folder of the series that the masks belong to"
        )
    folder = RunFolder(user_path(run))
    content = folder.read()
    task = task_of_run(folder, content["settings"])
    task.refuse({"export"})
    items, skipped = _finished(folder, content, cases, task)
    if accepted:
        items, refused = _accepted(folder, items)
        skipped |= refused
    target = folder.out / EXPORTS_FOLDER / form if out is None else user_path(out)
    already = bool(content["settings"].get("anonymised"))
    if key is not None and not (anonymise or already):
        raise ConfigError(KEY_ALONE)
    names = None
    if (anonymise and not already) or (already and dicom is not None):
        names = KeyFile(None if key is None else user_path(key), (folder.out if already else target,))
        items = _renamed(items, names, content["settings"]["site"]["id"], already=already)
    if dicom is not None:
        items, missing = _with_series(items, user_path(dicom), task.site)
        skipped |= missing
    if not items:
        raise DataError(f"{folder.out}: nothing to export: {_reasons(skipped)}")
    _check_target(target, overwrite)
    if names is not None:
        names.save()
    items = [replace(item, nameless=anonymise or already) for item in items]
    with output_lock(target), TemporaryDirectory(dir=target, prefix=".export-") as temporary:
        part = Path(temporary)
        done, files, failed = _written(writer, items, part, progress)
        skipped |= failed
        if not done:
            raise DataError(f"{folder.out}: nothing was exported: {_reasons(skipped)}")
        files = _put_in_place(part, target, writer.finish(done, files, part))
        inputs = {record["case"]: record.get("input_sha256") for record in content["cases"]}
        unsure = tuple(
            item.case for item in done if item.series is not None and item.series_sha256 != inputs[item.case]
        )
        record: dict[str, Any] = {
            "format": form,
            "cases": [item.name for item in done],
            "files": {name: sha256(target / name) for name in _below(target, files)},
        }
        untrusted = [item for item in done if not item.trusted]
        if untrusted:
            record["untrusted"] = [item.name for item in untrusted]
        if not (anonymise or already):
            record |= {"skipped": skipped, "unverified": list(unsure)}
        _record(target, record)
    return Exported(
        target,
        tuple(files),
        tuple(item.case for item in done),
        skipped,
        unsure,
        None if names is None else names.path,
        tuple(item.case for item in untrusted),
    )


def _finished(
    folder: RunFolder, content: Mapping[str, Any], cases: Sequence[str], task: Task
) -> tuple[list[Finished], dict[str, str]]:
    """Return the masks to export, and the cases that have none with the reason."""
    if not content.get("complete"):
        raise OutputError(f"{folder.out}: the run is not finished; adapt with --resume finishes it")
    records = {record["case"]: record for record in content["cases"]}
    if unknown := [name for name in cases if name not in records]:
        raise OutputError(
            f"{folder.out}: has no case {some(unknown, 10)}; it has {len(records)}: {some(list(records), 10)}"
        )
    told: dict[str, Any] = {
        "classes": task.pipeline.classes,
        "method": content["method"]["name"],
        "version": content["versions"]["tesla-med"],
        "weights": content.get("weights_sha256") or "",
        "pattern": task.site.files.series,
    }
    items, skipped = [], {}
    for name in dict.fromkeys(cases) if cases else records:
        if folder.mask(name).is_file():
            corrected = bool(records[name].get("status") == "corrected")
            about: dict[str, Any] = {
                "corrected": corrected,
                "trusted": records[name].get("trusted", True) is not False,
            }
            if records[name].get("used") == "source":
                about["method"] = "source"
            items.append(Finished(name, name, folder.mask(name), **told | about))
        else:
            skipped[name] = records[name].get("reason") or "it has no mask"
    return items, skipped


def _accepted(folder: RunFolder, items: Sequence[Finished]) -> tuple[list[Finished], dict[str, str]]:
    """Return the masks that reviewers agreed to, and for the others why they stay."""
    decisions = read_decisions(folder.out)
    found, refused = [], {}
    for item in items:
        choice, text = outcome(list(standing(decisions, item.case, sha256(item.mask)).values()))
        source = folder.source_mask(item.case)
        if choice == "accept":
            found.append(item)
        elif choice == "source" and source.is_file():
            found.append(replace(item, mask=source, method="source", corrected=False))
        else:
            refused[item.case] = text
    return found, refused


def _renamed(items: Sequence[Finished], names: KeyFile, site: str, *, already: bool) -> list[Finished]:
    """Return the masks under pseudonyms; those of a run that was anonymised have theirs ``already``."""
    if already:
        found = {item.case: names.of_pseudonym(item.case) for item in items}
    else:
        found = dict(names.assign(site, [item.case for item in items]))
    if unknown := [name for name, entry in found.items() if entry is None]:
        raise DataError(
            f"{names.path}: does not know {some(unknown, 5)} of the run; give the key file of the run: --key"
        )
    return [
        replace(item, name=entry.pseudonym, origin=entry.case, secret=entry.secret)
        for item in items
        if (entry := found[item.case]) is not None
    ]


def _with_series(
    items: Sequence[Finished], dicom: Path, site: SiteConfig
) -> tuple[list[Finished], dict[str, str]]:
    """Return the masks with the series that they belong to, and those for which none was found.

    Cases are looked for where ``adapt`` would: in the site's own folder, where there is one.
    """
    if not dicom.is_dir():
        raise DataError(f"{dicom}: not a folder of DICOM series")
    folders = dict.fromkeys((site_folder(dicom, site), dicom))
    found, missing = [], {}
    for item in items:
        places = [top / (item.origin or item.case) for top in folders]
        if len(items) == 1 and not any(place.is_dir() for place in places):
            places += folders
        series = next((place for place in places if place.is_dir() and dicom_files(place)), None)
        if series is None:
            missing[item.case] = f"no DICOM series in {' or '.join(map(str, places))}"
        else:
            found.append(replace(item, series=series, series_sha256=sha256(series)))
    return found, missing


def _written(
    writer: Export, items: Sequence[Finished], target: Path, progress: Progress
) -> tuple[list[Finished], list[Path], dict[str, str]]:
    """Return the masks that were written, their files, and by case why others were not."""
    done: list[Finished] = []
    files: list[Path] = []
    failed: dict[str, str] = {}
    for index, item in enumerate(items):
        progress("export", index, len(items))
        try:
            files += writer.write(item, target)
            done.append(item)
        except (DataError, GeometryError) as error:
            failed[item.case] = str(error)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # of files with parts missing
            failed[item.case] = f"{type(error).__name__}: {error}"
    progress("export", len(items), len(items))
    return done, files, failed


def _put_in_place(part: Path, target: Path, files: Sequence[Path]) -> list[Path]:
    """Move the files of an export to where they belong, in place of those of an earlier one."""
    names = _below(part, files)
    _clear(target)
    _record(target, {"complete": False, "files": dict.fromkeys(names, "")})
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).replace(target / name)
    return [target / name for name in names]


def _below(target: Path, files: Sequence[Path]) -> list[str]:
    return [str(path.relative_to(target)) for path in files]


def _record(target: Path, content: Mapping[str, Any]) -> None:
    """Write what an export holds, so that ``--overwrite`` knows it after an interrupt, too."""
    write_json(target / EXPORT_FILE, {"notice": NOTICE, **content})


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target}: is a file, not a folder; choose another --out")
    content = [item for item in target.iterdir() if not item.name.startswith(".")] if target.is_dir() else []
    if not content:
        return
    if not (target / EXPORT_FILE).is_file():
        names = some(sorted(item.name for item in content), 5)
        raise OutputError(f"{target}: holds files that are no export ({names}); choose another --out")
    if not overwrite:
        raise OutputError(
            f"{target}: holds an earlier export; give --overwrite to replace it, or another --out"
        )


def _clear(target: Path) -> None:
    """Remove the files of an earlier export, and nothing else."""
    try:
        content = json.loads((target / EXPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    root = target.resolve()
    for name in (*content.get("files", {}), EXPORT_FILE):
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            continue
        path.unlink(missing_ok=True)
        for folder in path.relative_to(root).parents:
            if folder.parts and (root / folder).is_dir() and not any((root / folder).iterdir()):
                (root / folder).rmdir()


def _reasons(skipped: Mapping[str, str]) -> str:
    texts = [f"{name}: {reason}" for name, reason in skipped.items()]
    return some(texts, 5) if texts else "it has no case"
