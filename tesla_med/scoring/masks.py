"""Score a folder of finished masks against a folder of references, whoever made them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tesla_med.config.models import LabelClass
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.masks import as_named_there, check_labels, find_masks
from tesla_med.io.pseudonyms import KeyFile
from tesla_med.records import Measured
from tesla_med.scoring.grids import field_diagonal
from tesla_med.scoring.metrics import METRICS, Empty, MaskPair, Metric, evaluate_metrics
from tesla_med.scoring.pairs import REMEDY, Meaning, corrected_of, one_sided, read_pair, without_names
from tesla_med.scoring.text import counted, decimals, percent, some
from tesla_med.types import IntArray, Record

LABELS_FILE = "labels.json"
NOTHING = np.zeros((1, 1, 1), np.uint8)
"""A mask of no class."""


def figure_columns() -> tuple[str, ...]:
    """Return the columns of all metrics; what needs no reference is measured of the reference too."""
    names = (
        (metric.name,) if metric.needs_reference else (metric.name, f"{metric.name}_reference")
        for metric in METRICS.in_order()
    )
    return tuple(name for pair in names for name in pair)


def columns() -> tuple[str, ...]:
    """Return the columns of ``metrics.csv``."""
    return ("case", "label", "name", *figure_columns(), "status", "reason")


class MaskScore(Measured):
    """Scores of one class of one case; None is "not applicable", as in :class:`ClassScore`.

    ``hd95_mm_or_diagonal`` is the diagonal of the grid where exactly one of the masks is empty.
    """

    label: int
    name: str
    dice: float | None = None
    hd95_mm: float | None = None
    hd95_mm_or_diagonal: float | None = None
    assd_mm: float | None = None
    volume_ml: float | None = None
    volume_ml_reference: float | None = None
    voxels: int = 0
    voxels_reference: int = 0


class EvaluatedCase(Record):
    """One prediction with its reference; ``unscored`` ones carry the reason and no scores.

    ``ignored``: voxels of the reference that are left out of every figure.
    """

    case: str
    prediction: str
    reference: str
    ignored: int = 0
    status: Literal["ok", "unscored"] = "ok"
    reason: str = ""
    scores: tuple[MaskScore, ...] = ()


class EvaluationResult(Record):
    """Every pair that was found, and every file that has no partner.

    Attributes:
        cases: the pairs, in natural order of their names.
        only_predictions: names (relative, without suffix) that have no reference.
        only_references: names that have no prediction.
        files: those written.
        empty: what the Dice of a class counts for where both masks are empty of it.
        unexplained: labels that only one side holds, where no class list says what they are.
        corrected: names whose masks were corrected by hand before the run, so that they are not scored.
    """

    cases: tuple[EvaluatedCase, ...]
    only_predictions: tuple[str, ...] = ()
    only_references: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    empty: Empty = "skip"
    unexplained: tuple[str, ...] = ()
    corrected: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every pair was scored."""
        return not self.unscored

    @property
    def unscored(self) -> tuple[EvaluatedCase, ...]:
        """Pairs that could not be scored."""
        return tuple(item for item in self.cases if item.status != "ok")

    @property
    def coverage(self) -> str:
        """How much of both folders the scores cover, in words."""
        pairs = len(self.cases)
        scored = pairs - len(self.unscored)
        return (
            f"scored {scored} of {pairs + len(self.only_predictions)} predictions and"
            f" {scored} of {pairs + len(self.only_references)} references"
        )

    def remarks(self) -> list[str]:
        """Return what could not be scored or has no partner, in words."""
        lists = (
            (self.only_predictions, "without a reference"),
            (self.only_references, "without a mask"),
            (self.corrected, "corrected by hand, not scored"),
        )
        found = [f"{len(names)} {text}: {some(names, 10)}" for names, text in lists if names]
        ignored = {case.case: case.ignored for case in self.cases if case.ignored}
        if ignored:
            what = f"{sum(ignored.values())} voxels of {counted(len(ignored), 'reference')}"
            found.append(f"{what} are ignored, left out of every figure: {some(list(ignored), 10)}")
        return found + ([f"{'; '.join(self.unexplained)}: {REMEDY}"] if self.unexplained else [])

    def errors(self) -> list[str]:
        """Return why pairs could not be scored, a line each."""
        return [f"{case.case}: {case.reason}" for case in self.unscored]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return title, column names and rows of what is shown."""
        metrics = [metric for metric in METRICS.in_order() if metric.needs_reference]
        rows = [
            [case.case, score.name, *(_shown(metric, score) for metric in metrics)]
            for case in self.cases
            for score in case.scores
        ]
        means = [[str(row["name"]), str(row["cases"]), percent(row["dice_mean"])] for row in self.summary()]
        return [
            ("", ["case", "class", *(f"{metric.title} {metric.unit or '%'}" for metric in metrics)], rows),
            ("Mean", ["class", "cases", "mean Dice %"], means),
        ]

    def record(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        return {**self.model_dump(mode="json"), "coverage": self.coverage, "summary": self.summary()}

    def summary(self) -> list[dict[str, Any]]:
        """Return for each class the means over cases, and the counts that belong to them.

        ``dice_mean`` leaves out cases where both masks are empty (``not_applicable``), unless they count
        as 1. Distances exist only where neither is, so ``missed`` and ``false_positive`` go with their
        means; ``hd95_mm_mean_or_diagonal`` takes those cases in, with the diagonal of their grid.
        """
        by_label: dict[int, list[MaskScore]] = {}
        for case in self.cases:
            for score in case.scores:
                by_label.setdefault(score.label, []).append(score)
        return [_summarise(scores) for _, scores in sorted(by_label.items())]


def evaluate_masks(
    predictions: Path,
    references: Path,
    *,
    out: Path | None = None,
    strict: bool = False,
    classes: Sequence[LabelClass] | None = None,
    empty: Empty = "skip",
    ignore: Sequence[int] = (),
    values: Mapping[int, int] | None = None,
    key: KeyFile | None = None,
) -> EvaluationResult:
    """Score every mask that has a reference, on its own grid.

    Files meet by their path relative to the two folders, without extension and without trailing name parts
    such as ``_mask`` or ``_segmentation``; ``P1_0000`` meets ``P1``. Where one folder holds both ``Case07``
    and ``Case07_seg``, the first is assumed to be the image. Voxel sizes are those of the headers.

    Args:
        predictions: folder of masks, or the output folder of a run.
        references: folder of references.
        out: where ``metrics.csv`` and ``summary.json`` are written; None writes nothing.
        strict: refuse files without a partner and pairs that cannot be scored.
        classes: the classes; None takes ``labels.json`` beside the predictions, else the values
            found in the masks.
        empty: where both masks are empty of a class the case is left out of the mean Dice ("skip"), or
            counts as 1 ("one").
        ignore: values of the references whose voxels are left out of every figure.
        values: value in a file, of either side -> label; others stay as they are.
        key: replaces names by pseudonyms in everything that is returned and written; None leaves them.

    Raises:
        ConfigError: a value is both ignored and mapped.
        DataError: a folder is missing or holds no mask, two files have one name, nothing matches,
            or ``strict`` finds something that is not scored, or a label that only one side holds.
    """
    predictions, references = Path(predictions), Path(references)
    if (predictions / "masks" / LABELS_FILE).is_file():
        predictions = predictions / "masks"
    ours, theirs = find_masks(predictions), find_masks(references)
    theirs = as_named_there(theirs, ours)
    corrected = {name: ours[name] for name in corrected_of(predictions) if name in ours}
    names = None
    if key is not None:
        names, ours, theirs = without_names(key, (predictions, references), ours, theirs)
    left_out = [name for name, path in ours.items() if path in corrected.values()]
    for name in left_out:
        del ours[name]
        theirs.pop(name, None)
    common = [name for name in ours if name in theirs]
    pairs = (ours, theirs), (theirs, ours)
    only = [tuple(name for name in first if name not in second) for first, second in pairs]
    if not common or (strict and any(only)):
        raise DataError(_unmatched(predictions, references, common, only[0], only[1]))
    if classes is None:
        classes = read_labels(predictions / LABELS_FILE)
    meaning = Meaning(tuple(ignore), values)
    found: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
    cases = [_score_pair(name, ours[name], theirs[name], classes, empty, meaning, found) for name in common]
    if names is not None:
        hidden = {"prediction": "", "reference": ""}
        cases = [item.model_copy(update={**hidden, "reason": names.text(item.reason)}) for item in cases]
    unexplained = tuple(one_sided(found)) if classes is None else ()
    if strict and unexplained:
        raise DataError(f"{'; '.join(unexplained)}, but strict was asked for: {REMEDY}")
    result = EvaluationResult(
        cases=tuple(_complete(cases, empty)),
        only_predictions=only[0],
        only_references=only[1],
        empty=empty,
        unexplained=unexplained,
        corrected=tuple(left_out),
    )
    if out is not None:
        result = _write(result, Path(out))
    if strict and result.unscored:
        reasons = "; ".join(f"{item.case}: {item.reason}" for item in result.unscored)
        raise DataError(f"{result.coverage}, but strict was asked for: {reasons}")
    return result


def read_labels(path: Path) -> tuple[LabelClass, ...] | None:
    """Return the classes of a ``labels.json``, or None where there is none.

    Raises:
        ConfigError: it is not ``{"labels": [{"value": ..., "name": ...}, ...]}``.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(LabelClass.model_validate(item) for item in content["labels"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{path}: expected {{"labels": [{{"value": 1, "name": "prostate"}}, ...]}}: {error}'
        ) from None


def _score_pair(
    name: str,
    prediction: Path,
    reference: Path,
    classes: Sequence[LabelClass] | None,
    empty: Empty,
    meaning: Meaning,
    found: dict[str, tuple[frozenset[int], frozenset[int]]],
) -> EvaluatedCase:
    """Score one pair, and note in ``found`` the labels of both sides."""
    case = EvaluatedCase(case=name, prediction=str(prediction), reference=str(reference))
    try:
        pair = read_pair(prediction, reference, meaning)
        mask, truth, spacing = pair.mask, pair.truth, pair.spacing
        found[name] = pair.found
        if classes is None:
            values = sorted(frozenset[int]().union(*pair.found))
            classes = [LabelClass(value=value, name=f"label {value}") for value in values]
        known = [item.value for item in classes]
        check_labels(truth, known, f"reference {reference}")
        check_labels(mask, known, f"prediction {prediction}")
    except DataError as error:
        return case.model_copy(update={"status": "unscored", "reason": str(error)})
    scores = tuple(_score_class(item, mask, truth, spacing, empty) for item in classes if item.value != 0)
    return case.model_copy(update={"scores": scores, "ignored": pair.ignored})


def _score_class(
    item: LabelClass, mask: IntArray, truth: IntArray, size: tuple[Sequence[float], float], empty: Empty
) -> MaskScore:
    ours, theirs = mask == item.value, truth == item.value
    metrics = METRICS.in_order()
    values = evaluate_metrics(MaskPair(theirs, ours, *size), metrics)
    alone = [metric for metric in metrics if not metric.needs_reference]
    of_reference = evaluate_metrics(MaskPair(None, theirs, *size), alone)
    values |= {f"{name}_reference": value for name, value in of_reference.items()}
    voxels, voxels_reference = int(np.count_nonzero(ours)), int(np.count_nonzero(theirs))
    if empty == "one" and not voxels and not voxels_reference:
        values["dice"] = 1.0
    one_empty = bool(voxels) != bool(voxels_reference)
    values["hd95_mm_or_diagonal"] = field_diagonal(mask.shape, size[0]) if one_empty else values["hd95_mm"]
    return MaskScore(
        label=item.value,
        name=item.name,
        **MaskScore.placed(values),
        voxels=voxels,
        voxels_reference=voxels_reference,
    )


def _complete(cases: Sequence[EvaluatedCase], empty: Empty) -> Iterator[EvaluatedCase]:
    """Give every scored case a row per label that occurs in any case; absent labels are empty."""
    names = {score.label: score.name for case in cases for score in case.scores}
    for case in cases:
        present = {score.label: score for score in case.scores}
        absent = [
            _score_class(LabelClass(value=label, name=name), NOTHING, NOTHING, ((1.0, 1.0, 1.0), 1.0), empty)
            for label, name in names.items()
            if label not in present
        ]
        rows = sorted([*case.scores, *absent], key=lambda score: score.label)
        yield case if case.status != "ok" else case.model_copy(update={"scores": tuple(rows)})


def _shown(metric: Metric, score: MaskScore) -> str:
    value = score.value(metric.name)
    return decimals(value, 2) if metric.unit else percent(value)


def _summarise(scores: Sequence[MaskScore]) -> dict[str, Any]:
    def known(name: str) -> list[float]:
        return [value for score in scores if (value := score.value(name)) is not None]

    def mean(name: str) -> float | None:
        values = known(name)
        return float(np.mean(values)) if values else None

    overlaps = known("dice")
    voxels = sum(score.voxels + score.voxels_reference for score in scores)
    common = sum((score.dice or 0.0) * (score.voxels + score.voxels_reference) for score in scores)
    return {
        "label": scores[0].label,
        "name": scores[0].name,
        "cases": len(scores),
        "not_applicable": sum(score.voxels == score.voxels_reference == 0 for score in scores),
        "missed": sum(score.voxels == 0 < score.voxels_reference for score in scores),
        "false_positive": sum(score.voxels_reference == 0 < score.voxels for score in scores),
        "dice_std": float(np.std(overlaps, ddof=1)) if len(overlaps) > 1 else None,
        "dice_pooled": common / voxels if voxels else None,
        **{f"{name}_mean": mean(name) for name in figure_columns()},
        "hd95_mm_mean_or_diagonal": mean("hd95_mm_or_diagonal"),
    }


def _write(result: EvaluationResult, out: Path) -> EvaluationResult:
    from tesla_med.io.files import write_json, write_text
    from tesla_med.io.tables import to_csv

    table, summary = out / "metrics.csv", out / "summary.json"
    rows = []
    for case in result.cases:
        common = {"case": case.case, "status": case.status, "reason": case.reason}
        if not case.scores:
            rows.append(dict.fromkeys(columns()) | common)
        for score in case.scores:
            figures = {name: score.value(name) for name in figure_columns()}
            rows.append({"label": score.label, "name": score.name} | figures | common)
    result = result.model_copy(update={"files": (str(table), str(summary))})
    write_text(table, to_csv(columns(), rows))
    content = {
        "coverage": result.coverage,
        "empty": result.empty,
        "ignored_voxels": sum(item.ignored for item in result.cases),
        "unexplained": list(result.unexplained),
        "classes": result.summary(),
        "unscored": {item.case: item.reason for item in result.unscored},
        "only_predictions": list(result.only_predictions),
        "only_references": list(result.only_references),
        "corrected": list(result.corrected),
    }
    write_json(summary, content)
    return result


def _unmatched(
    predictions: Path, references: Path, common: Sequence[str], first: Sequence[str], second: Sequence[str]
) -> str:
    lists = [
        f"{len(names)} only in {folder}: {', '.join(names)}"
        for folder, names in ((predictions, first), (references, second))
        if names
    ]
    return (
        f"{len(common)} of {len(common) + len(first)} predictions have a reference; {'; '.join(lists)}."
        " Names must agree apart from suffixes such as _mask or _segmentation, sub-folders included"
    )
