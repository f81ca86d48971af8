"""Made-up results of a site, for tests of reports."""

from __future__ import annotations

import numpy as np

from tesla_med.config.models import (
    Files,
    LabelClass,
    MaskLayer,
    PipelineConfig,
    ReportConfig,
    Scanner,
    SiteConfig,
)
from tesla_med.records import CaseResult
from tesla_med.reports.base import RunContext
from tesla_med.scoring.areas import calibration_region, count_case
from tesla_med.scoring.metrics import score_case
from tesla_med.types import CaseView

SPACING = (0.8, 0.8, 3.0)
SHAPE = (56, 64, 12)


def run_context(out, classes=2, notes=(), **report):
    colors = ("#000000", "#e6550d", "#3182bd", "#31a354")
    names = ("background", "prostate", "central zone", "urethra")
    site = SiteConfig(
        id="F",
        pipeline="prostate",
        institution="HK",
        description="Axial T2-weighted prostate",
        scanner=Scanner(manufacturer="Siemens", field_strength_t=1.5),
        files=Files(image=("Case*.nii.gz",), masks=(MaskLayer(pattern="*_segmentation.nii.gz"),)),
        terms="Research use only; cite the data set.",
        citation="Liu et al. 2020, doi 10.1109/TMI.2020.2974574",
    )
    pipeline = PipelineConfig(
        name="prostate",
        title="Whole prostate on axial T2-weighted MRI",
        sites="prostate",
        classes=tuple(LabelClass(value=i, name=names[i], color=colors[i]) for i in range(classes)),
        report=ReportConfig(**report),
        citation="Tomar et al., CVPR 2023",
    )
    manifest = {
        "version": "1.0",
        "device": "cpu",
        "weights_sha256": "9f2c" * 16,
        "versions": {"python": "3.11", "torch": "2.14"},
        "method": {"op_set": "intensity", "learning_rate": 0.0002, "weak_views": 5},
        "preprocessing": {"orientation": "RAS", "size": [256, 256], "intensity": {"scaling": "minmax"}},
    }
    return RunContext(out, site, pipeline, "tesla", "N-O", 0, "case", manifest, tuple(notes))


def blob(centre, radii, classes):
    grids = np.ogrid[tuple(slice(0, size) for size in SHAPE)]
    squared = sum(((g - c) / r) ** 2 for g, c, r in zip(grids, centre, radii, strict=True))
    labels = np.zeros(SHAPE, np.uint8)
    for value in range(1, classes):
        labels[squared <= (1.0 / value) ** 2] = value
    return labels


def probabilities(labels, classes, rng):
    logits = rng.normal(0, 1, (classes, *SHAPE)) + 3.0 * (np.arange(classes)[:, None, None, None] == labels)
    shifted = np.exp(logits - logits.max(axis=0))
    return (shifted / shifted.sum(axis=0)).astype(np.float32)


def case(run, number, *, shift=0, source_shift=4, referenced=True, affine=None, empty=False, name=None):
    """Return a scored case and its arrays; ``shift`` moves the masks off the truth."""
    rng = np.random.default_rng(number)
    classes = len(run.pipeline.classes)
    centre, radii = (28, 30, 6), (12 + number % 3, 10, 4)
    truth = blob(centre, radii, classes)
    mask = np.roll(truth, shift, axis=0) if not empty else np.zeros_like(truth)
    source = np.roll(truth, source_shift, axis=1)
    image = (200.0 + 120.0 * (truth > 0) + rng.normal(0, 25, SHAPE)).astype(np.float32)
    reference = truth if referenced else None
    affine = np.diag([-0.8, -0.8, 3.0, 1.0]) if affine is None else affine
    view = CaseView(image, source, mask, reference, affine, SPACING)
    calibration = None
    if referenced:
        region = calibration_region(truth, source, mask)
        arguments = (probabilities(source, classes, rng), probabilities(mask, classes, rng), truth, region)
        calibration = count_case(*arguments, run.pipeline.values, run.pipeline.report.bins)
    result = CaseResult(
        case=name or f"HK/Case{number:02d}",
        site="F",
        method="tesla",
        protocol="N-O",
        seed=0,
        status="empty" if empty else "ok",
        used="adapted",
        reason="no foreground found" if empty else "",
        seconds=12.5,
        slices=12,
        entropy=0.1,
        entropy_source=0.2,
        scores=score_case(mask, source, reference, run.pipeline.classes, SPACING),
        calibration=calibration,
    )
    return result, view


def failed(name="HK/Case90", reason="Case90.nii.gz: truncated: expected 1,204 bytes, got 812"):
    return CaseResult(
        case=name,
        site="F",
        method="tesla",
        protocol="N-O",
        seed=0,
        status="failed",
        used="source",
        reason=reason,
    )


def unscored(run, number=80):
    result, view = case(run, number, referenced=False)
    reason = "the reference's grid differs by 2.4 mm from the image; resample it or correct its header"
    return result.model_copy(update={"status": "unscored", "reason": reason}), view


def drive(report, pairs, steps=3):
    """Call every hook of a started report and return what it wrote."""
    for step in range(steps):
        report.step(step, {"loss/total": 1.0 / (step + 1), "policy/magnitude/gamma": 0.1 * step})
    for result, view in pairs:
        report.unit([result], view)
    return report.finish([result for result, _ in pairs])


# ------------------------------------------------------------ tiles


def tile_context(out, classes=4, notes=()):
    """Return the context of a run on tiles whose pictures lie in ``out``/tiles."""
    import tile_site

    from tesla_med.config.files import load_pipeline
    from tesla_med.records import TileResult
    from tesla_med.scoring.classes import class_counts

    pipeline = load_pipeline("kather")
    pipeline = pipeline.model_copy(update={"classes": pipeline.classes[:classes]})

    def counts(results):
        counted = class_counts(results, pipeline)
        return [] if counted is None else [counted]

    return RunContext(
        *(out, tile_site.site(), pipeline, "tesla", "N-O", 0, "site"),
        notes=tuple(notes),
        folder=out / "tiles",
        kind=TileResult,
        item="tile",
        counts=counts,
    )


def tile(run, number, *, shift=0, referenced=True, name=None):
    """Return the record of one tile; with ``shift`` the predicted class is another than the label."""
    from tesla_med.records import TileResult

    names = [item.name for item in run.pipeline.classes]
    label = number % len(names)
    logits = np.random.default_rng(number).normal(0, 0.5, (2, len(names)))
    logits[0, (label + shift) % len(names)] += 3
    probs, before = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)
    right = (int(probs.argmax()) == label, int(before.argmax()) == label) if referenced else (None, None)
    text = names[label] if referenced else ""
    return TileResult(name or f"TUM/{number}.png", "ok", "adapted", "", text, probs, before, *right), None


def failed_tile(name="TUM/90.png", reason="TUM/90.png: truncated or damaged"):
    from tesla_med.records import TileResult

    return TileResult(name, "failed", "source", reason)
