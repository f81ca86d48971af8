"""Find the images of a site in a folder, and the masks that belong to each."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tesla_med.config.models import SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.errors import DataError
from tesla_med.io.dicom import is_dicom, may_be_slice
from tesla_med.io.dicom_kinds import OTHER, no_image
from tesla_med.io.fetched import check_fetched
from tesla_med.io.matching import FURTHER_CHANNEL, MASK_BY_NAME, NO_CHANNEL, READABLE, Matcher
from tesla_med.io.names import fold, natural
from tesla_med.io.patterns import Match
from tesla_med.io.series import choose_series
from tesla_med.io.volumes import VOLUME_SUFFIXES, stem, volume_suffix
from tesla_med.io.walk import Skipped, is_entry, left_out, listed, walk
from tesla_med.types import Case

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaseList:
    """What a search found.

    Attributes:
        folder: the folder that names are relative to.
        cases: in natural order of their names: P1, P2, P10.
        skipped: every other file or folder met, with the reason.
        remarks: what looks wrong about the patterns, in words.
    """

    folder: Path
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Path, str], ...] = ()
    remarks: tuple[str, ...] = ()


def check_there(volumes: Path) -> None:
    """Raise DataError where there is neither a file nor a folder."""
    check_fetched(volumes)
    if not (volumes.is_file() or volumes.is_dir()):
        raise DataError(f"{volumes}: no such file or folder; give a folder of images or one image")


def find_cases(
    volumes: Path,
    site: SiteConfig,
    other_sites: Sequence[SiteConfig] = (),
    channels: int = 1,
    *,
    each: bool = False,
    within: Path | None = None,
) -> CaseList:
    """Find the cases of ``site``.

    A folder is searched with its sub-folders; if it has one named after the site (its institution, its
    id, or what follows the dash in its id), only that one. Image and masks meet by case key and by the
    folders above those of their patterns. Where no image matches, every series of DICOM slices is a case.
    Hidden files, folders named after another site and folders of earlier results are left out.

    Args:
        volumes: a folder, or one image file, which need not match the image pattern.
        site: gives the name patterns.
        other_sites: the other sites of the pipeline.
        channels: of the images. With several, ``site.files.image`` has one pattern per channel, and the files
            of a case share folder and case key.
        each: what is wrong with one case becomes its ``problem`` in place of an error, and finding none is
            none.
        within: the folder to search, ``volumes`` or one in it; None: as above.

    Raises:
        ConfigError: another number of patterns than of channels, or a pattern that can never match.
        DataError: nothing there or nothing that matches, or two files with one name.
    """
    volumes = Path(volumes)
    if volumes.is_file():
        return _one_file(volumes, site, channels)
    check_there(volumes)
    own = _names(site)
    folder = _site_folder(volumes, own) if within is None else within
    # Below the site's own folder a sub-folder called "2" is a patient, not another site.
    inside = folder != volumes or fold(volumes.resolve().name) in own
    foreign = (
        frozenset() if inside else frozenset(name for other in other_sites for name in _names(other)) - own
    )
    files, skipped = walk(folder, foreign)
    matcher = Matcher(site, folder, channels)
    files = matcher.without_exports(matcher.with_roots(files, skipped), skipped)
    files = matcher.without_masks(files, skipped)
    cases = matcher.cases(files, skipped, each=each)
    remarks = (
        *_elsewhere(folder, own, other_sites),
        *_left_out(skipped),
        *matcher.remarks(cases, files),
    )
    for text in remarks:
        log.warning("site %s: %s", site.id, text)
    cases = cases or _series(files, folder, site, skipped)
    if not cases and not each:
        raise DataError(_nothing(folder, site, files, skipped))
    cases = _without_clashes(cases) if each else _refuse_clashes(cases)
    return CaseList(
        folder,
        tuple(sorted(cases, key=lambda case: natural(case.name))),
        tuple(sorted(skipped, key=lambda item: natural(item[0]))),
        remarks,
    )


def _elsewhere(folder: Path, own: frozenset[str], other_sites: Sequence[SiteConfig]) -> Iterator[str]:
    """Yield a remark where the folder is called after the institution of another site."""
    called = fold(folder.resolve().name)
    for site in other_sites if called not in own else ():
        if site.institution and fold(site.institution) == called:
            yield f"the folder {folder} is called after another site, {site.id}; is it the right one?"


def _left_out(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yield a remark on images taken for masks by their names, and on channels that are not used."""
    reasons = {
        MASK_BY_NAME: (
            "left out as the mask of another image",
            "to use them as images, name these by --set site.files.image=PATTERN",
        ),
        FURTHER_CHANNEL: (FURTHER_CHANNEL, "its case is left out"),
        NO_CHANNEL: (NO_CHANNEL, "it is not used; is it the right model?"),
    }
    for reason, (what, then) in reasons.items():
        files = sorted(path for path, why in skipped if why == reason)
        if files:
            count = f"{len(files)} files are" if len(files) > 1 else "1 file is"
            yield f"{count} {what}, such as {files[0]}; {then}"


