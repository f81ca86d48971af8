"""Find the images of a site in a folder, and the masks that belong to each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tesla_med.config.models import SiteConfig
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.dicom import is_dicom, may_be_slice
from tesla_med.io.files import check_fetched, unfetched
from tesla_med.io.patterns import NamePattern, fold
from tesla_med.io.volumes import VOLUME_SUFFIXES, stem, volume_suffix
from tesla_med.io.walk import is_entry, listed, natural, walk
from tesla_med.types import Case

_Masks = dict[tuple[Path, int, str], list[Path]]
READABLE = "NIfTI (.nii, .nii.gz), MetaImage (.mha, .mhd) and NRRD (.nrrd, .nhdr)"


@dataclass(frozen=True)
class CaseList:
    """What a search found.

    Attributes:
        folder: the folder that names are relative to.
        cases: in natural order of their names: P1, P2, P10.
        skipped: every other file or folder met, with the reason.
    """

    folder: Path
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Path, str], ...] = ()


def check_there(volumes: Path) -> None:
    """Raise DataError where there is neither a file nor a folder."""
    check_fetched(volumes)
    if not (volumes.is_file() or volumes.is_dir()):
        raise DataError(f"{volumes}: no such file or folder; give a folder of images or one image")


def find_cases(
    volumes: Path, site: SiteConfig, other_sites: Sequence[SiteConfig] = (), channels: int = 1
) -> CaseList:
    """Find the cases of ``site``.

    A folder is searched with its sub-folders; if it has one named after the site (its institution, its
    id, or what follows the dash in its id), only that one. Image and masks meet by case key within one
    folder. Where no image matches, every folder of DICOM slices is a case. Hidden files, folders named
    after another site and folders of earlier results are left out.

    Args:
        volumes: a folder, or one image file, which need not match the image pattern.
        site: gives the name patterns.
        other_sites: the other sites of the pipeline.
        channels: of the images. With several, ``site.files.image`` has one pattern per channel, and the files
            of a case share folder and case key.

    Raises:
        ConfigError: another number of patterns than of channels.
        DataError: nothing there or nothing that matches, or two files with one name.
    """
    volumes = Path(volumes)
    if volumes.is_file():
        return _one_file(volumes, site, channels)
    check_there(volumes)
    own = _names(site)
    folder = _site_folder(volumes, own)
    # Below the site's own folder a sub-folder called "2" is a patient, not another site.
    inside = folder != volumes or fold(volumes.resolve().name) in own
    foreign = (
        frozenset() if inside else frozenset(name for other in other_sites for name in _names(other)) - own
    )
    files, skipped = walk(folder, foreign)
    matcher = _Matcher(site, channels)
    cases = matcher.cases(files, folder, skipped) or matcher.series(files, folder, skipped)
    if not cases:
        raise DataError(_nothing(folder, site, files, skipped))
    _refuse_clashes(cases)
    return CaseList(
        folder,
        tuple(sorted(cases, key=lambda case: natural(case.name))),
        tuple(sorted(skipped, key=lambda item: natural(item[0]))),
    )


def _one_file(path: Path, site: SiteConfig, channels: int) -> CaseList:
    matcher = _Matcher(site, channels)
    if not volume_suffix(path.name):
        hint = "; give the folder of its series" if is_dicom(path) else ""
        raise DataError(f"{path}: not an image that can be read; expected {READABLE}{hint}")
    if matcher.is_mask(path):
        raise DataError(
            f"{path}: a mask or region file according to the patterns of site {site.id}, not an image; "
            "give its image"
        )
    beside = listed(path.parent, lambda item: is_entry(item) and bool(volume_suffix(item.name)))
    masks = matcher.index([item for item in beside if item != path and not item.name.startswith(".")])
    key = matcher.image_key(path)
    return CaseList(
        path.parent, (matcher.case(path, stem(path), fold(stem(path)) if key is None else key, masks),)
    )


class _Matcher:
    """The name patterns of one site."""

    def __init__(self, site: SiteConfig, channels: int = 1) -> None:
        patterns = [NamePattern(text) for text in site.files.image]
        if channels > 1 and len(patterns) != channels:
            raise ConfigError(
                f"site {site.id}: the pipeline has {channels} channels, so files.image needs one pattern per "
                f"channel, got {len(patterns)}: {', '.join(site.files.image)}"
            )
        self.images = patterns if channels == 1 else patterns[:1]
        self.channels = patterns[1:] if channels > 1 else []
        self.masks = [NamePattern(layer.pattern) for layer in site.files.masks]
        self.region = NamePattern(site.region.pattern) if site.region.pattern is not None else None

    def image_key(self, path: Path) -> str | None:
        """Return the case key of an image, or None if no image pattern matches."""
        keys = (pattern.key(path) for pattern in self.images)
        return next((key for key in keys if key is not None), None)

    def is_mask(self, path: Path) -> bool:
        """Return whether a mask pattern or the region's matches."""
        patterns = [*self.masks, self.region] if self.region else self.masks
        return any(pattern is not None and pattern.key(path) is not None for pattern in patterns)

    def index(self, paths: Sequence[Path]) -> _Masks:
        """Return masks and channels by folder, layer and key; the region is layer -1, channels are below."""
        layers = list(enumerate(self.masks)) + ([(-1, self.region)] if self.region else [])
        layers += [(-2 - number, pattern) for number, pattern in enumerate(self.channels)]
        found: _Masks = {}
        for path in paths:
            for layer, pattern in layers:
                key = pattern.key(path)
                if key is not None:
                    found.setdefault((path.parent, layer, key), []).append(path)
        return found

    def case(self, path: Path, name: str, key: str, masks: _Masks) -> Case:
        """Return the case of an image with the masks that share its folder and key.

        Raises:
            DataError: two files for one layer.
        """

        def one(layer: int) -> Path | None:
            files = masks.get((path.parent, layer, key), [])
            if len(files) > 1:
                what, given = "masks" if layer > -2 else "files", " and ".join(map(str, files))
                raise DataError(f"two {what} for one layer of {path}: {given}; rename or remove one")
            return files[0] if files else None

        layers = tuple(one(layer) for layer in range(len(self.masks)))
        channels = tuple(one(-2 - number) for number in range(len(self.channels)))
        return Case(name, path, layers, one(-1), channels)

    def cases(self, files: Sequence[Path], folder: Path, skipped: list[tuple[Path, str]]) -> list[Case]:
        """Return the cases among ``files``; the rest goes to ``skipped``."""
        masks = self.index([path for path in files if volume_suffix(path.name)])
        cases: list[Case] = []
        for path in files:
            if not volume_suffix(path.name):
                skipped.append((path, unfetched(path) or f"not {READABLE}"))
            elif self.is_mask(path):
                continue
            elif (key := self.image_key(path)) is None:
                if any(pattern.key(path) is not None for pattern in self.channels):
                    continue
                skipped.append((path, "matches no image pattern of the site"))
            else:
                relative = path.relative_to(folder)
                cases.append(self.case(path, (relative.parent / stem(path)).as_posix(), key, masks))
        used = {path for case in cases for path in (*case.masks, case.region_mask, *case.channels)}
        every = {path: layer for (_, layer, _), paths in masks.items() for path in paths}
        skipped += [
            (path, "a mask without its image" if layer > -2 else "a further channel without the first")
            for path, layer in every.items()
            if path not in used
        ]
        return cases

    def series(self, files: Sequence[Path], folder: Path, skipped: list[tuple[Path, str]]) -> list[Case]:
        """Return a case for each folder of DICOM slices; their files leave ``skipped``.

        Whether the slices of a folder make one volume is found out when it is read.
        """
        slices = {path for path in files if not volume_suffix(path.name) and may_be_slice(path)}
        skipped[:] = [item for item in skipped if item[0] not in slices]
        return [
            Case(
                parent.relative_to(folder).as_posix() if parent != folder else folder.resolve().name,
                parent,
                (None,) * len(self.masks),
            )
            for parent in sorted({path.parent for path in slices}, key=natural)
        ]


