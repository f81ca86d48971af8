"""A truncated picture is left out by name and counted; it is never treated as complete."""

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
