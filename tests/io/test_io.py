from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
import SimpleITK as sitk  # noqa: N813 - its usual name

from tesla_med.config.models import Files, SiteConfig
from tesla_med.errors import DataError, GeometryError, OutputError
from tesla_med.io import references
from tesla_med.io import volumes as io
from tesla_med.io.files import write_bytes
from tesla_med.io.geometry import corner_displacement
from tesla_med.types import Case, Volume

Affine = npt.NDArray[np.float64]
SHAPE = (32, 28, 12)
GRID = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)


def oblique(spacing: tuple[float, float, float] = (0.977, 0.9, 3.3), degrees: float = 20) -> Affine:
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(spacing)
    affine[:3, 3] = (-17.3, 21.9, -40.2)
    return affine


def make(
    path: Path,
    codes: tuple[int, int] = (1, 1),
    shape: tuple[int, ...] = SHAPE,
    dtype: Any = np.int16,
    qform: Affine | None = None,
    sform: Affine | None = None,
    cls: Any = nib.Nifti1Image,
    data: npt.NDArray[Any] | None = None,
    **fields: Any,
) -> npt.NDArray[Any]:
    """Write a NIfTI file with (sform, qform) codes and raw header fields; return its stored voxels."""
    if data is None:
        data = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    header = cls.header_class()
    header.set_data_dtype(data.dtype)
    header.set_data_shape(data.shape)
    header["pixdim"][1:4] = (0.977, 0.9, 3.3)
    header.set_xyzt_units("mm")
    header.set_qform(oblique() if qform is None else qform, code=codes[1])
    header.set_sform(oblique() if sform is None else sform, code=codes[0])
    header["descrip"], header["aux_file"] = b"name of a person", b"aux"
    header["cal_min"], header["cal_max"] = 3, 900
    header["vox_offset"] = 352 if cls is nib.Nifti1Image else 544
    for name, value in fields.items():
        header[name] = value
    content = header.binaryblock + bytes(4) + data.tobytes(order="F")
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    return data


def raw_header(path: Path) -> Any:
    content = path.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    second = content[:4] == struct.pack("<i", 540)
    return (nib.Nifti2Header if second else nib.Nifti1Header)(content[: 540 if second else 348], check=False)


def labels_of(shape: tuple[int, ...] = SHAPE) -> npt.NDArray[np.int64]:
    mask = np.zeros(shape, np.int64)
    mask[3:9, 4:7, :2] = 2
    mask[3:5, 4:14, :1] = 5
    return mask


def test_stem_and_suffixes() -> None:
    assert io.stem(Path("a/B.x.NII.GZ")) == "B.x"
    assert [io.stem(f"c{end}") for end in io.VOLUME_SUFFIXES] == ["c"] * 6
    assert io.stem("c.dcm") == "c.dcm"


# ---------------------------------------------------------------- reading


def test_arrays_are_in_file_order(tmp_path: Path) -> None:
    data = make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert volume.array.dtype == np.float32
    assert np.array_equal(volume.array[0], data)
    assert volume.shape == SHAPE
    assert np.allclose(volume.affine, oblique(), atol=1e-5)
    assert np.allclose(volume.spacing, (0.977, 0.9, 3.3), atol=1e-6)
    assert volume.notes == []
    assert not volume.blank
    assert not volume.nominal_spacing


@pytest.mark.parametrize("codes", [(1, 1), (2, 1), (1, 0), (0, 1), (0, 0), (4, 2)])
def test_one_rule_places_the_image(tmp_path: Path, codes: tuple[int, int]) -> None:
    moved = oblique()
    moved[:3, 3] += (10, -5, 3)
    make(tmp_path / "a.nii.gz", codes, sform=moved)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert np.allclose(volume.affine, nib.load(tmp_path / "a.nii.gz").affine, atol=1e-5)
    text = " ".join(volume.notes)
    assert ("11.58 mm" in text) == (min(codes) > 0)
    assert ("neither" in text) == (codes == (0, 0))
    assert np.allclose(volume.spacing, (0.977, 0.9, 3.3), atol=1e-5)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_a_matrix_with_code_0_is_ignored(tmp_path: Path, fill: float) -> None:
    rows = {name: np.eye(4)[i] * fill for i, name in enumerate(("srow_x", "srow_y", "srow_z"))}
    make(tmp_path / "a.nii.gz", (0, 1), **rows)
    assert np.allclose(io.read_volume(tmp_path / "a.nii.gz").affine, oblique(), atol=1e-5)