def _one_file(path: Path, site: SiteConfig, channels: int) -> CaseList:
    if not volume_suffix(path.name):
        hint = "; give the folder of its series" if is_dicom(path) else ""
        raise DataError(f"{path}: not an image that can be read; expected {READABLE}{hint}")
    folder = _folder_of(path, site)
    path = folder / path.absolute().relative_to(folder.absolute())
    matcher = Matcher(site, folder, channels)
    if matcher.is_mask(path):
        raise DataError(
            f"{path}: a mask or region file according to the patterns of site {site.id}, not an image; "
            "give its image"
        )
    if folder == path.parent:
        files = listed(folder, lambda item: is_entry(item) and not item.name.startswith("."))
    else:
        files = walk(folder)[0]
    files = [item for item in matcher.with_roots(files, []) if volume_suffix(item.name) and item != path]
    found, relative = matcher.image(path), path.relative_to(folder)
    alone = Match(tuple(fold(part) for part in relative.parts[:-1]), fold(stem(path)))
    match = alone if found is None else found[1]
    return CaseList(folder, (matcher.case(path, stem(path), match, matcher.others(files)),))


def _folder_of(path: Path, site: SiteConfig) -> Path:
    """Return the folder that a search would have begun in to find an image and what belongs to it."""
    layers = [(layer.root, layer.pattern) for layer in site.files.masks] + [
        (site.region.root, site.region.pattern or "")
    ]
    roots = [user_path(root) for root, _ in layers if root is not None]
    patterns = [*site.files.image, *(pattern for _, pattern in layers)]
    above = path.absolute().parents
    if roots:
        return next(
            (folder for folder in above if any((folder / root).is_dir() for root in roots)), path.parent
        )
    depth = max(text.removeprefix("./").removeprefix("**/").count("/") for text in patterns)
    return above[min(depth, len(above) - 1)] if depth else path.parent


def _series(files: Sequence[Path], folder: Path, site: SiteConfig, skipped: list[Skipped]) -> list[Case]:
    """Return a case for each series of DICOM slices; their files leave ``skipped``, no others.

    Whether the slices of a folder make one volume is found out when it is read.
    """
    inside = (path for path in files if path.is_relative_to(folder) and not volume_suffix(path.name))
    kinds = {path: no_image(path) for path in inside if may_be_slice(path)}
    slices = {path for path, kind in kinds.items() if not kind}
    skipped[:] = [(path, kinds.get(path, why)) for path, why in skipped if path not in slices]
    folders = sorted({path.parent for path in slices}, key=natural)
    chosen, left_out = choose_series(folders, folder, site.files.series)
    skipped += left_out.items()
    return [
        Case(
            item.folder.relative_to(folder).as_posix() if item.folder != folder else folder.resolve().name,
            item.folder,
            (None,) * len(site.files.masks),
            problem=item.problem,
        )
        for item in chosen
    ]


