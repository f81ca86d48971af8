"""The cells of a study: which there are, and a folder for each whose name says what decides its result."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.config.files import load_site
from tesla_med.config.models import PipelineConfig, Protocol, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.resolve import other_sites, resolve
from tesla_med.config.study import StudyConfig, site_entries
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.cases import check_there
from tesla_med.io.files import digest_of
from tesla_med.io.inputs import Hashes, digest_of_items
from tesla_med.models.loading import weights_path, weights_sha256
from tesla_med.models.statistics import statistics_path
from tesla_med.reports.base import reports_of
from tesla_med.runs.folder import RunFolder
from tesla_med.tasks.base import Task, task_of
from tesla_med.tta.base import METHODS, check_params
from tesla_med.types import Items, Progress

CELLS_FOLDER, CELL_FILE, HASHES_FILE = "cells", "cell.json", "inputs.json"
NOT_OF_A_RESULT = {"reports", "report", "title", "citation", "train", "methods", "protocols"}
"""Fields of a pipeline that do not change a cell; of parameters its own method's and the source's count."""
ABOUT_A_SITE = {"weights", "description", "scanner", "terms", "citation"}
"""Fields of a site that do not change a cell."""
LONGEST_PREFIX = 80


@dataclass(frozen=True)
class StudyCell:
    """One run of ``adapt``, resolved, so that any machine that sees the files can do it.

    Attributes:
        name: folder below ``cells/``: the site, then a readable prefix and a hash of what decides the result.
        site: its configuration.
        pipeline: with the overrides.
        volumes: absolute path of the images.
        weights: absolute path.
        method: name.
        protocol: N-O, N-M, Y-O or Y-M.
        seed: of every generator.
        device: auto, cpu or cuda.
        overrides: ``key=value`` texts of the study.
        threads: of the CPU.
        trust_code: let MONAI run the code of a bundle that needs it.
        keep_weights: adapted weights stay.
        count: number of items.
        names: hash of their names.
        shown: site and weights as tables name them, so that no two of a study have one name.
    """

    name: str
    site: SiteConfig
    pipeline: PipelineConfig
    volumes: Path
    weights: Path
    method: str
    protocol: Protocol
    seed: int
    device: str
    overrides: tuple[str, ...]
    threads: int
    trust_code: bool
    keep_weights: bool
    count: int
    names: str
    shown: tuple[str, str] = ("", "")

    def folder(self, out: Path) -> Path:
        """Return its folder in the folder of a study."""
        return out / CELLS_FOLDER / self.name

    def done(self, out: Path) -> bool:
        """Whether it is there; a folder gets this name when it is whole."""
        folder = self.folder(out)
        return (folder / CELL_FILE).is_file() and RunFolder(folder).complete()

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from other cells of the study, as plain values."""
        return {
            "cell": self.name,
            "site": self.shown[0] or self.site.id,
            "weights": self.shown[1] or self.weights.name,
            "method": self.method,
            "protocol": self.protocol,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Grid:
    """What a study consists of.

    Attributes:
        cells: in the order of the study: sites, weights, methods, protocols, seeds.
        problems: (site, reason) of sites that no cell can be made of.
    """

    cells: tuple[StudyCell, ...]
    problems: tuple[tuple[str, str], ...]


def grid_of(study: StudyConfig, hashes: Hashes, device: str, *, trust_code: bool, progress: Progress) -> Grid:
    """Return the cells of a study. Every image is read once, for its hash; see :class:`Hashes`.

    A method runs under the protocols that it has; one without randomness under the first seed only, one that
    does not adapt under the first protocol only.

    Raises:
        ConfigError: an unknown site, method or pipeline, a wrong override, a site that is given twice, or an
            option that means nothing for the task.
        CheckpointError: a site without weights, or weights that cannot be used.
        DataError: no such common root of the images, or weights that cannot be read.
    """
    if study.volumes is not None:
        check_there(user_path(study.volumes))
    _runs(study, seeded=False)  # what is wrong with the methods is said before any file is read
    maker = _Maker(study, hashes, device, trust_code, progress)
    cells: list[StudyCell] = []
    problems: list[tuple[str, str]] = []
    seen: set[tuple[str, str]] = set()
    entries = [(entry, load_site(entry.site, None, study.set)) for entry in site_entries(study.sites)]
    for _, site in entries:
        if (site.pipeline, site.id) in seen:
            raise ConfigError(f"sites: {site.pipeline}/{site.id} is given twice; give each its own site file")
        seen.add((site.pipeline, site.id))
    for entry, site in entries:
        volumes = user_path(entry.volumes or study.volumes or ".").absolute()
        try:
            cells += maker.cells(site, volumes)
        except _NothingThereError as error:
            problems.append((site.id, str(error)))
    return Grid(tuple(_shown(cells)), tuple(problems))


def _shown(cells: Sequence[StudyCell]) -> Iterator[StudyCell]:
    """Yield the cells with names of sites and weights: as short as they can be, and no two the same."""
    sites = _shortest({(cell.site.pipeline, cell.site.id) for cell in cells})
    weights = _shortest({cell.weights.parts for cell in cells})
    for cell in cells:
        about = sites[cell.site.pipeline, cell.site.id], weights[cell.weights.parts]
        yield replace(cell, shown=about)


def _shortest(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return for each path (its parts) its last parts, as many as no other path ends with."""
    found: dict[tuple[str, ...], str] = {}
    left, length = set(paths), 1
    while left:
        ends = Counter(path[-length:] for path in left)
        for path in list(left):
            if ends[path[-length:]] == 1 or length >= len(path):
                found[path] = "/".join(path[-length:])
        left -= found.keys()
        length += 1
    return found


class _NothingThereError(Exception):
    """A site has no items."""


class _Maker:
    """Makes the cells of one site after the other; weights and site files are read once."""

    def __init__(
        self, study: StudyConfig, hashes: Hashes, device: str, trust_code: bool, progress: Progress
    ) -> None:
        self.study, self.hashes, self.progress = study, hashes, progress
        self.device, self.trust_code = device, trust_code
        self._others: dict[str, list[SiteConfig]] = {}
        self._weights: dict[Path, str] = {}

    def cells(self, site: SiteConfig, volumes: Path) -> list[StudyCell]:
        """Return the cells of a site.

        Raises:
            _NothingThereError: it has no items.
        """
        found: list[StudyCell] = []
        known: dict[tuple[str, int], tuple[Items, str]] = {}
        for given in self.study.weights or (None,):
            path = weights_path(given, site).absolute()
            _, pipeline = resolve(site, self.study.pipeline, self.study.set, path, trust_code=self.trust_code)
            self._hash_of_weights(path)
            _check(pipeline)
            kind = pipeline.task, pipeline.channels
            if kind not in known:
                items = self._items(task_of(pipeline)(site, pipeline), volumes)
                known[kind] = items, digest_of_items(items, self.hashes, self.progress, site.id)
            found += self._cells_of(site, pipeline, volumes, path, *known[kind])
        return found

    def _cells_of(
        self,
        site: SiteConfig,
        pipeline: PipelineConfig,
        volumes: Path,
        weights: Path,
        items: Items,
        digest: str,
    ) -> list[StudyCell]:
        study, names, found = self.study, names_digest(items), []
        for method, protocol, seed in _runs(study, seeded=task_of(pipeline).seeded):
            parameters = pipeline.method_params(method, protocol)
            check_params(method, parameters)
            content = {
                "version": __version__,
                "site": site.model_dump(mode="json", exclude=ABOUT_A_SITE),
                "pipeline": pipeline.model_dump(mode="json", exclude=NOT_OF_A_RESULT),
                "parameters": parameters,
                "source": pipeline.method_params("source", protocol),
                "run": [method, protocol, seed, self.device.partition(":")[0], study.threads],
                "weights": self._hash_of_weights(weights),
                "statistics": self._hash_of_statistics(weights) if protocol.startswith("Y") else None,
                "items": digest,
            }
            name = _name(site, weights, f"{method}-{protocol}", seed, content)
            run = (
                method,
                protocol,
                seed,
                self.device,
                study.set,
                study.threads,
                self.trust_code,
                study.keep_weights,
            )
            found.append(StudyCell(name, site, pipeline, volumes, weights, *run, len(items.names), names))
        return found

    def _items(self, task: Task, volumes: Path) -> Items:
        """Return the items of a site; the site files of a folder are read once for all of its sites."""
        site = task.site
        if site.pipeline not in self._others:
            self._others[site.pipeline] = other_sites(site.model_copy(update={"id": ""}))
        others = [other for other in self._others[site.pipeline] if other.id != site.id]
        try:
            return task.find(volumes, others)
        except DataError as error:
            raise _NothingThereError(str(error)) from error

    def _hash_of_weights(self, path: Path) -> str:
        """Return one hash of weights and of the card beside them, if there is one."""
        if path not in self._weights:
            card = path.with_suffix(".json")
            own = weights_sha256(path)
            with_card = path.is_file() and card.is_file()
            self._weights[path] = f"{own} {digest_of([card])}" if with_card else own
        return self._weights[path]

    def _hash_of_statistics(self, weights: Path) -> str:
        """Return a hash of the source statistics of weights; that they are missing is one, too."""
        path = statistics_path(weights)
        if path not in self._weights:
            self._weights[path] = digest_of([path, path.with_suffix(".json")])
        return self._weights[path]


def _check(pipeline: PipelineConfig) -> None:
    """Refuse what every run with a pipeline would refuse, as :func:`tesla_med.plan.resolve_request` does."""
    asked = {
        "guard": pipeline.guard.enabled,
        "recalibrate": pipeline.recalibrate,
        "keep-largest": pipeline.keep_largest,
    }
    task = task_of(pipeline)
    task.refuse({name for name, yes in asked.items() if yes})
    reports_of(task, pipeline.reports)


def names_digest(items: Items) -> str:
    """Return a hash of the names of items."""
    text = "\n".join(items.names).encode("utf-8", errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()


def _runs(study: StudyConfig, *, seeded: bool) -> list[tuple[str, Protocol, int]]:
    """Return method, protocol and seed of every cell of a site.

    Raises:
        ConfigError: an unknown method, or none that has any of the protocols.
    """
    found: list[tuple[str, Protocol, int]] = []
    for name in study.methods:
        method = METHODS.get(name)
        fixed = not method.adapts if seeded else method.deterministic
        has = [protocol for protocol in study.protocols if protocol in method.protocols]
        for protocol in has if method.adapts else has[:1]:
            found += [(name, protocol, seed) for seed in (study.seeds[:1] if fixed else study.seeds)]
    if not found:
        raise ConfigError(
            f"none of the methods ({', '.join(study.methods)}) has any of {', '.join(study.protocols)}"
        )
    return found


def _name(site: SiteConfig, weights: Path, run: str, seed: int, content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    prefix = f"{run}-seed-{seed}-{_plain(weights.stem)}"[:LONGEST_PREFIX]
    return f"{_plain(site.id)}/{prefix}-{hashlib.sha256(text).hexdigest()[:16]}"


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "+-_." else "_" for letter in text).lstrip(".")
