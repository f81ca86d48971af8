"""Other judges than the guard's rule, on what the zoo recorded: thresholds, learned judges, the best choice.

Example::

    python benchmarks/judges.py --zoo docs/reference/results/zoo
    python benchmarks/judges.py --without-batch-norm --zoo docs/reference/results/{zoo,zoo-3000}

Every volume that ``zoo.py`` recorded holds the signals of all candidates and, for scoring, their Dice. So
another judge can be tried without a GPU. A learned judge predicts by how many points a candidate is better
than the source's mask, from the signals of both; it takes the candidate for which it predicts the most, or
the source's if that is less than ``--margin``. It is learned on the other sites only (leave one site out),
so that no label of a site has a part in the choices there. The rule's thresholds in the pipelines were not
chosen in this way; the grid shows how little they matter.

With ``--without-batch-norm``, what ``least_trust_without_batch_norm`` does, by site, to the models that it is
for. The least that loses the fewest volumes by more than 2 points, among those whose mean is at most
``SPARED`` points below the best, is the choice of a site; what is reported of the others follows from it.

Dice is in percent; a loss is against the source's mask as written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tesla_med.config.files import load_pipeline
from tesla_med.engine.guard import VERDICTS, candidate_of, judge
from tesla_med.engine.quality import OFFSET

Row = dict[str, Any]
CLIP = 15.0
"""Points of Dice beyond which a difference counts no more for learning."""
GRID = ((0.2, 0.3), (0.4, 0.15), (0.6, 0.3), (0.8, 0.3))
"""Pairs of ``head_start`` and ``doubt``."""
LEAST = (0.0, 3.0, 3.5, 4.0, 4.25, 4.5, 4.75, 5.0)
"""Values of ``least_trust_without_batch_norm``."""
SPARED = 0.3
LEARNED: dict[str, Callable[[], Any]] = {
    "ridge": lambda: make_pipeline(StandardScaler(), Ridge(3.0)),
    "forest": lambda: RandomForestRegressor(400, min_samples_leaf=8, random_state=0),
    "boosted trees, median": lambda: boosted(0.5),
    "boosted trees, lowest quarter": lambda: boosted(0.25),
    "boosted trees, lowest tenth": lambda: boosted(0.1),
}


def boosted(quantile: float) -> GradientBoostingRegressor:
    """Return trees that predict a quantile of the gain."""
    options = {"n_estimators": 150, "max_depth": 2, "subsample": 0.7, "random_state": 0}
    return GradientBoostingRegressor(loss="quantile", alpha=quantile, **options)


def dice_of(row: Row, name: str) -> float:
    """Return the Dice of a candidate, 0 where it has none."""
    return zoo.candidate_dice(row, name) or 0.0


def features(row: Row, name: str) -> list[float]:
    """Return what a learned judge knows of a candidate and of the source's mask; no label is among it."""
    signals, names = row["signals"], list(row["candidates"])

    def agreement(one: str, two: str) -> float:
        key = f"agreement_{one}_{two}"
        return 1.0 if one == two else float(signals.get(key, signals.get(f"agreement_{two}_{one}")))

    def mean_agreement(one: str) -> float:
        return float(np.mean([agreement(one, two) for two in names if two not in (one, "part")]))

    with_norms = "own" in names
    steady, usual = log_scale(signals[f"consistency_{name}"]), log_scale(signals["consistency_source"])
    size = (signals[f"foreground_{name}"] + 1e-4) / (signals["foreground_source"] + 1e-4)
    return [
        steady,
        usual,
        steady - usual,
        log_scale(agreement(name, "source")),
        log_scale(agreement("source", "adapted")),
        log_scale(mean_agreement(name)) - log_scale(mean_agreement("source")),
        log_scale(min(agreement(name, two) for two in names)),
        signals[f"area_change_{name}"] - 1.0,
        signals["area_change_source"] - 1.0,
        signals.get(f"narrowing_{name}", 1.0),
        math.log(size),
        signals["weights_moved"],
        signals["statistics_distance"],
        log_scale(agreement("half", "source")) if with_norms else 0.0,
        log_scale(agreement("own", "source")) if with_norms else 0.0,
        float(with_norms),
        *(float(name == other) for other in VERDICTS if other != "source"),
    ]


def log_scale(agreement: float) -> float:
    """Return an agreement in [0, 1] on the guard's scale, on which sure ones lie apart."""
    return -math.log(OFFSET - agreement)


def learned(rows: Sequence[Row], make: Callable[[], Any], margin: float) -> list[str]:
    """Return the candidate that a learned judge takes of every volume, learned on the other sites."""
    asked = [
        (number, name) for number, row in enumerate(rows) for name in row["candidates"] if name != "source"
    ]
    known = np.array([features(rows[number], name) for number, name in asked])
    gains = np.array(
        [dice_of(rows[number], name) - dice_of(rows[number], "source") for number, name in asked]
    )
    sites = np.array([rows[number]["site"] for number, _ in asked])
    best = [(margin, "source")] * len(rows)
    for site in dict.fromkeys(sites.tolist()):
        there = sites == site
        model = make().fit(known[~there], np.clip(gains[~there], -CLIP, CLIP))
        for place, value in zip(np.flatnonzero(there), model.predict(known[there]), strict=True):
            number, name = asked[place]
            best[number] = max(best[number], (float(value), name))
    return [name for _, name in best]


