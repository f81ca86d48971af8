"""Which preprocessing a pipeline asks for: slices of a size and a range, or that of somebody else's model."""

from __future__ import annotations

from typing import TypeAlias

from tesla_med.config.models import PipelineConfig, Region
from tesla_med.config.resolve import FORMATS
from tesla_med.prepare.bundle import BundlePreprocessor
from tesla_med.prepare.nnunet import NnunetPreprocessor
from tesla_med.prepare.transforms import Preprocessor

AnyPreprocessor: TypeAlias = Preprocessor | NnunetPreprocessor | BundlePreprocessor


def is_foreign(pipeline: PipelineConfig) -> bool:
    """Whether a pipeline is that of a model which was trained elsewhere."""
    return pipeline.model.name in FORMATS


def preprocessor_of(pipeline: PipelineConfig, region: Region) -> AnyPreprocessor:
    """Return what prepares the volumes of a site.

    Raises:
        ConfigError: the region means nothing to the model.
    """
    classes = len(pipeline.classes)
    if pipeline.preprocessing.nnunet is not None:
        return NnunetPreprocessor(pipeline.preprocessing, region, classes, regions=pipeline.regions)
    if pipeline.preprocessing.bundle is not None:
        return BundlePreprocessor(
            *(pipeline.preprocessing, region, classes), channels=pipeline.channels, regions=pipeline.regions
        )
    return Preprocessor(pipeline.preprocessing, region, classes)
