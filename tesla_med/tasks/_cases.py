"""What is done with cases beside a run: check them, and count the calibration of several finished runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tesla_med.config.models import FillConfig, PipelineConfig, SiteConfig
from tesla_med.engine.quality import with_estimates
from tesla_med.errors import ConfigError, TeslaMedError
from tesla_med.io.files import digest_of, sha256_of
from tesla_med.io.nifti import slice_axis
from tesla_med.io.references import read_reference, read_region_mask
from tesla_med.io.volumes import read_case, read_map, read_mask
from tesla_med.prepare.fill import find_fill
from tesla_med.prepare.preprocessors import AnyPreprocessor, is_foreign
from tesla_med.records import CaseResult
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.areas import calibration_region, count_region
from tesla_med.scoring.calibration import CalibrationCounts
from tesla_med.scoring.score import (
    Scored,
    class_indices,
    counted_where,
    incomplete,
    mean_entropies,
    of_source,
    parted,
)
from tesla_med.tasks.base import ROLLED_BACK
from tesla_med.types import Case, CaseView, Check, Progress, Status, Unit, Verdict

if TYPE_CHECKING:
    from tesla_med.tasks._made import Masks
    from tesla_med.tasks.labelled import LabelledSource

READERS = 16
"""Cases read at once while calibration is counted, at most."""
log = logging.getLogger(__name__)


def notes_on(site: SiteConfig) -> tuple[str, ...]:
    """Return where region and slices of a site's cases come from, and what a nominal voxel size means."""
    notes, region = [], site.region
    if region.kind == "mask":
        what = "region of interest" + (" and slices come" if region.slices == "mask" else " comes")
        notes.append(f"The {what} from a reference mask ({region.pattern}): not available in practice.")
    if site.spacing == "nominal":
        notes.append("The voxel size of this site is nominal: figures in mm and ml are left out.")
    return tuple(notes)


def status_of(verdict: Verdict, problem: str, blank: bool, found: bool) -> Status:
    """Return the status of a case.

    Args:
        verdict: of the guard.
        problem: why it could not be scored, if so.
        blank: its image is constant.
        found: its mask has foreground.
    """
    if problem:
        return "unscored"
    if blank:
        return "blank"
    if verdict.collapsed:
        return "collapsed"
    return "ok" if found else "empty"


def record_of(
    unit: Unit, finished: Masks, scored: Scored, site: SiteConfig, pipeline: PipelineConfig
) -> CaseResult:
    """Return the record of a finished case.

    Args:
        unit: the case as loaded.
        finished: its masks and the guard's verdict.
        scored: its scores.
        site: of the case.
        pipeline: of the run.
    """
    loaded, verdict, chosen = unit.content, finished.verdict, unit.scaling
    source, adapted = finished.source, finished.adapted
    entropies = mean_entropies(source, adapted)
    fill = None if loaded.prepared is None else loaded.prepared.fill
    return CaseResult(
        case=loaded.case.name,
        site=site.id,
        status=status_of(verdict, scored.problem, loaded.prepared is None, bool(adapted.mask.any())),
        used=verdict.used,
        share=verdict.share,
        trusted=verdict.trusted,
        scaling="" if chosen is None else chosen.name or str(pipeline.preprocessing.intensity),
        reason="; ".join(text for text in (verdict.reason, scored.problem) if text),
        slices=0 if loaded.prepared is None else len(loaded.prepared.slice_index),
        voxels=int(adapted.mask.size),
        fill_voxels=0 if fill is None else int(np.count_nonzero(fill)),
        input_sha256=unit.sha256,
        references_sha256=references_digest(loaded.case),
        entropy_source=entropies[0],
        entropy=entropies[1],
        signals=verdict.signals | (dict(chosen.signals) if chosen is not None else {}),
        notes=(
            *unit.notes,
            *scored.notes,
            *((chosen.reason,) if chosen is not None and chosen.reason else ()),
        ),
        scores=with_estimates(scored.scores, verdict.signals, pipeline.quality),
        calibration=scored.calibration,
    )


def view_of(case: Case, site: SiteConfig, pipeline: PipelineConfig, folder: RunFolder) -> CaseView | None:
    """Return what reports may draw of a finished case, read from disk; None if it cannot be read."""
    reference = ignored = entropy = None
    try:
        volume = read_case(case, site)
        masks = [read_mask(path(case.name))[0] for path in (folder.source_mask, folder.mask)]
    except TeslaMedError:
        return None
    if case.labelled:
        with suppress(TeslaMedError):
            reference, ignored = parted(read_reference(case, site.files, volume, pipeline.values))
    if folder.uncertainty(case.name).is_file():
        with suppress(TeslaMedError):
            entropy = read_map(folder.uncertainty(case.name), 1)[0]
    grid = volume.affine, volume.spacing
    return CaseView(volume.array[0], masks[0], masks[1], reference, *grid, ignored, entropy)


