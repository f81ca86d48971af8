"""One zip file of all masks, with a manifest that has their hashes."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tesla_med.exports.base import EXPORTS, NOTICE, Export, Finished
from tesla_med.io.files import atomic_path
from tesla_med.io.names import valid

ARCHIVE, MANIFEST = "masks.zip", "manifest.json"
_WHEN = (1980, 1, 1, 0, 0, 0)
"""Date of every entry, so that the same masks give the same file."""


@EXPORTS.register("zip")
class Archive(Export):
    """``masks.zip``: the masks as they are, ``labels`` and SHA-256 of each in ``manifest.json``."""

    summary = "masks.zip with all NIfTI masks, and manifest.json with names, classes and SHA-256 of each"

    def write(self, item: Finished, out: Path) -> list[Path]:
        """Write nothing yet, but read the mask; see :meth:`finish`."""
        item.content()
        return []

    def finish(self, items: Sequence[Finished], files: Sequence[Path], out: Path) -> list[Path]:
        """Write ``masks.zip``; see :meth:`Export.finish`."""
        path, first = out / ARCHIVE, items[0]
        names = {item.name: f"masks/{valid(item.name)}_mask.nii.gz" for item in items}
        contents = {item.name: item.content() for item in items}
        manifest = {
            "notice": NOTICE,
            "tesla-med": first.version,
            "method": first.method,
            "weights_sha256": first.weights,
            "classes": [entry.model_dump() for entry in first.classes],
            "masks": [
                {
                    "case": valid(item.name),
                    "file": names[item.name],
                    "sha256": hashlib.sha256(contents[item.name]).hexdigest(),
                    "method": item.method,
                }
                for item in items
            ],
        }
        with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
            archive.writestr(zipfile.ZipInfo(MANIFEST, _WHEN), text)
            for name, content in contents.items():
                archive.writestr(zipfile.ZipInfo(names[name], _WHEN), content)
        return [path]
