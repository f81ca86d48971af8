"""Labelled slices for training: load, keep, split by subject, draw. Batched and seeded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tesla_med.augment.families import FAMILIES
from tesla_med.augment.randomise import randomise, restyle
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.config.resolve import other_sites
from tesla_med.errors import ConfigError, DataError
from tesla_med.models.base import predicted_class
from tesla_med.prepare.acquisition import Acquisition, acquisition_of, united
from tesla_med.prepare.preprocessors import is_foreign
from tesla_med.scoring.metrics import dice
from tesla_med.tasks.labelled import LabelledSource, Part
from tesla_med.tasks.subjects import subjects_of
from tesla_med.types import Case, Progress

MEMORY_LIMIT_MIB = 4096
NO_REFERENCE = "no reference"
FEWEST_TO_SPLIT = 5
"""Subjects from which on some are held out; with fewer, every one is worth more to train on."""


@dataclass(frozen=True)
class LabelledCase:
    """The slices of one case on the model's grid.

    Attributes:
        site: site id.
        name: the case's name within the site's folder.
        images: (N, C, H, W) float32 in [0, 1].
        labels: (N, H, W) uint8 or int64 class indices.
        foreground: indices of the slices that hold any foreground.
        patient: whose it is, within the site; "": the case is told by its own name.
        fill: (N, H, W) bool, where slices hold no measurement; None for nowhere.
    """

    site: str
    name: str
    images: Tensor
    labels: Tensor
    foreground: tuple[int, ...]
    patient: str = ""
    fill: Tensor | None = None

    @property
    def subject(self) -> str:
        """Cases of one subject share this; see :func:`tesla_med.tasks.subjects.subjects_of`."""
        return f"{self.site}/{self.patient or subjects_of([self.name], None, 'case')[0][0]}"


@dataclass
class LabelledSlices(LabelledSource):
    """Every labelled case of the training sites; owns the spill files, if any."""

    cases: list[LabelledCase]
    left_out: list[str]
    foreground_fraction: float
    classes: int
    acquisitions: list[Acquisition] = field(default_factory=list)
    split_by: dict[str, str] = field(default_factory=dict)
    _spill: list[Any] = field(default_factory=list)

    @property
    def acquisition(self) -> Acquisition | None:
        """Ranges over all cases."""
        return united(self.acquisitions)

    @property
    def shapes(self) -> list[str]:
        """Name and shape of the slices of every case."""
        return [f"{case.site}/{case.name}: {tuple(case.images.shape)}" for case in self.cases]

    def split(self, fraction: float, generator: torch.Generator) -> tuple[Slices, Slices]:
        """Return training and validation cases, split by subject; see :func:`split`."""
        training, held = split(self.cases, fraction, generator)
        first, second = (Slices(part, self.foreground_fraction, self.classes) for part in (training, held))
        return first, second

    def every(self) -> Slices:
        """Return all cases as one part."""
        return Slices(self.cases, self.foreground_fraction, self.classes)

    def vary(
        self, images: Tensor, labels: Tensor, family: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return slices varied by :func:`tesla_med.augment.randomise.randomise`."""
        chosen = FAMILIES[family]
        return (images, labels) if chosen is None else randomise(images, labels, chosen, generator)

    def restyle(self, images: Tensor, family: str, generator: torch.Generator) -> Tensor:
        """Return slices varied by :func:`tesla_med.augment.randomise.restyle`."""
        chosen = FAMILIES[family]
        return images if chosen is None else restyle(images, chosen, generator)

    def loss(self) -> Callable[[Tensor, Tensor], Any]:
        """Return Dice + cross-entropy: the Dice of the foreground over the whole batch.

        So small classes are not lost, and empty slices count little.
        """
        from monai.losses import DiceCELoss

        loss = DiceCELoss(softmax=True, to_onehot_y=True, include_background=False, batch=True)
        return lambda logits, labels: loss(logits, labels[:, None])


