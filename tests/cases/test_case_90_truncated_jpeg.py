"""A truncated picture is left out by name and counted; it is never treated as complete, nor trained on."""

import json

import tile_site
from lines import run, sets, write_site
from PIL import Image
from tile_files import classify, smooth, tiles

CASE = 90


def test_two_thirds_of_a_jpeg(tmp_path, tile_weights, monkeypatch, capsys):
    folder = tiles(tmp_path)
    for index in range(3):
        Image.fromarray(smooth(96, index)).save(folder / f"{index}.jpg")
    data = (folder / "1.jpg").read_bytes()
    (folder / "1.jpg").write_bytes(data[: 2 * len(data) // 3])
    code, rows = classify(tmp_path, tile_weights, monkeypatch)
    assert code == 1
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "ok"]
    assert rows["1.jpg"]["prediction"] == ""
    said = "".join(capsys.readouterr())
    assert "1.jpg: truncated" in said
    assert "0.jpg" not in said


def test_training(tmp_path, monkeypatch, capsys, one_thread):
    """A blank tile is left out with it: neither shows what its folder says."""
    monkeypatch.chdir(tmp_path)
    write_site(tmp_path, "kather")
    cut, white, *_ = tile_site.make_tiles(tmp_path / "nii", 4)
    data = cut.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    Image.new("RGB", (64, 64), "white").save(white)
    words = ["--pipeline", "kather", "--sites", "X", "--volumes", "nii", "--device", "cpu"]
    assert run(["train", *words, "--out", "weights", *sets(*tile_site.SMALL, "train.steps=1")]) == 0
    record = json.loads((tmp_path / "weights/train.json").read_text())
    assert [text[:26] for text in record["left_out"]] == [
        "X/TUM/0.png: truncated or ",
        "X/TUM/1.png: blank: 0.0 % ",
    ]
    assert len(record["training_cases"]) + len(record["validation_cases"]) == 14
    assert "Left out: 2, listed in train.json; the first: X/TUM/0.png: trunc" in capsys.readouterr().out
