"""Score finished results against references, whoever made them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from tesla_med.config.models import LabelClass
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError
from tesla_med.io.pseudonyms import KEY_ALONE, KeyFile
from tesla_med.scoring.metrics import Empty
from tesla_med.tasks.base import TASKS, Task


def evaluate(
    predictions: str | Path,
    references: str | Path | None = None,
    *,
    out: str | Path | None = None,
    strict: bool = False,
    classes: Sequence[LabelClass] | None = None,
    empty: Empty = "skip",
    ignore: Sequence[int] = (),
    values: Mapping[int, int] | None = None,
    task: str | None = None,
    anonymise: bool = False,
    key: str | Path | None = None,
) -> Any:
    """Score every result that has a reference.

    Args:
        predictions: folder of masks, the output folder of a run, or a ``predictions.csv`` of tiles.
        references: folder of reference masks; of tiles a folder with a sub-folder per class, a CSV with the
            columns ``tile`` and ``label``, or None for the column ``label`` of the table itself.
        out: where ``metrics.csv`` and ``summary.json`` are written; None writes nothing.
        strict: refuse files without a partner, pairs that cannot be scored, and values that only one side
            holds where no list of classes says what they are.
        classes: the classes of masks; None takes ``labels.json`` beside the predictions, else the values
            found in the masks.
        empty: where both masks are empty of a class the case is left out of the mean Dice ("skip"), or
            counts as 1 ("one").
        ignore: values of reference masks that mean "do not score": left out of every figure, and counted.
        values: value in a file of masks, of either side -> label; others stay as they are.
        task: what the predictions are of; None tells it from what is there, masks if nothing speaks for
            anything else.
        anonymise: replace the names of cases by pseudonyms in everything that is returned and written.
        key: file that says which is which; None: that of this user.

    Returns:
        The scores: :class:`tesla_med.scoring.masks.EvaluationResult` of masks,
        :class:`tesla_med.scoring.tables.TileEvaluation` of tiles.

    Raises:
        ConfigError: an option means nothing for these predictions or has a value that it cannot have, or
            the references are missing.
        DataError: a folder is missing or holds nothing that can be scored, names clash, nothing matches,
            or ``strict`` finds something that is not scored.
    """
    _check(empty, ignore, values)
    kind = _kind(user_path(predictions)) if task is None else TASKS.get(task)
    asked = {"empty": empty != "skip", "classes": classes is not None}
    asked |= {"ignore": bool(ignore), "values": bool(values), "anonymise": anonymise}
    kind.refuse({name for name, yes in asked.items() if yes})
    if key is not None and not anonymise:
        raise ConfigError(KEY_ALONE)
    names, apart = None, () if out is None else (user_path(out),)
    if anonymise:
        names = KeyFile(None if key is None else user_path(key), apart)
    return kind.evaluate(
        user_path(predictions),
        None if references is None else user_path(references),
        out=None if out is None else user_path(out),
        strict=strict,
        classes=classes,
        empty=empty,
        ignore=ignore,
        values=values,
        **({} if names is None else {"key": names}),
    )


def _check(empty: object, ignore: object, values: object) -> None:
    """Check what the command line cannot get wrong.

    Raises:
        ConfigError: a value that an option cannot have.
    """
    if empty not in get_args(Empty):
        raise ConfigError(f"empty: expected 'skip' or 'one', got {empty!r}")
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(map(_whole, ignore)):
        raise ConfigError(f"ignore: expected whole numbers, as in [255], got {ignore!r}")
    pairs = values.items() if isinstance(values, Mapping) else [(None, None)] if values else []
    if not all(_whole(part) for pair in pairs for part in pair):
        raise ConfigError(f"values: expected whole numbers for whole numbers, as in {{2: 1}}, got {values!r}")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _kind(predictions: Path) -> type[Task]:
    found = (task for _, task in TASKS.items() if task.recognises(predictions))
    return next(found, TASKS.get("segmentation"))
