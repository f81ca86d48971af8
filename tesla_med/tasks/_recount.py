"""Calibration of several finished runs on one case, over one region for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import TeslaMedError
from tesla_med.io.nifti import slice_axis
from tesla_med.io.references import read_reference
from tesla_med.io.volumes import read_case, read_map, read_mask
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.areas import calibration_region, count_region
from tesla_med.scoring.calibration import CalibrationCounts
from tesla_med.scoring.score import class_indices
from tesla_med.types import Case

log = logging.getLogger(__name__)


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
        truth = read_reference(case, site.files, volume, pipeline.values)
        indices = class_indices(truth, pipeline)
    except TeslaMedError as error:
        log.info("%s: not among the calibration: %s", case.name, error)
        return {}
    masks = [read_mask(folder.mask(case.name))[0] for folder in there.values()]
    axis = slice_axis(volume.affine, pipeline.preprocessing.orientation)
    region = calibration_region(truth, *masks, dilation=pipeline.report.region_dilation, slice_axis=axis)
    found = {}
    for key, folder in there.items():
        probs = np.clip(read_map(folder.probs(case.name), len(pipeline.classes)), 0, 1)
        found[key] = count_region(probs, indices, region, pipeline.report.bins)
    return found
