"""Write a comparison: Markdown, LaTeX, HTML with pictures, and JSON."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.compare.figures import ACCURACY, AVERAGE, DICE, Figure, Key, Metric, Summary, case_values
from tesla_med.config.tables import TableConfig
from tesla_med.io.files import atomic_path, write_json

NOT_RUN = "n/a"
INK, ZERO = "#27313d", "#c0392b"
COLOURS = (
    *("#7f7f7f", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#a6761d"),
    *("#1f6f8b", "#8a94a3"),
)
NOTES = (
    "Dice in %, mean over foreground classes, then cases, of the 3-D volumes on their native grids; mean "
    "and standard deviation over seeds. Change, interval (95 %, bootstrap over cases) and p (Wilcoxon "
    "signed-rank, Holm corrected over rows) are against the baseline, paired by case. Harmed: cases more "
    "than a point below the baseline. ECE: over one region for all rows, the first seed, mean over sites. "
    "Not a medical device."
)
TILE_NOTES = (
    "Error, 100 % less the accuracy over all labelled tiles of a site; mean and standard deviation over "
    "seeds; lower is better. Change of the error, in points, its interval (95 %, bootstrap over tiles) and p "
    "(McNemar's exact test over tiles, Holm corrected over rows; over several seeds a tile is won or lost by "
    "the share of seeds that were right) are against the baseline, paired by tile. Harmed: tiles that are "
    "right less often. ECE: over all labelled tiles, the first seed, mean over sites. Not a medical device."
)


def write_report(
    out: Path,
    table: TableConfig,
    summary: Summary,
    rows: Sequence[Mapping[str, Any]],
    problems: Mapping[str, str],
    more: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write ``table.md``, ``table.tex``, ``comparison.html``, ``comparison.json`` and the pictures.

    With several classes also ``classes.md`` and ``classes.tex``.

    Args:
        out: folder.
        table: what was asked for.
        summary: what came out.
        rows: tidy rows, for the points in the pictures.
        problems: cells that could not be run, with the reason.
        more: further pictures by file name.
    """
    header, body = grid(summary)
    notes, extra = notes_of(summary.metric), class_grid(summary)
    pictures = draw(summary, rows) | dict(more or {})
    texts = {
        "table.md": markdown(table, header, body, problems, notes),
        "table.tex": latex(table.caption or table.title, header, body),
        "comparison.html": _html(table, header, body, pictures, problems, notes, extra),
    }
    if extra is not None:
        title = f"{table.title}: {extra[0]}"
        texts["classes.md"] = markdown(
            table.model_copy(update={"title": title, "caption": ""}), *extra[1:], {}, ""
        )
        texts["classes.tex"] = latex(title, *extra[1:])
    written = []
    for name, text in texts.items():
        with atomic_path(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        written.append(out / name)
    for name, content in pictures.items():
        with atomic_path(out / name) as temporary:
            temporary.write_bytes(content)
        written.append(out / name)
    write_json(out / "comparison.json", as_json(table, summary, problems))
    return [*written, out / "comparison.json"]


def notes_of(metric: Metric) -> str:
    """Return what the columns of a table mean."""
    return TILE_NOTES if metric is ACCURACY else NOTES


def grid(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the table as text without empty columns; the best are between asterisks."""
    columns = [*summary.sites, AVERAGE] if len(summary.sites) > 1 else list(summary.sites)
    metric = summary.metric
    header = [
        *("row", "protocol"),
        *(f"{column}, error %" if metric.as_error else column for column in columns),
        *("change", "95 % interval", "p", "harmed", "worst", "ECE", f"ms a {metric.piece}", "MiB"),
    ]
    best = {
        column: max(
            (figure.mean for key in summary.rows if (figure := summary.figures.get((*key, column)))),
            default=None,
        )
        for column in columns
    }
    body = [_line(summary, key, columns, best) for key in summary.rows]
    used = [index for index in range(len(header)) if any(line[index] for line in body)]
    return [header[index] for index in used], [[line[index] for index in used] for line in body]


def class_grid(summary: Summary) -> tuple[str, list[str], list[list[str]]] | None:
    """Return title, header and cells of accuracy or Dice by class, None without several classes."""
    columns = [*summary.classes, AVERAGE]
    if not summary.by_class:
        return None
    best = {
        column: max(
            (figure.mean for (*_, name), figure in summary.by_class.items() if name == column), default=None
        )
        for column in columns
    }
    body = []
    for key in summary.rows:
        cells = [*key]
        for column in columns:
            figure = summary.by_class.get((*key, column))
            text = NOT_RUN if figure is None else figure_text(figure)
            cells.append(f"**{text}**" if figure is not None and figure.mean == best[column] else text)
        body.append(cells)
    return f"{summary.metric.name} by class, %", ["row", "protocol", *columns], body


def _line(summary: Summary, key: Key, columns: Sequence[str], best: Mapping[str, float | None]) -> list[str]:
    cells = [key[0], key[1]]
    error = summary.metric.as_error
    for column in columns:
        figure = summary.figures.get((*key, column))
        text = NOT_RUN if figure is None else figure_text(figure, error)
        bold = figure is not None and best[column] is not None and figure.mean == best[column]
        cells.append(f"**{text}**" if bold else text)
    paired = summary.paired.get(key)
    if paired is None:
        cells += [""] * 5
    else:
        low, high, change = paired.low, paired.high, paired.difference
        if error:
            low, high = None if high is None else -high, None if low is None else -low
            change = 0.0 - change
        span = "" if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
        p = "" if paired.p_holm is None else ("<0.001" if paired.p_holm < 0.001 else f"{paired.p_holm:.3f}")
        harmed = f"{paired.harmed} of {paired.cases}"
        worst = "" if error else f"{100 * paired.worst:+.1f}"
        cells += [f"{100 * change:+.1f}", span, p, harmed, worst]
    errors = [
        item["ece"] for (*row, _), item in summary.calibration.items() if tuple(row) == key and item["ece"]
    ]
    cells.append(f"{sum(errors) / len(errors):.3f}" if errors else "")
    cost = summary.costs.get(key)
    seconds = None if cost is None else cost.seconds_per_slice
    memory = None if cost is None else cost.peak_memory_mib
    cells += ["" if seconds is None else f"{1000 * seconds:.0f}", "" if memory is None else f"{memory:.0f}"]
    return cells


def figure_text(figure: Figure, as_error: bool = False) -> str:
    """Return mean and deviation in %, as in 81.2 ± 0.4; ``as_error``, 100 less the mean."""
    deviation = "" if figure.std is None else f" ± {100 * figure.std:.1f}"
    mean = 1.0 - figure.mean if as_error else figure.mean
    return f"{100 * mean:.1f}{deviation}"


def markdown(
    table: TableConfig,
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    problems: Mapping[str, str],
    notes: str = NOTES,
) -> str:
    """Return the table as Markdown."""
    lines = [f"# {table.title}", "", table.caption, ""] if table.caption else [f"# {table.title}", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in body]
    lines += ["", notes] if notes else []
    lines += [f"- not run: {name}: {reason}" for name, reason in problems.items()]
    return "\n".join(lines) + "\n"


def latex(caption: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return the table as LaTeX for the package booktabs."""
    lines = [
        r"\begin{table}",
        rf"\caption{{{_tex(caption)}}}",
        rf"\begin{{tabular}}{{ll{'r' * (len(header) - 2)}}}",
        r"\toprule",
        " & ".join(_tex(cell) for cell in header) + r" \\",
        r"\midrule",
    ]
    lines += [" & ".join(_tex(cell) for cell in row) + r" \\" for row in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _tex(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    plain = text[2:-2] if bold else text
    for mark in "&%#_":
        plain = plain.replace(mark, f"\\{mark}")
    plain = plain.replace("±", r"$\pm$").replace("<", "$<$").replace("~", r"\textasciitilde{}")
    return rf"\textbf{{{plain}}}" if bold else plain


def _html(
    table: TableConfig,
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    pictures: Mapping[str, bytes],
    problems: Mapping[str, str],
    notes: str,
    extra: tuple[str, Sequence[str], Sequence[Sequence[str]]] | None,
) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tesla_med", "reports"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    tables = [("", header, body)] if extra is None else [("", header, body), extra]
    shown = [
        (
            title.capitalize(),
            head,
            [[(cell.strip("*"), cell.startswith("**")) for cell in row] for row in rows],
        )
        for title, head, rows in tables
    ]  # cells: text and whether it is the best
    images = {name: base64.b64encode(content).decode("ascii") for name, content in pictures.items()}
    template = environment.get_template("comparison.html.j2")
    return template.render(table=table, tables=shown, pictures=images, notes=notes, problems=dict(problems))


def as_json(table: TableConfig, summary: Summary, problems: Mapping[str, str]) -> dict[str, Any]:
    """Return everything in figures."""
    from tesla_med.models.checkpoint import versions

    rows = []
    for key in summary.rows:
        paired, cost = summary.paired.get(key), summary.costs.get(key)
        figures = {
            column: vars(figure)
            for column in (*summary.sites, AVERAGE)
            if (figure := summary.figures.get((*key, column)))
        }
        errors = {site: item for (*row, site), item in summary.calibration.items() if tuple(row) == key}
        rows.append(
            {
                "row": key[0],
                "protocol": key[1],
                summary.metric.name: figures,
                "against_baseline": None if paired is None else vars(paired),
                "cost": None if cost is None else vars(cost),
                "calibration" if summary.metric is ACCURACY else "region_calibration": errors,
                "failed": summary.failed.get(key, 0),
                "by_class": {
                    name: vars(figure)
                    for (*row, name), figure in summary.by_class.items()
                    if tuple(row) == key
                },
            }
        )
    return {
        "table": table.model_dump(mode="json"),
        "metric": summary.metric.name,
        "baseline": summary.baseline,
        "rows": rows,
        "not_run": dict(problems),
        "versions": versions(),
    }


# ------------------------------------------------------------ pictures


def draw(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return PNG files by name: Dice or error by site and row, the change of the cases, the calibration."""
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for (row, protocol, site, case, _), value in case_values(rows, summary.metric).items():
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
            points = [value for (*row, place, _), value in means.items() if (*row, place) == (*key, site)]
            colour = COLOURS[index % len(COLOURS)]
            spread = [index + 0.25 * ((7 * n) % 11 / 10 - 0.5) for n in range(len(points))]
            part.plot(spread, [100 * v for v in points], "o", color=colour, markersize=3.5, alpha=0.65, mew=0)
            if points:
                mean = 100 * sum(points) / len(points)
                part.plot([index - 0.32, index + 0.32], [mean, mean], color=colour, linewidth=2.4)
        part.set_title(site, color=INK, fontsize=11)
        part.set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)
    axes[0].set_ylabel("Dice of a case, %", color=INK)
    return _png(figure)


def _harm_plot(summary: Summary, means: Mapping[tuple[str, str, str, str], float]) -> bytes | None:
    labels = {key: text for key, text in _labels(summary).items() if key in summary.paired}
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
    axes[0].set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)
    axes[0].set_ylabel(f"Dice of a case less that of {summary.baseline}, points", color=INK)
    axes[0].set_title("Change of each case; red: more than a point lost", color=INK, fontsize=11)
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
        part.set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)
    axes[0].set_ylabel("error, %; 95 % interval over tiles", color=INK)
    return _png(figure)


def _won_and_lost(summary: Summary, means: Mapping[tuple[str, str, str, str], float]) -> bytes | None:
    """Draw the share of tiles that are right more often, and less often, than under the baseline."""
    labels = {key: text for key, text in _labels(summary).items() if key in summary.paired}
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
    axes[0].set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)
    axes[0].set_ylabel(f"% of tiles won and lost against {summary.baseline}", color=INK)
    axes[0].set_title("Tiles right more often (up) and less often (down, red)", color=INK, fontsize=11)
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
    axes[0].set_xticks(range(len(labels)), list(labels.values()), rotation=60, ha="right", fontsize=8)
    where = "" if summary.metric is ACCURACY else " in the region"
    axes[0].set_ylabel(f"ECE{where}; a point a site", color=INK)
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
    for index, (key, text) in enumerate(labels.items()):
        above, below = grid[2 * (index // columns) : 2 * (index // columns) + 2, index % columns]
        bins = summary.reliability[key]
        left, width = bins["edges"][:-1], bins["edges"][1] - bins["edges"][0]
        filled = [place for place, count in enumerate(bins["count"]) if count]
        colour = COLOURS[index % len(COLOURS)]
        places, shares = [left[place] for place in filled], [bins["accuracy"][place] for place in filled]
        above.bar(places, shares, width, align="edge", color=colour, edgecolor="white", linewidth=0.6)
        above.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above.plot([bins["confidence"][place] for place in filled], shares, "o", color=INK, markersize=2)
        above.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        above.set_title(text, color=INK, fontsize=8)
        total = max(sum(bins["count"]), 1)
        below.bar(left, [count / total for count in bins["count"]], width, align="edge", color=colour)
        below.set_ylim(0, 1)
        below.set_yticks([])
        if index % columns == 0:
            above.set_ylabel("share that is correct", color=INK, fontsize=8)
            below.set_ylabel("voxels" if summary.metric is DICE else "tiles", color=INK, fontsize=8)
        if index + columns >= len(labels):
            below.set_xlabel("confidence", color=INK, fontsize=8)
    for unused in range(len(labels), lines * columns):
        for item in grid[2 * (unused // columns) : 2 * (unused // columns) + 2, unused % columns]:
            item.set_axis_off()
    return _png(figure)
