"""The contract of an export: one mask of a finished run in, files of another format out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tesla_med.config.models import LabelClass
from tesla_med.io.nifti import encode_nifti
from tesla_med.io.volumes import read_mask
from tesla_med.registry import Registry
from tesla_med.types import IntArray

NOTICE = "For research use only; not a medical device."
TEXTS = ("data_type", "db_name", "descrip", "aux_file", "intent_name")
"""Fields of a NIfTI header that hold texts."""


@dataclass(frozen=True)
class Finished:
    """One mask of a run.

    Attributes:
        case: its name in the run; ``/`` between folders.
        name: what the export calls it.
        mask: its file.
        classes: of the pipeline, background first.
        method: that adapted, for example ``tesla``.
        version: of tesla-med that made it.
        weights: SHA-256 of the source weights.
        series: folder of the DICOM series that it belongs to, where one is known.
        series_sha256: of that folder.
        pattern: what chooses the series where the folder holds several, ``site.files.series`` of the run.
        origin: name of its case in the folder of the images, where ``case`` is a pseudonym; else "".
        secret: of its pseudonym, where names are replaced: identifiers are made from it; else "".
        corrected: whether the mask was corrected by hand.
        nameless: whether no name is to be left in what is written.
        trusted: False where nothing that was found for the case is trustworthy.
    """

    case: str
    name: str
    mask: Path
    classes: tuple[LabelClass, ...]
    method: str
    version: str
    weights: str
    series: Path | None = None
    series_sha256: str = ""
    pattern: str | None = None
    origin: str = ""
    secret: str = ""
    corrected: bool = False
    nameless: bool = False
    trusted: bool = True

    @property
    def foreground(self) -> tuple[LabelClass, ...]:
        """The classes but the background."""
        return self.classes[1:]

    def read(self) -> tuple[IntArray, np.ndarray]:
        """Return the class values (I, J, K) and the affine (4, 4) to RAS+ mm."""
        return read_mask(self.mask)

    def content(self) -> bytes:
        """Return the mask's file as it is; where no name is to be left, without texts that others wrote.

        Raises:
            DataError: it cannot be read.
        """
        import nibabel as nib

        values, content = self.read()[0], self.mask.read_bytes()
        if not self.nameless:
            return content
        header: Any = nib.load(self.mask).header
        texts = [bytes(header[name]) for name in TEXTS if name in header]
        if not any(text.strip(b"\0 ") for text in texts) and not header.extensions:
            return content
        return encode_nifti(values.astype(np.min_scalar_type(int(values.max(initial=0)))), header)


class Export(ABC):
    """One format.

    Attributes:
        summary: what it writes, in one line.
        needs_series: whether every mask needs the DICOM series that it belongs to.
    """

    summary: ClassVar[str]
    needs_series: ClassVar[bool] = False

    def check(self) -> None:  # noqa: B027 - optional hook
        """Check that what the format needs is installed.

        Raises:
            ConfigError: it is not; the message names what to install.
        """

    @abstractmethod
    def write(self, item: Finished, out: Path) -> list[Path]:
        """Write the files of one case below ``out`` and return them.

        Raises:
            DataError: the mask or its series cannot be read.
            GeometryError: their grids differ.
        """

    def finish(self, items: Sequence[Finished], files: Sequence[Path], out: Path) -> list[Path]:
        """Write what belongs to all cases; return the files that are to stay, ``files`` included."""
        return list(files)


EXPORTS: Registry[type[Export]] = Registry("export format", "tesla_med.exports", "tesla_med.exports")


def rgb(color: str) -> tuple[int, int, int]:
    """Return a colour ``#rrggbb`` as three values of 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
