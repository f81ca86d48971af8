"""The task of a finished run, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import OutputError
from tesla_med.runs.folder import RUN_FILE, RunFolder, without_retired
from tesla_med.tasks.base import Task, task_of


def task_of_run(folder: RunFolder, settings: Mapping[str, Any]) -> Task:
    """Return the task of a run.

    Raises:
        OutputError: the settings are those of another version.
    """
    try:
        site = SiteConfig.model_validate(settings["site"])
        pipeline = PipelineConfig.model_validate(without_retired(settings)["pipeline"])
    except (KeyError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{error} is missing"
        raise OutputError(f"{folder.out / RUN_FILE}: settings of another version ({problem})") from None
    return task_of(pipeline)(site, pipeline)