def test_qfac_of_0_and_negative_pixdim_are_read(tmp_path: Path) -> None:
    pixdim = [0, -0.977, 0.9, 3.3, 0, 0, 0, 0]
    make(tmp_path / "a.nii.gz", (0, 1), pixdim=pixdim)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert np.allclose(volume.affine, oblique(), atol=1e-5)
    assert any("-0.977, 0.9, 3.3 mm" in note for note in volume.notes)
    io.write_mask(tmp_path / "m.nii.gz", labels_of(), volume)
    written = raw_header(tmp_path / "m.nii.gz")["pixdim"]
    assert np.allclose(written, [0, 0.977, 0.9, 3.3, 0, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 4)), np.full((4, 4), np.nan), np.ones((4, 4)), np.full((4, 4), np.inf)]
)
def test_degenerate_affines(tmp_path: Path, bad: Affine) -> None:
    make(tmp_path / "a.nii.gz", (1, 0), sform=bad)
    with pytest.raises(GeometryError, match=r"a\.nii\.gz.*repair the header"):
        io.read_volume(tmp_path / "a.nii.gz")


def test_qform_that_is_no_rotation(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz", (0, 1), quatern_b=3.0)
    with pytest.raises(GeometryError, match="qform"):
        io.read_volume(tmp_path / "a.nii.gz")
    make(tmp_path / "b.nii.gz", (1, 1), quatern_b=3.0)
    assert np.allclose(io.read_volume(tmp_path / "b.nii.gz").affine, oblique(), atol=1e-5)


@pytest.mark.parametrize(
    ("unit", "factor", "note"), [(3, 0.001, "micro"), (1, 1000, "metres"), (2, 1, ""), (0, 1, "assumed")]
)
def test_units(tmp_path: Path, unit: int, factor: float, note: str) -> None:
    make(tmp_path / "a.nii.gz", xyzt_units=unit | 8)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert np.allclose(volume.affine[:3], oblique()[:3] * factor, rtol=1e-5)
    assert np.allclose(volume.spacing, np.array([0.977, 0.9, 3.3]) * factor)
    assert note in " ".join(volume.notes)
    assert bool(volume.notes) == bool(note)
    io.write_mask(tmp_path / "m.nii.gz", labels_of(), volume)
    assert int(raw_header(tmp_path / "m.nii.gz")["xyzt_units"]) == unit | 8
    assert np.allclose(io.read_mask(tmp_path / "m.nii.gz")[1], volume.affine)


@pytest.mark.parametrize(
    ("slope", "inter", "low"), [(2, -100, -100), (0, 7, 0), (np.nan, 7, 0), (1, 0, 0), (0.5, np.nan, 0)]
)
def test_slope_and_intercept(tmp_path: Path, slope: float, inter: float, low: float) -> None:
    data = np.arange(np.prod(SHAPE), dtype=np.int64).reshape(SHAPE) % 200
    make(tmp_path / "a.nii.gz", data=data.astype(np.uint8), scl_slope=slope, scl_inter=inter)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    factor = slope if slope > 0 else 1
    assert np.array_equal(volume.array[0], (data * factor + low).astype(np.float32))
    io.write_mask(tmp_path / "m.nii.gz", labels_of(), volume)
    assert float(raw_header(tmp_path / "m.nii.gz")["scl_slope"]) == 1
    assert float(raw_header(tmp_path / "m.nii.gz")["scl_inter"]) == 0


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8"])
def test_types(tmp_path: Path, dtype: str) -> None:
    data = make(
        tmp_path / "a.nii", dtype=dtype, data=(np.arange(np.prod(SHAPE)) % 100).reshape(SHAPE).astype(dtype)
    )
    assert np.array_equal(io.read_volume(tmp_path / "a.nii").array[0], data)


def test_big_endian_and_nifti_2(tmp_path: Path) -> None:
    image = nib.Nifti1Image(labels_of().astype(">i2"), oblique(), nib.Nifti1Header(endianness=">"))
    nib.save(image, tmp_path / "big.nii.gz")
    assert raw_header(tmp_path / "big.nii.gz").endianness == ">"
    volume = io.read_volume(tmp_path / "big.nii.gz")
    assert np.array_equal(volume.array[0], labels_of())
    io.write_mask(tmp_path / "m.nii.gz", labels_of(), volume)
    assert np.array_equal(nib.load(tmp_path / "m.nii.gz").affine, nib.load(tmp_path / "big.nii.gz").affine)
    make(tmp_path / "two.nii.gz", cls=nib.Nifti2Image)
    io.write_mask(tmp_path / "m2.nii.gz", labels_of(), io.read_volume(tmp_path / "two.nii.gz"))
    written = nib.load(tmp_path / "m2.nii.gz")
    assert isinstance(written, nib.Nifti2Image)
    assert np.array_equal(np.asarray(written.dataobj), labels_of())
    for name in GRID:
        assert np.array_equal(
            raw_header(tmp_path / "m2.nii.gz")[name], raw_header(tmp_path / "two.nii.gz")[name]
        )


def test_a_fourth_axis_of_one_is_dropped(tmp_path: Path) -> None:
    data = make(tmp_path / "a.nii.gz", shape=(16, 16, 8, 1))
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert volume.shape == (16, 16, 8)
    assert io.read_mask(tmp_path / "a.nii.gz")[0].shape == (16, 16, 8)
    io.write_mask(tmp_path / "m.nii.gz", data[..., 0], volume)
    assert nib.load(tmp_path / "m.nii.gz").shape == (16, 16, 8)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((16, 16, 8, 5), np.int16, r"series of shape \(16, 16, 8, 5\)"),
        ((16, 16), np.int16, r"3-D image, got shape \(16, 16\)"),
        ((16, 0, 8), np.int16, r"empty: shape \(16, 0, 8\)"),
        ((8, 8, 4), np.complex64, "complex"),
        ((8, 8, 4), np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]), "RGB"),
    ],
)
def test_other_kinds_of_image_are_refused_by_name(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, words: str
) -> None:
    make(tmp_path / "a.nii.gz", data=np.zeros(shape, dtype))
    with pytest.raises(DataError, match=rf"a\.nii\.gz: .*{words}"):
        io.read_volume(tmp_path / "a.nii.gz")


