"""Tiles without tissue are blank: counted, with their share of tissue, not classified nor learned from."""

import csv
import json

import numpy as np
import pytest
import tile_site
from lines import run
from PIL import Image

CASE = 94
SETTINGS = [word for text in (*tile_site.SMALL, "reports=[html]") for word in ("--set", text)]

pytestmark = pytest.mark.slow


def plain(*colour):
    return np.broadcast_to(np.array(colour, np.uint8), (48, 48, 3)).copy()


def nearly_white():
    return np.random.default_rng(0).integers(228, 256, (48, 48, 3)).astype(np.uint8)


BLANK = {
    "white": plain(255, 255, 255),
    "nearly_white": nearly_white(),
    "black": plain(4, 4, 4),
    "blue_pen": plain(20, 60, 190),
    "green_pen": plain(20, 150, 60),
}
NOT_BLANK = {"grey": plain(150, 150, 150), "eosin": plain(225, 150, 190), "haematoxylin": plain(90, 60, 150)}


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def words(weights, tmp_path):
    tile_site.make_tiles(tmp_path / "nii", 4, seed=3, shift=0.4)
    site = tmp_path / "kather" / "X.yaml"
    site.parent.mkdir()
    content = tile_site.site().model_dump(mode="json", exclude_defaults=True)
    content.pop("id")
    site.write_text(json.dumps(content))
    given = ["--site", str(site), "--volumes", str(tmp_path / "nii"), "--weights", str(weights)]
    return ["adapt", *given, "--out", str(tmp_path / "out"), "--device", "cpu", *SETTINGS]


def add(tmp_path, tiles):
    folder = sorted(item for item in (tmp_path / "nii").iterdir() if item.is_dir())[0]
    for name, array in tiles.items():
        Image.fromarray(array).save(folder / f"zz_{name}.png")


def table(out):
    with (out / "predictions.csv").open() as stream:
        return {row["tile"]: row for row in csv.DictReader(stream)}


@pytest.mark.parametrize("protocol", ["N-O", pytest.param("N-M", marks=pytest.mark.slow)])
def test_they_are_blank_and_change_nothing(protocol, words, tmp_path, capsys):
    add(tmp_path, {})
    assert run([*words, "--protocol", protocol, "--method", "source"]) == 0
    before = table(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "before")
    add(tmp_path, BLANK | NOT_BLANK)
    assert run([*words, "--protocol", protocol, "--method", "source"]) == 0
    after = table(tmp_path / "out")
    blank = {name: row for name, row in after.items() if row.get("status") == "blank"}
    assert {name.split("zz_")[1].removesuffix(".png") for name in blank} == set(BLANK)
    assert all(row["prediction"] == "" and float(row["tissue"]) < 0.05 for row in blank.values())
    assert all(after[name]["prediction"] == row["prediction"] for name, row in before.items())
    assert all(float(row["tissue"]) > 0.05 for row in before.values())
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["blank"] == len(BLANK)
    figures = json.loads((tmp_path / "out/report/metrics.json").read_text())
    assert figures["blank"] == len(BLANK)
    assert figures["tiles"] == len(after) - len(BLANK)
    assert figures["failed"] == 0
    page = (tmp_path / "out/report/report.html").read_text(encoding="utf-8")
    assert f"{len(BLANK)} show too little tissue" in page
    assert f", {len(BLANK)} without tissue." in capsys.readouterr().out


def test_nothing_is_learned_from_them(words, tmp_path):
    """A site of blank tiles alone leaves the method as it is."""
    for path in (tmp_path / "nii").rglob("*.png"):
        path.unlink()
    add(tmp_path, {f"{index}_{name}": array for index in range(4) for name, array in BLANK.items()})
    assert run(words) == 0
    assert {row.get("status") for row in table(tmp_path / "out").values()} == {"blank"}


def test_the_share_is_a_setting(words, tmp_path):
    add(tmp_path, BLANK)
    assert run([*words, "--method", "source", "--set", "preprocessing.least_tissue=0"]) == 0
    assert {row.get("status") for row in table(tmp_path / "out").values()} == {"ok"}


def test_a_tile_of_one_pixel_fails_by_name(words, tmp_path, capsys):
    add(tmp_path, {"tiny": np.full((1, 1, 3), 120, np.uint8)})
    assert run([*words, "--method", "source"]) == 1
    said = "".join(capsys.readouterr())
    assert "zz_tiny.png" in said
    assert "1x1 pixels; expected at least 16" in said


def test_check_and_training_say_so_too(words, tmp_path, capsys):
    add(tmp_path, BLANK)
    site = words[words.index("--site") + 1]
    run(["sites", "check", site, "--volumes", str(tmp_path / "nii")])
    assert "".join(capsys.readouterr()).count("blank: ") >= len(BLANK)
