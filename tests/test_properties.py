"""Properties that hold for any image, configuration or damage: random examples.

50 of each by default, 1000 with ``make stress``.
"""

from __future__ import annotations

import gzip
import os
import string
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.ndimage import binary_dilation, binary_erosion, generate_binary_structure

from tesla_med.config.files import load_site, site_files
from tesla_med.config.models import Preprocessing, Region
from tesla_med.errors import ConfigError, DataError, TeslaMedError
from tesla_med.io.volumes import read_volume, write_mask
from tesla_med.prepare.transforms import Preprocessor

EXAMPLES = int(os.environ.get("TESLA_MED_EXAMPLES", "50"))
pytestmark = pytest.mark.usefixtures("one_thread")
often = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
ORIENTATIONS = ("RAS", "LPS", "LPI", "ASR", "SAR", "PIR")
GRID = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)


@st.composite
def affines(draw, shear=True):
    """Rotation from a random quaternion, spacing 0.2 to 8 mm, maybe left-handed, a little sheared."""
    numbers = [draw(st.floats(-1, 1)) for _ in range(4)]
    assume(np.linalg.norm(numbers) > 0.1)
    turn = nib.quaternions.quat2mat(numbers)
    if draw(st.booleans()):  # along the axes
        turn = np.eye(3)[:, list(draw(st.permutations(range(3))))]
    spacing = [draw(st.floats(0.2, 8)) for _ in range(3)]
    signs = [draw(st.sampled_from((1, -1))) for _ in range(3)]
    matrix = turn @ np.diag(np.multiply(spacing, signs))
    if shear and draw(st.booleans()):
        matrix[0, 1] += draw(st.floats(-0.05, 0.05)) * spacing[1]
    affine = np.eye(4)
    affine[:3, :3] = matrix
    affine[:3, 3] = [draw(st.floats(-300, 300)) for _ in range(3)]
    return affine


@st.composite
def shapes(draw):
    shape = [draw(st.integers(1, 70)) for _ in range(3)]
    assume(np.prod(shape) <= 60000)
    return tuple(shape)


@st.composite
def images(draw, shear=True):
    """A NIfTI image: random grid, type, codes and scaling."""
    affine, shape = draw(affines(shear)), draw(shapes())
    kind = np.dtype(draw(st.sampled_from(TYPES)))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    data = generator.uniform(0, 100, shape)
    data = (data if kind.kind == "f" else np.round(data)).astype(kind)
    cls = nib.Nifti2Image if draw(st.booleans()) else nib.Nifti1Image
    header = cls.header_class()
    header.set_data_dtype(kind)
    header.set_data_shape(shape)
    codes = draw(st.sampled_from(((1, 0), (2, 0), (1, 1), (4, 1), (0, 1), (0, 3))))
    header.set_sform(affine if codes[0] else None, code=codes[0])
    if codes[1]:
        header.set_qform(affine, code=codes[1], strip_shears=True)
    slope = draw(st.sampled_from((None, 0.0, 1.0, 2.0, -0.5, 0.01)))
    return cls, header, data, slope, draw(st.floats(-100, 100))


def write(path: Path, image) -> None:
    cls, header, data, slope, intercept = image
    content = cls(data, None, header)
    content.header.set_slope_inter(1, 0)
    path.write_bytes(content.to_bytes())
    if slope is not None:
        raw = bytearray(path.read_bytes())
        header = cls.header_class.from_fileobj(path.open("rb"))
        header["scl_slope"], header["scl_inter"] = slope, intercept
        raw[: len(header.binaryblock)] = header.binaryblock
        path.write_bytes(bytes(raw))


def thresholded(volume, preprocessing: Preprocessing):
    """Return the mask of a network that says: foreground where the scaled intensity is above a half."""
    prepared = Preprocessor(preprocessing, Region(), 2)(volume)
    probs = torch.cat([1 - prepared.images, prepared.images], dim=1)
    return prepared.restore(probs).argmax(axis=0)


@often
@given(image=images(), orientation=st.sampled_from(ORIENTATIONS))
def test_any_grid_is_repeated_exactly(tmp_path_factory, image, orientation):
    folder = tmp_path_factory.mktemp("grid")
    source, target = folder / "image.nii", folder / "mask.nii.gz"
    write(source, image)
    volume = read_volume(source)
    assume(not volume.blank)
    mask = thresholded(volume, Preprocessing(orientation=orientation))
    write_mask(target, mask.astype(np.uint8), volume)
    before, after = nib.load(source), nib.load(target)
    agree = np.allclose(before.header["pixdim"][1:4], volume.spacing, rtol=0.01)
    for name in GRID:
        if name == "pixdim" and not agree and before.header["qform_code"] == 0:
            assert np.allclose(after.header["pixdim"][1:4], volume.spacing)
            continue
        assert np.array_equal(before.header[name], after.header[name], equal_nan=True), name
    assert before.shape == after.shape
    stored = np.asarray(after.dataobj.get_unscaled())
    array = volume.array[0].astype(np.float64)
    scaled = (array - array.min()) / (array.max() - array.min())
    sure = np.abs(scaled - 0.5) > 1e-5
    assert np.array_equal(stored[sure] > 0, scaled[sure] > 0.5)


