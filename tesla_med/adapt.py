"""Adapt one site: the main path of the package. Results are final before references are read (``score``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.predictor import NOT_FINITE
from tesla_med.engine.stages import stage
from tesla_med.errors import OutputError
from tesla_med.io.locks import output_lock
from tesla_med.plan import Plan, RunRequest, make_plan
from tesla_med.prepare.stream import Behind, SiteImages, Told, read_ahead
from tesla_med.records import SiteResult
from tesla_med.reports.base import Reports
from tesla_med.runs.folder import RunFolder
from tesla_med.runs.weights import no_weights
from tesla_med.types import Carry, Failure, Progress, Ref, Unit


def adapt_site(
    site: str | SiteConfig | None,
    volumes: str | Path,
    *,
    weights: str | Path | None = None,
    statistics: str | Path | None = None,
    pipeline: str | PipelineConfig | None = None,
    method: str | None = None,
    protocol: Protocol | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    reset: Reset | None = None,
    guard: bool | None = None,
    save_probs: bool = False,
    save_uncertainty: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
    corrections: str | Path | None = None,
    anonymise: bool = False,
    key: str | Path | None = None,
    progress: Progress | None = None,
) -> SiteResult:
    """Adapt a model to one site and write results, figures and reports.

    Args:
        site: id, ``pipeline/id``, YAML path, a loaded configuration, or None: every image, nothing is scored.
        volumes: folder of images or of tiles, or one image.
        weights: source weights, or the folder of an nnU-Net or a MONAI bundle; default: the site's.
        statistics: source feature statistics, for the Y protocols only; default: beside the weights.
        pipeline: name, YAML path or loaded configuration; default: the site's.
        method: default: the pipeline's.
        protocol: N-O (each case as it comes), N-M (passes over the site first), Y-O, Y-M (source statistics).
        out: output folder; default ``runs/<site>/<method>-<protocol>``.
        seed: of every generator; the same seed gives the same results on the CPU, bit for bit.
        device: auto, cpu or cuda.
        reset: return to the source model: never, per site or per case; default: the pipeline's.
        guard: stay at or near the source model where adapting does not help; default: the pipeline's.
        save_probs: also write class probabilities.
        save_uncertainty: also write normalised entropy.
        resume: continue an interrupted run with the same settings.
        overwrite: replace an earlier run.
        overrides: ``key=value`` texts over the pipeline, ``site.key=value`` over the site.
        trust_code: let MONAI run the code of a bundle that needs it.
        corrections: folder of corrected masks of some cases, which take part in every update.
        anonymise: replace the names of cases in everything that is written.
        key: file that says which is which.
        progress: called as the work goes on.

    Returns:
        The records of the items; an item that failed is among them and does not stop the others.

    Raises:
        ConfigError: site, pipeline, method or an override is wrong, or an option means nothing for the task.
        DataError: nothing found.
        CheckpointError: weights missing, unreadable, or of another architecture or task.
        AdaptationError: the method cannot adapt this model.
        OutputError: the output folder cannot be used.
    """
    request = RunRequest(
        *(site, volumes, weights, statistics, pipeline, method, protocol, out, seed, device, reset, guard),
        *(save_probs, save_uncertainty, overrides, trust_code, corrections, anonymise, key),
    )
    return run_plan(make_plan(request), resume=resume, overwrite=overwrite, progress=progress)


def run_plan(
    plan: Plan,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    carry: Carry | None = None,
) -> SiteResult:
    """Carry out a plan; arguments and errors as in :func:`adapt_site`.

    What is wrong is found before the output folder is touched. The method takes up and leaves ``carry``.
    """
    free_device_memory()
    run = Run(plan, folder := RunFolder(plan.out), progress or (lambda *_: None), Reports())
    if carry is not None and carry.state is not None:
        run.method.load_state_dict(carry.state)
    folder.check(plan.settings(), resume=resume, overwrite=overwrite, inputs=plan.inputs)
    plan.keep_names()
    with output_lock(plan.out, plan.request.lock):
        folder.prepare(plan.settings(), resume=resume, overwrite=overwrite)
        result = run.execute(resume)
    if carry is not None:
        carry.state = run.method.state_dict()
    return result


class Run:
    """One run while it goes on: every unit is adapted to, judged, finished, scored and reported."""

    def __init__(self, plan: Plan, folder: RunFolder, progress: Progress, reports: Reports) -> None:
        self.plan, self.folder, self.progress, self.task = plan, folder, progress, plan.task
        self.reports, self.tell = reports, Told(self.progress, f"{plan.task.item}s", len(plan.items.names))
        self.predict = plan.make_predictor(self.reports.step)
        self.method, self.driver = self.predict.method, self.predict.driver
        self.ledger = plan.ledger(folder, independent=plan.independent)

    def execute(self, resume: bool) -> SiteResult:
        """Do every unit that is not done, write the reports."""
        saved = self.ledger.take_over(partial(self.task.intact, self.folder)) if resume else None
        if saved is not None:
            self.driver.load_state_dict(saved.cursor["driver"])
            self.method.load_state_dict(saved.state | {"generators": saved.cursor["generators"]})
        for ref in self.ledger.todo:
            self.task.discard(self.folder, ref)
        if not self.plan.independent and not self.ledger.whole:
            self.folder.discard("adapted")
        self.folder.write_manifest(self.plan.settings(), self.plan.manifest(), complete=False)
        self.task.started(self.folder)
        context, earlier = self.plan.report_context(), self.ledger.earlier if resume else None
        with self.reports.started(self.plan.reports, context, earlier):
            for ref, records in self.ledger.taken(self.plan.elsewhere, self.reports.step, self.tell):
                self.reports.earlier(records, partial(self.task.view_again, self.folder, ref))
            self.work(self.ledger.todo)
            return self._finish()

    def work(self, todo: Sequence[Ref]) -> None:
        """Do these units."""
        plan, task, ledger = self.plan, self.task, self.ledger
        if not self.driver.case_by_case and not ledger.whole:
            site = SiteImages(plan.refs, task.load, self.predict.scaled, joined=task.joins, count=task.ahead)
            self.driver.adapt_to_site(site, self.progress, start=ledger.passes, on_pass=self._pass_done)
        self.tell.items(ledger.items_done)
        with Behind() as behind:
            for loaded in read_ahead(todo, task.load, task.ahead):
                self.driver.begin(loaded.ref.name, self.tell)
                next(unit := self._do(loaded))
                behind(unit)
        if ledger.weights_due:
            self._weights(self.folder.checkpoint("adapted"), "adapted")()

    def _pass_done(self, passes: int) -> None:
        self.ledger.passes = passes
        self.reports.steps(self.reports.held())
        self.ledger.keep_state(self.ledger.due(self.method.state_dict, now=True), self.driver.state_dict())

    def _do(self, loaded: Unit | Failure) -> Iterator[None]:
        """Do one unit, whatever is wrong with it; after the yield no network and no device is needed."""
        start, ref, view, outcome, failed = time.perf_counter(), loaded.ref, None, None, None
        moving, save, link = self.driver.case_by_case, no_weights, no_weights
        try:
            if isinstance(loaded, Failure):
                raise loaded.error
            loaded = self.predict.scaled(loaded)
            outcome = self.predict.of(loaded, adapt=ref.name not in self.task.corrections)
            if outcome is not None and outcome.verdict.used != "source" and self.plan.reset == "case":
                save = self._weights(self.folder.checkpoint(ref.name), ref.name, loaded, outcome.verdict)
        except Exception as error:
            failed = error
        if self.task.links and not self.plan.independent and moving and outcome is not None:
            link = self._weights(self.folder.after(ref.name), ref.name)
        state = self.ledger.due(self.method.state_dict, changed=moving), self.driver.state_dict()
        steps, seconds = self.reports.held(), time.perf_counter() - start
        yield
        start = time.perf_counter() - seconds
        try:
            if failed is not None:
                raise failed
            save()
            finished = self.task.finish(self.folder, unit := cast("Unit", loaded), outcome)
            records, view = self.task.score(unit, finished), self.task.view(unit, finished)
        except OutputError:
            raise
        except Exception as error:
            records = self.task.lost(self.folder, ref, error)
        records = [self.plan.told(item, time.perf_counter() - start) for item in records]
        self.ledger.done(ref.name, records, loaded.sha256 if isinstance(loaded, Unit) else "")
        if any(item.status not in ("failed", "collapsed", "blank", "corrected") for item in records):
            link()
        self.ledger.keep_state(*state)
        self.reports.unit(records, view, steps)
        self.tell.later(self.ledger.items_done)

    def _weights(self, path: Path, name: str, *of: Any) -> Callable[[], None]:
        """Copy the network that made the results, of one unit or as it is now; return what writes it."""
        chain = self.plan.chain(self.folder, *of[:1])
        with stage("weights"):
            return chain.copied(self.predict, path, name, self.ledger.seen, *of)

    def _finish(self) -> SiteResult:
        plan, results = self.plan, self.ledger.results(self.plan.items.names)
        files = self.reports.finish(results, self.tell)
        diverged = self.ledger.count(lambda item: NOT_FINITE in item.reason)
        found = plan.result(results, files, self.reports.failed, diverged)
        said = {"notes": list(found.notes), "reports_failed": found.reports_failed}
        self.folder.write_manifest(plan.settings(), plan.manifest(results) | said, complete=True)
        self.folder.states.clear()
        return found
