"""Pictures and the page of a run on tiles."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError
from tesla_med.io.files import atomic_path
from tesla_med.io.tiles import TileSet, read_tile

SHOWN, COLUMNS = 24, 6
THUMBNAIL, GAP, LINE, TEXT = 150, 10, 32, 12  # pixels
INK, WRONG = "#27313d", "#b3261e"


def contact_sheet(tiles: TileSet, probs: Any, pipeline: PipelineConfig) -> bytes:
    """Return a PNG of the least certain tiles with what they were taken for, most uncertain first.

    Where the label is another class it stands below, in red.
    """
    from PIL import Image, ImageDraw, ImageFont

    from tesla_med.scoring.score import normalised_entropy

    known = np.flatnonzero(~np.isnan(probs).any(axis=1))
    entropy = normalised_entropy(probs[known].T)
    chosen = known[np.argsort(-entropy, kind="stable")][:SHOWN]
    rows = max(1, -(-len(chosen) // COLUMNS))
    step = THUMBNAIL + GAP
    sheet = Image.new("RGB", (COLUMNS * step + GAP, rows * (step + LINE) + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    names = {item.value: item.name for item in pipeline.classes}
    for number, place in enumerate(chosen):
        left, top = GAP + number % COLUMNS * step, GAP + number // COLUMNS * (step + LINE)
        best, label = int(probs[place].argmax()), int(tiles.labels[place])
        taken = pipeline.classes[best]
        pen.text((left, top), f"{taken.name} {100 * probs[place, best]:.0f} %", fill=INK, font=font)
        if label in names and label != taken.value:
            pen.text((left, top + LINE // 2), f"label: {names[label]}", fill=WRONG, font=font)
        try:
            array = read_tile(tiles.paths[place]).array
        except DataError:
            continue
        image = Image.fromarray((255 * array.transpose(1, 2, 0)).round().astype(np.uint8))
        sheet.paste(image.resize((THUMBNAIL, THUMBNAIL)), (left, top + LINE))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def confusion_png(figures: Mapping[str, Any], pipeline: PipelineConfig) -> bytes:
    """Return a PNG: what tiles of each label were taken for, in % of them, source beside adapted."""
    from matplotlib.figure import Figure

    from tesla_med.tasks.tile_runs import png_of

    names = [item.name for item in pipeline.classes]
    figure = Figure(figsize=(9, 4.4), layout="constrained", facecolor="white")
    for part, name in zip(figure.subplots(1, 2), ("source", "adapted"), strict=True):
        counts = np.array(figures[name]["confusion"], float)
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        part.imshow(share, cmap="Blues", vmin=0, vmax=1)
        for row in range(len(names)):
            for column in range(len(names)):
                colour = "white" if share[row, column] > 0.5 else INK
                text = f"{100 * share[row, column]:.0f}"
                part.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        part.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        part.set_yticks(range(len(names)), names, fontsize=8)
        part.set_xlabel("taken for", color=INK)
        part.set_ylabel("label", color=INK)
        part.tick_params(length=0)
        part.spines[:].set_color("#aab3bf")
        part.set_title(f"{name}: {100 * figures[name]['accuracy']:.1f} % right", color=INK, fontsize=11)
    return png_of(figure)


def write_html(
    path: Path,
    site: SiteConfig,
    pipeline: PipelineConfig,
    method: str,
    protocol: str,
    figures: Mapping[str, Any],
    pictures: Mapping[str, bytes],
    remarks: Mapping[str, int],
) -> None:
    """Write one page that needs no other file."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tesla_med", "reports"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    images = {name: base64.b64encode(content).decode("ascii") for name, content in pictures.items()}
    text = environment.get_template("tiles.html.j2").render(
        site=site,
        pipeline=pipeline,
        method=method,
        protocol=protocol,
        figures=figures,
        pictures=images,
        remarks=dict(remarks),
    )
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
