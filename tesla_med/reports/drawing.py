"""What pictures of reports share."""

from __future__ import annotations

import base64
import io
from typing import Any

INK = "#27313d"
WRONG = "#b3261e"


def png_of(figure: Any, dpi: int = 130) -> bytes:
    """Return a matplotlib figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()


def data_uri(content: bytes, media_type: str) -> str:
    """Return ``content`` as text that a browser shows without fetching anything."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
