"""How often does ``watch`` see a drift in a stream without one, and how soon does it notice a real one?

Example::

    python benchmarks/drift.py --out drift.json

Streams of figures: every figure of an image and the predicted Dice, independent of each other, drawn from a
distribution that does not change (false alarms), or of which one shifts by so many standard deviations after
case 100 (delay). Streams of images: generated prostates of the source's scanner, all along or until case 100,
then of one that lies some way towards another; the figures are measured on them. The rule is that of
``tesla_med.watch.drift`` with its defaults. An alarm is a figure that becomes one that has drifted; it lasts
for as long as it stays so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.demo.volumes import make_site, preset
from tesla_med.io.volumes import read_volume
from tesla_med.models.checkpoint import versions
from tesla_med.watch.drift import ALPHA, REFERENCE, WINDOW, find_drifts
from tesla_med.watch.statistics import NAMES, image_statistics

Doubles = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Doubles]
FIGURES = (*NAMES, "predicted_dice")
CASES, CHANGE = 500, 100
SHIFTS = (0.5, 1.0, 1.5, 2.0, 3.0)


# ------------------------------------------------------------ streams of figures


def correlated(generator: np.random.Generator, count: int) -> Doubles:
    """Return values of which each is correlated by 0.3 with the one before."""
    values = generator.normal(size=count)
    for index in range(1, count):
        values[index] = 0.3 * values[index - 1] + np.sqrt(1 - 0.3**2) * values[index]
    return values


DRAWS: Mapping[str, Draw] = {
    "normal": lambda generator, count: generator.normal(size=count),
    "heavy tails (t, 3 degrees)": lambda generator, count: generator.standard_t(3, count),
    "skewed (log-normal)": lambda generator, count: generator.lognormal(size=count),
    "two values (70 %, 30 %)": lambda generator, count: generator.choice([0.0, 1.0], count, p=(0.7, 0.3)),
    "correlated (0.3 with the case before)": correlated,
}


def false_alarms(draw: Draw, streams: int, cases: int, seed: int) -> dict[str, float]:
    """Return how often streams without drift give an alarm."""
    generator = np.random.default_rng(seed)
    alarms, touched = 0, 0
    for _ in range(streams):
        found = find_drifts({name: draw(generator, cases).tolist() for name in FIGURES})
        alarms += len(found)
        touched += bool(found)
    looked = streams * (cases - REFERENCE - WINDOW + 1)
    return {
        "streams": streams,
        "cases_per_stream": cases,
        "share_of_streams_with_an_alarm": touched / streams,
        "alarms_per_1000_cases": 1000 * alarms / looked,
    }


def delays(shift: float, streams: int, seed: int) -> dict[str, float | None]:
    """Return how soon a shift of one normal figure by so many standard deviations is noticed."""
    generator = np.random.default_rng(seed)
    found: list[float] = []
    for _ in range(streams):
        figures = {name: generator.normal(size=CHANGE + 100) for name in FIGURES}
        figures["noise"][CHANGE:] += shift
        drifts = find_drifts({name: values.tolist() for name, values in figures.items()})
        at = [item.first - CHANGE + 1 for item in drifts if item.name == "noise" and item.first >= CHANGE]
        found.append(min(at, default=np.inf))
    return _noticed(found) | {"shift_in_standard_deviations": shift}


def _noticed(found: Sequence[float]) -> dict[str, float | None]:
    middle = float(np.median(found))
    return {
        "streams": len(found),
        "share_noticed_within_20_cases": float(np.mean(np.array(found) <= 20)),
        "share_noticed_within_100_cases": float(np.mean(np.array(found) <= 100)),
        "median_delay_cases": middle if np.isfinite(middle) else None,
    }


# ------------------------------------------------------------ streams of images


def measured(folder: Path, strength: float, count: int, seed: int) -> list[dict[str, float]]:
    """Return the figures of generated images of a scanner so far on the way to the preset ``hard``."""
    settings = preset("prostate", "hard", shift=strength).model_copy(update={"matrix": 64, "slices": 8})
    paths = make_site(folder, "prostate", settings, count, seed)
    return [image_statistics(read_volume(path)) for path in paths]


def image_streams(strength: float, streams: int, seed: int) -> dict[str, Any]:
    """Return in how many streams of 160 images a drift is found, and when."""
    found: list[float] = []
    early, names = 0, set()
    for number in range(streams):
        with tempfile.TemporaryDirectory() as folder:
            before = measured(Path(folder, "before"), 0.0, CHANGE, seed + 2 * number)
            after = measured(Path(folder, "after"), strength, 60, seed + 2 * number + 1)
        images = [*before, *after]
        drifts = find_drifts({name: [item.get(name) for item in images] for name in NAMES})
        early += any(item.first < CHANGE for item in drifts)
        names |= {item.name for item in drifts if item.first >= CHANGE}
        found.append(
            min((item.first - CHANGE + 1 for item in drifts if item.first >= CHANGE), default=np.inf)
        )
    return _noticed(found) | {
        "strength": strength,
        "streams_with_an_alarm_before_the_change": early,
        "figures": [name for name in NAMES if name in names],
    }


# ------------------------------------------------------------ the program


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [list(columns), ["---"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return "n/a" if share is None else f"{100 * share:.1f} %"


def tables(result: Mapping[str, Any]) -> str:
    """Return the three tables of a result."""
    quiet = []
    for name, item in result["false_alarms"].items():
        share, rate = item["share_of_streams_with_an_alarm"], item["alarms_per_1000_cases"]
        quiet.append([name, str(item["streams"]), percent(share), f"{rate:.2f}"])
    columns = [
        "values",
        "streams",
        f"streams of {result['cases']} cases with an alarm",
        "alarms per 1000 cases",
    ]
    shares = ("share_noticed_within_20_cases", "share_noticed_within_100_cases")

    def told(item: Mapping[str, Any], *names: str) -> list[str]:
        delay = item["median_delay_cases"]
        return [*(percent(item[name]) for name in names), "none" if delay is None else f"{delay:.0f}"]

    shifted = [
        [f"{item['shift_in_standard_deviations']:g}", *told(item, *shares)] for item in result["delays"]
    ]
    imaged = []
    for item in result["images"]:
        early = str(item["streams_with_an_alarm_before_the_change"])
        names = ", ".join(item["figures"]) or "none"
        imaged.append([f"{item['strength']:g}", str(item["streams"]), early, *told(item, shares[0]), names])
    ways = ["way to the other scanner", "streams", "alarms before the change", "noticed within 20 cases"]
    parts = [
        table(columns, quiet),
        table(("shift, SD", "noticed within 20 cases", "within 100", "median delay, cases"), shifted),
        table((*ways, "median delay, cases", "figures"), imaged),
    ]
    return "\n\n".join(parts)


def measure(streams: int, images: int, cases: int, seed: int) -> dict[str, Any]:
    """Return every figure of this program."""
    return {
        "command": " ".join(["python", "benchmarks/drift.py", *sys.argv[1:]]),
        "versions": versions(),
        "alpha": ALPHA,
        "reference_cases": REFERENCE,
        "window_cases": WINDOW,
        "cases": cases,
        "false_alarms": {name: false_alarms(draw, streams, cases, seed) for name, draw in DRAWS.items()},
        "delays": [delays(shift, streams, seed) for shift in SHIFTS],
        "images": [image_streams(strength, images, seed) for strength in (0.0, 0.1, 0.25, 0.5)],
    }


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    parser.add_argument("--streams", type=int, default=500, help="streams of figures of each kind")
    parser.add_argument("--images", type=int, default=8, help="streams of images of each strength")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few and short streams, to see that it works")
    arguments = parser.parse_args()
    sizes = (4, 1, 120) if arguments.quick else (arguments.streams, arguments.images, CASES)
    result = measure(*sizes, arguments.seed)
    print(tables(result))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
