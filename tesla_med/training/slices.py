"""Labelled slices for training: load, keep, split by subject, draw, vary. Batched and seeded."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError
from tesla_med.prepare.acquisition import Acquisition, measure
from tesla_med.types import Progress

MEMORY_LIMIT_MIB = 4096
_SUBJECT = re.compile(r"sub-[A-Za-z0-9]+")


@dataclass(frozen=True)
class LabelledCase:
    """The slices of one case on the model's grid.

    Attributes:
        site: site id.
        name: the case's name within the site's folder.
        images: (N, C, H, W) float32 in [0, 1].
        labels: (N, H, W) uint8 or int64 class indices.
        foreground: indices of the slices that hold any foreground.
    """

    site: str
    name: str
    images: Tensor
    labels: Tensor
    foreground: tuple[int, ...]

    @property
    def subject(self) -> str:
        """Cases of one subject share this: ``sub-<id>`` in the name, else the case itself."""
        found = _SUBJECT.search(self.name)
        return f"{self.site}/{found.group() if found else self.name}"


@dataclass
class LabelledSet:
    """Every labelled case of the training sites; owns the spill files, if any."""

    cases: list[LabelledCase]
    left_out: list[str]
    acquisitions: list[Acquisition] = field(default_factory=list)
    _spill: list[Any] = field(default_factory=list)

    @property
    def slices(self) -> int:
        """Number of slices."""
        return sum(len(case.images) for case in self.cases)


def load_labelled(
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    volumes: Path,
    progress: Progress | None = None,
    memory_limit_mib: float = MEMORY_LIMIT_MIB,
) -> LabelledSet:
    """Read and preprocess every case that has all its reference files.

    Up to ``memory_limit_mib`` of slices stay in memory as float32; later cases are kept in a
    temporary folder on disk and mapped, which is slower but gives the same numbers.

    Raises:
        DataError: no labelled case at all, or a file that cannot be used.
    """
    from tesla_med.io.cases import find_cases
    from tesla_med.io.references import read_reference, read_region_mask
    from tesla_med.io.volumes import read_volume
    from tesla_med.prepare.transforms import Preprocessor
    from tesla_med.scoring.score import class_indices

    found = [
        (site, case)
        for site in sites
        for case in find_cases(volumes, site, [other for other in sites if other.id != site.id]).cases
    ]
    result = LabelledSet([], [])
    kept = 0.0
    for index, (site, case) in enumerate(found):
        if not case.labelled:
            result.left_out.append(f"{site.id}/{case.name}: no reference")
            continue
        volume = read_volume(case.image, spacing=site.spacing, index=site.files.series_image)
        reference = read_reference(case, site.files, volume, pipeline.values)
        region = read_region_mask(case, volume) if site.region.kind == "mask" else None
        preprocess = Preprocessor(pipeline.preprocessing, site.region, len(pipeline.classes))
        prepared = preprocess(volume, region, labels=class_indices(reference, pipeline))
        labelled = _labelled(site.id, case.name, prepared.images, prepared.labels, len(pipeline.classes))
        kept += _mebibytes(labelled)
        seen = measure(volume, site.region, pipeline.preprocessing.orientation)
        result.acquisitions += [] if seen is None else [seen]
        result.cases.append(labelled if kept <= memory_limit_mib else _spilled(labelled, result))
        if progress:
            progress("load", index + 1, len(found))
    if not result.cases:
        raise DataError(
            f"{volumes}: expected labelled cases of site(s) {', '.join(site.id for site in sites)}, "
            f"found {len(found)} image(s) and no reference; check the site's mask patterns with "
            "'tesla-med sites check'"
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


def _spilled(case: LabelledCase, owner: LabelledSet) -> LabelledCase:
    if not owner._spill:
        owner._spill.append(tempfile.TemporaryDirectory(prefix="tesla-med-slices-"))
    path = str(Path(owner._spill[0].name) / f"{len(owner.cases)}.raw")
    mapped = torch.from_file(path, shared=True, size=case.images.numel(), dtype=torch.float32)
    mapped = mapped.view(case.images.shape)
    mapped.copy_(case.images)
    return LabelledCase(case.site, case.name, mapped, case.labels, case.foreground)


def split(
    cases: Sequence[LabelledCase], fraction: float, generator: torch.Generator
) -> tuple[list[LabelledCase], list[LabelledCase]]:
    """Split by subject into training and validation cases.

    With a fraction above 0 and more than one subject at least one is held out; one subject at
    least is always trained on.
    """
    subjects = sorted({case.subject for case in cases})
    count = max(1, round(fraction * len(subjects))) if fraction > 0 else 0
    count = min(count, len(subjects) - 1)
    order = torch.randperm(len(subjects), generator=generator).tolist()
    held = {subjects[i] for i in order[:count]}
    return [case for case in cases if case.subject not in held], [
        case for case in cases if case.subject in held
    ]


class Sampler:
    """Draws batches of slices; ``foreground_fraction`` of them hold foreground on average."""

    def __init__(self, cases: Sequence[LabelledCase], foreground_fraction: float) -> None:
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
        places = torch.rand(size, generator=generator)
        picked = []
        for foreground, place in zip(wants.tolist(), places.tolist(), strict=True):
            pool = (self._with if foreground else self._without) or self._with or self._without
            picked.append(pool[min(int(place * len(pool)), len(pool) - 1)])
        images = torch.stack([self._cases[c].images[s] for c, s in picked])
        labels = torch.stack([self._cases[c].labels[s] for c, s in picked])
        return images, labels.long()


def augment(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vary a batch as scanners and patients do, with MONAI's random transforms, each slice its own way.

    Left-right flip (p 0.5), rotation within 10 degrees, zoom 0.9 to 1.1, shift within 5 % of the
    field; gamma 0.8 to 1.25, contrast within 15 %, brightness within 0.08, Gaussian blur up to 0.8 pixels
    (p 0.3), noise up to 0.03.

    Args:
        images: (N, C, H, W) float32 in [0, 1]; the first spatial axis runs left-right.
        labels: (N, H, W) int64.
        generator: on the CPU; one number of it seeds the transforms for the batch.

    Returns:
        Images in [0, 1] and labels of the same shapes.
    """
    transform = _augmentation(int(images.shape[2]), int(images.shape[3]))
    transform.set_random_state(seed=int(torch.randint(2**31, (1,), generator=generator)))
    varied = [
        transform({"image": image, "label": label[None].float()})
        for image, label in zip(images, labels, strict=True)
    ]
    moved = torch.stack([item["image"] for item in varied])
    targets = torch.stack([item["label"][0] for item in varied])
    return moved.clamp(0, 1), targets.round().long()