def site_folder(volumes: Path, site: SiteConfig) -> Path:
    """Return the folder below ``volumes`` that is named after the site, or ``volumes`` itself.

    Raises:
        DataError: no such folder, or two that are named after it.
    """
    if not volumes.is_dir():
        raise DataError(f"{volumes}: no such folder")
    return _site_folder(volumes, _names(site))


def beside(folder: Path, volumes: Path, site: SiteConfig, others: Sequence[SiteConfig]) -> list[Path]:
    """Return what lies in ``volumes`` beside the folder of a site, and is not another's.

    Args:
        folder: of the site; where it is ``volumes`` itself, there is nothing.
        volumes: that was given.
        site: of the folder.
        others: the other sites of the pipeline.

    Raises:
        DataError: the folder cannot be listed.
    """
    if folder == volumes:
        return []
    foreign = frozenset(name for other in others for name in _names(other)) - _names(site)
    return listed(volumes, lambda path: path != folder and not left_out(path, foreign))


def _names(site: SiteConfig) -> frozenset[str]:
    names = (site.id, site.institution, site.id.partition("-")[2])
    return frozenset(fold(name) for name in names if name)


def _site_folder(folder: Path, names: frozenset[str]) -> Path:
    found = listed(folder, lambda item: fold(item.name) in names and item.is_dir())
    if len(found) > 1:
        names_found = " and ".join(item.name for item in found)
        raise DataError(
            f"{folder}: {names_found} are both named after this site; keep one, or give the one to use"
        )
    return found[0] if found else folder


def _by_name(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases whose results would share a name, together."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[fold(case.name)].append(case)
    return list(groups.values())


def _shared_name(groups: Sequence[Sequence[Case]]) -> str:
    clashes = [" and ".join(sorted(str(case.image) for case in group)) for group in groups]
    return f"images whose results would share a name: {'; '.join(sorted(clashes))}; rename or remove one"


def _refuse_clashes(cases: list[Case]) -> list[Case]:
    clashes = [group for group in _by_name(cases) if len(group) > 1]
    if clashes:
        raise DataError(_shared_name(clashes))
    return cases


def _without_clashes(cases: list[Case]) -> list[Case]:
    """Return one case for each name, with a problem where several images would share it."""
    return [
        group[0] if len(group) == 1 else replace(group[0], problem=_shared_name([group]))
        for group in _by_name(cases)
    ]


def _nothing(
    folder: Path, site: SiteConfig, files: Sequence[Path], skipped: Sequence[tuple[Path, str]]
) -> str:
    tried, formats = ", ".join(site.files.image), ", ".join(VOLUME_SUFFIXES)
    start = f"{folder}: no image of site {site.id} found; names tried: {tried} (with {formats})"
    known = set(files)
    aside = Counter(reason for path, reason in skipped if path not in known)
    left_out = "".join(f"; left out: {count} x {reason}" for reason, count in sorted(aside.items()))
    if not files:
        own = fold(folder.resolve().name) in _names(site) or not (site.institution and left_out)
        where = "" if own else f"; images are expected in it, or in a folder {site.institution} in it"
        return f"{start}; the folder holds no files of its own{where}{left_out}"
    kinds = Counter(
        volume_suffix(path.name).lower() or path.suffix.lower() or "no extension" for path in files
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    inside = [path for path in files if path.is_relative_to(folder)]
    names = ", ".join(path.relative_to(folder).as_posix() for path in inside[:3])
    hint = ""
    others = (f"{path.name} is {why}" for path, why in skipped if path in known and why.startswith(OTHER))
    if first := next(others, ""):
        hint = f"; {first}; give the slices that it belongs to"
    elif set(kinds) <= {".dcm", ".ima"}:
        hint = f"; none of these has the mark of a DICOM file; convert them to {READABLE}"
    return f"{start}; there are {counts}, such as {names}{left_out}{hint}"
