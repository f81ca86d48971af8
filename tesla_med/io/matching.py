"""Which of the files of a site are images, which belong to them: one rule for every command."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tesla_med.config.models import SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.fetched import unfetched
from tesla_med.io.masks import SUFFIX_PARTS, SURE_PARTS, shortened
from tesla_med.io.names import fold
from tesla_med.io.patterns import Match, NamePattern
from tesla_med.io.volumes import VOLUME_SUFFIXES, stem, volume_suffix
from tesla_med.io.walk import RESULTS, Skipped, exports_among, walk
from tesla_med.types import Case

READABLE = "NIfTI (.nii, .nii.gz), MetaImage (.mha, .mhd) and NRRD (.nrrd, .nhdr)"
REGION = -1
MASK_BY_NAME = "the mask of another image, by its name"
NO_PATTERN = "matches no image pattern of the site"
FURTHER_CHANNEL = "a further channel without the first"
NO_CHANNEL = "a further channel than the model takes"
MOST_CHANNELS = 5
"""More images whose names differ in the last four digits alone are not taken for channels of one."""
_Others = dict[tuple[int, Match], list[Path]]
"""Masks and channels by layer and where they belong; the region is layer -1, channels are below."""


class Matcher:
    """The name patterns of one site, applied to the files below one folder.

    Args:
        site: gives the patterns.
        folder: that is searched; patterns are matched against paths below it.
        channels: of the images.

    Raises:
        ConfigError: another number of image patterns than of channels, or a pattern that can never match.
    """

    def __init__(self, site: SiteConfig, folder: Path, channels: int = 1) -> None:
        patterns = [NamePattern(text) for text in site.files.image]
        if channels > 1 and len(patterns) != channels:
            raise ConfigError(
                f"site {site.id}: the pipeline has {channels} channels, so files.image needs one pattern per "
                f"channel, got {len(patterns)}: {', '.join(site.files.image)}"
            )
        self.folder = folder
        self.images = patterns if channels == 1 else patterns[:1]
        self.channels = patterns[1:] if channels > 1 else []
        self.masks = [NamePattern(layer.pattern) for layer in site.files.masks]
        self.region = NamePattern(site.region.pattern) if site.region.pattern is not None else None
        roots = [self._root(layer.root) for layer in site.files.masks]
        self._layers = [*zip(range(len(roots)), self.masks, roots, strict=True)]
        if self.region is not None:
            self._layers.append((REGION, self.region, self._root(site.region.root)))
        own = dict.fromkeys(root for _, _, root in self._layers if root != folder)
        self.roots = [root for root in own if not folder.is_relative_to(root)]

    def _root(self, text: str | None) -> Path:
        if text is None:
            return self.folder
        root = Path(os.path.normpath(self.folder / user_path(text)))
        real, own = root.resolve(), self.folder.resolve()
        return self.folder / real.relative_to(own) if real.is_relative_to(own) else root

    def image(self, path: Path) -> tuple[NamePattern, Match] | None:
        """Return the image pattern that a file matches and where it belongs, or None."""
        relative = path.relative_to(self.folder)
        found = ((pattern, pattern.match(relative)) for pattern in self.images)
        return next(((pattern, match) for pattern, match in found if match is not None), None)

    def _as_other(self, path: Path) -> Iterator[tuple[int, Match]]:
        """Yield each layer that a file belongs to by its pattern, and where."""
        for number, pattern, root in self._layers:
            inside = self._owner(path)
            if path.is_relative_to(root) and (inside is None or inside == root):
                match = pattern.match(path.relative_to(root))
                if match is not None:
                    yield number, match

    def _owner(self, path: Path) -> Path | None:
        """Return the root of masks that a file lies below, the nearest, or None."""
        above = [root for root in self.roots if path.is_relative_to(root)]
        return max(above, key=lambda root: len(root.parts), default=None)

    def is_mask(self, path: Path) -> bool:
        """Return whether a file belongs to a mask or the region: by a pattern, or below their root."""
        return self._owner(path) is not None or next(self._as_other(path), None) is not None

    def with_roots(self, files: Sequence[Path], skipped: list[Skipped]) -> list[Path]:
        """Return ``files`` with those below roots of masks elsewhere."""
        every = list(files)
        for root in self.roots:
            if root.is_dir() and not root.resolve().is_relative_to(self.folder.resolve()):
                more, left_out = walk(root)
                every += more
                skipped += left_out
        return list(dict.fromkeys(every))

    def without_exports(self, files: Sequence[Path], skipped: list[Skipped]) -> list[Path]:
        """Return ``files`` without exports below the folder; what is a mask by its pattern stays."""
        exports = {path for path in exports_among(files) if self.folder in path.parents}
        if not exports:
            return list(files)
        skipped += [(path, RESULTS) for path in exports]
        return [path for path in files if exports.isdisjoint(path.parents) or self.is_mask(path)]

    def without_masks(self, files: Sequence[Path], skipped: list[Skipped]) -> list[Path]:
        """Return ``files``; where every name may be an image's, without masks of others by their names.

        ``Case07_segmentation.nii.gz`` is left out, with its reason, where ``Case07.nii.gz`` lies beside it.
        """
        if [pattern.text for pattern in self.images] != ["*"]:
            return list(files)
        inside = [path for path in files if volume_suffix(path.name) and path.is_relative_to(self.folder)]
        names = {(path.parent, fold(stem(path))) for path in inside}
        masks = {
            path
            for path in inside
            if not self.is_mask(path)
            and any((path.parent, fold(name)) in names for name in shortened(stem(path), SURE_PARTS))
        }
        skipped += [(path, MASK_BY_NAME) for path in masks]
        return [path for path in files if path not in masks]

    def others(self, paths: Sequence[Path]) -> _Others:
        """Return masks and channels by layer and where they belong."""
        found: _Others = {}
        for path in paths:
            for number, match in self._as_other(path):
                found.setdefault((number, match), []).append(path)
            if self.channels and not self.is_mask(path):
                relative = path.relative_to(self.folder)
                for number, pattern in enumerate(self.channels):
                    if place := pattern.match(relative):
                        found.setdefault((-2 - number, place), []).append(path)
        return found

    def case(self, path: Path, name: str, match: Match, others: _Others) -> Case:
        """Return the case of an image with the files that belong where it does.

        Raises:
            DataError: two files for one layer.
        """

        def one(layer: int) -> Path | None:
            files = others.get((layer, match), [])
            if len(files) > 1:
                what, given = "masks" if layer > -2 else "files", " and ".join(map(str, files))
                raise DataError(f"two {what} for one layer of {path}: {given}; rename or remove one")
            return files[0] if files else None

        layers = tuple(one(layer) for layer in range(len(self.masks)))
        channels = tuple(one(-2 - number) for number in range(len(self.channels)))
        return Case(name, path, layers, one(REGION), channels)

    def cases(self, files: Sequence[Path], skipped: list[Skipped], *, each: bool = False) -> list[Case]:
        """Return the cases among ``files``; the rest goes to ``skipped``.

        Raises:
            DataError: two files for one layer; with ``each`` that is the case's ``problem`` instead.
        """
        others = self.others([path for path in files if volume_suffix(path.name)])
        taken = {path for paths in others.values() for path in paths}
        cases: list[Case] = []
        for path in files:
            if not volume_suffix(path.name):
                skipped.append((path, unfetched(path) or f"not {READABLE}"))
            elif self.is_mask(path):
                if path not in taken:
                    skipped.append((path, "in the folder of masks, but matches no pattern of a mask"))
            elif (found := self.image(path)) is None:
                if path not in taken:
                    skipped.append((path, NO_CHANNEL if self._beyond(path, files) else NO_PATTERN))
            else:
                pattern, match = found
                name = pattern.name(path.relative_to(self.folder))
                try:
                    cases.append(self.case(path, name, match, others))
                except DataError as error:
                    if not each:
                        raise
                    cases.append(Case(name, path, problem=str(error)))
        used = {path for case in cases for path in (*case.masks, case.region_mask, *case.channels)}
        every = {path: layer for (layer, _), paths in others.items() for path in paths}
        skipped += [
            (path, "a mask without its image" if layer > -2 else FURTHER_CHANNEL)
            for path, layer in every.items()
            if path not in used
        ]
        return cases

    def _beyond(self, path: Path, files: Sequence[Path]) -> bool:
        """Return whether a file that no pattern matches is named as a channel of an image of several."""
        name, first = stem(path), _first_channel(stem(path))
        return bool(self.channels and first) and path.with_name(path.name.replace(name, first, 1)) in files

    # ------------------------------------------------------------ what looks wrong

    def remarks(self, cases: Sequence[Case], files: Sequence[Path]) -> tuple[str, ...]:
        """Say what looks wrong: patterns that match nothing, masks that meet no image, labels as images."""
        found = [*self._never(dicom=not cases)]
        if cases:
            others = self.others([path for path in files if volume_suffix(path.name)])
            for number, pattern, root in self._layers:
                where = "" if root == self.folder else f" below {root}"
                what = f"the {'region' if number == REGION else 'mask'} pattern {pattern.text!r}{where}"
                if any(self._file(case, number) is not None for case in cases):
                    continue
                if not root.is_dir():
                    found.append(f"{what} matches nothing: there is no such folder")
                elif not (
                    there := {match: paths[0] for (layer, match), paths in others.items() if layer == number}
                ):
                    if number == REGION or root != self.folder:
                        found.append(f"{what} matches none of the files there")
                else:
                    found.append(f"{what} meets no image: {self._apart(cases[0], there)}")
        return (*found, *self._labels_as_images(cases), *self._channels_as_images(cases))

    def _never(self, *, dicom: bool) -> Iterator[str]:
        every = (*self.images, *self.channels, *self.masks, *([self.region] if self.region else []))
        for pattern in every:
            end = pattern.unreadable()
            if end and not (dicom and end.lower() in (".dcm", ".ima")):  # slices are found by folder
                known = f"{end} is none of the formats read, {', '.join(VOLUME_SUFFIXES)}"
                yield f"the pattern {pattern.text!r} can never match: {known}"

    @staticmethod
    def _file(case: Case, number: int) -> Path | None:
        return case.region_mask if number == REGION else case.masks[number]

    def _apart(self, case: Case, there: Mapping[Match, Path]) -> str:
        image, (match, path) = self.image(case.image), next(iter(there.items()))
        own = f"{case.image} ({image[1]})" if image is not None else str(case.image)
        return (
            f"files of a case agree in folder and key, but {own} and {path} ({match}) do not; write the "
            "folders into both patterns, or give the mask a 'root'"
        )

    def _labels_as_images(self, cases: Sequence[Case]) -> Iterator[str]:
        suspects = [case.image for case in cases if self._label_like(case.image)]
        if suspects:
            yield (
                f"{len(suspects)} of {len(cases)} images lie in a folder that sounds like labels, such as "
                f"{suspects[0]}; if they are masks, name the folder of the images in files.image, as in "
                "imagesTr/*.nii.gz, and that of the masks in files.masks"
            )

    @staticmethod
    def _channels_as_images(cases: Sequence[Case]) -> Iterator[str]:
        names = {case.name for case in cases}
        further = [case for case in cases if _first_channel(case.name) in names]
        most = max(Counter(_first_channel(case.name) for case in further).values(), default=0)
        if 0 < most < MOST_CHANNELS:  # more are rather numbers of patients
            yield (
                f"{len(further)} of {len(cases)} images, such as {further[0].image}, may be further channels "
                "of others; if they are, name those of the model in files.image, as in '*_0000.nii.gz'"
            )

    def _label_like(self, path: Path) -> bool:
        """Return whether a folder that the image patterns do not spell out is called after labels."""
        found = self.image(path)
        relative = path.relative_to(self.folder)
        name = relative.as_posix() if found is None else found[0].name(relative)
        return any(is_label_like(part) for part in name.split("/")[:-1])


def is_named_as_mask(path: Path, site: SiteConfig) -> bool:
    """Whether a file is named as a mask where every name may be an image's; see ``without_masks``."""
    return list(site.files.image) == ["*"] and bool(shortened(stem(path), SURE_PARTS))


def _first_channel(name: str) -> str:
    """Return what the first channel would be called, of which an image of this name is a further one."""
    further = re.fullmatch(r"(.*_)(?!0000)\d{4}", name)
    return "" if further is None else f"{further[1]}0000"


def is_label_like(folder: str) -> bool:
    """Return whether a folder is called after labels, as labelsTr and manual_masks are."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", folder)
    return any(fold(word) in SUFFIX_PARTS for word in words)
