"""Compare finished masks with their reference. The only place where references are read.

Called after a case's mask is final, so that nothing here can reach a method.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError
from tesla_med.io.geometry import voxel_mm3
from tesla_med.io.nifti import slice_axis
from tesla_med.io.references import IGNORED, read_reference
from tesla_med.records import CaseResult, ClassScore
from tesla_med.scoring import areas, metrics
from tesla_med.types import BoolArray, Case, IntArray, Prediction, Volume

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """Scores of one case. ``problem`` says why a reference that exists was not used.

    ``ignored``: (I, J, K), true where the reference says "do not score", and it is 0 there; or None.
    """

    scores: tuple[ClassScore, ...]
    reference: IntArray | None
    calibration: dict[str, Any] | None
    problem: str = ""
    ignored: BoolArray | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """How many voxels are not scored, in words."""
        count = 0 if self.ignored is None else int(np.count_nonzero(self.ignored))
        return (f"{count} voxels of the reference are ignored: left out of every figure",) if count else ()


def score(
    case: Case,
    volume: Volume,
    source: Prediction,
    adapted: Prediction,
    site: SiteConfig,
    pipeline: PipelineConfig,
    fill: BoolArray | None = None,
) -> Scored:
    """Score a case where it has a reference; else give volumes only.

    The masks are written by then, so whatever goes wrong here only leaves the case unscored. Where there is
    ``fill``, (I, J, K), calibration is not counted.
    """
    try:
        return _score(case, volume, source, adapted, site, pipeline, fill)
    except Exception as error:
        log.info("%s", case.image, exc_info=error)
        kind = f"{type(error).__name__}: {str(error) or 'no details'}"
        return Scored((), None, None, f"{case.image}: could not be scored ({kind})")


def _score(
    case: Case,
    volume: Volume,
    source: Prediction,
    adapted: Prediction,
    site: SiteConfig,
    pipeline: PipelineConfig,
    fill: BoolArray | None,
) -> Scored:
    reference, problem, ignored = None, "", None
    masks = adapted.mask, source.mask
    if case.labelled:
        try:
            reference, ignored = parted(read_reference(case, site.files, volume, pipeline.values))
        except DataError as error:
            problem = str(error)
    else:
        problem = incomplete(case, site)
    if ignored is not None:
        masks = np.where(ignored, 0, adapted.mask), np.where(ignored, 0, source.mask)
    scores = metrics.score_case(
        *(*masks, reference, pipeline.classes, volume.spacing, volume.nominal_spacing),
        voxel_mm3=voxel_mm3(volume.affine),
    )
    counts = None
    if reference is not None:
        axis = slice_axis(volume.affine, pipeline.preprocessing.orientation)
        region = areas.calibration_region(
            reference, *masks, dilation=pipeline.report.region_dilation, slice_axis=axis
        )
        seen = counted_where(ignored, fill)
        counts = areas.count_case(
            source.probs[:, seen],
            adapted.probs[:, seen],
            class_indices(reference, pipeline)[seen],
            region[seen],
            pipeline.values,
            pipeline.report.bins,
            areas.boundary_band(reference, slice_axis=axis)[seen],
        )
    return Scored(scores, reference, counts, problem, ignored)


def parted(reference: IntArray) -> tuple[IntArray, BoolArray | None]:
    """Return a reference with 0 in place of ``IGNORED``, and where that was, None for nowhere."""
    ignored: BoolArray = reference == IGNORED
    return (np.where(ignored, 0, reference), ignored) if ignored.any() else (reference, None)


def counted_where(*left_out: BoolArray | None) -> Any:
    """Return the index of the voxels of a (I, J, K) grid that are in none of these, or of all voxels."""
    known = [item for item in left_out if item is not None]
    return ~np.logical_or.reduce(known) if known else slice(None)


def incomplete(case: Case, site: SiteConfig) -> str:
    """Return which layers of a reference have no file, in words; "" where all have one or none has."""
    layers = [layer.where for layer, mask in zip(site.files.masks, case.masks, strict=True) if mask is None]
    if not layers or len(layers) == len(case.masks):
        return ""
    return f"reference incomplete: nothing matches {', '.join(layers)} for {case.image}"


def class_indices(labels: IntArray, pipeline: PipelineConfig) -> IntArray:
    """Return class indices 0 to L - 1 of an array of label values."""
    order = np.argsort(pipeline.values)
    index: npt.NDArray[Any] = np.searchsorted(np.asarray(pipeline.values)[order], labels)
    result: IntArray = order[index]
    return result


def label_values(probs: npt.NDArray[np.float32], pipeline: PipelineConfig) -> IntArray:
    """Return the label value of the largest probability, (L, I, J, K) -> (I, J, K) uint16.

    Ties go to the lower class index. Classes from overlapping regions are painted one after the other where
    the region's own probability, its share of what is left for it and all before it, is above a half.
    """
    values = np.asarray(pipeline.values, dtype=np.uint16)
    mask: IntArray
    if not pipeline.regions:
        mask = values[probs.argmax(axis=0)]
        return mask
    mask = np.full(probs.shape[1:], values[0])
    before = probs[0].copy()
    for value, inside in zip(values[1:], probs[1:], strict=True):
        mask[inside > before] = value
        before += inside
    return mask


def normalised_entropy(probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the entropy of each voxel over log L, (L, I, J, K) -> (I, J, K) float32 in [0, 1]."""
    total = np.zeros(probs.shape[1:], dtype=np.float32)
    for channel in probs:
        total -= channel * np.log(np.maximum(channel, 1e-12))
    scaled: npt.NDArray[np.float32] = np.clip(total / np.float32(np.log(len(probs))), 0.0, 1.0)
    return scaled


def mean_entropies(source: Prediction, adapted: Prediction) -> tuple[float | None, float | None]:
    """Return the mean normalised entropy over the union of both foregrounds, of each model."""
    region = (source.mask > 0) | (adapted.mask > 0)
    if not region.any():
        return None, None
    return (
        float(normalised_entropy(source.probs[:, region]).mean()),
        float(normalised_entropy(adapted.probs[:, region]).mean()),
    )


def of_source(record: CaseResult, reason: str) -> CaseResult:
    """Return the record of a case whose mask is the source model's now; its distances were never measured."""
    found = any(score.voxels_source for score in record.scores)
    status = ("ok" if found else "empty") if record.status in ("ok", "empty") else record.status
    counts = record.calibration
    return record.model_copy(
        update={
            "used": "source",
            "share": 0.0,
            "status": status,
            "reason": reason,
            "entropy": record.entropy_source,
            "scores": tuple(map(_source_score, record.scores)),
            "calibration": None if counts is None else {**counts, "adapted": counts["source"]},
        }
    )


def _source_score(score: ClassScore) -> ClassScore:
    """Return the figures of the source mask; what was measured of the adapted mask alone is None."""
    known = {metric.name: metric for metric in metrics.METRICS.in_order()}
    values = dict.fromkeys((*known, *score.more), None) | {
        column: score.value(metric.source)
        for metric in known.values()
        if metric.of_source
        for column in metric.columns
    }
    return score.model_copy(
        update={
            **ClassScore.placed(values),
            "voxels": score.voxels_source,
            "predicted_dice": None,
            "predicted_low": None,
            "predicted_high": None,
        }
    )
