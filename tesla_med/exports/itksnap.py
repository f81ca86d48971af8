"""Masks for ITK-SNAP: NIfTI files and one table of labels to load beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tesla_med.config.models import LabelClass
from tesla_med.exports.base import EXPORTS, Export, Finished, rgb
from tesla_med.io.files import atomic_path

LABELS = "labels.txt"
HEAD = "# ITK-SNAP label descriptions: IDX -R- -G- -B- -A-- VIS MSH LABEL"


@EXPORTS.register("itksnap")
class ItkSnap(Export):
    """The mask of each case as it is, and ``labels.txt`` with names and colours."""

    summary = "NIfTI masks, and labels.txt with names and colours for ITK-SNAP (Segmentation > Import labels)"

    def write(self, item: Finished, out: Path) -> list[Path]:
        """Write ``<case>_mask.nii.gz``; see :meth:`Export.write`."""
        path, content = out / f"{item.name}_mask.nii.gz", item.content()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
        return [path]

    def finish(self, items: Sequence[Finished], files: Sequence[Path], out: Path) -> list[Path]:
        """Write ``labels.txt``; see :meth:`Export.finish`."""
        path = out / LABELS
        with atomic_path(path) as temporary:
            temporary.write_text(label_descriptions(items[0].classes), encoding="utf-8")
        return [*files, path]


def label_descriptions(classes: Sequence[LabelClass]) -> str:
    """Return a table of labels: index, red, green, blue, opacity, visible, mesh, name."""
    lines = [HEAD]
    for entry in classes:
        shown = int(entry.value > 0)
        red, green, blue = rgb(entry.color)
        name = "Clear Label" if not shown else entry.name.replace('"', "'")
        lines.append(
            f'{entry.value:5d} {red:4d} {green:4d} {blue:4d} {shown:4d} {shown:4d} {shown:4d}    "{name}"'
        )
    return "\n".join(lines) + "\n"
