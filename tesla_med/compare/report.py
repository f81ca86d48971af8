"""Write a comparison: Markdown, LaTeX, HTML with pictures, and JSON."""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.compare.figures import ACCURACY, AVERAGE, Figure, Key, Metric, Summary
from tesla_med.compare.plots import draw
from tesla_med.config.tables import TableConfig
from tesla_med.io.files import atomic_path, write_json

NOT_RUN = "n/a"
NOTES = (
    "Dice in %, mean over foreground classes, then cases, of the 3-D volumes on their native grids; mean "
    "and standard deviation over seeds. Change, interval (95 %, bootstrap over cases) and p (Wilcoxon "
    "signed-rank, Holm-corrected over rows) are against the baseline, paired by case. Harmed: cases more "
    "than a point below the baseline. ECE: over one region for all rows, first seed, mean over sites. "
    "Not a medical device."
)
TILE_NOTES = (
    "Error, 100 % minus the accuracy over all labelled tiles of a site; mean and standard deviation over "
    "seeds; lower is better. Change of the error, in points, its interval (95 %, bootstrap over tiles) and p "
    "(McNemar's exact test over tiles, Holm-corrected over rows; over several seeds a tile is won or lost by "
    "the share of seeds that are correct) are against the baseline, paired by tile. Harmed: tiles classified "
    "correctly less often. ECE: over all labelled tiles, first seed, mean over sites. Not a medical device."
)


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the tidy rows as CSV, blank where there is no value, and return the path."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows({name: "" if row[name] is None else row[name] for name in columns} for row in rows)
    return path


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
        *("change", "95 % interval", "p", "harmed", "worst", "ECE", f"ms per {metric.piece}", "MiB"),
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
