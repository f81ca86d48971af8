"""Tiles: every kind of picture becomes the RGB that it shows, or is refused by name."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from tesla_med.errors import DataError
from tesla_med.io.tiles import UNLABELLED, find_tiles, read_tile
from tesla_med.prepare.tiles import stream


def smooth(size=32, seed=0):
    """Return a smooth 8-bit RGB picture (H, W, 3)."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return (255 * fine[0].permute(1, 2, 0)).round().numpy().astype(np.uint8)


def save(path, array, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array, mode).save(path, **options)
    return path


def test_plain_rgb(tmp_path):
    array = smooth()
    picture = read_tile(save(tmp_path / "a.png", array))
    assert np.allclose(picture.array, array.transpose(2, 0, 1) / 255)
    assert picture.array.dtype == np.float32
    assert picture.notes == ()


def test_transparent_is_white_and_opaque_is_as_it_was(tmp_path):
    array = np.dstack([smooth(), np.full((32, 32), 255, np.uint8)])
    opaque = read_tile(save(tmp_path / "a.png", array))
    assert np.allclose(opaque.array, smooth().transpose(2, 0, 1) / 255)
    assert opaque.notes == ()
    array[:16, :, 3] = 0
    half = read_tile(save(tmp_path / "b.png", array))
    assert (half.array[:, :16] == 1).all()
    assert np.allclose(half.array[:, 16:], opaque.array[:, 16:])
    assert half.notes == ("transparent pixels placed on white",)


@pytest.mark.parametrize("end", ["png", "tif"])
def test_palettes(tmp_path, end):
    plain = Image.fromarray(smooth()).quantize(64)
    plain.save(tmp_path / f"p.{end}")
    want = np.asarray(plain.convert("RGB"), np.float32).transpose(2, 0, 1) / 255
    picture = read_tile(tmp_path / f"p.{end}")
    assert np.allclose(picture.array, want)
    assert picture.notes == ("palette expanded",)


def test_a_transparent_entry_of_a_palette(tmp_path):
    plain = Image.fromarray(np.repeat(np.arange(32, dtype=np.uint8)[None] % 2, 32, 0), "P")
    plain.putpalette([200, 10, 10, 10, 200, 10])
    plain.save(tmp_path / "p.png", transparency=0)
    picture = read_tile(tmp_path / "p.png")
    assert (picture.array[:, :, 0::2] == 1).all()
    assert np.allclose(picture.array[:, 0, 1], np.array([10, 200, 10]) / 255)


def test_cmyk_is_converted_not_taken_for_alpha(tmp_path):
    Image.fromarray(smooth()).convert("CMYK").save(tmp_path / "c.tif")
    picture = read_tile(tmp_path / "c.tif")
    assert np.abs(picture.array - smooth().transpose(2, 0, 1) / 255).max() < 0.02
    assert picture.notes == ("converted from CMYK",)


