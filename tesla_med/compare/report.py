"""Write a comparison: Markdown, LaTeX, HTML with pictures, CSV and JSON."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.compare.figures import Summary
from tesla_med.compare.plots import draw
from tesla_med.compare.results import as_json, summary_rows
from tesla_med.compare.tables import Sheet, sheets
from tesla_med.config.tables import TableConfig
from tesla_med.io.files import write_bytes, write_json, write_text


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the tidy rows as CSV, blank where there is no value, and return the path."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns)
    writer.writeheader()
    writer.writerows({name: "" if row[name] is None else row[name] for name in columns} for row in rows)
    write_text(path, stream.getvalue())
    return path


def write_report(
    out: Path,
    table: TableConfig,
    summary: Summary,
    rows: Sequence[Mapping[str, Any]],
    problems: Mapping[str, str],
    more: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write the tables as Markdown and LaTeX, ``comparison.html``, the pictures, and the figures as data.

    Args:
        out: folder.
        table: what was asked for.
        summary: what came out.
        rows: tidy rows, for the points in the pictures.
        problems: cells that could not be run, with the reason.
        more: further pictures by file name.
    """
    shown = sheets(summary)
    pictures = draw(summary, rows) | dict(more or {})
    texts = {"comparison.html": _html(table, shown, pictures, problems)}
    for sheet in shown:
        title = f"{table.title}: {sheet.title}" if sheet.title else table.title
        caption, missing = ("", {}) if sheet.title else (table.caption, problems)
        texts[f"{sheet.stem}.md"] = markdown(title, caption, sheet, missing)
        texts[f"{sheet.stem}.tex"] = latex(caption or title, sheet.header, sheet.body)
    for name, text in texts.items():
        write_text(out / name, text)
    for name, picture in pictures.items():
        write_bytes(out / name, picture)
    written = [out / name for name in (*texts, *pictures)]
    written.append(write_rows(out / "summary.csv", *summary_rows(summary)))
    write_json(out / "comparison.json", as_json(table, summary, problems))
    return [*written, out / "comparison.json"]


def markdown(title: str, caption: str, sheet: Sheet, problems: Mapping[str, str]) -> str:
    """Return a table as Markdown, with its notes and what could not be run."""
    lines = [f"# {title}", "", *((caption, "") if caption else ())]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in (sheet.header, *sheet.body)]
    lines += [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(sheet.header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows[1:]]
    lines += ["", sheet.notes] if sheet.notes else []
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


IN_TEX = {mark: f"\\{mark}" for mark in "&%#_${}"} | {
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}


def _tex(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    plain = text[2:-2] if bold else text
    plain = "".join(IN_TEX.get(letter, letter) for letter in plain)
    return rf"\textbf{{{plain}}}" if bold else plain


def _html(
    table: TableConfig, shown: Sequence[Sheet], pictures: Mapping[str, bytes], problems: Mapping[str, str]
) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tesla_med", "reports"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    cells = {
        sheet.stem: [[(cell.strip("*"), cell.startswith("**")) for cell in row] for row in sheet.body]
        for sheet in shown
    }  # text and whether it is the best
    images = {name: base64.b64encode(content).decode("ascii") for name, content in pictures.items()}
    template = environment.get_template("comparison.html.j2")
    return template.render(table=table, sheets=shown, cells=cells, pictures=images, problems=dict(problems))