@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.9, 0.9999])
def test_truncated_nifti(tmp_path: Path, name: str, share: float) -> None:
    make(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=name):
        io.read_volume(tmp_path / name)


def test_corrupt_nifti(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz")
    content = bytearray((tmp_path / "a.nii.gz").read_bytes())
    content[-6] ^= 255  # the checksum
    (tmp_path / "a.nii.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.nii\.gz: truncated or corrupt"):
        io.read_volume(tmp_path / "a.nii.gz")
    for field, value in (
        ("dim", [9, 1, 1, 1, 1, 1, 1, 1]),
        ("datatype", 999),
        ("vox_offset", np.nan),
        ("magic", b"ni1"),
    ):
        make(tmp_path / "b.nii", **{field: value})
        with pytest.raises(DataError, match=r"b\.nii"):
            io.read_volume(tmp_path / "b.nii")
    for name, text in (
        ("c.nii", b"not an image at all" * 40),
        ("d.mha", b"nothing"),
        ("e.nrrd", b"NRRD0004\n"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(DataError, match=name):
            io.read_volume(tmp_path / name)
    for name in ("missing.nii.gz", "missing.mha", "a.dcm"):
        with pytest.raises(DataError, match=name):
            io.read_volume(tmp_path / name)


def test_compression_by_content_not_by_name(tmp_path: Path) -> None:
    data = make(tmp_path / "a.nii")
    make(tmp_path / "b.nii.gz")
    (tmp_path / "a.nii").rename(tmp_path / "plain.nii.gz")
    (tmp_path / "b.nii.gz").rename(tmp_path / "packed.nii")
    for name in ("plain.nii.gz", "packed.nii"):
        volume = io.read_volume(tmp_path / name)
        assert np.array_equal(volume.array[0], data)
        assert "name says otherwise" in volume.notes[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_voxels_that_are_not_finite(tmp_path: Path, value: float) -> None:
    data = np.linspace(-5, 9, int(np.prod(SHAPE)), dtype=np.float32).reshape(SHAPE)
    broken = data.copy()
    broken[4, 5, 6] = broken[0] = value
    make(tmp_path / "a.nii.gz", data=broken)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    bad = ~np.isfinite(broken)
    assert f"{28 * 12 + 1} voxels" in volume.notes[0]
    assert np.array_equal(volume.array[0][~bad], data[~bad])
    assert (volume.array[0][bad] == data[~bad].min()).all()
    make(tmp_path / "b.nii.gz", data=np.full(SHAPE, value, np.float32))
    with pytest.raises(DataError, match=r"b\.nii\.gz: none of its"):
        io.read_volume(tmp_path / "b.nii.gz")


@pytest.mark.parametrize("value", [1e300, -1e39])
def test_finite_values_beyond_float32_are_refused(tmp_path: Path, value: float) -> None:
    data = np.ones(SHAPE)
    data[0, 0, 0] = value
    data[1, 0, 0] = np.nan
    make(tmp_path / "a.nii.gz", data=data)
    with pytest.raises(DataError, match=r"a\.nii\.gz: 1 voxels hold values too large for float32, such as "):
        io.read_volume(tmp_path / "a.nii.gz")


@pytest.mark.parametrize(("offset", "dtype"), [(1e9, np.float64), (-1e9, np.float64), (2**30, np.int32)])
def test_small_differences_of_large_values_are_kept(tmp_path: Path, offset: float, dtype: type) -> None:
    steps = np.random.default_rng(0).integers(0, 100, SHAPE)
    steps.flat[:2] = 0, 99
    make(tmp_path / "a.nii.gz", data=(steps + offset).astype(dtype))
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert np.array_equal(volume.array[0], steps)
    assert not volume.blank
    assert f"{offset:.10g} subtracted from all voxels" in " ".join(volume.notes)


def test_a_subtracted_offset_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    data = 1e9 + np.linspace(0, 1, int(np.prod(SHAPE))).reshape(SHAPE)
    broken = data.copy()
    broken[4, 5, 6] = np.inf
    make(tmp_path / "a.nii.gz", data=broken)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    data[4, 5, 6] = 1e9
    assert volume.array[0] == pytest.approx(data - 1e9, abs=1e-6)
    assert "1 voxels that were not finite replaced by the smallest finite value 1e+09" in volume.notes[-1]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(1000, 1050, dtype=np.int16),
        np.linspace(1e4, 1e4 + 10, 50),
        np.linspace(0, 1e9, 50),
        np.float64([2**24 + 2, 2**24 + 4]),
        np.float64([1e9, np.nextafter(1e9, 2e9)]),
    ],
    ids=str,
)
def test_no_offset_where_float32_holds_the_differences(tmp_path: Path, values: npt.NDArray[Any]) -> None:
    data = np.resize(values, SHAPE)
    make(tmp_path / "a.nii.gz", data=data)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    assert np.array_equal(volume.array[0], data.astype(np.float32))
    assert "subtracted" not in " ".join(volume.notes)


def test_each_channel_has_its_own_offset(tmp_path: Path) -> None:
    steps = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 7
    for number, offset in enumerate((0, 1e9, 1e12)):
        make(tmp_path / f"a_{number}.nii.gz", data=steps + offset)
    paths = [tmp_path / f"a_{number}.nii.gz" for number in range(3)]
    site = SiteConfig(
        id="x", pipeline="p", institution="i", files=Files(image=["a_0.nii.gz", "a_1.nii.gz", "a_2.nii.gz"])
    )
    volume = io.read_case(Case("a", paths[0], None, channels=tuple(paths[1:])), site)
    assert all(np.array_equal(channel, steps) for channel in volume.array)
    notes = [text for text in volume.notes if "subtracted" in text]
    assert [text.partition(" subtracted")[0] for text in notes] == [
        "channel 2: 1000000000",
        "channel 3: 1e+12",
    ]


@pytest.mark.parametrize("value", [0, 5])
def test_blank(tmp_path: Path, value: int) -> None:
    make(tmp_path / "a.nii.gz", data=np.full(SHAPE, value, np.int16))
    assert io.read_volume(tmp_path / "a.nii.gz").blank


@pytest.mark.parametrize(
    ("size", "rule", "nominal"),
    [
        (1.0, "header", False),
        (1.0, "nominal_if_unit", True),
        (1.1, "nominal_if_unit", False),
        (1.1, "nominal", True),
    ],
)
def test_nominal_spacing(tmp_path: Path, size: float, rule: Any, nominal: bool) -> None:
    make(tmp_path / "a.nii.gz", sform=oblique((size, 1, 1), 30), qform=oblique((size, 1, 1), 30))
    volume = io.read_volume(tmp_path / "a.nii.gz", spacing=rule)
    assert volume.nominal_spacing == nominal
    assert ("nominal" in " ".join(volume.notes)) == (nominal and rule == "nominal_if_unit")


# ---------------------------------------------------------------- MetaImage and NRRD


def itk_image(dtype: Any = np.int16) -> sitk.Image:
    data = np.random.default_rng(2).integers(0, 90, SHAPE[::-1]).astype(dtype)
    image = sitk.GetImageFromArray(data)
    image.SetSpacing((0.977, 0.9, 3.3))
    image.SetOrigin((17.25, -21.5, -40.125))
    angle = np.deg2rad(20)
    image.SetDirection((np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0, 0, 0, 1))
    return image


def world_of(image: sitk.Image, voxel: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    return np.array(image.TransformIndexToPhysicalPoint(voxel)) * (-1, -1, 1)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["a.mha", "a.mhd", "a.nrrd", "a.nhdr", "A.MHA"])
def test_metaimage_and_nrrd_geometry(tmp_path: Path, name: str, compressed: bool) -> None:
    image = itk_image()
    path = tmp_path / name.lower()
    sitk.WriteImage(image, str(path), useCompression=compressed)
    if path.name != name:
        path = path.rename(tmp_path / name)
    volume = io.read_volume(path)
    assert np.array_equal(volume.array[0], sitk.GetArrayFromImage(image).T)
    for voxel in ((0, 0, 0), (31, 0, 0), (5, 27, 11)):
        assert np.allclose(volume.affine @ [*voxel, 1], [*world_of(image, voxel), 1], atol=1e-9)
    mask = labels_of()
    io.write_mask(tmp_path / "m.nii.gz", mask, volume)
    written = sitk.ReadImage(str(tmp_path / "m.nii.gz"))
    assert np.array_equal(sitk.GetArrayFromImage(written).T, mask)
    for voxel in ((0, 0, 0), (31, 27, 11)):
        assert np.allclose(world_of(written, voxel), world_of(image, voxel), atol=1e-4)
    header = raw_header(tmp_path / "m.nii.gz")
    assert (int(header["sform_code"]), int(header["qform_code"])) == (1, 1)
    again, affine = io.read_mask(tmp_path / "m.nii.gz")
    io.check_same_grid(again.shape, affine, volume, "mask")


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["a.mha", "a.mhd", "a.nrrd", "a.nhdr"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_truncated_metaimage_and_nrrd(tmp_path: Path, name: str, compressed: bool, share: float) -> None:
    sitk.WriteImage(itk_image(), str(tmp_path / name), useCompression=compressed)
    largest = max(tmp_path.iterdir(), key=lambda item: item.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=rf"{name}"):
        io.read_volume(tmp_path / name)


def test_metaimage_without_its_data_file(tmp_path: Path) -> None:
    sitk.WriteImage(itk_image(), str(tmp_path / "a.mhd"))
    (tmp_path / "a.raw").unlink()
    with pytest.raises(DataError, match=r"a\.mhd"):
        io.read_volume(tmp_path / "a.mhd")


def test_metaimage_kinds_that_are_refused(tmp_path: Path) -> None:
    vectors = sitk.GetImageFromArray(np.zeros((4, 5, 6, 3), np.float32), isVector=True)
    sitk.WriteImage(vectors, str(tmp_path / "v.mha"))
    with pytest.raises(DataError, match="one value per voxel, got 3"):
        io.read_volume(tmp_path / "v.mha")
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 5), np.int16)), str(tmp_path / "p.nrrd"))
    with pytest.raises(DataError, match=r"\(5, 4\)"):
        io.read_volume(tmp_path / "p.nrrd")
    sitk.WriteImage(
        sitk.GetImageFromArray(np.zeros((3, 4, 5, 6), np.int16), isVector=False), str(tmp_path / "t.mha")
    )
    with pytest.raises(DataError, match=r"series of shape \(6, 5, 4, 3\)"):
        io.read_volume(tmp_path / "t.mha")