@lru_cache(maxsize=4)
def _augmentation(height: int, width: int) -> Any:
    """Return the random transforms for slices of this size; shifts are given in pixels there."""
    from monai import transforms as mt

    both = ("image", "label")
    return mt.Compose(
        [
            mt.RandFlipd(both, prob=0.5, spatial_axis=0),
            mt.RandAffined(
                both,
                prob=1.0,
                rotate_range=math.pi / 18,
                scale_range=(0.1, 0.1),
                translate_range=(0.05 * height, 0.05 * width),
                mode=("bilinear", "nearest"),
                padding_mode="border",
                cache_grid=True,
                spatial_size=(height, width),
            ),
            mt.RandAdjustContrastd("image", prob=1.0, gamma=(0.8, 1.25)),
            mt.RandScaleIntensityFixedMeand("image", prob=1.0, factors=0.15),
            mt.RandShiftIntensityd("image", prob=1.0, offsets=0.08),
            mt.RandGaussianSmoothd("image", prob=0.3, sigma_x=(0.3, 0.8), sigma_y=(0.3, 0.8)),
            mt.RandGaussianNoised("image", prob=1.0, std=0.03, sample_std=True),
            mt.ToTensord(both, track_meta=False),
        ]
    )


def batches(images: Tensor, size: int) -> Iterator[Tensor]:
    """Yield (at most ``size``, C, H, W) parts in order."""
    yield from torch.split(images, size)
