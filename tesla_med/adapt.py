"""Adapt one site: items in, results and reports out. The main path of the package, for every task.

Methods see images only. A result is final before its reference is read (``Task.score``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.predictor import NOT_FINITE
from tesla_med.engine.stages import stage
from tesla_med.errors import OutputError
from tesla_med.io.locks import output_lock
from tesla_med.plan import Plan, RunRequest, make_plan
from tesla_med.prepare.stream import SiteImages, named_error, read_ahead
from tesla_med.records import SiteResult
from tesla_med.reports.base import Reports
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.text import some_of
from tesla_med.types import Carry, Failure, Progress, Ref, Unit, Verdict

log = logging.getLogger(__name__)


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
        protocol: N-O (each case adapted to and predicted as it comes) or N-M (several passes over
            the site, then prediction), Y-O or Y-M (the same with source statistics); default: the pipeline's.
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
        *(save_probs, save_uncertainty, overrides, trust_code),
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

    Whatever can be found wrong is found before the output folder is touched. With ``carry`` the method
    starts from the state that it holds, and leaves its own there.
    """
    free_device_memory()
    folder = RunFolder(plan.out)
    run = _Run(plan, folder, progress or (lambda *_: None))
    if carry is not None and carry.state is not None:
        run.method.load_state_dict(carry.state)
    inputs = plan.items.folder, plan.weights
    folder.check(plan.settings(), resume=resume, overwrite=overwrite, inputs=inputs)
    with output_lock(plan.out, plan.request.lock):
        folder.prepare(plan.settings(), resume=resume, overwrite=overwrite)
        result = run.execute(resume)
    if carry is not None:
        carry.state = run.method.state_dict()
    return result


class _Run:
    """One run while it goes on: every unit is adapted to, judged, finished, scored and reported."""

    def __init__(self, plan: Plan, folder: RunFolder, progress: Progress) -> None:
        self.plan, self.folder, self.progress, self.task = plan, folder, progress, plan.task
        self.reports = Reports()
        self.predict = plan.make_predictor(self.reports.step)
        self.method, self.driver = self.predict.method, self.predict.driver
        self.independent = plan.reset == "case" or not self.method.adapts
        self.ledger = plan.ledger(folder, independent=self.independent)

    def execute(self, resume: bool) -> SiteResult:
        """Do every unit that is not done, write the reports."""
        saved = self.ledger.take_over(partial(self.task.intact, self.folder)) if resume else None
        if saved is not None:
            self.driver.load_state_dict(saved.cursor["driver"])
            self.method.load_state_dict(saved.state | {"generators": saved.cursor["generators"]})
        for ref in (todo := self.ledger.todo):
            self.task.discard(self.folder, ref)
        if not self.independent and not self.ledger.whole:
            self.folder.discard("adapted")
        self.folder.write_manifest(self.plan.settings(), self.plan.manifest(), complete=False)
        self.task.started(self.folder)
        context, earlier = self.plan.report_context(), self.ledger.earlier if resume else None
        with self.reports.started(self.plan.reports, context, earlier):
            for ref, records in self.ledger.done_before:
                self.reports.earlier(records, partial(self.task.view_again, self.folder, ref))
            self._work(todo)
            return self._finish()

    def _work(self, todo: Sequence[Ref]) -> None:
        plan, task, ledger = self.plan, self.task, self.ledger
        if not self.driver.case_by_case and not ledger.whole:
            site = SiteImages(plan.refs, task.load, self.predict.scaled, joined=task.joins, count=task.ahead)
            self.driver.adapt_to_site(site, self.progress, start=ledger.passes, on_pass=self._pass_done)
        self.progress(items := f"{task.item}s", ledger.items_done, total := len(plan.items.names))
        for loaded in read_ahead(todo, task.load, task.ahead):
            self.driver.begin(loaded.ref.name, self.progress)
            self._do(loaded)
            self.progress(items, ledger.items_done, total)
        if not self.independent and not ledger.whole and ledger.used - {"source"}:
            self._save(self.folder.checkpoint("adapted"), "adapted")

    def _pass_done(self, passes: int) -> None:
        self.ledger.passes = passes
        self.ledger.keep_state(self.method.state_dict, self.driver.state_dict(), changed=True, now=True)

    def _do(self, loaded: Unit | Failure) -> None:
        """Do one unit; whatever is wrong with it, the others go on."""
        start, ref, view = time.perf_counter(), loaded.ref, None
        try:
            if isinstance(loaded, Failure):
                raise loaded.error
            loaded = self.predict.scaled(loaded)
            outcome = None if loaded.images is None else self.predict(loaded.images, loaded.fill)
            if outcome is not None and outcome.verdict.used != "source" and self.plan.reset == "case":
                self._save(self.folder.checkpoint(ref.name), ref.name, loaded, outcome.verdict)
            finished = self.task.finish(self.folder, loaded, outcome)
            records = self.task.score(loaded, finished)
            view = self.task.view(loaded, finished)
        except OutputError:
            raise
        except Exception as error:
            reason = str(named_error(self.task.named(ref), error))
            log.info("%s: failed", ref.name)
            self.task.discard(self.folder, ref)
            records = self.task.failed(ref, reason)
        plan, seconds = self.plan, time.perf_counter() - start
        records = [item.of_run(plan.method, plan.protocol, plan.seed, seconds) for item in records]
        self.ledger.done(ref.name, records, loaded.sha256 if isinstance(loaded, Unit) else "")
        moving = self.driver.case_by_case
        moved = any(item.status not in ("failed", "collapsed", "blank") for item in records)
        if self.task.links and not self.independent and moving and moved:
            self._save(self.folder.after(ref.name), ref.name)
        self.ledger.keep_state(self.method.state_dict, self.driver.state_dict(), changed=moving)
        self.reports.unit(records, view)

    def _save(self, path: Path, name: str, unit: Unit | None = None, verdict: Verdict | None = None) -> None:
        """Save the network that made the results, of one unit or as it is now."""
        images = None if unit is None else unit.images
        method, predict = self.method, self.method.deployed_params(images)
        if predict and not self.task.joins:  # a batch's own statistics: batches must be as large
            predict["batch_slices"] = method.params.batch_slices
        seen = list(self.ledger.records) if images is None else [name]
        share = 1.0 if verdict is None else verdict.share
        with stage("weights"), self.predict.deployed(images, verdict) as network:
            chain = self.plan.chain(self.folder, unit)
            chain.save(path, network, name, seen, updates=method.steps, predict=predict, share=share)

    def _finish(self) -> SiteResult:
        plan, task, results = self.plan, self.task, self.ledger.results(self.plan.items.names)
        units, diverged = len(plan.refs), self.ledger.count(lambda item: NOT_FINITE in item.reason)
        notes = plan.notes + some_of(NOT_FINITE, diverged, units, task.unit)
        files, broken = self.reports.finish(results, self.progress), self.reports.failed
        said = {"notes": list(notes), "reports_failed": broken, **task.account(plan.items, results)}
        self.folder.write_manifest(plan.settings(), plan.manifest() | said, complete=True)
        self.folder.states.clear()
        outcome = plan.out, tuple(results), tuple(files), plan.items.skipped, notes
        return SiteResult(*outcome, task.metric, diverged, units, broken, task.predicted(results))
