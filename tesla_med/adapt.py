"""Adapt one site: cases in, masks and results out. The main path of the package.

Methods see slices only. A mask is final before its reference is read (see ``scoring``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.guard import Verdict
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.postprocess import keep_largest
from tesla_med.engine.predictor import CasePredictor
from tesla_med.engine.quality import with_estimates
from tesla_med.engine.recalibration import scale_volume
from tesla_med.errors import OutputError
from tesla_med.io.files import output_lock, sha256
from tesla_med.io.volumes import write_map, write_mask
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.plan import Plan, make_plan
from tesla_med.prepare.stream import CaseLoader, Failure, LoadedCase, SiteSlices, case_error, read_ahead
from tesla_med.reports.base import REPORTS, Report, RunContext, make_reports
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring import score as scoring
from tesla_med.types import Case, CaseResult, CaseView, Prediction, Progress, mean_of_known

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteResult:
    """Outcome of a run.

    Attributes:
        out: the output folder.
        results: one record a case, in order.
        files: report files written.
        skipped: files that were not used, with the reason.
        notes: remarks that hold for the whole run.
    """

    out: Path
    results: tuple[CaseResult, ...]
    files: tuple[Path, ...]
    skipped: tuple[tuple[Path, str], ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Cases without a mask, or whose reference does not fit."""
        return tuple(item for item in self.results if item.status in ("failed", "unscored"))

    @property
    def mean_dice(self) -> float | None:
        """Mean over cases of the mean foreground Dice, or None without references."""
        return mean_of_known(item.mean_dice for item in self.results)

    @property
    def mean_dice_source(self) -> float | None:
        """The same for the unadapted model."""
        return mean_of_known(item.mean_dice_source for item in self.results)


def adapt_site(
    site: str | SiteConfig,
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
    progress: Progress | None = None,
) -> SiteResult:
    """Adapt a model to one site and write masks, figures and reports.

    Args:
        site: id, ``pipeline/id``, YAML path, or a loaded configuration.
        volumes: folder of images, or one image.
        weights: source weights (.safetensors, .pth); default: the site's.
        statistics: source feature statistics, for the Y protocols only; default: beside the weights.
        pipeline: name, YAML path or loaded configuration; default: the site's.
        method: default: the pipeline's.
        protocol: N-O (each case adapted to and predicted as it comes) or N-M (several passes over
            the site, then prediction), Y-O or Y-M (the same with source statistics); default: the pipeline's.
        out: output folder; default ``runs/<site>/<method>-<protocol>``.
        seed: of every generator; the same seed gives the same masks on the CPU, bit for bit.
        device: auto, cpu or cuda.
        reset: when the method returns to the source model: never, site or case; default: the
            pipeline's for the protocol.
        guard: judge every volume and stay at or near the source where adapting does not help; default:
            the pipeline's.
        save_probs: also write class probabilities.
        save_uncertainty: also write normalised entropy.
        resume: go on with an interrupted run of the same settings.
        overwrite: replace an earlier run.
        overrides: ``key=value`` texts over the pipeline, ``site.key=value`` over the site.
        progress: called as the work goes on.

    Returns:
        The cases' records; a case that failed is among them and does not stop the others.

    Raises:
        ConfigError: site, pipeline, method or an override is wrong.
        DataError: no images found.
        CheckpointError: weights missing, unreadable, or of another architecture or task.
        AdaptationError: the method cannot adapt this model.
        OutputError: the output folder cannot be used.
    """
    plan = make_plan(
        site,
        volumes,
        weights=weights,
        statistics=statistics,
        pipeline=pipeline,
        method=method,
        protocol=protocol,
        out=out,
        seed=seed,
        device=device,
        reset=reset,
        overrides=(*overrides, *guard_override(guard)),
        save_probs=save_probs,
        save_uncertainty=save_uncertainty,
    )
    return run_plan(plan, resume=resume, overwrite=overwrite, progress=progress)


def guard_override(guard: bool | None) -> tuple[str, ...]:
    """Return the override that ``--guard`` and ``--no-guard`` stand for."""
    return () if guard is None else (f"guard.enabled={str(guard).lower()}",)


@dataclass
class Carry:
    """A method's state on its way from one site to the next, under ``reset: never``."""

    state: dict[str, Any] | None = None


