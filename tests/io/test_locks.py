from __future__ import annotations

from pathlib import Path

import pytest

from tesla_med.errors import OutputError
from tesla_med.io.locks import in_folder, output_lock


def test_what_a_killed_process_was_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    left, other = tmp_path / ".tmp-0123456789ab.pt", tmp_path / "cells" / ".tmp-0123456789ab.json"
    other.parent.mkdir()
    for path in (left, other, tmp_path / "last.pt"):
        path.write_bytes(b"half")
    assert {path.name for path in in_folder(tmp_path)} == {"cells", "last.pt"}
    with output_lock(tmp_path):
        assert not left.exists()
        assert other.exists()
        left.write_bytes(b"being written")
        with pytest.raises(OutputError, match="another run is writing here"), output_lock(tmp_path):
            pass
        assert left.exists()
    assert (tmp_path / "last.pt").read_bytes() == b"half"
    assert in_folder(tmp_path / "nowhere") == []