def test_metaimage_with_a_fourth_axis_of_one(tmp_path: Path) -> None:
    data = np.arange(60, dtype=np.int16).reshape(1, 3, 4, 5)
    sitk.WriteImage(sitk.GetImageFromArray(data, isVector=False), str(tmp_path / "a.mha"))
    assert np.array_equal(io.read_volume(tmp_path / "a.mha").array[0], data[0].T)


# ---------------------------------------------------------------- writing


def write_map(path: Path, array: npt.NDArray[Any], volume: Volume) -> None:
    write_bytes(path, io.encode_map(path, array, volume))


@pytest.mark.parametrize("codes", [(1, 1), (2, 1), (1, 0), (0, 1), (0, 0)])
def test_masks_repeat_the_header(tmp_path: Path, codes: tuple[int, int]) -> None:
    moved = oblique()
    moved[:3, 3] += (10, -5, 3)
    make(tmp_path / "a.nii.gz", codes, sform=moved, intent_name=b"secret", db_name=b"id", toffset=3)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    io.write_mask(tmp_path / "out" / "m.nii.gz", labels_of(), volume)
    write_map(tmp_path / "out" / "p.nii.gz", np.random.default_rng(0).random((3, *SHAPE)), volume)
    before = raw_header(tmp_path / "a.nii.gz")
    for name in ("m.nii.gz", "p.nii.gz"):
        after = raw_header(tmp_path / "out" / name)
        for key in GRID:
            assert after[key].tobytes() == before[key].tobytes(), key
        for key in ("descrip", "aux_file", "db_name", "intent_name"):
            assert bytes(after[key].item()) == b""
        assert float(after["cal_min"]) == float(after["cal_max"]) == 0
        assert (float(after["scl_slope"]), float(after["scl_inter"])) == (1, 0)
    mask = nib.load(tmp_path / "out" / "m.nii.gz")
    assert mask.get_data_dtype() == np.uint8
    assert set(np.unique(np.asarray(mask.dataobj))) == {0, 2, 5}
    assert np.array_equal(np.asarray(mask.dataobj), labels_of())
    assert np.array_equal(mask.affine, nib.load(tmp_path / "a.nii.gz").affine)
    image, written = (sitk.ReadImage(str(tmp_path / name)) for name in ("a.nii.gz", "out/m.nii.gz"))
    assert np.array_equal(sitk.GetArrayFromImage(written).T, labels_of())
    for get in ("GetOrigin", "GetSpacing", "GetDirection", "GetSize"):
        assert getattr(written, get)() == getattr(image, get)()


