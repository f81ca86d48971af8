"""Which DICOM series of a patient is the image: the only one, or the one that the site's pattern chooses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tesla_med.errors import DataError
from tesla_med.io.dicom import Slice, dicom_files, in_words, is_chosen, read_header


@dataclass(frozen=True)
class Chosen:
    """The folder of one image, or why a patient has none that could be told apart.

    Attributes:
        folder: of the slices; where there is a problem of the patient, or of its first series
            where the patient has no folder of its own.
        problem: what is wrong, in words, or "".
    """

    folder: Path
    problem: str = ""


def choose_series(
    folders: Sequence[Path], top: Path, pattern: str | None
) -> tuple[list[Chosen], dict[Path, str]]:
    """Return the image of each patient, and why other folders of slices are not used.

    A folder directly below ``top`` is a patient, with what lies below it; folders whose headers name the same
    patient and study, but differ in their description, are one patient too. Each study has one image.

    Args:
        folders: with DICOM files.
        top: the folder that was searched.
        pattern: glob for the description or the protocol name; None where there is one series.
    """
    chosen: list[Chosen] = []
    left_out: dict[Path, str] = {}
    for members in _patients(folders, top):
        if pattern is None and len(members) == 1:
            chosen.append(Chosen(members[0]))
            continue
        slices: dict[Path, list[Slice]] = {}
        for folder in members:
            try:
                slices[folder] = [read_header(path) for path in dicom_files(folder)]
            except DataError:
                chosen.append(Chosen(folder))  # reading it says what is wrong
        chosen += _of_patient(slices, top, pattern, left_out)
    return chosen, left_out


def _patients(folders: Sequence[Path], top: Path) -> list[list[Path]]:
    """Return the folders of each patient."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        parts = folder.relative_to(top).parts
        groups.setdefault(parts[0] if parts else "", []).append(folder)
    same: dict[tuple[str, str], dict[str, list[Path]]] = {}
    result: list[list[Path]] = []
    for members in groups.values():
        head = _head(members[0]) if len(groups) > 1 and len(members) == 1 else None
        if head is None or not (head.patient and head.study):
            result.append(members)
            continue
        known = same.setdefault((head.patient, head.study), {})
        if known and head.description not in known:
            next(iter(known.values())).append(members[0])
        else:
            result.append(members)
        known.setdefault(head.description, members)
    return result


def _head(folder: Path) -> Slice | None:
    try:
        return next((read_header(path) for path in dicom_files(folder)), None)
    except DataError:
        return None


def _of_patient(
    slices: dict[Path, list[Slice]], top: Path, pattern: str | None, left_out: dict[Path, str]
) -> list[Chosen]:
    if not slices:
        return []
    every = [item for items in slices.values() for item in items]
    where = Path(os.path.commonpath(list(slices)))
    told = str(where)
    if where == top:  # the folders of the series lie beside each other
        where, told = next(iter(slices)), " and ".join(map(str, slices))
    wanted = [item for item in every if is_chosen(item, pattern)]
    if not wanted:
        return [
            Chosen(
                where,
                f"{told}: no series matches site.files.series {pattern!r}; there are: {in_words(every)}",
            )
        ]
    for study in dict.fromkeys(item.study for item in wanted):
        of_study = [item for item in wanted if item.study == study]
        if len({item.series for item in of_study}) > 1:
            what = (
                "several series" if pattern is None else f"several series match site.files.series {pattern!r}"
            )
            hint = "choose one by a pattern for its description, site.files.series"
            return [Chosen(where, f"{told}: {what}: {in_words(of_study)}; {hint}")]
    used = {item.path.parent for item in wanted}
    left_out |= {
        folder: "another series than site.files.series chooses" for folder in slices if folder not in used
    }
    return [Chosen(folder) for folder in slices if folder in used]
