"""NIfTI files with exactly the header fields that a test asks for, and runs on them."""

from __future__ import annotations

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
import small_site as small

GRID = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)
MM = 2


def diagonal(*steps, origin=(0.0, 0.0, 0.0)):
    """Return an affine (4, 4) along the world axes."""
    affine = np.diag([*steps, 1.0]).astype(float)
    affine[:3, 3] = origin
    return affine


def noise(shape, seed=0, dtype=np.int16):
    """Return numbers from 0 to 200, both included."""
    values = np.random.default_rng(seed).integers(0, 201, shape)
    values.flat[:2] = 0, 200
    return values.astype(dtype)


def blocks(shape, value=100):
    """Return an L off centre and a mark in one corner: no turn or flip maps it onto itself."""
    array = np.zeros(shape, np.int16)
    i, j, k = (max(1, size // 5) for size in shape)
    array[i : 4 * i, j : 2 * j, :k] = value
    array[i : 2 * i, j : 4 * j, :k] = value
    array[0, 0, 0] = value
    return array


def write(path: Path, data, sform=None, qform=None, *, codes=(1, 1), unit=MM, **fields):
    """Write voxels as they are, (sform, qform) codes, the unit of length and raw header fields."""
    sform = diagonal(1, 1, 3) if sform is None else sform
    header = nib.Nifti1Header()
    header.set_data_dtype(data.dtype)
    header.set_data_shape(data.shape)
    header["pixdim"][1:4] = np.linalg.norm(sform[:3, :3], axis=0)
    header["xyzt_units"] = unit
    if codes[1]:
        header.set_qform(sform if qform is None else qform, code=codes[1])
    header.set_sform(sform, code=codes[0])
    header["vox_offset"] = 352
    header["scl_slope"], header["scl_inter"] = 1, 0
    for name, value in fields.items():
        header[name] = value
    content = header.binaryblock + bytes(4) + data.tobytes(order="F")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1) if path.name.lower().endswith(".gz") else content)
    return path


def raw(path: Path):
    """Return the header as it is stored, and the stored numbers without slope and intercept."""
    content = path.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    header = nib.Nifti1Header(content[:348], check=False)
    shape, start = header.get_data_shape(), int(header["vox_offset"])
    stored = np.frombuffer(content, header.get_data_dtype(), int(np.prod(shape)), start)
    return header, stored.reshape(shape, order="F")


def assert_same_grid(mask: Path, image: Path):
    """Check that two files have the same shape and, bit for bit, the same fields that place the grid."""
    (one, _), (other, _) = raw(mask), raw(image)
    assert one.get_data_shape() == other.get_data_shape()[:3]
    for name in GRID:
        assert one[name].tobytes() == other[name].tobytes(), name


def run_whole(volumes, weights, out, *, overrides=(), **options):
    """Run the source model on slices of their own size."""
    overrides = ("preprocessing.size=null", *overrides)
    return small.run(volumes, weights, out, method="source", overrides=overrides, **options)
