"""Resolve what a run will do before anything is written: configuration and files, then weights and method."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tesla_med.config.effort import with_effort
from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.request import RunRequest as RunRequest
from tesla_med.config.resolve import other_sites, resolve
from tesla_med.errors import ConfigError
from tesla_med.io.pseudonyms import KEY_ALONE, Pseudonyms
from tesla_med.records import SiteResult
from tesla_med.registry import unknown_name
from tesla_med.reports.base import RunContext, context_of, reports_of
from tesla_med.scoring.text import some_of
from tesla_med.tasks.base import Task, task_of
from tesla_med.tasks.resolved import Resolved as Resolved
from tesla_med.types import Elsewhere, Items, Ref, Unit

if TYPE_CHECKING:
    import torch

    from tesla_med.engine.driver import OnStep
    from tesla_med.engine.predictor import Predictor
    from tesla_med.models.base import Network
    from tesla_med.models.checkpoint import ModelCard
    from tesla_med.models.statistics import GivenStatistics
    from tesla_med.runs.folder import RunFolder
    from tesla_med.runs.resuming import Ledger
    from tesla_med.runs.weights import Chain
    from tesla_med.tta.base import MethodContext, TTAMethod

log = logging.getLogger(__name__)
RESETS: tuple[Reset, ...] = ("never", "site", "case")


@dataclass(frozen=True)
class Plan:
    """A run, resolved.

    Attributes:
        request: what was asked for.
        task: of the pipeline, for this site.
        items: what will be done, and what will not be used.
        weights: path of the source weights.
        weights_sha256: their hash.
        model: the source network.
        card: of the weights, or None.
        method: name.
        protocol: N-O, N-M, Y-O or Y-M.
        reset: never, site or case.
        device: where to compute.
        out: output folder.
        notes: remarks for the whole run.
        reports: names, in order.
        statistics: of the source features, for the Y protocols; None under N.
        names: of cases, where they are replaced.
        elsewhere: has units done by other processes, and yields each with its steps; None: this one does all.
    """

    request: RunRequest
    task: Task
    items: Items
    weights: Path
    weights_sha256: str
    model: Network
    card: ModelCard | None
    method: str
    protocol: Protocol
    reset: Reset
    device: torch.device
    out: Path
    notes: tuple[str, ...]
    reports: tuple[str, ...]
    statistics: GivenStatistics | None = None
    names: Pseudonyms | None = None
    elsewhere: Elsewhere | None = None

    @property
    def site(self) -> SiteConfig:
        """The site."""
        return self.task.site

    @property
    def pipeline(self) -> PipelineConfig:
        """The pipeline, following the weights' card."""
        return self.task.pipeline

    @property
    def independent(self) -> bool:
        """Whether no unit depends on another."""
        from tesla_med.tta.base import METHODS

        return self.reset == "case" or not METHODS.get(self.method).adapts

    @property
    def seed(self) -> int:
        """Of every generator."""
        return self.request.seed

    @cached_property
    def refs(self) -> Sequence[Ref]:
        """Every unit in order, unread."""
        size = self.params(self.method).batch_slices or self.pipeline.predict_batch
        return self.task.refs(self.items, self.seed, size)

    @cached_property
    def context(self) -> MethodContext:
        """What methods are told."""
        from tesla_med.tta.base import MethodContext

        return MethodContext(
            device=self.device,
            seed=self.seed,
            model_range=self.pipeline.preprocessing.model_range,
            precision=self.pipeline.precision,
            predict_batch=self.pipeline.predict_batch,
            cuda_graphs=self.pipeline.cuda_graphs,
            statistics=None if self.statistics is None else self.statistics.moments,
        )

    @property
    def inputs(self) -> tuple[Path, ...]:
        """What is read, and must not be written over."""
        return self.items.folder, self.weights, *(item.mask for item in self.task.corrections.values())

    def keep_names(self) -> None:
        """Write the key file, where names are replaced."""
        if self.names is not None:
            self.names.key.save()

    def told(self, record: Any, seconds: float) -> Any:
        """Return a record with what only the run knows, and without names where these are replaced."""
        record = record if self.names is None else self.names.cleaner.record(record)
        return record.of_run(self.method, self.protocol, self.seed, seconds)

    def make_method(self, name: str) -> TTAMethod:
        """Return a method on its own copy of the source model.

        Raises:
            ConfigError: its parameters do not fit.
            AdaptationError: it cannot adapt this model.
        """
        from tesla_med.tta.base import make_method

        return make_method(name, self.model, self.method_params(name), self.context)

    def make_predictor(self, on_step: OnStep) -> Predictor:
        """Return what predicts unit after unit: source and method, the driver between them, the guard."""
        from tesla_med.engine.building import predictor_of

        return predictor_of(self, on_step)

    def chain(self, folder: RunFolder, unit: Unit | None = None) -> Chain:
        """Return where adapted weights go, those of one unit or of all."""
        from tesla_med.runs.weights import chain_of

        return chain_of(self, folder, unit)

    def ledger(self, folder: RunFolder, *, independent: bool) -> Ledger:
        """Return the ledger of the run; ``independent``: units do not depend on each other."""
        from tesla_med.runs.resuming import Ledger

        keep_every, kind = self.task.keep_every, self.task.result
        return Ledger(folder, self.refs, kind, independent=independent, keep_every=keep_every)

    def report_context(self) -> RunContext:
        """Return what reports know of the run before its first unit."""
        return context_of(self)

    def result(
        self, results: Sequence[Any], files: Sequence[Path], broken: dict[str, str], diverged: int
    ) -> SiteResult:
        """Return the outcome of a run in ``diverged`` of whose units adaptation gave no finite values."""
        from tesla_med.engine.predictor import NOT_FINITE

        notes = self.notes + some_of(NOT_FINITE, diverged, len(self.refs), self.task.unit)
        outcome = self.out, tuple(results), tuple(files), self.items.skipped, notes, self.task.metric
        predicted = self.task.predicted(results)
        return SiteResult(*outcome, diverged, len(self.refs), broken, predicted, self.method)

    def method_params(self, name: str) -> dict[str, Any]:
        """Return the parameters of a method: the pipeline's, for ``source`` over those of the card."""
        params = self.pipeline.method_params(name, self.protocol)
        needed = self.card.extra.get("predict", {}) if self.card is not None and name == "source" else {}
        return {**needed, **params}

    def params(self, name: str) -> Any:
        """Return the checked parameters of a method, defaults included."""
        from tesla_med.tta.base import check_params

        return check_params(name, self.method_params(name))

    def settings(self) -> dict[str, Any]:
        """Return everything that must be the same for a run to be resumed."""
        return {
            "site": self.site.model_dump(mode="json"),
            "pipeline": self.pipeline.model_dump(mode="json", exclude={"reports"}),
            "method": self.method,
            "protocol": self.protocol,
            "reset": self.reset,
            "seed": self.seed,
            "device": self.device.type,
            "weights_sha256": self.weights_sha256,
            "statistics_sha256": None if self.statistics is None else self.statistics.sha256,
            **self.task.settings(self.items),
            **({} if self.names is None else {"anonymised": True}),
        }

    def manifest(self, results: Sequence[Any] = ()) -> dict[str, Any]:
        """Return what a reader needs to judge and repeat the run, and what became of its items."""
        from tesla_med.runs.manifest import manifest_of

        return manifest_of(self, results)


