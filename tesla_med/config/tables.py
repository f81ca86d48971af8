"""Tables of a comparison as YAML: which rows, protocols, sites and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tesla_med.config.files import is_yaml, read_yaml, search_roots, validate, yaml_files
from tesla_med.config.models import Protocol, Section
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name


class Row(Section):
    """One row: a method, with overrides of its own."""

    label: str = Field(min_length=1)
    method: str
    pipeline: str | None = Field(None, description="instead of the table's")
    set: tuple[str, ...] = Field((), description="key=value texts over the pipeline")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The texts of ``set``."""
        return self.set


class TableConfig(Section):
    """A grid of rows x protocols x sites x seeds."""

    title: str = "Comparison"
    caption: str = ""
    pipeline: str
    sites: tuple[str, ...] = Field(min_length=1)
    protocols: tuple[Protocol, ...] = Field(("N-O",), min_length=1)
    seeds: int = Field(3, ge=1, description="how many")
    first_seed: int = Field(0, ge=0, description="so that parts of a grid can be run separately")
    rows: tuple[Row, ...] = Field(min_length=1)
    baseline: str = Field("source", description="label of the row that others are tested against")
    figures: tuple[Literal["qualitative", "projection", "sanity_check"], ...] = Field(
        (), description="figures in addition to those of the table"
    )

    @model_validator(mode="after")
    def _distinct(self) -> TableConfig:
        labels = [row.label for row in self.rows]
        doubled = {label for label in labels if labels.count(label) > 1}
        if doubled:
            raise ValueError(f"rows must have distinct labels; {sorted(doubled)[0]!r} occurs twice")
        if "baseline" in self.model_fields_set and self.baseline not in labels:
            raise ValueError(unknown_name("row", self.baseline, labels))
        return self


def table_files(roots: Iterable[Path] | None = None) -> dict[str, Path]:
    """Return every table by name, from ``pipelines/tables`` and ``pipelines/figures`` of the search path."""
    every = roots if roots is not None else search_roots()
    return yaml_files(root / "pipelines" / folder for root in every for folder in ("tables", "figures"))


def load_table(name: str | Path, roots: Iterable[Path] | None = None) -> TableConfig:
    """Read a table by name or by the path of a YAML file.

    Raises:
        ConfigError: unknown name, unreadable YAML, unknown key, wrong type or value.
    """
    path = user_path(name)
    if not is_yaml(path.name):
        known = table_files(roots)
        if str(name) not in known:
            raise ConfigError(unknown_name("table", str(name), list(known)))
        path = known[str(name)]
    elif not path.is_file():
        raise ConfigError(f"no table file at {path}")
    return validate(TableConfig, read_yaml(path), str(path))


def make_table(
    pipeline: str,
    sites: Sequence[str],
    methods: Sequence[str],
    protocols: Sequence[Protocol],
    seeds: int,
    baseline: str | None = None,
    first_seed: int = 0,
) -> TableConfig:
    """Return the table of some methods, a row each; the baseline is ``source`` if it is among them.

    Raises:
        ConfigError: no site or no method, or one named twice.
    """
    rows = [{"label": name, "method": name} for name in methods]
    chosen = baseline or ("source" if "source" in methods or not methods else methods[0])
    content = {
        "title": f"{', '.join(methods)} on {pipeline}",
        "pipeline": pipeline,
        "sites": list(sites),
        "protocols": list(protocols),
        "seeds": seeds,
        "first_seed": first_seed,
        "rows": rows,
        "baseline": chosen,
    }
    return validate(TableConfig, content, "compare")
