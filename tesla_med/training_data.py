"""Labelled slices for training: load, keep, split by subject, draw, vary. Batched and seeded."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.config import PipelineConfig, SiteConfig
from tesla_med.errors import DataError

Progress = Callable[[str, int, int], None]
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
    from tesla_med.cases import find_cases
    from tesla_med.io import read_reference, read_region_mask, read_volume
    from tesla_med.scoring import class_indices
    from tesla_med.transforms import Preprocessor

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
        volume = read_volume(case.image, spacing=site.spacing)
        reference = read_reference(case, site.files, volume, pipeline.values)
        region = read_region_mask(case, volume) if site.region.kind == "mask" else None
        preprocess = Preprocessor(pipeline.preprocessing, site.region, len(pipeline.classes))
        prepared = preprocess(volume, region, labels=class_indices(reference, pipeline))
        labelled = _labelled(site.id, case.name, prepared.images, prepared.labels, len(pipeline.classes))
        kept += _mebibytes(labelled)
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
    """Vary a batch as scanners and patients do; parameters are drawn on the CPU, one set a slice.

    Left-right flip (p 0.5), rotation within 10 degrees, zoom 0.9 to 1.1, shift within 5 % of the
    field; gamma 0.8 to 1.25, contrast within 15 %, brightness within 0.08, Gaussian blur up to 0.8 pixels
    (p 0.3), noise up to 0.03.

    Args:
        images: (N, C, H, W) float32 in [0, 1]; the first spatial axis runs left-right.
        labels: (N, H, W) int64.
        generator: on the CPU.

    Returns:
        Images in [0, 1] and labels of the same shapes.
    """
    size = len(images)

    def draw(low: float, high: float) -> Tensor:
        return (torch.rand(size, generator=generator) * (high - low) + low).to(images.device)

    images, labels = _moved(images, labels, _matrices(draw, images.shape[-2:]))
    each = (slice(None), None, None, None)
    images = images.clamp(0, 1) ** torch.exp(draw(-0.223, 0.223))[each]
    images = (images - 0.5) * draw(0.85, 1.15)[each] + 0.5 + draw(-0.08, 0.08)[each]
    images = _blurred(images, torch.where(draw(0, 1) < 0.3, draw(0.3, 0.8), 1e-3))
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    return (images + noise * draw(0, 0.03)[each]).clamp(0, 1), labels


def _matrices(draw: Callable[[float, float], Tensor], shape: Sequence[int]) -> Tensor:
    """Return (N, 2, 3) output-to-input matrices in grid units, for ``affine_grid``."""
    angle = draw(-math.pi / 18, math.pi / 18)
    zoom, flip = draw(0.9, 1.1), torch.sign(draw(-1, 1) + 1e-7)
    aspect = shape[0] / shape[1]
    cosine, sine = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    shift = (draw(-0.1, 0.1), draw(-0.1, 0.1))
    # affine_grid counts the last axis first; the flip acts on the first spatial axis
    first = torch.stack([cosine, -sine * aspect, shift[0]], dim=1)
    second = torch.stack([sine / aspect * flip, cosine * flip, shift[1]], dim=1)
    return torch.stack([first, second], dim=1)


def _moved(images: Tensor, labels: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    targets = functional.grid_sample(
        labels[:, None].float(), grid, mode="nearest", padding_mode="border", align_corners=False
    )
    return moved, targets[:, 0].round().long()


def _blurred(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image with its own Gaussian, ``sigma`` (N,) in pixels, edges replicated."""
    offsets = torch.arange(-2, 3, device=images.device)
    kernel = torch.exp(-0.5 * (offsets[None] / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)
    count, channels = images.shape[:2]
    stacked = functional.pad(images, (2, 2, 2, 2), mode="replicate").flatten(0, 1)[None]
    weights = kernel.repeat_interleave(channels, dim=0)[:, None]
    stacked = functional.conv2d(stacked, weights[:, :, :, None], groups=count * channels)
    stacked = functional.conv2d(stacked, weights[:, :, None, :], groups=count * channels)
    return stacked.view(images.shape)


def batches(images: Tensor, size: int) -> Iterator[Tensor]:
    """Yield (at most ``size``, C, H, W) parts in order."""
    yield from torch.split(images, size)
