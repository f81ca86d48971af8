"""Plots of a comparison: the headline metric, harm, calibration."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from tesla_med.compare.figures import ACCURACY, DICE, Summary, case_values
from tesla_med.compare.statistics import Key
from tesla_med.scoring.calibration import meaning_of

INK, ZERO = "#27313d", "#c0392b"
COLOURS = (
    *("#7f7f7f", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#a6761d"),
    *("#1f6f8b", "#8a94a3"),
)


def draw(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return PNG files by name: Dice or error by site and row, the change of the cases, the calibration."""
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for (row, protocol, site, case, _), value in case_values(rows, summary.metric.column).items():
        values.setdefault((row, protocol, site, case), []).append(value)
    means = {key: sum(items) / len(items) for key, items in values.items()}
    pictures = {}
    if means and summary.metric is ACCURACY:
        pictures["error.png"] = _error_plot(summary)
        lost = _won_and_lost(summary, means)
        if lost is not None:
            pictures["harm.png"] = lost
    elif means:
        pictures["dice.png"] = _dice_plot(summary, means)
        harm = _harm_plot(summary, means)
        if harm is not None:
            pictures["harm.png"] = harm
    if summary.calibration:
        pictures["calibration.png"] = _calibration_plot(summary)
    if summary.reliability:
        pictures["reliability.png"] = _reliability_plot(summary)
    return pictures


def _labels(summary: Summary) -> dict[Key, str]:
    several = len({protocol for _, protocol in summary.rows}) > 1
    return {key: f"{key[0]} {key[1]}" if several else key[0] for key in summary.rows}


