"""Look through a site's files before anything is run: what is found, what fits, what does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import TeslaMedError
from tesla_med.io.cases import find_cases
from tesla_med.io.references import read_reference, read_region_mask
from tesla_med.io.volumes import read_volume
from tesla_med.plan import other_sites
from tesla_med.prepare.transforms import Preprocessor
from tesla_med.scoring.score import incomplete
from tesla_med.types import Case, Progress


@dataclass(frozen=True)
class CaseCheck:
    """What was found of one case.

    Attributes:
        case: its name.
        shape: voxels along each axis, or None where the image cannot be read.
        spacing: mm along each axis, or None.
        labels: label values of the reference, or None without one.
        problems: what would make the case fail or stay unscored.
        notes: remarks of reading.
    """

    case: str
    shape: tuple[int, int, int] | None
    spacing: tuple[float, float, float] | None
    labels: tuple[int, ...] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SiteCheck:
    """What was found of a site: its cases, and the files that are not used."""

    folder: Path
    cases: tuple[CaseCheck, ...]
    skipped: tuple[tuple[Path, str], ...]

    @property
    def problems(self) -> int:
        """Number of cases with a problem."""
        return sum(bool(case.problems) for case in self.cases)


def check_site(
    site: SiteConfig, pipeline: PipelineConfig, volumes: Path, progress: Progress = lambda *_: None
) -> SiteCheck:
    """Read every image, reference and region mask of a site.

    Raises:
        DataError: no images found.
    """
    found = find_cases(volumes, site, other_sites(site))
    checks = []
    prepare = Preprocessor(pipeline.preprocessing, site.region, len(pipeline.classes))
    for case in found.cases:
        checks.append(_check_case(case, site, pipeline, prepare))
        progress("checking cases", len(checks), len(found.cases))
    return SiteCheck(found.folder, tuple(checks), found.skipped)


def _check_case(case: Case, site: SiteConfig, pipeline: PipelineConfig, prepare: Preprocessor) -> CaseCheck:
    try:
        volume = read_volume(case.image, spacing=site.spacing, index=site.files.series_image)
    except TeslaMedError as error:
        return CaseCheck(case.name, None, None, None, (str(error),), ())
    notes = list(volume.notes)
    problems: list[str] = []
    labels: tuple[int, ...] | None = None
    if volume.blank:
        problems.append("the image is constant")
    else:
        try:
            region = read_region_mask(case, volume) if site.region.kind == "mask" else None
            notes += prepare(volume, region).notes
        except TeslaMedError as error:
            problems.append(str(error))
    if case.labelled:
        try:
            reference = read_reference(case, site.files, volume, pipeline.values)
            labels = tuple(int(value) for value in np.unique(reference))
        except TeslaMedError as error:
            problems.append(str(error))
    elif missing := incomplete(case, site):
        problems.append(missing)
    return CaseCheck(case.name, volume.shape, volume.spacing, labels, tuple(problems), tuple(notes))
