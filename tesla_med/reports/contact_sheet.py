"""``report/uncertain.png``: the tiles that the model is least certain of."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.config.models import PipelineConfig
from tesla_med.errors import DataError
from tesla_med.io.files import write_bytes
from tesla_med.io.tiles import read_tile
from tesla_med.records import TileResult
from tesla_med.reports.base import REPORTS, Report, RunContext
from tesla_med.reports.drawing import INK, WRONG
from tesla_med.scoring.score import normalised_entropy

SHOWN, COLUMNS = 24, 6
THUMBNAIL, GAP, LINE, TEXT = 150, 10, 32, 12  # pixels


@REPORTS.register("contact_sheet")
class ContactSheetReport(Report):
    """The least certain tiles with their predicted classes."""

    name = "contact_sheet"
    summary = "uncertain.png, the least certain tiles"
    kinds = (TileResult,)
    from_records = False  # it shows the tiles themselves

    @classmethod
    def renew(cls, run: RunContext, units: Sequence[Sequence[Any]], undone: Sequence[str]) -> None:
        """Remove the sheet."""
        if undone:
            (run.report_folder / "uncertain.png").unlink(missing_ok=True)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Draw the sheet."""
        path = self.run.report_folder / "uncertain.png"
        write_bytes(path, contact_sheet(results, self.run.folder, self.run.pipeline))
        return [path]


def contact_sheet(results: Sequence[TileResult], folder: Path, pipeline: PipelineConfig) -> bytes:
    """Return a PNG of the least certain tiles with their predicted class, most uncertain first.

    A label that differs from the predicted class is shown below it, in red.

    Args:
        results: of all tiles.
        folder: that their names are relative to.
        pipeline: names the classes.
    """
    from PIL import Image, ImageDraw, ImageFont

    read = [item for item in results if item.probs is not None]
    entropy = (
        normalised_entropy(np.array([item.probs for item in read], np.float32).T) if read else np.zeros(0)
    )
    chosen = [read[int(index)] for index in np.argsort(-entropy, kind="stable")[:SHOWN]]
    lines = max(1, -(-len(chosen) // COLUMNS))
    step = THUMBNAIL + GAP
    sheet = Image.new("RGB", (COLUMNS * step + GAP, lines * (step + LINE) + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for number, item in enumerate(chosen):
        assert item.probs is not None  # noqa: S101 - chosen among those that were read
        left, top = GAP + number % COLUMNS * step, GAP + number // COLUMNS * (step + LINE)
        best = int(item.probs.argmax())
        predicted = pipeline.classes[best].name
        pen.text((left, top), f"{predicted} {100 * item.probs[best]:.0f} %", fill=INK, font=font)
        if item.label and item.label != predicted:
            pen.text((left, top + LINE // 2), f"label: {item.label}", fill=WRONG, font=font)
        try:
            array = read_tile(folder / item.case).array
        except DataError:
            continue
        image = Image.fromarray((255 * array.transpose(1, 2, 0)).round().astype(np.uint8))
        sheet.paste(image.resize((THUMBNAIL, THUMBNAIL)), (left, top + LINE))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()