def ruled(rows: Sequence[Row], head_start: float, doubt: float, *, mixed: bool) -> list[str]:
    """Return the candidate that the guard's rule takes of every volume under other thresholds."""
    pipelines = {task: load_pipeline(task).guard for task in ("prostate", "spinal_cord")}
    taken = []
    for row in rows:
        config = pipelines[zoo.MODELS[row["model"]].task]
        candidates = [name for name in VERDICTS if name != "mixed" or mixed]
        changes = {"head_start": head_start, "doubt": doubt, "candidates": tuple(candidates)}
        taken.append(candidate_of(judge(row["signals"], config.model_copy(update=changes))))
    return taken


def judges(rows: Sequence[Row], margin: float) -> Iterator[tuple[str, list[str]]]:
    """Yield every judge and what it takes of each volume."""
    yield "source always", ["source"] * len(rows)
    yield "adapted always", ["adapted"] * len(rows)
    yield "the guard", [row["taken"] for row in rows]
    for mixed in (False, True):
        for head_start, doubt in GRID:
            name = f"its rule, head_start {head_start:g}, doubt {doubt:g}" + (", mixed" if mixed else "")
            yield name, ruled(rows, head_start, doubt, mixed=mixed)
    for name, make in LEARNED.items():
        yield name, learned(rows, make, margin)
    yield "best of all", [max(row["candidates"], key=lambda name: dice_of(row, name)) for row in rows]


def line(name: str, rows: Sequence[Row], taken: Sequence[str]) -> str:
    """Return the figures of one judge."""
    ends = [dice_of(row, item) for row, item in zip(rows, taken, strict=True)]
    down = [(row["dice"]["source"] or 0.0) - end for row, end in zip(rows, ends, strict=True)]
    pairs: dict[tuple[str, str], list[float]] = {}
    for row, end in zip(rows, ends, strict=True):
        pairs.setdefault((row["model"], row["site"]), []).append(end)
    mean = float(np.mean([np.mean(values) for values in pairs.values()]))
    shares = [f"{100 * np.mean([loss > limit for loss in down]):.1f}" for limit in zoo.LOSSES]
    return "| " + " | ".join([name, f"{mean:.1f}", *shares, f"{max(0.0, *down):.1f}"]) + " |"


def least_trusts(rows: Sequence[Row]) -> Iterator[tuple[str, float, float, list[float]]]:
    """Yield site, least trust, mean gain over models, and losses in points, of models without batch norm."""
    alone = [row for row in rows if "own" not in row["candidates"]]
    guard = load_pipeline("prostate").guard
    for site in dict.fromkeys(row["site"] for row in alone):
        for least in LEAST:
            config = guard.model_copy(update={"least_trust_without_batch_norm": least})
            gains: dict[str, list[float]] = {}
            for row in alone:
                if row["site"] == site:
                    end = dice_of(row, candidate_of(judge(row["signals"], config)))
                    model = f"{row['model']} of {row['zoo']}"
                    gains.setdefault(model, []).append(end - dice_of(row, "source"))
            losses = [-value for values in gains.values() for value in values]
            yield site, least, float(np.mean([np.mean(values) for values in gains.values()])), losses


def print_least_trusts(rows: Sequence[Row]) -> None:
    """Print the table of :func:`least_trusts`, and what each site chooses."""
    heads = ["site", "least trust", "mean gain", *(f"> {limit:g}" for limit in zoo.LOSSES), "worst"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    found = list(least_trusts(rows))
    for site, least, gain, losses in found:
        counts = [str(sum(loss > limit for loss in losses)) for limit in zoo.LOSSES]
        print(
            "| " + " | ".join([site, f"{least:g}", f"{gain:.2f}", *counts, f"{max(0.0, *losses):.1f}"]) + " |"
        )
    for site in dict.fromkeys(item[0] for item in found):
        there = [item for item in found if item[0] == site]
        near = [item for item in there if item[2] >= max(gain for _, _, gain, _ in there) - SPARED]
        chosen = min(near, key=lambda item: sum(loss > 2 for loss in item[3]))
        print(f"\n{site} chooses {chosen[1]:g}.", end="")
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, nargs="+", required=True, help="folders of the results of zoo.py")
    parser.add_argument("--without-batch-norm", action="store_true")
    parser.add_argument("--margin", type=float, default=1.0, help="least predicted gain, in points of Dice")
    options = parser.parse_args(arguments)
    rows = [
        {**row, "zoo": folder.name}
        for folder in options.zoo
        for row in zoo.finished(zoo.parse(["--out", str(folder), "--table"]))
    ]
    if options.without_batch_norm:
        print_least_trusts(rows)
        return 0
    heads = ["judge", "mean Dice", *(f"> {limit:g} points lost, %" for limit in zoo.LOSSES), "worst"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for name, taken in judges(rows, options.margin):
        print(line(name, rows, taken), flush=True)
    print(f"\n{len(rows)} volumes; the mean is over models and sites.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