@pytest.mark.parametrize("axes", list(permutations(range(3))))
def test_masks_of_every_orientation_open_elsewhere_on_the_same_grid(
    tmp_path: Path, axes: tuple[int, int, int]
) -> None:
    for number, signs in enumerate(product((1, -1), repeat=3)):
        affine = np.eye(4)
        affine[:3, :3] = (oblique()[:3, :3] * signs)[:, list(axes)]
        affine[:3, 3] = (3, -8, 11)
        source, target = tmp_path / f"{number}.nii.gz", tmp_path / f"{number}_mask.nii.gz"
        io.save_image(source, np.arange(np.prod(SHAPE)).reshape(SHAPE), affine)
        volume = io.read_volume(source)
        assert np.allclose(volume.affine, affine, atol=1e-5)
        assert volume.notes == []
        io.write_mask(target, labels_of(), volume)
        assert np.array_equal(nib.load(target).affine, nib.load(source).affine)
        image, written = sitk.ReadImage(str(source)), sitk.ReadImage(str(target))
        assert written.GetDirection() == image.GetDirection()
        assert written.GetOrigin() == image.GetOrigin()
        assert np.array_equal(sitk.GetArrayFromImage(written).T, labels_of())


@pytest.mark.parametrize("shear", [0.001, 0.05])
def test_sheared_grids_are_kept(tmp_path: Path, shear: float) -> None:
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    affine[0, 1] = shear
    make(tmp_path / "a.nii.gz", (1, 0), shape=(16, 16, 8), sform=affine)
    volume = io.read_volume(tmp_path / "a.nii.gz")
    io.write_mask(tmp_path / "m.nii.gz", np.zeros((16, 16, 8), np.uint8), volume)
    assert np.array_equal(nib.load(tmp_path / "m.nii.gz").affine, affine.astype(np.float32))
    io.save_image(tmp_path / "s.nii.gz", np.zeros((4, 4, 4)), affine)
    assert np.allclose(io.read_volume(tmp_path / "s.nii.gz").affine, affine)