def make_plan(request: RunRequest) -> Plan:
    """Resolve a run; errors as in :func:`tesla_med.adapt_site`."""
    return open_plan(request, resolve_request(request))


def resolve_request(request: RunRequest, *, find: bool = True) -> Resolved:
    """Return site, pipeline, task and items of a request: whatever can be checked without torch.

    Raises:
        ConfigError: an unknown name, a wrong override, or an option that means nothing for this task.
        DataError: no items found; without ``find`` none are looked for.
    """
    if request.reset is not None and request.reset not in RESETS:
        raise ConfigError(unknown_name("reset", request.reset, list(RESETS)))
    site, pipeline = resolve(
        *(request.site, request.pipeline, request.texts, request.weights), trust_code=request.trust_code
    )
    pipeline = with_effort(pipeline, request.method or pipeline.method, request.effort, request.texts)
    task = task_of(pipeline)(site, pipeline, wanted=request.wanted)
    asked = {
        "guard": pipeline.guard.enabled,
        "recalibrate": pipeline.recalibrate,
        "keep-largest": pipeline.keep_largest,
        "reset-case": request.reset == "case",
        "anonymise": request.anonymise,
    }
    task.refuse(request.wanted | {name for name, yes in asked.items() if yes})
    reports_of(task, pipeline.reports)
    folder, others = user_path(request.volumes), other_sites(site) if request.site is not None else []
    items = task.find(folder, others) if find else Items(folder, (), (), ())
    drawn = {} if request.corrections is None else task.corrected(user_path(request.corrections), items)
    if request.key is not None and not request.anonymise:
        raise ConfigError(KEY_ALONE)
    shown = task.renamed(items, drawn, request) if request.anonymise else (items, drawn)
    return Resolved(site, pipeline, task, *shown)


def open_plan(request: RunRequest, resolved: Resolved) -> Plan:
    """Return the plan of a request: device, method, weights and their statistics.

    Raises:
        ConfigError: unknown method, protocol or device, or a card that contradicts the task.
        CheckpointError: weights or statistics are missing, unreadable, or of another task.
    """
    from tesla_med.models.base import default_device
    from tesla_med.models.loading import load_model, weights_path, weights_sha256
    from tesla_med.models.statistics import statistics_for, with_histogram
    from tesla_med.tta.base import choose_protocol

    device = default_device(request.device)
    site, given = resolved.site, resolved.pipeline
    method = request.method or given.method
    protocol = choose_protocol(method, request.protocol, given.protocol)
    path = weights_path(request.weights, site)
    loaded = load_model(path, given, request.texts)
    for text in loaded.warnings:
        log.warning("%s", text)
    trained, digest = loaded.card.acquisition if loaded.card is not None else None, weights_sha256(path)
    statistics = statistics_for(protocol, path, digest, loaded.pipeline, request.statistics)
    pipeline = with_histogram(loaded.pipeline, statistics)
    task = type(resolved.task)(site, pipeline, trained, request.wanted)
    task.corrections = resolved.corrections
    reset = request.reset or task.reset_for(protocol)
    if reset == "case":
        task.refuse({"reset-case"})
    default_out = Path("runs") / site.id / (request.folder_name or f"{method}-{protocol}")
    return Plan(
        request=request,
        task=task,
        items=resolved.items,
        weights=path,
        weights_sha256=digest,
        model=loaded.model,
        card=loaded.card,
        method=method,
        protocol=protocol,
        reset=reset,
        device=device,
        out=default_out if request.out is None else user_path(request.out),
        notes=(*task.notes(), *loaded.warnings, *loaded.notes),
        reports=reports_of(task, task.pipeline.reports),
        statistics=statistics,
        names=resolved.names,
    )
