"""How often each class is predicted, and whether that looks like a collapse; no references are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tesla_med.config.models import PipelineConfig
from tesla_med.records import CaseResult, Predicted, TileResult
from tesla_med.scoring.text import counted, plural

NEARLY_ALL = 0.95
"""Share of the tiles from which on a class takes nearly all of them."""


def predicted_tiles(results: Sequence[TileResult], pipeline: PipelineConfig) -> Predicted:
    """Return the number of tiles that each model gives each class.

    A class is remarked on that the adapted model never predicts, or that takes ``NEARLY_ALL`` tiles, where
    there are at least as many tiles as classes.
    """
    names = [item.name for item in pipeline.classes]
    counts: dict[str, dict[str, int]] = {name: {"source": 0, "adapted": 0} for name in names}
    for item in results:
        if item.probs is not None and item.probs_source is not None:
            counts[names[int(item.probs_source.argmax())]]["source"] += 1
            counts[names[int(item.probs.argmax())]]["adapted"] += 1
    return Predicted(counts, tuple(tile_remarks(counts)))


def tile_remarks(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what is to be said of the numbers of tiles by class and model."""
    total = sum(item["adapted"] for item in counts.values())
    if total < len(counts):
        return []
    found = []
    for name, item in counts.items():
        source = f" (source model: {item['source']})" if "source" in item else ""
        if not item["adapted"]:
            found.append(f"class {name} is never predicted: 0 of {counted(total, 'tile')}{source}")
        elif item["adapted"] >= NEARLY_ALL * total:
            text = f"class {name} takes nearly all: {item['adapted']} of {counted(total, 'tile')}{source}"
            found.append(text)
    return found


def predicted_cases(results: Sequence[CaseResult], pipeline: PipelineConfig) -> Predicted:
    """Return in how many cases each model finds each foreground class, and with how many voxels.

    A class is remarked on that the masks hold in no case, or that takes more than the share
    ``guard.largest_foreground`` of all voxels. Constant images are left out.
    """
    read = [item for item in results if item.scores and item.status not in ("failed", "blank", "corrected")]
    field = sum(item.voxels for item in read)
    counts, remarks = {}, []
    for item in pipeline.classes[1:]:
        scores = [score for case in read for score in case.scores if score.label == item.value]
        own = {
            "source": sum(score.voxels_source > 0 for score in scores),
            "adapted": sum(score.voxels > 0 for score in scores),
            "voxels_source": sum(score.voxels_source for score in scores),
            "voxels_adapted": sum(score.voxels for score in scores),
        }
        counts[item.name] = own
        if scores and not own["adapted"]:
            where = f"in 0 of {counted(len(scores), 'case')}"
            remarks.append(f"class {item.name} is never predicted: {where} (source model: {own['source']})")
        elif field and own["voxels_adapted"] > pipeline.guard.largest_foreground * field:
            share, before = (100 * own[f"voxels_{model}"] / field for model in ("adapted", "source"))
            text = f"{share:.0f} % of all voxels (source model: {before:.0f} %)"
            remarks.append(f"class {item.name} takes nearly all: {text}")
    return Predicted(counts, tuple(remarks))


def predicted_table(
    found: Predicted, noun: str, *, frozen: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the counts, as text.

    Args:
        found: the counts.
        noun: what is counted, in the singular.
        frozen: nothing was adapted, so that there is one model.
    """
    keys = list(next(iter(found.counts.values()), {}))
    titles = {"source": f"{plural(noun)}, source", "adapted": f"{plural(noun)}, adapted"}
    titles |= {f"voxels_{model}": f"voxels, {model}" for model in ("source", "adapted")}
    if frozen:
        keys = [key for key in keys if key.endswith("adapted")]
        titles = {"adapted": plural(noun), "voxels_adapted": "voxels"}
    rows = [[name, *(str(item[key]) for key in keys)] for name, item in found.counts.items()]
    return ["predicted class", *(titles[key] for key in keys)], rows
