"""Corrected masks of cases: found and checked before a run, learned from in it, kept as its own masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.request import RunRequest
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.files import sha256_of
from tesla_med.io.geometry import voxel_mm3
from tesla_med.io.masks import find_masks, mask_name
from tesla_med.io.names import natural
from tesla_med.io.pseudonyms import WITHHELD, Cleaner, KeyFile, Pseudonyms
from tesla_med.io.references import read_region_mask
from tesla_med.io.volumes import read_case, read_mask_of
from tesla_med.prepare.preprocessors import AnyPreprocessor, is_foreign
from tesla_med.records import CaseResult
from tesla_med.runs.folder import RUN_FILE, RunFolder
from tesla_med.scoring.metrics import score_case
from tesla_med.scoring.score import class_indices
from tesla_med.scoring.text import counted, some
from tesla_med.tasks.base import Task
from tesla_med.types import Case, CaseView, IntArray, Items, Prediction, Ref, Unit, Volume

if TYPE_CHECKING:
    from tesla_med.engine.predictor import Predictor
    from tesla_med.engine.supervision import Labelled, Supervision
    from tesla_med.tasks._made import Masks

CORRECTED = "corrected by hand: the corrected mask is kept, and it is not scored"


@dataclass(frozen=True)
class Correction:
    """The corrected mask of one case.

    Attributes:
        case: the case.
        mask: file of the mask.
        sha256: of mask and image together.
    """

    case: Case
    mask: Path
    sha256: str

    def read(self, volume: Volume, pipeline: PipelineConfig) -> IntArray:
        """Return the label values (I, J, K) on the grid of the case.

        Raises:
            DataError: it cannot be read, or holds a value that is no class.
            GeometryError: it lies on another grid.
        """
        values = read_mask_of(self.mask, volume, self.case.name)
        unknown = sorted(set(np.unique(values).tolist()) - set(pipeline.values))
        if unknown:
            raise DataError(
                f"case {self.case.name}: the corrected mask {self.mask} holds label {_list(unknown)}, "
                f"expected only {_list(pipeline.values)}; use the values of masks/labels.json"
            )
        return values


class CorrectedCases(Task):
    """A task of cases whose masks can be corrected by hand, and whose names can be replaced."""

    preprocessor: AnyPreprocessor

    def corrected(self, folder: Path, items: Items) -> dict[str, Correction]:
        """Return corrected masks by case; see :func:`find_corrections`."""
        return find_corrections(folder, items, self.site, self.pipeline)

    def maps(self, name: str) -> frozenset[str]:
        """Return which maps are wanted beside the mask of a case; of a corrected mask there are none."""
        return frozenset() if name in self.corrections else self.wanted

    def kept(self, name: str, volume: Volume, adapted: Prediction) -> Prediction:
        """Return what is written of a case: what was adapted, or the corrected mask if there is one."""
        drawn = self.corrections.get(name)
        return adapted if drawn is None else Prediction(adapted.probs, drawn.read(volume, self.pipeline))

    def view_again(self, folder: RunFolder, ref: Ref) -> CaseView | None:
        """Return arrays of a finished case, read from disk; nothing of a corrected one."""
        from tesla_med.tasks._cases import view_of

        if ref.name in self.corrections:
            return None
        return view_of(ref.content, self.site, self.pipeline, folder)

    def renamed(
        self, items: Items, corrections: Mapping[str, Correction], request: RunRequest
    ) -> tuple[Items, dict[str, Correction], Pseudonyms]:
        """Return cases and corrections under pseudonyms; see :func:`renamed`."""
        return renamed(items, corrections, request, self.site.id)

    def supervision(self, refs: Sequence[Ref], predictor: Predictor) -> Supervision:
        """Return the labelled slices of corrected cases, which take part in every update of a method."""
        return supervised(self, [ref for ref in refs if ref.name in self.corrections], predictor)


def find_corrections(
    folder: Path, items: Items, site: SiteConfig, pipeline: PipelineConfig
) -> dict[str, Correction]:
    """Return the corrected masks of a folder by the names of their cases, each of them checked.

    Args:
        folder: masks as NIfTI or another format that is read, named as the run names its own.
        items: the cases of the site.
        site: of the cases.
        pipeline: gives the label values.

    Raises:
        ConfigError: the folder is part of a run or of the images, or the model was trained elsewhere.
        DataError: no folder, no mask in it, one of no case of the site, or one that cannot be used.
        GeometryError: a mask on another grid than its image.
    """
    if is_foreign(pipeline):
        raise ConfigError(
            f"--corrections: not for pipeline {pipeline.name!r}, whose model was trained elsewhere and "
            "prepares no labels; leave the option out"
        )
    _check_apart(folder, items.folder)
    found = find_masks(folder)
    cases: dict[str, Case] = {mask_name(Path(f"{case.name}.nii.gz")): case for case in items.content}
    if unknown := [path for name, path in found.items() if name not in cases]:
        raise DataError(
            f"{folder}: {counted(len(unknown), 'corrected mask')} of no case of site {site.id}: "
            f"{some([path.name for path in unknown], 5)}; expected <case>_mask.nii.gz as in masks/ of a run, "
            f"where {items.folder} holds {counted(len(cases), 'case')}: {some(list(items.names), 5)}"
        )
    result = {}
    for case in items.content:
        path = found.get(mask_name(Path(f"{case.name}.nii.gz")))
        if path is None:
            continue
        correction = Correction(case, path, sha256_of([path, *case.files]))
        volume = read_case(case, site)
        if volume.blank:
            raise DataError(f"case {case.name}: {case.image} is constant, so nothing can be learned from it")
        correction.read(volume, pipeline)
        result[case.name] = correction
    return result


def renamed(
    items: Items, corrections: Mapping[str, Correction], request: RunRequest, site: str
) -> tuple[Items, dict[str, Correction], Pseudonyms]:
    """Return cases and corrections under pseudonyms, in the order of these.

    Names of files that were left out are withheld: whose they are is not known.

    Raises:
        ConfigError: the key file lies in the output folder of the run.
        DataError: it cannot be read.
    """
    path = None if request.key is None else user_path(request.key)
    key = KeyFile(path, () if request.out is None else (user_path(request.out),))
    entries = key.assign(site, items.names)
    cleaner = Cleaner(items.content, entries, items.folder)
    cases = [replace(case, name=entries[case.name].pseudonym) for case in items.content]
    cases.sort(key=lambda case: natural(case.name))
    new = [
        (entries[name].pseudonym, replace(item, case=replace(item.case, name=entries[name].pseudonym)))
        for name, item in corrections.items()
    ]
    hidden = tuple((Path(WITHHELD), "a file that was left out") for _ in items.skipped)
    names = tuple(case.name for case in cases)
    shown = replace(items, names=names, skipped=hidden, content=tuple(cases), remarks=())
    return shown, dict(sorted(new)), Pseudonyms(key, cleaner)


def _list(values: Sequence[int]) -> str:
    return some([str(value) for value in values], 10)


def _check_apart(folder: Path, images: Path) -> None:
    """Refuse a folder of masks that somebody else's masks or the images may be mistaken for."""
    run = next((path for path in (folder, *folder.absolute().parents) if (path / RUN_FILE).is_file()), None)
    if run is not None:
        raise ConfigError(
            f"--corrections: {folder} lies in the output folder of a run, {run}; every mask in it would "
            "count as corrected; copy those that were into a folder of their own"
        )
    if folder.resolve().is_relative_to(images.resolve()) or images.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--corrections: {folder} and the images in {images} lie in each other, so masks and images "
            "could be taken for each other; keep them apart"
        )


