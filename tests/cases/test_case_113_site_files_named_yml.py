"""Configuration files may be named ``.yml`` or ``.yaml``; two of one name in one folder are refused."""

import json

import pytest
from lines import run

CASE = 113


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("site_configs/prostate", "pipelines/tables"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(capsys, *words):
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_kind_of_file_is_found(folder, capsys):
    (folder / "site_configs/prostate/YM.yml").write_text("institution: Nowhere\n")
    (folder / "site_configs/prostate/._YM.yml").write_bytes(b"\x00\x05\x16\x07")
    (folder / "pipelines/mine.yml").write_text("extends: prostate\ntitle: Mine\n")
    (folder / "pipelines/tables/few.yml").write_text(
        "pipeline: mine\nsites: [YM]\nrows: [{label: source, method: source}]\n"
    )
    assert listed(capsys, "sites", "show", "YM")["institution"] == "Nowhere"
    assert "YM" in [item["id"] for item in listed(capsys, "sites", "list")["sites"]]
    assert "Mine" in [item["title"] for item in listed(capsys, "list", "pipelines")["pipelines"]]
    assert "few" in [item["table"] for item in listed(capsys, "list", "tables")["tables"]]


def test_two_files_of_one_name(folder, capsys):
    for end in ("yml", "yaml"):
        (folder / f"site_configs/prostate/YM.{end}").write_text("institution: Nowhere\n")
    assert run(["sites", "show", "YM"]) == 2
    assert "one name" in capsys.readouterr().err