def load_labelled(
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    volumes: Path,
    progress: Progress | None = None,
    memory_limit_mib: float = MEMORY_LIMIT_MIB,
) -> LabelledSlices:
    """Read and preprocess every case that has all its reference files and whose image is not constant.

    Up to ``memory_limit_mib`` of slices stay in memory as float32; later cases are kept in a
    temporary folder on disk and mapped, which is slower but gives the same numbers.

    Raises:
        ConfigError: the pipeline is that of somebody else's model.
        DataError: no labelled case at all, or a file that cannot be used.
    """
    if is_foreign(pipeline):
        raise ConfigError(
            f"pipeline {pipeline.name!r} is of a model that was trained elsewhere: it is trained, "
            "and its features are measured, there; here it is adapted and predicted with"
        )
    from tesla_med.io.cases import find_cases
    from tesla_med.io.references import read_reference, read_region_mask
    from tesla_med.io.volumes import read_case
    from tesla_med.prepare.transforms import Preprocessor
    from tesla_med.scoring.score import class_indices, parted

    result = LabelledSlices([], [], pipeline.train.foreground_fraction, len(pipeline.classes))
    found: list[tuple[SiteConfig, Case, str]] = []
    for site in sites:
        cases = find_cases(volumes, site, [*other_sites(site), *sites], pipeline.channels).cases
        names = [case.name for case in cases]
        patients, result.split_by[site.id] = subjects_of(names, site.files.subject, "case")
        found += [(site, case, patient) for case, patient in zip(cases, patients, strict=True)]
    kept = 0.0
    for index, (site, case, patient) in enumerate(found):
        if not case.labelled:
            result.left_out.append(f"{site.id}/{case.name}: {NO_REFERENCE}")
            continue
        volume = read_case(case, site)
        if volume.blank:
            result.left_out.append(f"{site.id}/{case.name}: blank: the image is constant")
            continue
        reference, ignored = parted(read_reference(case, site.files, volume, pipeline.values))
        count = len(pipeline.classes)
        indices = class_indices(reference, pipeline)
        if ignored is not None:
            indices = np.where(ignored, count, indices)
        region = read_region_mask(case, volume) if site.region.kind == "mask" else None
        preprocess = Preprocessor(pipeline.preprocessing, site.region, count + (ignored is not None))
        prepared = preprocess(volume, region, labels=indices)
        images, labels, fill = prepared.images, torch.as_tensor(prepared.labels), prepared.hidden
        whole = (labels < count).flatten(1).all(dim=1)
        if not whole.all():
            name = f"{site.id}/{case.name}"
            result.left_out.append(f"{name}: {int((~whole).sum())} slices with voxels that are ignored")
            images, labels = torch.as_tensor(images)[whole], labels[whole]
            fill = None if fill is None else fill[whole]
        if not len(images):
            continue
        labelled = replace(_labelled(site.id, case.name, images, labels, count), patient=patient, fill=fill)
        kept += _mebibytes(labelled)
        seen = acquisition_of(volume, site.region, pipeline.preprocessing.orientation)
        result.acquisitions += [] if seen is None else [seen]
        result.cases.append(labelled if kept <= memory_limit_mib else _spilled(labelled, result))
        if progress:
            progress("load", index + 1, len(found))
    if not result.cases:
        unusable = next((text for text in result.left_out if not text.endswith(NO_REFERENCE)), "")
        raise DataError(
            f"{volumes}: expected labelled cases of site(s) {', '.join(site.id for site in sites)}, "
            f"found {len(found)} image(s) and no reference"
            + (f" that can be used ({unusable})" if unusable else "")
            + "; check the site's mask patterns with 'tesla-med sites check'"
        )
    return result


def _labelled(site: str, name: str, images: Any, labels: Any, classes: int) -> LabelledCase:
    pictures = torch.as_tensor(images, dtype=torch.float32).contiguous()
    kind = torch.uint8 if classes <= 256 else torch.int64
    targets = torch.as_tensor(labels).to(kind).contiguous()
    holds = targets.flatten(1).any(dim=1)
    return LabelledCase(site, name, pictures, targets, tuple(holds.nonzero().flatten().tolist()))


