"""What the cells of a comparison rest on: every row of a site on the same images and references."""

from __future__ import annotations

from pathlib import Path

from tesla_med.config.resolve import other_sites
from tesla_med.errors import TeslaMedError
from tesla_med.io.inputs import Hashes, digest_of_items
from tesla_med.tasks.base import Task


def inputs_of(task: Task, volumes: Path) -> str:
    """Return a hash of every file that the items of a task's site are read from; "" where none are found."""
    try:
        items = task.find(volumes, other_sites(task.site))
    except TeslaMedError:
        return ""
    return digest_of_items(items, Hashes(), lambda *_: None, task.site.id)
