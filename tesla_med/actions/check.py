"""Look through a site's files before anything is run: what is found, what fits, what does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.resolve import other_sites
from tesla_med.prepare.stream import ahead
from tesla_med.tasks.base import task_of
from tesla_med.types import Check, Progress


@dataclass(frozen=True)
class SiteCheck:
    """What was found of a site: its items, files that are not used, what looks wrong about patterns."""

    folder: Path
    item: str
    cases: tuple[Check, ...]
    skipped: tuple[tuple[Path, str], ...]
    remarks: tuple[str, ...] = ()

    @property
    def problems(self) -> int:
        """Number of items with a problem."""
        return sum(bool(case.problems) for case in self.cases)


def check_site(
    site: SiteConfig, pipeline: PipelineConfig, volumes: Path, progress: Progress = lambda *_: None
) -> SiteCheck:
    """Read every image or tile, reference and region mask of a site.

    Raises:
        DataError: nothing found.
    """
    task = task_of(pipeline)(site, pipeline)
    items = task.find(user_path(volumes), other_sites(site))
    checks: list[Check] = []
    for found in ahead(task.refs(items, 0, 1), task.check):
        checks.append(found)
        progress(f"checking {task.item}s", len(checks), len(items.names))
    order = {name: index for index, name in enumerate(items.names)}
    checks.sort(key=lambda item: order[item.case])
    return SiteCheck(items.folder, task.item, tuple(checks), items.skipped, items.remarks)