def _mebibytes(case: LabelledCase) -> float:
    return sum(item.numel() * item.element_size() for item in (case.images, case.labels)) / 2**20


def _spilled(case: LabelledCase, owner: LabelledSlices) -> LabelledCase:
    if not owner._spill:
        owner._spill.append(tempfile.TemporaryDirectory(prefix="tesla-med-slices-"))
    path = str(Path(owner._spill[0].name) / f"{len(owner.cases)}.raw")
    mapped = torch.from_file(path, shared=True, size=case.images.numel(), dtype=torch.float32)
    mapped = mapped.view(case.images.shape)
    mapped.copy_(case.images)
    return replace(case, images=mapped)


def split(
    cases: Sequence[LabelledCase], fraction: float, generator: torch.Generator
) -> tuple[list[LabelledCase], list[LabelledCase]]:
    """Split by subject into training and validation cases.

    With a fraction above 0 and ``FEWEST_TO_SPLIT`` subjects at least one is held out, with fewer subjects
    none; one subject at least is always trained on.
    """
    subjects = sorted({case.subject for case in cases})
    count = max(1, round(fraction * len(subjects))) if fraction > 0 else 0
    count = min(count, len(subjects) - 1) if len(subjects) >= FEWEST_TO_SPLIT else 0
    order = torch.randperm(len(subjects), generator=generator).tolist()
    held = {subjects[i] for i in order[:count]}
    return [case for case in cases if case.subject not in held], [
        case for case in cases if case.subject in held
    ]


class Slices(Part):
    """Cases of one part; of the slices drawn, ``foreground_fraction`` hold foreground on average."""

    def __init__(self, cases: Sequence[LabelledCase], foreground_fraction: float, classes: int = 2) -> None:
        self.names = tuple(f"{case.site}/{case.name}" for case in cases)
        self.sites = tuple(case.site for case in cases)
        self.images = sum(len(case.images) for case in cases)
        self._classes = classes
        self._cases = list(cases)
        self._fraction = foreground_fraction
        self._with = [(c, s) for c, case in enumerate(cases) for s in case.foreground]
        self._without = [
            (c, s)
            for c, case in enumerate(cases)
            for s in sorted(set(range(len(case.images))) - set(case.foreground))
        ]

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (size, C, H, W) float32 in [0, 1] and labels (size, H, W) int64."""
        wants = torch.rand(size, generator=generator) < self._fraction
        draws = torch.rand(size, generator=generator)
        picked = []
        for foreground, draw in zip(wants.tolist(), draws.tolist(), strict=True):
            pool = (self._with if foreground else self._without) or self._with or self._without
            picked.append(pool[min(int(draw * len(pool)), len(pool) - 1)])
        images = torch.stack([self._cases[c].images[s] for c, s in picked])
        labels = torch.stack([self._cases[c].labels[s] for c, s in picked])
        return images, labels.long()

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the slices of each case in order."""
        for case in self._cases:
            yield from zip(torch.split(case.images, size), torch.split(case.labels, size), strict=True)

    def unmeasured(self, size: int) -> Iterator[Tensor | None]:
        """Yield where the slices of each case are fill, batch by batch."""
        for case in self._cases:
            if case.fill is None:
                yield from (None for _ in torch.split(case.images, size))
            else:
                yield from torch.split(case.fill, size)

    def masks(self) -> Iterator[Tensor]:
        """Yield the labels (N, H, W) of each case."""
        return (case.labels for case in self._cases)

    def score(self, predict: Callable[[Tensor], Tensor]) -> float:
        """Return the mean over cases of the mean foreground Dice; 0 if none can be scored."""
        scores = [score for case in self._cases if (score := self._case_dice(case, predict)) is not None]
        return sum(scores) / len(scores) if scores else 0.0

    def _case_dice(self, case: LabelledCase, predict: Callable[[Tensor], Tensor]) -> float | None:
        mask, labels = predicted_class(predict(case.images)).cpu().numpy(), case.labels.numpy()
        known = [
            value for k in range(1, self._classes) if (value := dice(labels == k, mask == k)) is not None
        ]
        return sum(known) / len(known) if known else None