@often
@given(affine=affines(), seed=st.integers(0, 2**31), orientation=st.sampled_from(ORIENTATIONS))
def test_resampling_stays_within_a_voxel_of_the_surface(tmp_path_factory, affine, seed, orientation):
    generator = np.random.default_rng(seed)
    shape = tuple(int(size) for size in generator.integers(24, 48, 3))
    axes = np.meshgrid(*(np.linspace(-1, 1, size) for size in shape), indexing="ij")
    centre, radius = generator.uniform(-0.2, 0.2, 3), generator.uniform(0.4, 0.7, 3)
    distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip(axes, centre, radius, strict=True))
    array = (1000 / (1 + np.exp(6 * (distance - 1)))).astype(np.int16)
    path = tmp_path_factory.mktemp("surface") / "image.nii"
    nib.save(nib.Nifti1Image(array, affine), path)
    volume = read_volume(path)
    mask = thresholded(volume, Preprocessing(orientation=orientation, size=(64, 64))) > 0
    scaled = volume.array[0] / volume.array[0].max()
    truth = scaled > 0.5
    cube = generate_binary_structure(3, 3)
    near = binary_dilation(truth, cube) & ~binary_erosion(truth, cube, border_value=1)
    assert not (mask != truth)[~near].any()


# ------------------------------------------------------------ configurations

WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=8)
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=True)),
    *(st.text(string.printable, max_size=8), st.lists(st.integers(), max_size=3)),
    st.dictionaries(WORDS, st.integers(), max_size=2),
)


def refusal(function, *arguments, of=TeslaMedError):
    """Return the error of the package that a call raises, or None; any other error goes on."""
    try:
        function(*arguments)
    except of as error:
        return error
    return None


def paths_of(content, prefix=()):
    for key, value in content.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, key))


@often
@given(data=st.data())
def test_a_changed_configuration_loads_or_names_the_key(tmp_path_factory, data):
    files = sorted(path for folder in ("prostate", "spinal_cord") for path in site_files(folder).values())
    original = data.draw(st.sampled_from(files))
    content = yaml.safe_load(original.read_text(encoding="utf-8"))
    place = data.draw(st.sampled_from(sorted(paths_of(content), key=str)))
    section = content
    for key in place[:-1]:
        section = section[key]
    change = data.draw(st.sampled_from(("value", "rename", "remove", "add")))
    if change == "value":
        section[place[-1]] = data.draw(VALUES)
    elif change == "rename":
        section[data.draw(WORDS)] = section.pop(place[-1])
    elif change == "remove":
        section.pop(place[-1])
    else:
        section[data.draw(WORDS)] = data.draw(VALUES)
    folder = tmp_path_factory.mktemp("yaml") / original.parent.name
    folder.mkdir()
    path = folder / original.name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    error = refusal(load_site, str(path), of=ConfigError)
    assert error is None or original.name in str(error)


@often
@given(text=st.text(max_size=60))
def test_any_text_as_configuration_is_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "prostate" / "x.yaml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_site(str(path))


# ------------------------------------------------------------ damage


@often
@given(data=st.data(), packed=st.booleans(), seed=st.integers(0, 1000))
def test_a_damaged_file_is_refused_by_name_or_whole(tmp_path_factory, data, packed, seed):
    folder = tmp_path_factory.mktemp("damage")
    path = folder / ("image.nii.gz" if packed else "image.nii")
    array = np.random.default_rng(seed).integers(0, 500, (9, 8, 7)).astype(np.int16)
    nib.save(nib.Nifti1Image(array, np.diag([1.0, 1.2, 3.0, 1.0])), path)
    whole = read_volume(path)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(("cut", "flip", "extension")))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] ^= data.draw(st.integers(1, 255))
    else:
        content = bytearray(gzip.decompress(content)) if packed else bytearray(gzip.compress(bytes(content)))
    path.write_bytes(bytes(content))
    error = refusal(read_volume, path)
    if error is not None:
        assert isinstance(error, DataError)
        assert path.name in str(error)
        assert kind != "extension"
        return
    volume = read_volume(path)
    assert np.isfinite(volume.array).all()
    if packed and kind != "extension":  # only bytes that gzip itself ignores may pass
        assert np.array_equal(volume.array, whole.array)
        assert kind != "cut"
    if kind == "extension":
        assert np.array_equal(volume.array, whole.array)
    mask = folder / "mask.nii.gz"
    write_mask(mask, np.zeros(volume.shape, np.uint8), volume)
    assert nib.load(mask).shape == volume.shape
