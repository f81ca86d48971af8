"""The cells of a comparison: which there are, what they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tesla_med.compare.statistics import Key
from tesla_med.config.files import is_yaml, load_pipeline
from tesla_med.config.models import PROTOCOLS, PipelineConfig, Protocol
from tesla_med.config.tables import Row, TableConfig
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name
from tesla_med.tasks.base import Task, task_of
from tesla_med.tta.base import METHODS


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    row: Row
    protocol: Protocol
    site: str
    seed: int

    @property
    def name(self) -> str:
        """Folder below ``cells/``."""
        return f"{self.site}/{_slug(self.row.label)}-{self.protocol}/seed-{self.seed}"

    @property
    def key(self) -> Key:
        """Row and protocol."""
        return self.row.label, self.protocol


def scored_classes(pipeline: PipelineConfig, task: type[Task]) -> list[str]:
    """Return the names of the classes that are scored."""
    return [item.name for item in pipeline.classes if task.background or item.value != 0]


def task_of_table(table: TableConfig) -> type[Task]:
    """Return the task of the runs that a table compares.

    Raises:
        ConfigError: its rows are of several tasks, or it asks for pictures that the task does not have.
    """
    names = dict.fromkeys((table.pipeline, *(row.pipeline for row in table.rows if row.pipeline)))
    tasks = {name: load_pipeline(name) for name in names}
    if len({pipeline.task for pipeline in tasks.values()}) > 1:
        listed = ", ".join(f"{name} ({pipeline.task})" for name, pipeline in tasks.items())
        raise ConfigError(f"a table compares runs of one task; its pipelines are {listed}")
    task = task_of(tasks[table.pipeline])
    task.refuse({"figures"} if table.figures else ())
    return task


def cells_of(table: TableConfig) -> list[Cell]:
    """Return the cells of a table: each row under the protocols that its method has.

    A method without randomness runs under the first seed only, one that does not adapt under the first
    protocol only. Where the seed draws the order of the units, every method that adapts is random.

    Raises:
        ConfigError: an unknown method or pipeline, pipelines of several tasks, or nothing to run.
    """
    task = task_of_table(table)
    found = []
    for row in table.rows:
        method = METHODS.get(row.method)
        fixed = not method.adapts if task.seeded else method.deterministic
        seeds = range(table.first_seed, table.first_seed + (1 if fixed else table.seeds))
        has = [protocol for protocol in table.protocols if protocol in method.protocols]
        for protocol in has if method.adapts else has[:1]:
            found += [Cell(row, protocol, site, seed) for site in table.sites for seed in seeds]
    if not found:
        names = ", ".join(row.method for row in table.rows)
        raise ConfigError(f"none of the methods ({names}) has any of {', '.join(table.protocols)}")
    return found


def with_rows(table: TableConfig, labels: Sequence[str]) -> TableConfig:
    """Return the table with the rows of these labels alone.

    Raises:
        ConfigError: no row of this label.
    """
    known = [row.label for row in table.rows]
    for label in labels:
        if label not in known:
            raise ConfigError(unknown_name("row of the table", label, known))
    return table.model_copy(update={"rows": tuple(row for row in table.rows if row.label in labels)})


def site_names(sites: Sequence[str]) -> dict[str, str]:
    """Return the name of each site, its id or the name of its file, and what was given for it.

    Raises:
        ConfigError: two sites of one name.
    """
    found: dict[str, str] = {}
    for given in sites:
        name = Path(given).stem if is_yaml(given) else given
        if name in found:
            raise ConfigError(f"sites: {found[name]} and {given} share the name {name!r}; rename a file")
        found[name] = given
    return found


def _slug(text: str) -> str:
    """Return a label as a folder name; labels that would share one are told apart by a hash."""
    plain = "".join(letter if letter.isalnum() or letter in "+-._" else "_" for letter in text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check_protocols(names: Sequence[str]) -> tuple[Protocol, ...]:
    """Return the names as protocols.

    Raises:
        ConfigError: an unknown one.
    """
    unknown = [name for name in names if name not in PROTOCOLS]
    if unknown:
        raise ConfigError(f"protocol {unknown[0]!r} is not known. Known: {', '.join(PROTOCOLS)}.")
    return tuple(name for name in PROTOCOLS if name in names)