def site_folder(volumes: Path, site: SiteConfig) -> Path:
    """Return the folder below ``volumes`` that is named after the site, or ``volumes`` itself.

    Raises:
        DataError: no such folder, or two that are named after it.
    """
    if not volumes.is_dir():
        raise DataError(f"{volumes}: no such folder")
    return _site_folder(volumes, _names(site))


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


def _refuse_clashes(cases: Sequence[Case]) -> None:
    by_name: dict[str, list[Path]] = defaultdict(list)
    for case in cases:
        by_name[fold(case.name)].append(case.image)
    clashes = [" and ".join(map(str, sorted(paths))) for paths in by_name.values() if len(paths) > 1]
    if clashes:
        raise DataError(
            f"images whose results would share a name: {'; '.join(sorted(clashes))}; rename or remove one"
        )


def _nothing(
    folder: Path, site: SiteConfig, files: Sequence[Path], skipped: Sequence[tuple[Path, str]]
) -> str:
    tried, formats = ", ".join(site.files.image), ", ".join(VOLUME_SUFFIXES)
    start = f"{folder}: no image of site {site.id} found; names tried: {tried} (with {formats})"
    known = set(files)
    aside = Counter(reason for path, reason in skipped if path not in known)
    left_out = "".join(f"; left out: {count} x {reason}" for reason, count in sorted(aside.items()))
    if not files:
        return f"{start}; the folder holds no files{left_out}"
    kinds = Counter(
        volume_suffix(path.name).lower() or path.suffix.lower() or "no extension" for path in files
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    names = ", ".join(path.relative_to(folder).as_posix() for path in files[:3])
    hint = (
        f"; none of these has the mark of a DICOM file; convert them to {READABLE}"
        if set(kinds) <= {".dcm", ".ima"}
        else ""
    )
    return f"{start}; there are {counts}, such as {names}{left_out}{hint}"
