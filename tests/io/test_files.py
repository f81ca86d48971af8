from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tesla_med.errors import DataError, OutputError
from tesla_med.io.files import atomic_path, sha256, write_bytes, write_json, write_text, write_together
from tesla_med.io.locks import output_lock


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_atomic_path_has_the_same_folder_and_suffixes_and_is_hidden(tmp_path: Path) -> None:
    target = tmp_path / "new" / "Case 01_mask.nii.gz"
    with atomic_path(target) as temporary:
        assert temporary.parent == target.parent
        assert temporary.name.startswith(".")
        assert temporary.name.endswith(".nii.gz")
        temporary.write_bytes(b"abc")
        assert not target.exists()
    assert target.read_bytes() == b"abc"
    assert names(target.parent) == [target.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_block_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_full_disk_names_the_file_and_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"a\.bin.*No space left.*3\.0 MiB needed.*MiB free"):
        write_bytes(tmp_path / "a.bin", bytes(3 << 20))
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a file size limit")
def test_a_real_size_limit_leaves_no_file(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys; from pathlib import Path; from tesla_med.io.files import write_bytes\n"
        "from tesla_med.errors import OutputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40960, 40960))\n"
        "try: write_bytes(Path(sys.argv[1]), bytes(100000))\n"
        "except OutputError as error: sys.exit(str(error))\n"
    )
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script, str(tmp_path / "m.nii.gz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "m.nii.gz" in done.stderr
    assert "97.7 KiB needed" in done.stderr
    assert names(tmp_path) == []


def test_unwritable_places_are_output_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(OutputError, match="file"):
        write_text(tmp_path / "file" / "a.txt", "x")
    with pytest.raises(OutputError, match="folder"):
        write_text(tmp_path / "folder", "x")
    assert names(tmp_path) == ["file", "folder"]


def test_json_keeps_order_and_refuses_nan(tmp_path: Path) -> None:
    target = tmp_path / "Ümläut 画像" / "run.json"
    write_json(target, {"b": 1, "a": "é画", "odd": "x\udcff"})
    text = target.read_text(encoding="utf-8")
    assert text.startswith('{\n  "b": 1,\n  "a": "é画"')
    assert text.endswith("}\n")
    assert json.loads(text) == {"b": 1, "a": "é画", "odd": "x\udcff"}
    with pytest.raises(OutputError, match=r"run\.json"):
        write_json(target, {"a": float("nan")})
    assert json.loads(target.read_text(encoding="utf-8"))["b"] == 1


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    write_text(tmp_path / "a.csv", "a\r\nb\n")
    assert (tmp_path / "a.csv").read_bytes() == b"a\r\nb\n"


def test_sha256_of_contents(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "a").write_bytes(data)
    assert sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()
    with pytest.raises(DataError, match="missing"):
        sha256(tmp_path / "missing")


def test_lock_refuses_a_second_run_and_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "D"
    with output_lock(folder), pytest.raises(OutputError, match="another run"), output_lock(folder):
        pass
    with output_lock(folder):
        pass


def test_lock_holds_between_processes_and_ends_with_them(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tesla_med.io.locks import output_lock\n"
        "with output_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(OutputError, match="another run"), output_lock(tmp_path):
            pass
        holder.kill()
        holder.wait(timeout=20)
    with output_lock(tmp_path):
        pass


def test_files_that_are_written_together_leave_the_others_as_they_were(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("old", encoding="utf-8")
    second.mkdir()
    with pytest.raises(OutputError, match="b: expected a file to be replaced, found a folder"):
        write_together([(first, lambda: b"new"), (second, lambda: b"new")])
    assert first.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["a", "b"]
