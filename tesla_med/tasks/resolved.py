"""What is known of a request before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.io.pseudonyms import Pseudonyms
from tesla_med.tasks.base import Task
from tesla_med.types import Items


@dataclass(frozen=True)
class Resolved:
    """What is known of a request before torch is imported.

    Attributes:
        site: the site.
        pipeline: the pipeline as given.
        task: of the pipeline.
        items: what was found.
        corrections: corrected masks by case.
        names: of cases, where they are replaced.
    """

    site: SiteConfig
    pipeline: PipelineConfig
    task: Task
    items: Items
    corrections: Mapping[str, Any] = field(default_factory=dict)
    names: Pseudonyms | None = None