def test_large_labels_need_16_bits(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    mask = np.zeros(SHAPE, np.int64)
    mask[0, 0, 0] = 255
    io.write_mask(tmp_path / "m.nii.gz", mask, volume)
    assert nib.load(tmp_path / "m.nii.gz").get_data_dtype() == np.uint8
    mask[0, 0, 0] = 256
    io.write_mask(tmp_path / "m.nii.gz", mask, volume)
    assert nib.load(tmp_path / "m.nii.gz").get_data_dtype() == np.uint16
    mask[0, 0, 0] = 65535
    io.write_mask(tmp_path / "m.nii.gz", mask, volume)
    written = nib.load(tmp_path / "m.nii.gz")
    assert written.get_data_dtype() == np.uint16
    assert int(np.asarray(written.dataobj).max()) == 65535
    assert int(sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / "m.nii.gz"))).max()) == 65535


def test_what_cannot_be_written(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    target = tmp_path / "m.nii.gz"
    for mask in (labels_of() * 20000, labels_of() - 1, labels_of().astype(np.float32)):
        with pytest.raises(DataError, match=r"m\.nii\.gz"):
            io.write_mask(target, mask, volume)
    with pytest.raises(GeometryError, match="shape"):
        io.write_mask(target, labels_of()[1:], volume)
    with pytest.raises(GeometryError, match="shape"):
        write_map(target, np.zeros((*SHAPE, 3)), volume)
    with pytest.raises(OutputError, match=r"\.nii\.gz"):
        io.write_mask(tmp_path / "m.mha", labels_of(), volume)
    with pytest.raises(OutputError, match=r"\.nii"):
        io.save_image(tmp_path / "m.png", labels_of(), np.eye(4))
    assert [item.name for item in tmp_path.iterdir()] == ["a.nii.gz"]


def test_maps_put_channels_last(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    probs = np.random.default_rng(0).random((3, *SHAPE)).astype(np.float32)
    write_map(tmp_path / "p.nii.gz", probs, volume)
    written = nib.load(tmp_path / "p.nii.gz")
    assert written.get_data_dtype() == np.float32
    assert np.array_equal(np.moveaxis(np.asarray(written.dataobj), -1, 0), probs)
    write_map(tmp_path / "e.nii.gz", probs[0], volume)
    assert np.array_equal(io.read_volume(tmp_path / "e.nii.gz").array[0], probs[0])


def test_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    io.write_mask(tmp_path / "one.nii.gz", labels_of(), volume)
    io.write_mask(tmp_path / "two.nii.gz", labels_of().astype(np.uint8), volume)
    content = (tmp_path / "one.nii.gz").read_bytes()
    assert content == (tmp_path / "two.nii.gz").read_bytes()
    assert content[4:8] == bytes(4)
    assert b"one" not in content[:40]


def test_ten_cycles_change_nothing(tmp_path: Path) -> None:
    data = np.zeros(SHAPE, np.float64)
    data[:4, :4, :4], data[5:, 5:, 5:] = 1.9999, 6.9999999
    make(tmp_path / "0.nii.gz", (2, 1), data=data)
    first, _ = io.read_mask(tmp_path / "0.nii.gz")
    for number in range(10):
        volume = io.read_volume(tmp_path / f"{number}.nii.gz")
        mask, _ = io.read_mask(tmp_path / f"{number}.nii.gz")
        io.write_mask(tmp_path / f"{number + 1}.nii.gz", mask, volume)
    last, affine = io.read_mask(tmp_path / "10.nii.gz")
    assert set(np.unique(last)) == {0, 2, 7}
    assert np.array_equal(first, last)
    assert np.array_equal(affine, io.read_volume(tmp_path / "0.nii.gz").affine)
    assert (tmp_path / "1.nii.gz").read_bytes() == (tmp_path / "10.nii.gz").read_bytes()


def test_single_slice_and_strange_paths(tmp_path: Path) -> None:
    folder = tmp_path / "Mü 画像 x"
    folder.mkdir()
    make(folder / "ä 1.nii.gz", shape=(40, 40, 1))
    volume = io.read_volume(folder / "ä 1.nii.gz")
    assert volume.shape == (40, 40, 1)
    io.write_mask(folder / "out é" / "ä 1_mask.nii.gz", labels_of((40, 40, 1)), volume)
    assert sitk.ReadImage(str(folder / "out é" / "ä 1_mask.nii.gz")).GetSize() == (40, 40, 1)


# ---------------------------------------------------------------- masks and references


@pytest.mark.parametrize("value", [0.5, np.nan, -1.0, 3.02, 1e12])
def test_masks_that_hold_no_labels(tmp_path: Path, value: float) -> None:
    data = np.zeros(SHAPE)
    data[1, 2, 3] = value
    make(tmp_path / "m.nii.gz", data=data)
    with pytest.raises(DataError, match=r"m\.nii\.gz"):
        io.read_mask(tmp_path / "m.nii.gz")


def case_with(
    tmp_path: Path, *layers: npt.NDArray[Any], region: npt.NDArray[Any] | None = None
) -> tuple[Case, Volume]:
    make(tmp_path / "a.nii.gz")
    volume = io.read_volume(tmp_path / "a.nii.gz")
    masks = []
    for number, layer in enumerate([*layers, *([region] if region is not None else [])]):
        masks.append(tmp_path / f"m{number}.nii.gz")
        io.write_mask(masks[-1], layer, volume)
    chosen = masks.pop() if region is not None else None
    return Case("a", tmp_path / "a.nii.gz", tuple(masks), chosen), volume


def files_of(combine: str, *layers: dict[str, Any]) -> Files:
    masks = [{"pattern": f"*_{number}", **layer} for number, layer in enumerate(layers)]
    return Files.model_validate({"image": "*", "masks": masks, "combine": combine})


def test_layers_are_painted_in_order(tmp_path: Path) -> None:
    cord, grey = np.zeros(SHAPE, int), np.zeros(SHAPE, int)
    cord[2:10, 2:10], grey[4:6, 4:12] = 1, 7
    case, volume = case_with(tmp_path, cord, grey)
    result = references.read_reference(case, files_of("paint", {"write": 1}, {"write": 2}), volume, (0, 1, 2))
    expected = cord.copy()
    expected[grey > 0] = 2
    assert np.array_equal(result, expected)


def test_values_are_mapped_and_unknown_ones_named(tmp_path: Path) -> None:
    case, volume = case_with(tmp_path, labels_of())
    known = files_of("paint", {"values": {0: 0, 2: 1, 5: 2}})
    result = references.read_reference(case, known, volume, (0, 1, 2))
    assert np.array_equal(result, np.select([labels_of() == 2, labels_of() == 5], [1, 2]))
    with pytest.raises(DataError, match=r"case a: .*m0\.nii\.gz holds value 5.*'values'"):
        references.read_reference(case, files_of("paint", {"values": {0: 0, 2: 1}}), volume, (0, 1))
    with pytest.raises(DataError, match="label 5, expected only 0, 2"):
        references.read_reference(case, files_of("paint", {}), volume, (0, 2))
    assert np.array_equal(
        references.read_reference(case, files_of("paint", {}), volume, (0, 2, 5)), labels_of()
    )


def test_majority_and_ties(tmp_path: Path) -> None:
    raters = np.zeros((4, *SHAPE), int)
    raters[:, 0, 0, 0] = (1, 1, 1, 2)
    raters[:, 0, 0, 1] = (1, 1, 2, 2)
    raters[:, 0, 0, 2] = (2, 2, 0, 1)
    raters[:, 0, 0, 3] = (0, 0, 1, 1)
    raters[:, 0, 0, 4] = (300, 300, 300, 0)
    case, volume = case_with(tmp_path, *raters)
    result = references.read_reference(case, files_of("majority", {}, {}, {}, {}), volume, (0, 1, 2, 300))
    assert result[0, 0, :5].tolist() == [1, 0, 2, 0, 300]
    assert not result[1:].any()


def test_reference_without_a_file(tmp_path: Path) -> None:
    case, volume = case_with(tmp_path, labels_of())
    broken = Case("a", case.image, (case.masks[0], None))
    with pytest.raises(DataError, match=r"case a: no reference file .*\*_1"):
        references.read_reference(broken, files_of("paint", {}, {}), volume, (0, 2, 5))
    with pytest.raises(DataError, match="case a"):
        references.read_reference(Case("a", case.image), files_of("paint"), volume, (0,))


@pytest.mark.parametrize(("shift", "fits"), [(0.0, True), (1e-6, True), (0.09, True), (0.3, False)])
def test_grids_must_agree_to_a_tenth_of_a_millimetre(tmp_path: Path, shift: float, fits: bool) -> None:
    case, volume = case_with(tmp_path, labels_of(), region=labels_of())
    moved = volume.affine.copy()
    moved[0, 3] += shift
    for path in (case.masks[0], case.region_mask):
        assert path is not None
        io.save_image(path, labels_of(), moved, np.uint8)
    if fits:
        assert np.array_equal(
            references.read_reference(case, files_of("paint", {}), volume, (0, 2, 5)), labels_of()
        )
        assert np.array_equal(references.read_region_mask(case, volume), labels_of() > 0)
        return
    with pytest.raises(GeometryError, match=r"case a: .*m0\.nii\.gz.*0\.3 mm"):
        references.read_reference(case, files_of("paint", {}), volume, (0, 2, 5))
    with pytest.raises(GeometryError, match=r"0\.3 mm"):
        references.read_region_mask(case, volume)


def test_tilt_is_measured_at_the_far_corner_and_small_voxels_need_half_a_voxel() -> None:
    affine = np.diag([0.05, 0.05, 0.05, 1.0])
    volume = Volume(np.zeros((1, 10, 10, 10), np.float32), affine, (0.05, 0.05, 0.05), None, Path("a.nii"))
    moved = affine.copy()
    moved[0, 3] = 0.04
    with pytest.raises(GeometryError, match=r"0\.025 mm"):
        io.check_same_grid((10, 10, 10), moved, volume, "mask")
    tilted = np.eye(4)
    tilted[1, 0] = 0.01
    assert corner_displacement(np.eye(4), tilted, (101, 5, 5)) == pytest.approx(1.005)
    with pytest.raises(GeometryError, match="shape"):
        io.check_same_grid((10, 10, 9), affine, volume, "mask")


def test_region_mask_that_is_missing() -> None:
    volume = Volume(np.zeros((1, 4, 4, 4), np.float32), np.eye(4), (1, 1, 1), None, Path("a.nii"))
    with pytest.raises(DataError, match=r"--set site\.region\.kind=square"):
        references.read_region_mask(Case("a", Path("a.nii")), volume)


@pytest.mark.shared
def test_grey_matter_mask_that_lies_a_little_off(shared: Path) -> None:
    folder = shared / "data" / "spinal_cord" / "CHUM"
    volume = io.read_volume(folder / "sub-9604_T2starw.nii.gz")
    mask, affine = io.read_mask(folder / "sub-9604_T2starw_gmseg-manual.nii.gz")
    assert 0.05 < corner_displacement(affine, volume.affine, mask.shape) < 0.1
    io.check_same_grid(mask.shape, affine, volume, "mask")


def test_importing_stays_light() -> None:
    script = (
        "import sys, tesla_med.io.volumes, tesla_med.io.cases, tesla_med.prepare.transforms\n"
        "sys.exit(', '.join({'torch', 'monai', 'SimpleITK'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.stderr.strip() == ""
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["a.nii.gz", "a.mha", "a.nrrd"])
def test_voxel_sizes_as_the_header_states_them(tmp_path: Path, name: str) -> None:
    image = sitk.GetImageFromArray(np.zeros((3, 4, 5), np.float32))
    image.SetSpacing((0.9, 0.7, 1.3))
    image.SetDirection(
        (0.936293, -0.275096, 0.218351, 0.289629, 0.956425, -0.036957, -0.198669, 0.097843, 0.975170)
    )
    sitk.WriteImage(image, str(tmp_path / name))
    volume = io.read_volume(tmp_path / name)
    assert volume.stated == sitk.ReadImage(str(tmp_path / name)).GetSpacing()
    assert (volume.spacing != volume.stated) == (name != "a.nrrd")  # which states no size but its matrix
    assert np.allclose(volume.spacing, volume.stated, rtol=1e-5)


def test_stated_voxel_sizes_that_contradict_the_affine_do_not_count(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.ones((3, 4, 5), np.float32), np.diag([2.0, 2.0, 2.0, 1.0]))
    image.header["pixdim"][1:4] = (2.01, 2.0, 2.0)  # within what is left in the header
    nib.save(image, tmp_path / "a.nii.gz")
    raw = bytearray(gzip.decompress((tmp_path / "a.nii.gz").read_bytes()))
    raw[80:84] = struct.pack("<f", 2.01)
    (tmp_path / "a.nii").write_bytes(raw)
    volume = io.read_volume(tmp_path / "a.nii")
    assert volume.header["pixdim"][1] == np.float32(2.01)
    assert volume.stated == volume.spacing == (2.0, 2.0, 2.0)