def run_plan(
    plan: Plan,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    carry: Carry | None = None,
) -> SiteResult:
    """Carry out a plan; see :func:`adapt_site`.

    Whatever can be found wrong is found before the output folder is touched.

    Args:
        plan: what to do.
        resume: go on with an interrupted run.
        overwrite: replace an earlier run.
        progress: called as the work goes on.
        carry: the method starts from its state, and leaves its own there.
    """
    free_device_memory()
    folder = RunFolder(plan.out)
    run = _Run(plan, folder, progress or (lambda *_: None))
    if carry is not None and carry.state is not None:
        run.method.load_state_dict(carry.state)
    inputs = (plan.folder, plan.weights)
    folder.check(plan.settings(), resume=resume, overwrite=overwrite, inputs=inputs)
    with output_lock(plan.out):
        folder.prepare(plan.settings(), resume=resume, overwrite=overwrite)
        result = run.execute(resume)
    if carry is not None:
        carry.state = run.method.state_dict()
    return result


class _Run:
    """One run while it goes on."""

    def __init__(self, plan: Plan, folder: RunFolder, progress: Progress) -> None:
        self.plan = plan
        self.folder = folder
        self.progress = progress
        self.source = plan.make_method("source")
        self.method = self.source if plan.method == "source" else plan.make_method(plan.method)
        self.load = CaseLoader(plan.site, plan.pipeline, plan.card)
        self.manifest = plan.manifest()
        self.results: dict[str, CaseResult] = {}
        self.passes = 0
        self.whole = False  # everything was done before: nothing is adapted, nothing saved
        self.driver = Driver(self.method, plan.protocol, plan.reset, self._tell_step)
        self.predict = CasePredictor(
            self.source,
            self.method,
            self.driver,
            plan.pipeline.guard,
            recalibrate=plan.pipeline.recalibrate,
        )
        self.independent = plan.reset == "case" or not self.method.adapts
        self.reports: list[Report] = []
        for name in plan.pipeline.reports:
            REPORTS.get(name)

    def execute(self, resume: bool) -> SiteResult:
        """Do every case that is not done, write the reports."""
        todo = self._begin(resume)
        try:
            self._work(todo)
            return self._finish()
        except BaseException:
            for report in self.reports:
                report.close()
            raise

    def _begin(self, resume: bool) -> list[Case]:
        """Take over what is done, start the reports, and return the cases to do."""
        plan = self.plan
        if resume and not self._take_over():
            self.folder.states.clear()
        todo = [case for case in plan.cases if case.name not in self.results]
        for case in todo:
            self.folder.discard(case.name)
        if not self.independent and not self.whole:
            self.folder.discard("adapted")
        self.folder.write_manifest(plan.settings(), self.manifest, [], complete=False)
        self.folder.write_labels(plan.pipeline)
        self.reports = make_reports(plan.pipeline.reports, self._context())
        for result in self.results.values():
            self._tell(result, None)
        return todo

    def _take_over(self) -> bool:
        """Take over what an earlier attempt did; return whether its state, if it has one, was used."""
        plan, folder = self.plan, self.folder
        if self.independent:
            found = [folder.finished(case, self._extras(case)) for case in plan.cases]
            self.results = {result.case: result for result in found if result is not None}
            return False
        saved = folder.states.load()
        self.whole = saved is None and folder.complete()
        names = [case.name for case in plan.cases] if saved is None else saved.cursor["done"]
        done = plan.cases[: len(names)]
        records = [folder.record(case.name) for case in done]
        usable = [case.name for case in done] == names and all(
            record is not None and self._still_good(case, record)
            for case, record in zip(done, records, strict=True)
        )
        if not usable or not (saved or self.whole):
            self.whole = False
            return False
        self.results = {record.case: record for record in records if record is not None}
        if saved is not None:
            self.passes = saved.cursor["passes"]
            self.driver.load_state_dict(saved.cursor["driver"])
            self.method.load_state_dict(saved.state | {"generators": saved.cursor["generators"]})
        return True

    def _still_good(self, case: Case, record: CaseResult) -> bool:
        """Whether a case of a stream may stay as it is; a failed one in a stream that goes on may."""
        if record.status == "failed":
            return not self.whole
        return self.folder.unchanged(case, record, self._extras(case))

    def _keep_state(self, *, changed: bool) -> None:
        """Keep what going on from here needs; ``changed``: the method is not what it was last time."""
        if self.independent:
            return
        state = self.method.state_dict()
        cursor = {
            "done": list(self.results),
            "passes": self.passes,
            "driver": self.driver.state_dict(),
            "generators": state["generators"],
        }
        self.folder.states.save(cursor, state if changed else None)

    def _pass_done(self, passes: int) -> None:
        self.passes = passes
        self._keep_state(changed=True)

    def _work(self, todo: list[Case]) -> None:
        total = len(self.plan.cases)
        if not self.driver.case_by_case and not self.whole:
            self.driver.adapt_to_site(
                SiteSlices(self.plan.cases, self.load),
                progress=self.progress,
                start=self.passes,
                on_pass=self._pass_done,
            )
        self.progress("cases", len(self.results), total)
        for loaded in read_ahead(todo, self.load):
            self._do_case(loaded)
            self.progress("cases", len(self.results), total)
        if (
            not self.independent
            and not self.whole
            and any(item.used != "source" for item in self.results.values())
        ):
            self._save_checkpoint("adapted", None)

    def _finish(self) -> SiteResult:
        plan = self.plan
        results = [self.results[case.name] for case in plan.cases]
        files: list[Path] = []
        for index, report in enumerate(self.reports):
            self.progress("reports", index, len(self.reports))
            files += report.finish(results)
        self.progress("reports", len(self.reports), len(self.reports))
        self.folder.write_manifest(plan.settings(), self.manifest, results, complete=True)
        self.folder.states.clear()
        return SiteResult(plan.out, tuple(results), tuple(files), plan.skipped, plan.notes)

    def _context(self) -> RunContext:
        plan = self.plan
        return RunContext(
            out=plan.out,
            site=plan.site,
            pipeline=plan.pipeline,
            method=plan.method,
            protocol=plan.protocol,
            seed=plan.seed,
            reset=plan.reset,
            manifest=self.manifest,
            notes=plan.notes,
        )

    def _extras(self, case: Case) -> list[Path]:
        """Return what a finished case has besides its masks."""
        plan, folder = self.plan, self.folder
        wanted = ((plan.save_probs, folder.probs), (plan.save_uncertainty, folder.uncertainty))
        return [path(case.name) for asked, path in wanted if asked]

    # ------------------------------------------------------------ one case

    def _do_case(self, loaded: LoadedCase | Failure) -> None:
        start = time.perf_counter()
        view: CaseView | None = None
        try:
            if isinstance(loaded, Failure):
                raise loaded.error
            result, view = self._process(loaded)
        except OutputError:
            raise
        except Exception as error:  # whatever is wrong with one case, the others go on
            reason = str(case_error(loaded.case, error))
            log.warning("%s: %s", loaded.case.name, reason)
            self.folder.discard(loaded.case.name)
            result = self._result(loaded.case, status="failed", used="source", reason=reason)
        result = result.model_copy(update={"seconds": time.perf_counter() - start})
        self.folder.keep(result)
        self.results[result.case] = result
        moved = result.status not in ("failed", "collapsed", "blank")
        if not self.independent and self.driver.case_by_case and moved:
            self._save_after(result)
        self._keep_state(changed=self.driver.case_by_case)
        self._tell(result, view)

    def _tell(self, result: CaseResult, view: CaseView | None) -> None:
        for report in self.reports:
            report.case(result, view)

    def _tell_step(self, step: int, scalars: dict[str, float]) -> None:
        for report in self.reports:
            report.step(step, scalars)

    def _result(self, case: Case, **fields: Any) -> CaseResult:
        plan = self.plan
        return CaseResult(
            case=case.name,
            site=plan.site.id,
            method=plan.method,
            protocol=plan.protocol,
            seed=plan.seed,
            **fields,
        )

    def _process(self, loaded: LoadedCase) -> tuple[CaseResult, CaseView]:
        if loaded.prepared is None:
            source = adapted = self._background(loaded)
            verdict, slices = Verdict(0.0, "the image is constant: nothing to adapt to or to find"), 0
        else:
            images = loaded.prepared.images
            slices = images.shape[0]
            outcome = self.predict(images)
            verdict = outcome.verdict
            source = adapted = self._restore(loaded, outcome.source)
            if verdict.used != "source":
                adapted = self._restore(loaded, outcome.probs, outcome.temperature)
                if self.plan.reset == "case":
                    self._save_checkpoint(loaded.case.name, images, verdict)
        self._write(loaded, source, adapted)
        scored = scoring.score(
            loaded.case, loaded.volume, source, adapted, self.plan.site, self.plan.pipeline
        )
        entropies = _entropies(source, adapted)
        result = self._result(
            loaded.case,
            status=_status(loaded, adapted, verdict, scored.problem),
            used=verdict.used,
            share=verdict.share,
            reason="; ".join(text for text in (verdict.reason, scored.problem) if text),
            slices=slices,
            input_sha256=loaded.input_sha256,
            entropy_source=entropies[0],
            entropy=entropies[1],
            signals=verdict.signals,
            notes=loaded.notes,
            scores=with_estimates(scored.scores, verdict.signals, self.plan.pipeline.quality),
            calibration=scored.calibration,
        )
        view = CaseView(
            image=loaded.volume.array[0],
            source_mask=source.mask,
            mask=adapted.mask,
            reference=scored.reference,
            affine=loaded.volume.affine,
            spacing=loaded.volume.spacing,
        )
        return result, view

    def _restore(self, loaded: LoadedCase, probs: Tensor, temperature: float = 1.0) -> Prediction:
        assert loaded.prepared is not None  # noqa: S101 - a blank case never gets here
        native = loaded.prepared.restore(probs)
        mask = scoring.label_values(native, self.plan.pipeline)
        if temperature != 1.0:
            native = scale_volume(native, temperature)
        return Prediction(native, keep_largest(mask) if self.plan.pipeline.keep_largest else mask)

    def _background(self, loaded: LoadedCase) -> Prediction:
        probs = np.zeros((len(self.plan.pipeline.classes), *loaded.volume.shape), dtype=np.float32)
        probs[0] = 1.0
        return Prediction(probs, scoring.label_values(probs, self.plan.pipeline))

    def _write(self, loaded: LoadedCase, source: Prediction, adapted: Prediction) -> None:
        name, volume = loaded.case.name, loaded.volume
        write_mask(self.folder.source_mask(name), source.mask, volume)
        if self.plan.save_probs:
            write_map(self.folder.probs(name), adapted.probs, volume)
        if self.plan.save_uncertainty:
            write_map(self.folder.uncertainty(name), scoring.normalised_entropy(adapted.probs), volume)
        write_mask(self.folder.mask(name), adapted.mask, volume)

    def _save_after(self, result: CaseResult) -> None:
        """Save the weights after a case: one more link of the chain that leads back to the source."""
        self._save(self.folder.after(result.case), result.case, None)

    def _save_checkpoint(self, name: str, images: Tensor | None, verdict: Verdict | None = None) -> None:
        self._save(self.folder.checkpoint(name), name, images, verdict)

    def _save(self, path: Path, name: str, images: Tensor | None, verdict: Verdict | None = None) -> None:
        plan = self.plan
        seen = [name] if images is not None else list(self.results)
        extra = {
            "adapted_to": plan.site.id,
            "case": name,
            "cases_seen": seen,
            "method": plan.method,
            "protocol": plan.protocol,
            "seed": plan.seed,
            "updates": self.method.steps,
            "share": 1.0 if verdict is None else verdict.share,
            "predict": self.method.deployed_params(images),
            "source_sha256": plan.weights_sha256,
            "parent_sha256": self._parent(seen[:-1]),
        }
        sites = plan.card.training_sites if plan.card is not None else ()
        acquisition = plan.card.acquisition if plan.card is not None else None
        card = make_card(plan.pipeline, sites, extra, acquisition)
        with self.predict.deployed(images, verdict) as network:
            save_checkpoint(path, network, card)

    def _parent(self, earlier: Sequence[str]) -> str:
        """Return the hash of the weights after the last of the earlier cases, or of the source."""
        links = [self.folder.after(name) for name in earlier]
        last = next((path for path in reversed(links) if path.is_file()), None)
        return self.plan.weights_sha256 if last is None else sha256(last)


def _entropies(source: Prediction, adapted: Prediction) -> tuple[float | None, float | None]:
    """Return the mean normalised entropy over the union of both foregrounds, of each model."""
    region = (source.mask > 0) | (adapted.mask > 0)
    if not region.any():
        return None, None
    return (
        float(scoring.normalised_entropy(source.probs[:, region]).mean()),
        float(scoring.normalised_entropy(adapted.probs[:, region]).mean()),
    )


def _status(loaded: LoadedCase, adapted: Prediction, verdict: Verdict, problem: str) -> str:
    if problem:
        return "unscored"
    if loaded.prepared is None:
        return "blank"
    if verdict.collapsed:
        return "collapsed"
    return "ok" if (adapted.mask > 0).any() else "empty"


__all__ = ["Progress", "SiteResult", "adapt_site", "run_plan"]