@pytest.mark.parametrize("end", ["png", "tif"])
def test_sixteen_bits_are_scaled(tmp_path, end):
    ramp = np.repeat(np.linspace(0, 65535, 64).astype(np.uint16)[None], 64, 0)
    Image.fromarray(ramp).save(tmp_path / f"r.{end}")
    picture = read_tile(tmp_path / f"r.{end}")
    assert np.abs(picture.array[0] - ramp / 65535).max() < 1e-4
    assert len(np.unique(picture.array)) == 64
    eight = read_tile(save(tmp_path / "e.png", (ramp // 257).astype(np.uint8)))
    assert np.abs(picture.array - eight.array).max() < 0.005


@pytest.mark.parametrize("clear", [0, 65535, 12345])
def test_a_transparent_value_of_sixteen_bits(tmp_path, clear):
    ramp = np.repeat(np.linspace(0, 65535, 64).astype(np.uint16)[None], 64, 0)
    Image.fromarray(ramp).save(tmp_path / "r.png", transparency=clear)
    with Image.open(tmp_path / "r.png") as image:
        assert image.info["transparency"] == clear
    picture = read_tile(tmp_path / "r.png")
    want = np.where(ramp == clear, 1.0, ramp / 65535)
    assert all(np.abs(channel - want).max() < 1e-4 for channel in picture.array)
    assert ("transparent pixels placed on white" in picture.notes) == (clear in ramp)


def test_grey_is_repeated(tmp_path):
    grey = smooth()[..., 0]
    picture = read_tile(save(tmp_path / "g.png", grey))
    assert all(np.allclose(channel, grey / 255) for channel in picture.array)
    assert "grey" in picture.notes[0]
    bits = read_tile(save(tmp_path / "b.png", grey > 100))
    assert set(np.unique(bits.array)) == {0, 1}


@pytest.mark.parametrize("share", [0.2, 0.67, 0.97])
@pytest.mark.parametrize("end", ["jpg", "png"])
def test_truncated(tmp_path, share, end):
    path = save(tmp_path / f"t.{end}", smooth(96))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DataError, match=rf"t\.{end}: (truncated|not a picture)"):
        read_tile(path)


def test_what_is_refused(tmp_path):
    (tmp_path / "x.png").write_text("no picture")
    with pytest.raises(DataError, match="not a picture"):
        read_tile(tmp_path / "x.png")
    with pytest.raises(DataError, match="no such file"):
        read_tile(tmp_path / "gone.png")
    pages = [Image.fromarray(smooth(seed=seed)) for seed in (0, 1)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match="2 pages"):
        read_tile(tmp_path / "pages.tif")
    Image.fromarray(np.full((8, 8), 7.5, np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(DataError, match=r"7\.5 to 7\.5"):
        read_tile(tmp_path / "f.tif")


def test_no_warning_reaches_the_user(tmp_path):
    plain = Image.fromarray(smooth()).quantize(8)
    plain.save(tmp_path / "p.png", transparency=bytes([0, 255] * 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_tile(tmp_path / "p.png")


def test_folders_are_classes(tmp_path):
    for name, count in (("01_TUMOR", 2), ("02_stroma", 1), ("08_EMPTY", 3)):
        for index in range(count):
            save(tmp_path / name / f"{index}.png", smooth())
    (tmp_path / "01_TUMOR" / "notes.txt").write_text("x")
    found = find_tiles(tmp_path, {"01_TUMOR": 0, "02_STROMA": 1, "04_LYMPHO": 2})
    assert found.names == ["01_TUMOR/0.png", "01_TUMOR/1.png", "02_stroma/0.png"]
    assert found.labels.tolist() == [0, 0, 1]
    assert found.labelled
    assert found.skipped["folder 08_EMPTY: no class of the site"] == 3
    assert sum(found.skipped.values()) == 4


def test_tiles_come_in_natural_order(tmp_path):
    for index in range(12):
        save(tmp_path / "TUM" / f"{index}.png", np.zeros((8, 8, 3), np.uint8))
    assert find_tiles(tmp_path, {"TUM": 0}).names == [f"TUM/{index}.png" for index in range(12)]


def test_without_class_folders_there_are_no_labels(tmp_path):
    save(tmp_path / "b" / "x.TIF", smooth())
    save(tmp_path / "a.png", smooth())
    found = find_tiles(tmp_path, {"TUM": 0})
    assert found.names == ["a.png", "b/x.TIF"]
    assert found.labels.tolist() == [UNLABELLED] * 2
    assert not found.labelled
    with pytest.raises(DataError, match="no tile found"):
        find_tiles(tmp_path / "b", {}) if (tmp_path / "b" / "x.TIF").unlink() is None else None
    with pytest.raises(DataError, match="no such folder"):
        find_tiles(tmp_path / "gone", {})


def test_a_stream_of_mixed_sizes_with_a_broken_tile(tmp_path):
    for index, size in enumerate((32, 48, 20, 32, 32, 64, 32)):
        save(tmp_path / f"{index}.png", smooth(size, seed=index))
    (tmp_path / "3.png").write_text("broken")
    found = find_tiles(tmp_path, {})
    order = [6, 5, 4, 3, 2, 1, 0]
    batches = list(stream(found, order, 3, (32, 32)))
    assert [batch.index.tolist() for batch in batches] == [[6, 5, 4], [2, 1], [0]]
    assert [batch.images.shape[0] for batch in batches] == [3, 2, 1]
    assert all(batch.images.shape[1:] == (3, 32, 32) for batch in batches)
    assert list(batches[1].failed) == [3]
    assert torch.allclose(batches[2].images[0], torch.from_numpy(read_tile(found.paths[0]).array))
    assert all(batch.images.min() >= 0 and batch.images.max() <= 1 for batch in batches)


def test_a_stream_notes_what_was_done_to_a_tile(tmp_path):
    for index in range(3):
        image = Image.fromarray(smooth(seed=index))
        (image.convert("L") if index == 1 else image).save(tmp_path / f"{index}.png")
    batch = next(stream(find_tiles(tmp_path, {}), [0, 1, 2], 3, (32, 32)))
    assert list(batch.notes) == [1]
    assert "grey" in batch.notes[1][0]
    assert (batch.images[1][0] == batch.images[1][2]).all()
