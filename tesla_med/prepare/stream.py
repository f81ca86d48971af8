"""From cases to prepared slices: loading, reading ahead, batches over a whole site."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError, TeslaMedError
from tesla_med.io.files import sha256
from tesla_med.io.references import read_region_mask
from tesla_med.io.volumes import read_volume
from tesla_med.models.checkpoint import ModelCard
from tesla_med.prepare.acquisition import differences, measure
from tesla_med.prepare.transforms import PreparedCase, Preprocessor
from tesla_med.types import Case, Volume

log = logging.getLogger(__name__)

SLICE_CACHE_BYTES = 2 << 30
"""Prepared slices kept in memory between the passes over a site; older ones are read again."""


@dataclass(frozen=True)
class LoadedCase:
    """One case ready for the model; ``prepared`` is None for a blank image."""

    case: Case
    volume: Volume
    prepared: PreparedCase | None
    input_sha256: str

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of reading and preparing."""
        own = self.prepared.notes if self.prepared is not None else []
        return tuple(dict.fromkeys([*self.volume.notes, *own]))


@dataclass(frozen=True)
class Failure:
    """A case that could not be loaded, and why."""

    case: Case
    error: TeslaMedError


class CaseLoader:
    """Read and prepare cases as a site and a pipeline say.

    With the weights' card, an image far from what they were trained on is noted and warned of by name.
    """

    def __init__(self, site: SiteConfig, pipeline: PipelineConfig, card: ModelCard | None = None) -> None:
        self.site = site
        self.trained = card.acquisition if card is not None else None
        self.orientation = pipeline.preprocessing.orientation
        self.preprocessor = Preprocessor(pipeline.preprocessing, site.region, len(pipeline.classes))

    def __call__(self, case: Case) -> LoadedCase:
        """Read one case.

        Raises:
            DataError: the image cannot be used, or its region's mask is missing.
            GeometryError: its grid cannot be used.
        """
        digest = sha256(case.image)
        volume = read_volume(case.image, spacing=self.site.spacing, index=self.site.files.series_image)
        far = differences(measure(volume, self.site.region, self.orientation), self.trained)
        volume.notes.extend(far)
        for text in far:
            log.warning("%s: %s", case.name, text)
        if volume.blank:
            return LoadedCase(case, volume, None, digest)
        region = None
        if self.site.region.kind == "mask" and case.region_mask is not None:
            region = read_region_mask(case, volume)
        return LoadedCase(case, volume, self.preprocessor(volume, region), digest)


def read_ahead(cases: Sequence[Case], load: Callable[[Case], LoadedCase]) -> Iterator[LoadedCase | Failure]:
    """Yield every case in order, reading the next one while the present one is worked on.

    What cannot be used comes as a :class:`Failure`, whatever the reason, so that the others go on.
    """
    if not cases:
        return

    def attempt(case: Case) -> LoadedCase | Failure:
        try:
            return load(case)
        except Exception as error:
            return Failure(case, case_error(case, error))

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        coming = pool.submit(attempt, cases[0])
        for index in range(len(cases)):
            loaded = coming.result()
            if index + 1 < len(cases):
                coming = pool.submit(attempt, cases[index + 1])
            yield loaded


def case_error(case: Case, error: Exception) -> TeslaMedError:
    """Return ``error`` if it speaks for itself, else one that names the file and the kind of error."""
    if isinstance(error, TeslaMedError):
        return error
    log.info("%s", case.image, exc_info=error)
    text = f"{case.image}: unexpected {type(error).__name__}: {str(error) or 'no details'}"
    if isinstance(error, MemoryError):
        text = f"{case.image}: not enough memory for this case ({error})"
    named = DataError(f"{text}; --verbose shows where it happened")
    named.__cause__ = error
    return named


class SiteSlices:
    """Slices of all cases of a site, for methods that pass over it several times.

    Args:
        cases: the cases in order.
        load: reads and prepares one.
        limit: bytes of prepared slices kept between passes.
    """

    def __init__(
        self, cases: Sequence[Case], load: Callable[[Case], LoadedCase], limit: int = SLICE_CACHE_BYTES
    ) -> None:
        self.cases = tuple(cases)
        self._load = load
        self._limit = limit
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0
        self.failures: dict[str, Failure] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the slices (N, C, H, W) of each case that can be read and is not blank."""
        missing = [
            case for case in self.cases if case.name not in self._kept and case.name not in self.failures
        ]
        fresh = read_ahead(missing, self._load)
        for case in self.cases:
            if case.name in self._kept:
                yield self._kept[case.name]
            elif case.name not in self.failures:
                images = self._take(next(fresh))
                if images is not None:
                    yield images

    def _take(self, loaded: LoadedCase | Failure) -> Tensor | None:
        if isinstance(loaded, Failure):
            self.failures[loaded.case.name] = loaded
            return None
        if loaded.prepared is None:
            return None
        images = loaded.prepared.images
        size = images.numel() * images.element_size()
        if self._bytes + size <= self._limit:
            self._kept[loaded.case.name] = images
            self._bytes += size
        return images

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield batches of ``size`` slices in order, across the borders of cases; the last may be smaller."""
        held: list[Tensor] = []
        count = 0
        for images in self:
            held.append(images)
            count += images.shape[0]
            if count >= size:
                joined = torch.cat(held) if len(held) > 1 else held[0]
                whole = count - count % size
                yield from torch.split(joined[:whole], size)
                held = [joined[whole:]] if whole < count else []
                count -= whole
        if count:
            yield torch.cat(held)