def _figure(width: float, height: float, parts: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    figure = Picture(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, parts, squeeze=False, sharey=True)[0]
    for item in axes:
        item.spines[["top", "right"]].set_visible(False)
        item.grid(axis="y", color="#e8ebef", linewidth=0.8)
        item.set_axisbelow(True)
    return figure, axes


def _name_rows(axes: Any, labels: Mapping[Key, str]) -> None:
    """Write the labels of the rows below the axis."""
    axes.set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _dice_plot(summary: Summary, means: Mapping[tuple[str, str, str, str], float]) -> bytes:
    labels = _labels(summary)
    width = max(5.0, 1.2 + len(summary.sites) * (0.5 + 0.28 * len(labels)))
    figure, axes = _figure(width, 4.2, len(summary.sites))
    for part, site in zip(axes, summary.sites, strict=True):
        for index, key in enumerate(summary.rows):
            points = [value for (*row, name, _), value in means.items() if (*row, name) == (*key, site)]
            colour = COLOURS[index % len(COLOURS)]
            spread = [index + 0.25 * ((7 * n) % 11 / 10 - 0.5) for n in range(len(points))]
            part.plot(spread, [100 * v for v in points], "o", color=colour, markersize=3.5, alpha=0.65, mew=0)
            if points:
                mean = 100 * sum(points) / len(points)
                part.plot([index - 0.32, index + 0.32], [mean, mean], color=colour, linewidth=2.4)
        part.set_title(site, color=INK, fontsize=11)
        _name_rows(part, labels)
    axes[0].set_ylabel("Dice per case, %", color=INK)
    return _png(figure)


def _harm_plot(summary: Summary, means: Mapping[tuple[str, str, str, str], float]) -> bytes | None:
    labels = {key: text for key, text in _labels(summary).items() if key in summary.paired.baseline}
    if not labels:
        return None
    protocols = [protocol for row, protocol in summary.rows if row == summary.baseline]
    figure, axes = _figure(max(5.0, 1.4 + 0.75 * len(labels)), 4.2)
    for index, key in enumerate(labels):
        against = key[1] if key[1] in protocols else protocols[0]
        changes = sorted(
            100 * (value - means[summary.baseline, against, site, case])
            for (row, protocol, site, case), value in means.items()
            if (row, protocol) == key and (summary.baseline, against, site, case) in means
        )
        spread = [index + 0.5 * ((7 * n) % 11 / 10 - 0.5) for n in range(len(changes))]
        colours = [ZERO if change < -1 else "#1f6f8b" for change in changes]
        axes[0].scatter(spread, changes, s=14, c=colours, alpha=0.75, linewidths=0)
    axes[0].axhline(0, color=INK, linewidth=1)
    axes[0].set_yscale("symlog", linthresh=5)
    ticks = [tick for size in (1, 3, 10, 30, 100) for tick in (-size, size)]
    axes[0].set_yticks([0, *ticks], [str(tick) for tick in (0, *ticks)])
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(min(low, -3), max(high, 3))
    _name_rows(axes[0], labels)
    axes[0].set_ylabel(f"change in Dice per case against {summary.baseline}, points", color=INK)
    axes[0].set_title("Change per case; red: loss of more than one point", color=INK, fontsize=11)
    return _png(figure)


def _error_plot(summary: Summary) -> bytes:
    """Draw the error of each row at each site, with its 95 % interval over tiles."""
    labels = _labels(summary)
    width = max(5.0, 1.2 + len(summary.sites) * (0.5 + 0.28 * len(labels)))
    figure, axes = _figure(width, 4.2, len(summary.sites))
    for part, site in zip(axes, summary.sites, strict=True):
        for index, key in enumerate(summary.rows):
            found = summary.figures.get((*key, site))
            if found is None:
                continue
            part.bar(index, 100 * (1 - found.mean), 0.62, color=COLOURS[index % len(COLOURS)])
            if found.low is not None and found.high is not None:
                ends = [100 * (1 - found.high), 100 * (1 - found.low)]
                part.plot([index, index], ends, color=INK, linewidth=1.2)
        part.set_title(site, color=INK, fontsize=11)
        _name_rows(part, labels)
    axes[0].set_ylabel("error, %; 95 % interval over tiles", color=INK)
    return _png(figure)


def _won_and_lost(summary: Summary, means: Mapping[tuple[str, str, str, str], float]) -> bytes | None:
    """Draw the share of tiles classified correctly more often, and less often, than under the baseline."""
    labels = {key: text for key, text in _labels(summary).items() if key in summary.paired.baseline}
    if not labels:
        return None
    protocols = [protocol for row, protocol in summary.rows if row == summary.baseline]
    figure, axes = _figure(max(5.0, 1.4 + 0.75 * len(labels)), 4.2)
    for index, key in enumerate(labels):
        against = key[1] if key[1] in protocols else protocols[0]
        changes = [
            value - means[summary.baseline, against, site, tile]
            for (row, protocol, site, tile), value in means.items()
            if (row, protocol) == key and (summary.baseline, against, site, tile) in means
        ]
        won = 100 * sum(change > 0 for change in changes) / len(changes)
        lost = 100 * sum(change < 0 for change in changes) / len(changes)
        axes[0].bar(index, won, 0.62, color="#1f6f8b")
        axes[0].bar(index, -lost, 0.62, color=ZERO)
    axes[0].axhline(0, color=INK, linewidth=1)
    _name_rows(axes[0], labels)
    axes[0].set_ylabel(f"% of tiles gained and lost against {summary.baseline}", color=INK)
    axes[0].set_title(
        "Tiles classified correctly more often (up) and less often (down, red)", color=INK, fontsize=11
    )
    return _png(figure)


def _calibration_plot(summary: Summary) -> bytes:
    labels = _labels(summary)
    figure, axes = _figure(max(5.0, 1.4 + 0.75 * len(labels)), 3.6)
    for index, key in enumerate(summary.rows):
        points = [
            item["ece"]
            for (*row, _), item in summary.calibration.items()
            if tuple(row) == key and item["ece"] is not None
        ]
        if points:
            axes[0].bar(index, sum(points) / len(points), 0.62, color=COLOURS[index % len(COLOURS)])
            axes[0].plot([index] * len(points), points, "o", color=INK, markersize=3)
    _name_rows(axes[0], labels)
    where = "" if summary.metric is ACCURACY else " in the region"
    axes[0].set_ylabel(f"ECE{where}; one point per site", color=INK)
    return _png(figure)


def _reliability_plot(summary: Summary) -> bytes:
    """Draw a reliability diagram a row and protocol, side by side, and below each how full its bins are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    labels = {key: text for key, text in _labels(summary).items() if key in summary.reliability}
    columns = min(6, len(labels))
    lines = -(-len(labels) // columns)
    figure = Picture(figsize=(2.1 * columns + 0.5, 2.9 * lines), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        2 * lines, columns, squeeze=False, sharex=True, gridspec_kw={"height_ratios": [4, 1] * lines}
    )
    for item in grid.flat:
        item.spines[["top", "right"]].set_visible(False)
        item.tick_params(labelsize=7)
    noun = "voxel" if summary.metric is DICE else "tile"
    confidence, accuracy = meaning_of(noun=noun)
    for index, (key, text) in enumerate(labels.items()):
        above, below = grid[2 * (index // columns) : 2 * (index // columns) + 2, index % columns]
        bins = summary.reliability[key]
        left, width = bins["edges"][:-1], bins["edges"][1] - bins["edges"][0]
        filled = [number for number, count in enumerate(bins["count"]) if count]
        colour = COLOURS[index % len(COLOURS)]
        starts, shares = [left[number] for number in filled], [bins["accuracy"][number] for number in filled]
        above.bar(starts, shares, width, align="edge", color=colour, edgecolor="white", linewidth=0.6)
        above.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above.plot([bins["confidence"][number] for number in filled], shares, "o", color=INK, markersize=2)
        above.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        above.set_title(text, color=INK, fontsize=8)
        total = max(sum(bins["count"]), 1)
        below.bar(left, [count / total for count in bins["count"]], width, align="edge", color=colour)
        below.set_ylim(0, 1)
        below.set_yticks([])
        if index % columns == 0:
            above.set_ylabel(accuracy, color=INK, fontsize=6.5, wrap=True)
            below.set_ylabel(f"{noun}s", color=INK, fontsize=8)
        if index + columns >= len(labels):
            below.set_xlabel(confidence, color=INK, fontsize=8)
    for unused in range(len(labels), lines * columns):
        for item in grid[2 * (unused // columns) : 2 * (unused // columns) + 2, unused % columns]:
            item.set_axis_off()
    return _png(figure)
