"""What `tesla-med doctor` finds, and what it says where something is wrong."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tesla_med.actions import doctor
from tesla_med.cli.app import run


def test_a_machine_that_works(one_thread, tmp_path, capsys):
    assert run(["doctor", "--out", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    for word in ("tesla-med", "torch ", "cores", "self-test: two slices adapted to", "locks"):
        assert word in said
    assert "BAD" not in said
    assert not (tmp_path / "runs").exists()
    assert run(["doctor", "--out", str(tmp_path), "--no-self-test", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "self-test" not in [item["name"] for item in findings]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LIBRARIES", ("torch", "no-such-library"))
    assert run(["doctor", "--out", str(tmp_path), "--no-self-test"]) == 1
    assert "BAD libraries: PackageNotFoundError" in capsys.readouterr().out.replace("\n", " ")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert run(["doctor", "--out", str(tmp_path / "file" / "runs"), "--no-self-test"]) == 1
    assert "BAD folder" in capsys.readouterr().out


def test_extras_and_space_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", {"review": ("no_such_module_at_all",)})
    monkeypatch.setattr(doctor, "LOW_DISK", 2**70)
    found = {item.name: item for item in doctor.examine(tmp_path, self_test=False)}
    assert found["extras"].text == "review not installed (no no_such_module_at_all)"
    assert found["extras"].good
    assert not found["folder"].good
    assert "too little" in found["folder"].text


def test_a_self_test_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tesla_med.models.base.build_model", lambda _: (_ for _ in ()).throw(RuntimeError("no kernel"))
    )
    found = {item.name: item for item in doctor.examine(tmp_path)}
    assert not found["self-test"].good
    assert found["self-test"].text == "RuntimeError: no kernel"
    assert importlib.metadata.version("torch") in found["libraries"].text


@pytest.mark.parametrize("word", ["--install-completion", "--show-completion"])
def test_completion_of_the_shell_is_offered(word, capsys):
    assert run(["--help"]) == 0
    assert word in capsys.readouterr().out
