"""Whose image a case or a tile is: what a split between training and validation keeps together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonpath
from pathlib import PurePath

from tesla_med.errors import ConfigError
from tesla_med.io.patterns import NamePattern

_BIDS = re.compile(r"sub-[A-Za-z0-9]+")
_PATIENT = re.compile(r"(p|pt|pat|patient|s|subj?|subject|case)[-_ ]?\d+", re.IGNORECASE)
BY_FOLDER = "the folder of each patient"
BY_BIDS = "sub-<id> in the name"


def subjects_of(names: Sequence[str], pattern: str | None, item: str) -> tuple[tuple[str, ...], str]:
    """Return the subject of each case or tile of a site, and in words by what they are told.

    With a pattern it is what the wildcards of its folders stand for, or its case key where it has none. Else
    it is ``sub-<id>`` where the name has it, else the first folder below what all names have in common, so
    that a patient with a folder of its own stays together. Where no folder is left below, all names lie in
    one: it is that of a single patient if it is called so (``P01``, ``patient_7``); in any other
    (``imagesTr``, ``T2``), as in no folder at all, every name is its own subject.

    Args:
        names: paths with ``/``, the site's folder left out.
        pattern: ``site.files.subject``.
        item: what a name is of: case or tile.

    Raises:
        ConfigError: a name does not match the pattern.
    """
    if pattern is not None:
        by = f"site.files.subject {pattern!r}"
        return tuple(_by_pattern(NamePattern(pattern), name) for name in names), by
    common = _in_common(names)
    found: list[str] = []
    told: dict[str, None] = {}
    for name in names:
        folders = PurePath(name).relative_to(common).parts[:-1]
        bids = _BIDS.search(name)
        found.append(bids.group() if bids else folders[0] if folders else name)
        told[BY_BIDS if bids else BY_FOLDER if folders else f"the {item}"] = None
    return tuple(found), ", else ".join(told)


def _in_common(names: Sequence[str]) -> PurePath:
    """Return the folder below which the folders of patients are sought."""
    if not names:
        return PurePath()
    parents = [PurePath(name).parent for name in names]
    common = PurePath(commonpath(parents))
    one_patient = all(parent == common for parent in parents) and _PATIENT.fullmatch(common.name) is not None
    return common.parent if one_patient else common


def _by_pattern(pattern: NamePattern, name: str) -> str:
    path = PurePath(name)
    if pattern.match(path) is None:
        raise ConfigError(
            f"{name}: does not match site.files.subject {pattern.text!r}, which must tell the patient of "
            "every name; for example '*_T?' for P01_T1, or 'P*/*' for P01/T1"
        )
    return pattern.subject(path)
