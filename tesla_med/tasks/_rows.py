"""The rows of a comparison that a finished run gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.metrics import compared


def rows_of(folder: RunFolder, names: Sequence[str], kind: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each class of each item, one without figures where nothing was scored.

    Args:
        folder: of the run.
        names: of its items.
        kind: class of its records.
    """
    columns = compared()
    for record in folder.records(names, kind):
        common = {"case": record.case, "status": record.status, "used": record.used}
        common |= {"seconds": round(record.seconds, 3), "slices": record.slices}
        if not record.scores:
            yield common | dict.fromkeys(("label", "class", *columns))
        for score in record.scores:
            figures = {name: score.value(name) for name in columns}
            yield common | {"label": score.label, "class": score.name} | figures
