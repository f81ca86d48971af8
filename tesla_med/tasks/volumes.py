"""Volumes: one case is one image, its slices go through the network, a mask on the input grid comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.engine.stages import stage
from tesla_med.errors import ConfigError
from tesla_med.io.cases import find_cases
from tesla_med.io.files import sha256_of, write_together
from tesla_med.io.references import read_region_mask
from tesla_med.io.volumes import encode_map, encode_mask, read_case
from tesla_med.prepare.acquisition import acquisition_of, differences
from tesla_med.prepare.preprocessors import preprocessor_of
from tesla_med.records import CaseResult
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring import score as scoring
from tesla_med.tasks._corrections import CorrectedCases, corrected_record, told
from tesla_med.tasks._made import CONSTANT, Loaded, Masks
from tesla_med.tasks.base import TASKS
from tesla_med.types import (
    Case,
    CaseView,
    Check,
    ItemEstimate,
    Items,
    Prediction,
    Progress,
    Ref,
    Unit,
    Volume,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tesla_med.engine.outcome import Outcome
    from tesla_med.scoring.calibration import CalibrationCounts
    from tesla_med.scoring.masks import EvaluationResult
    from tesla_med.tasks.labelled import LabelledSource


@TASKS.register("segmentation")
class Volumes(CorrectedCases):
    """Masks of volumes: site, case and slices of MRI."""

    honours: ClassVar = (
        frozenset(("guard", "recalibrate", "keep-largest", "probs", "uncertainty", "reset-case", "rollback"))
        | {"empty", "figures", "classes", "ignore", "values", "single", "export", "review", "watch"}
        | {"corrections", "anonymise"}
    )
    links: ClassVar[bool] = True
    reports: ClassVar = ("table", "calibration", "quality", "tensorboard", "html")

    def prepare(self) -> None:
        """Get the transforms ready."""
        self.preprocessor = preprocessor_of(self.pipeline, self.site.region)
        self._scalings = self.preprocessor.scaled(self.pipeline.scaling.candidates)

    # ------------------------------------------------------------ from files to slices

    def find(self, volumes: Path, others: Sequence[SiteConfig]) -> Items:
        """Return the cases of the site; see :func:`tesla_med.io.cases.find_cases`."""
        found = find_cases(volumes, self.site, others, self.pipeline.channels)
        names = tuple(case.name for case in found.cases)
        return Items(found.folder, names, found.skipped, found.cases, found.remarks)

    def refs(self, items: Items, seed: int, size: int) -> Sequence[Ref]:
        """Return the cases in order."""
        return [Ref(case.name, (case.name,), case) for case in items.content]

    def named(self, ref: Ref) -> str:
        """Return the path of the image."""
        return str(ref.content.image)

    def load(self, ref: Ref) -> Unit:
        """Read one case and cut it into slices.

        Raises:
            DataError: the image cannot be used, or its region's mask is missing.
            GeometryError: its grid cannot be used.
        """
        case: Case = ref.content
        with stage("read"):
            digest = sha256_of(case.files)
            volume = read_case(case, self.site)
        seen = acquisition_of(volume, self.site.region, self.pipeline.preprocessing.orientation)
        volume.notes += differences(seen, self.trained)
        prepared, scalings = None, {}
        if not volume.blank:
            needed = self.site.region.kind == "mask" and case.region_mask is not None
            region = read_region_mask(case, volume) if needed else None
            with stage("prepare"):
                prepared = self.preprocessor(volume, region)
                scalings = {name: scale(volume, region).images for name, scale in self._scalings.items()}
        notes = tuple(dict.fromkeys([*volume.notes, *(prepared.notes if prepared is not None else [])]))
        images, fill = (None, None) if prepared is None else (prepared.images, prepared.hidden)
        content = Loaded(case, volume, prepared)
        return Unit(ref, images, content, digest, notes, scalings=scalings, fill=fill)

    def as_scaled(self, unit: Unit) -> PipelineConfig:
        """Return the pipeline with the scaling that was chosen for a unit."""
        if unit.scaling is None or not unit.scaling.name:
            return self.pipeline
        taken = self._scalings[unit.scaling.name].preprocessing
        return self.pipeline.model_copy(update={"preprocessing": taken})

    def check(self, ref: Ref) -> Check:
        """Read image, region mask and reference of a case, and say what fits and what does not."""
        from tesla_med.tasks._cases import check_case

        return check_case(ref.content, self.site, self.pipeline, self.preprocessor)

    def expected(self, ref: Ref, unit: Unit | None, problem: str) -> list[ItemEstimate]:
        """Return grid and number of slices of a case."""
        shape = None if unit is None else unit.content.volume.shape
        count = 0 if unit is None or unit.images is None else len(unit.content.prepared.slice_index)
        notes, drawn = () if unit is None else unit.notes, ref.name in self.corrections
        return [
            ItemEstimate(ref.name, shape, count, ref.content.labelled and not drawn, problem, notes, drawn)
        ]

    # ------------------------------------------------------------ from probabilities to a mask on disk

    def finish(self, folder: RunFolder, unit: Unit, outcome: Outcome | None) -> Masks:
        """Bring probabilities back to the native grid, take labels from them, write every file."""
        loaded: Loaded = unit.content
        if outcome is None:
            source = adapted = self._background(loaded.volume)
            verdict = CONSTANT
        else:
            verdict = outcome.verdict
            with stage("restore"):
                source = adapted = self._restore(loaded, outcome.source)
                if verdict.used != "source":
                    adapted = self._restore(loaded, outcome.probs, outcome.temperature)
        made = Masks(source, self.kept(loaded.case.name, loaded.volume, adapted), verdict)
        with stage("write"):
            if "uncertainty" in self.maps(loaded.case.name):
                made.entropy = scoring.normalised_entropy(adapted.probs)
            self._write(folder, loaded, made)
        return made

    def _restore(self, loaded: Loaded, probs: Tensor, temperature: float = 1.0) -> Prediction:
        from tesla_med.engine.postprocess import keep_largest
        from tesla_med.engine.recalibration import scale_volume

        assert loaded.prepared is not None  # noqa: S101 - a blank case has no outcome
        native = loaded.prepared.restore(probs)
        mask = scoring.label_values(native, self.pipeline)
        if temperature != 1.0:
            native = scale_volume(native, temperature)
        return Prediction(native, keep_largest(mask) if self.pipeline.keep_largest else mask)

    def _background(self, volume: Volume) -> Prediction:
        probs = np.zeros((len(self.pipeline.classes), *volume.shape), dtype=np.float32)
        probs[0] = 1.0
        return Prediction(probs, scoring.label_values(probs, self.pipeline))

    def _write(self, folder: RunFolder, loaded: Loaded, made: Masks) -> None:
        """Write all files of the case or none; the mask gets its name last."""
        name, volume, source, adapted = loaded.case.name, loaded.volume, made.source, made.adapted
        paths = folder.source_mask(name), folder.probs(name), folder.uncertainty(name), folder.mask(name)
        files = [(paths[0], lambda: encode_mask(paths[0], source.mask, volume))]
        if "probs" in self.maps(name):
            files.append((paths[1], lambda: encode_map(paths[1], adapted.probs, volume)))
        if (entropy := made.entropy) is not None:
            files.append((paths[2], lambda: encode_map(paths[2], entropy, volume)))
        files.append((paths[3], lambda: encode_mask(paths[3], adapted.mask, volume)))
        write_together(files)

    # ------------------------------------------------------------ after the mask is final

    def score(self, unit: Unit, finished: Masks) -> list[CaseResult]:
        """Compare the masks with the case's reference, if it has one."""
        from tesla_med.tasks._cases import record_of

        loaded: Loaded = unit.content
        if loaded.case.name in self.corrections:
            return [corrected_record(unit, finished, self)]
        source, adapted = finished.source, finished.adapted
        about = loaded.case, loaded.volume, source, adapted, self.site, self.pipeline
        with stage("score"):
            scored = scoring.score(*about, None if loaded.prepared is None else loaded.prepared.fill)
        finished.scored = scored
        return [record_of(unit, finished, scored, self.site, self.pipeline)]

    def view(self, unit: Unit, finished: Masks) -> CaseView | None:
        """Return image, masks and reference; nothing of a corrected case, whose mask no model made."""
        if unit.ref.name in self.corrections:
            return None
        volume = unit.content.volume
        return CaseView(
            image=volume.array[0],
            source_mask=finished.source.mask,
            mask=finished.adapted.mask,
            reference=None if finished.scored is None else finished.scored.reference,
            affine=volume.affine,
            spacing=volume.spacing,
            ignored=None if finished.scored is None else finished.scored.ignored,
            entropy=finished.entropy,
        )

    # ------------------------------------------------------------ resuming and going back

    def started(self, folder: RunFolder) -> None:
        """Write ``masks/labels.json``."""
        folder.write_labels(self.pipeline)

    def intact(self, folder: RunFolder, ref: Ref, records: Sequence[Any], digest: str) -> bool:
        """Whether the image is still the one of the record, and the case's files can be read."""
        from tesla_med.tasks._cases import is_intact

        return is_intact(folder, ref.content, records[0], self.maps(ref.name))

    def undo(self, folder: RunFolder, records: Sequence[Any], where: str) -> list[CaseResult]:
        """Put the source mask in place of the adapted one, and its figures in the record."""
        from tesla_med.tasks._cases import undone

        return [undone(folder, records[0], where)]

    def notes(self) -> tuple[str, ...]:
        """Return where region and slices come from, what a nominal voxel size means, what was corrected."""
        from tesla_med.tasks._cases import notes_on

        return (*notes_on(self.site), *told(self.corrections, self.pipeline.corrections.weight))

    def recount(self, items: Items, runs: Mapping[Any, RunFolder]) -> Iterator[dict[Any, CalibrationCounts]]:
        """Yield the counts of every labelled case, over one region for all runs; a few threads read."""
        from tesla_med.tasks._cases import count_cases

        yield from count_cases(items.content, self.site, self.pipeline, runs)

    @classmethod
    def evaluate(cls, predictions: Path, references: Path | None, **options: Any) -> EvaluationResult:
        """Score masks; see :func:`tesla_med.scoring.masks.evaluate_masks`."""
        from tesla_med.scoring.masks import evaluate_masks

        if references is None:
            raise ConfigError("--references is needed: the folder of reference masks")
        return evaluate_masks(predictions, references, **options)

    def labelled(
        self, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None = None
    ) -> LabelledSource:
        """Return every labelled case of the sites.

        Raises:
            ConfigError: the pipeline is that of somebody else's model.
        """
        from tesla_med.tasks._cases import labelled_cases

        return labelled_cases(self.pipeline, sites, volumes, progress)
