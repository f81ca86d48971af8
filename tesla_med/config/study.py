"""A study as YAML: sites x weights x methods x protocols x seeds, and the cluster that may carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tesla_med.config.files import is_yaml, read_yaml, validate
from tesla_med.config.models import Protocol
from tesla_med.config.paths import user_path
from tesla_med.config.section import Section
from tesla_med.errors import ConfigError


class StudySite(Section):
    """One site of a study. A site file may be a pattern, ``sites/*.yaml``: every file that it matches."""

    site: str = Field(min_length=1, description="id, pipeline/id, a site file, or a pattern of site files")
    volumes: str | None = Field(None, description="folder of this site's images; default: the study's")


class StudyConfig(Section):
    """A grid of sites x weights x methods x protocols x seeds."""

    name: str = Field(pattern=r"^\w[\w.+-]*$", description="names the output folder")
    sites: tuple[StudySite, ...] = Field(min_length=1)
    volumes: str | None = Field(None, description="common root of the images of all sites")
    pipeline: str | None = Field(None, description="default: each site's")
    weights: tuple[str, ...] = Field((), description="source weights; none: each site's own")
    methods: tuple[str, ...] = Field(("tesla",), min_length=1)
    protocols: tuple[Protocol, ...] = Field(("N-O",), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="a list, or how many, from 0"
    )
    set: tuple[str, ...] = Field((), description="key=value texts over pipeline and site")
    threads: int = Field(1, ge=1, description="CPU threads of every cell, wherever it runs")
    keep_weights: bool = Field(True, description="false: adapted weights go when their cell is done")

    @field_validator("sites", mode="before")
    @classmethod
    def _texts_are_sites(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"site": item} if isinstance(item, str) else item for item in value]

    @field_validator("weights", "methods", "protocols", "set", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("seeds", mode="before")
    @classmethod
    def _how_many(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value < 1:
            raise ValueError("expected how many seeds, 1 or more, or a list of them")
        return tuple(range(value))

    @field_validator("weights", "methods", "protocols", "seeds")
    @classmethod
    def _distinct(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        doubled = [item for place, item in enumerate(value) if item in value[:place]]
        if doubled:
            raise ValueError(f"{doubled[0]!r} is given twice")
        return value

    @model_validator(mode="after")
    def _images_of_every_site(self) -> StudyConfig:
        without = [item.site for item in self.sites if item.volumes is None]
        if self.volumes is None and without:
            raise ValueError(
                f"no folder of images for site {without[0]!r}: give it 'volumes', or the study a common one"
            )
        return self


class SlurmConfig(Section):
    """Jobs of a SLURM cluster: each runs one worker, which does one cell at a time."""

    jobs: int = Field(ge=1, description="at most this many jobs at a time")
    memory: str = Field(min_length=1, description="of a job, such as 16GB")
    walltime: str = Field("24:00:00", description="of a job, as sbatch takes it; longer than any cell")
    cpus: int = Field(1, ge=1, description="CPUs of a job")
    gpus: int = Field(0, ge=0, le=1, description="GPUs of a job: --gres=gpu:1, or none")
    partition: str | None = None
    account: str | None = None
    directives: tuple[str, ...] = Field((), description="further options of sbatch, such as --qos=long")
    prologue: tuple[str, ...] = Field((), description="shell lines before the worker, such as module load")
    python: str | None = Field(None, description="interpreter of the jobs; default: that of the command")
    interface: str | None = Field(None, description="network interface of the scheduler and the workers")
    scratch: str | None = Field(None, description="local folder of a node for the workers' own files")


def load_study(
    path: str | Path, volumes: str | Path | None = None, overrides: Sequence[str] = ()
) -> StudyConfig:
    """Read STUDY.yaml.

    Args:
        path: the file.
        volumes: common root of the images, instead of that of the file.
        overrides: ``key=value`` texts over those of the file.

    Raises:
        ConfigError: no such file, unreadable YAML, unknown key, wrong type or value; names file and key.
    """
    found, content = _content(path, "study")
    if volumes is not None:
        content["volumes"] = str(volumes)
    study = validate(StudyConfig, content, str(found))
    return study.model_copy(update={"set": (*study.set, *overrides)})


def load_slurm(path: str | Path) -> SlurmConfig:
    """Read the description of a SLURM cluster; errors as of :func:`load_study`."""
    found, content = _content(path, "cluster")
    return validate(SlurmConfig, content, str(found))


def _content(path: str | Path, noun: str) -> tuple[Path, dict[str, Any]]:
    found = user_path(path)
    if not found.is_file():
        raise ConfigError(f"no {noun} file at {found}")
    return found, read_yaml(found)


def site_entries(sites: Sequence[StudySite]) -> list[StudySite]:
    """Return one entry per site: patterns of site files are replaced by the files, by name.

    Raises:
        ConfigError: a pattern matches no file.
    """
    found: list[StudySite] = []
    for entry in sites:
        if not (is_yaml(entry.site) and any(letter in entry.site for letter in "*?[")):
            found.append(entry)
            continue
        pattern = user_path(entry.site)
        root = Path(pattern.anchor) if pattern.is_absolute() else Path()
        files = sorted(root.glob(str(pattern.relative_to(root) if pattern.is_absolute() else pattern)))
        if not files:
            raise ConfigError(f"sites: {entry.site!r} matches no file in {Path.cwd()}; check the pattern")
        found += [entry.model_copy(update={"site": str(path)}) for path in files]
    return found