def count_runs(
    case: Case, *, site: SiteConfig, pipeline: PipelineConfig, runs: Mapping[Any, RunFolder]
) -> dict[Any, CalibrationCounts]:
    """Return the counts of one case by run: the region is the union over the masks of all runs.

    Args:
        case: with a reference; else nothing is counted.
        site: of the case.
        pipeline: of the runs.
        runs: finished runs; those that kept no probabilities of the case are left out.
    """
    there = {key: folder for key, folder in runs.items() if folder.probs(case.name).is_file()}
    if not there or not case.labelled:
        return {}
    try:
        volume = read_case(case, site)
        truth, ignored = parted(read_reference(case, site.files, volume, pipeline.values))
        indices = class_indices(truth, pipeline)
    except TeslaMedError as error:
        log.info("%s: left out of the calibration: %s", case.name, error)
        return {}
    masks = [read_mask(folder.mask(case.name))[0] for folder in there.values()]
    if ignored is not None:
        masks = [np.where(ignored, 0, mask) for mask in masks]
    axis = slice_axis(volume.affine, pipeline.preprocessing.orientation)
    region = calibration_region(truth, *masks, dilation=pipeline.report.region_dilation, slice_axis=axis)
    seen = counted_where(ignored, find_fill(volume.array, pipeline.preprocessing.fill, axis))
    found = {}
    for key, folder in there.items():
        probs = np.clip(read_map(folder.probs(case.name), len(pipeline.classes)), 0, 1)
        found[key] = count_region(probs[:, seen], indices[seen], region[seen], pipeline.report.bins)
    return found


def fill_left_out(runs: Iterable[RunFolder]) -> FillConfig:
    """Return what finished runs took for fill: that of the first one that looked for it."""
    for folder in runs:
        with suppress(TeslaMedError, KeyError, TypeError, ValueError):
            found = FillConfig.model_validate(folder.read()["settings"]["pipeline"]["preprocessing"]["fill"])
            if found.enabled:
                return found
    return FillConfig()


def count_cases(
    cases: Sequence[Case], site: SiteConfig, pipeline: PipelineConfig, runs: Mapping[Any, RunFolder]
) -> Iterator[dict[Any, CalibrationCounts]]:
    """Yield :func:`count_runs` of every case, without fill as the runs left it out; a few threads read."""
    preprocessing = pipeline.preprocessing.model_copy(update={"fill": fill_left_out(runs.values())})
    pipeline = pipeline.model_copy(update={"preprocessing": preprocessing})
    count = partial(count_runs, site=site, pipeline=pipeline, runs=runs)
    with ThreadPoolExecutor(max_workers=min(READERS, os.cpu_count() or 1)) as pool:
        yield from pool.map(count, cases)


def check_case(case: Case, site: SiteConfig, pipeline: PipelineConfig, prepare: AnyPreprocessor) -> Check:
    """Read image, region mask and reference of a case, and say what fits and what does not."""
    try:
        volume = read_case(case, site)
    except TeslaMedError as error:
        return Check(case.name, None, None, None, (str(error),))
    notes, problems = list(volume.notes), []
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
            reference, ignored = parted(read_reference(case, site.files, volume, pipeline.values))
            if ignored is not None:
                notes.append(f"{np.count_nonzero(ignored)} voxels of the reference are ignored")
            labels = tuple(int(value) for value in np.unique(reference))
        except TeslaMedError as error:
            problems.append(str(error))
    elif missing := incomplete(case, site):
        problems.append(missing)
    return Check(case.name, volume.shape, volume.spacing, labels, tuple(problems), tuple(notes))


def references_digest(case: Case) -> str:
    """Return one hash of the files of a case's references and region; "" without any."""
    files = [path for path in (*case.masks, case.region_mask) if path is not None]
    return digest_of(files) if files else ""


def is_intact(folder: RunFolder, case: Case, record: CaseResult, wanted: Collection[str]) -> bool:
    """Whether a case's image and references are still those of the record, and its files can be read.

    Scores are those of the references that were there: with others the case is done again.
    """
    try:
        if record.input_sha256 != sha256_of(case.files):
            return False
        if record.references_sha256 not in (None, references_digest(case)):
            return False
        read_mask(folder.mask(case.name))
        read_mask(folder.source_mask(case.name))
    except (OSError, ValueError, TeslaMedError):
        return False
    paths = (("probs", folder.probs), ("uncertainty", folder.uncertainty))
    return all(path(case.name).is_file() for option, path in paths if option in wanted)


def undone(folder: RunFolder, record: CaseResult, where: str) -> CaseResult:
    """Put the source mask of a case in place of the adapted one, and its figures in the record.

    Args:
        folder: of the run.
        record: of the case.
        where: what was gone back to, in words.
    """
    if record.status == "failed" or record.used in ("source", "corrected"):
        return record
    folder.take_source(record.case)
    return of_source(record, f"{ROLLED_BACK} {where}")


def labelled_cases(
    pipeline: PipelineConfig, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None
) -> LabelledSource:
    """Return every labelled case of the sites.

    Raises:
        ConfigError: the pipeline is that of somebody else's model.
    """
    from tesla_med.tasks.labelled_slices import load_labelled

    if is_foreign(pipeline):
        raise ConfigError(
            f"pipeline {pipeline.name!r} is of a model that was trained elsewhere: it is trained, "
            "and its features are measured, there; here it is adapted and predicted with"
        )
    return load_labelled(pipeline, sites, volumes, progress)