def supervised(task: CorrectedCases, refs: Sequence[Ref], predictor: Predictor) -> Supervision:
    """Return the slices of corrected cases with their labels, attached to the method of a predictor.

    Args:
        task: of the run.
        refs: the corrected cases.
        predictor: of the run, which chooses the scaling of each case.

    Raises:
        ConfigError: the method does not learn.
        DataError: a case or its mask cannot be read.
        GeometryError: a mask lies on another grid than its image.
    """
    from tesla_med.engine.supervision import Supervision

    units = [predictor.scaled(task.load(ref)) for ref in refs]
    labelled = [_labelled(unit, task.corrections[unit.ref.name], task) for unit in units]
    return Supervision(predictor.method, labelled, task.pipeline.corrections)


def _labelled(unit: Unit, correction: Correction, task: CorrectedCases) -> Labelled:
    """Return the slices of a corrected case with their labels, on the model's grid."""
    import torch

    from tesla_med.engine.supervision import Labelled

    volume = unit.content.volume
    indices = class_indices(correction.read(volume, task.pipeline), task.pipeline)
    needed = task.site.region.kind == "mask" and correction.case.region_mask is not None
    region = read_region_mask(correction.case, volume) if needed else None
    prepared: Any = task.preprocessor(volume, region, labels=indices)
    assert unit.images is not None  # noqa: S101 - a constant image is refused where corrections are found
    return Labelled(unit.images, torch.as_tensor(prepared.labels).long(), unit.fill)


def corrected_record(unit: Unit, masks: Masks, task: CorrectedCases) -> CaseResult:
    """Return the record of a corrected case: volumes of both masks, and no figure that needs a reference."""
    volume = unit.content.volume
    both = masks.adapted.mask, masks.source.mask
    return CaseResult(
        case=unit.content.case.name,
        site=task.site.id,
        status="corrected",
        used="corrected",
        reason=CORRECTED,
        slices=len(unit.content.prepared.slice_index),
        voxels=int(both[0].size),
        input_sha256=unit.sha256,
        notes=unit.notes,
        scores=score_case(
            *(*both, None, task.pipeline.classes, volume.spacing, volume.nominal_spacing),
            voxel_mm3=voxel_mm3(volume.affine),
        ),
    )


def told(corrections: Mapping[str, Correction], weight: float, *, done: bool = True) -> tuple[str, ...]:
    """Return what is said of a run with corrections, as remarks; ``done``: of one that is not a preview."""
    if not corrections:
        return ()
    what, names = counted(len(corrections), "case"), some(list(corrections), 20)
    return (
        f"Corrected masks of {what} {'took' if done else 'would take'} part in every update with weight "
        f"{weight:g} (corrections.weight): {names}. These cases are not scored, and their masks are the "
        "corrected ones.",
    )
