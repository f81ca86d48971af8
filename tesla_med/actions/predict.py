"""Results of frozen weights, adapted ones too: no adaptation, the same files and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tesla_med.adapt import run_plan
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.plan import RunRequest, make_plan
from tesla_med.records import SiteResult
from tesla_med.types import Progress


def predict(
    volumes: str | Path,
    weights: str | Path,
    *,
    site: str | SiteConfig | None = None,
    pipeline: str | PipelineConfig | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
    anonymise: bool = False,
    key: str | Path | None = None,
    progress: Progress | None = None,
) -> SiteResult:
    """Predict every image or tile with frozen weights.

    Args:
        volumes: folder of images or of tiles, or one image.
        weights: weights, such as ``checkpoints/adapted.safetensors`` of an earlier run.
        site: for its file patterns, region of interest and references; None takes every image
            whole and scores nothing.
        pipeline: default: that of the site, or of the weights' card.
        out: output folder; default ``runs/<site>/predict``.
        device: auto, cpu or cuda.
        overwrite: replace an earlier run.
        overrides: ``key=value`` texts over the pipeline, ``site.key=value`` over the site.
        trust_code: let MONAI run the code of a bundle that needs it.
        anonymise: replace the names of cases in everything that is written.
        key: key file of the pseudonyms; default: that of this user.
        progress: called as the work goes on.

    Returns:
        The records, as :func:`tesla_med.adapt_site` gives them, method ``source``.

    Raises:
        TeslaMedError: as :func:`tesla_med.adapt_site`.
    """
    request = RunRequest(
        site,
        volumes,
        weights=weights,
        pipeline=pipeline,
        method="source",
        protocol="N-O",
        out=out,
        device=device,
        overrides=tuple(overrides),
        folder_name="predict",
        trust_code=trust_code,
        anonymise=anonymise,
        key=key,
    )
    return run_plan(make_plan(request), overwrite=overwrite, progress=progress)
