"""Made-up DICOM series, slice by slice, with what a test asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def write_series(
    folder: Path,
    array,
    *,
    spacing=(1.0, 1.5),
    step=3.0,
    origin=(-10.0, 20.0, 5.0),
    direction=AXIAL,
    drift=(0.0, 0.0, 0.0),
    places=None,
    series=None,
    number=1,
    **fields,
) -> list[Path]:
    """Write array (I, J, K) as K files named against their order.

    ``spacing`` is (between columns, between rows) in mm, ``drift`` is added from slice to slice, ``places``
    are the slices' distances along the normal in place of multiples of ``step``; ``fields`` are set on every
    slice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    across, down = np.array(direction[:3]), np.array(direction[3:])
    normal = np.cross(across, down)
    series = series or generate_uid(entropy_srcs=[str(folder), str(number)])
    count = array.shape[2]
    places = [index * step for index in range(count)] if places is None else places
    paths = []
    for index, place in enumerate(places):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = MRImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[series, str(index)])
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        item = Dataset()
        item.file_meta = meta
        item.SOPClassUID, item.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
        item.Modality, item.PatientName, item.PatientID = "MR", "Quimby^Zelda", "identifier-4711"
        item.StudyInstanceUID, item.SeriesInstanceUID = generate_uid(entropy_srcs=["study"]), series
        item.SeriesNumber, item.InstanceNumber = number, 1 + (7 * index) % 97
        item.SeriesDescription = "secret words"
        item.ImagePositionPatient = [
            float(value) for value in np.array(origin) + place * normal + index * np.array(drift)
        ]
        item.ImageOrientationPatient = [float(value) for value in direction]
        item.PixelSpacing = [spacing[1], spacing[0]]
        item.SliceThickness = step
        item.Rows, item.Columns = array.shape[1], array.shape[0]
        item.SamplesPerPixel, item.PhotometricInterpretation = 1, "MONOCHROME2"
        item.BitsAllocated, item.BitsStored, item.HighBit, item.PixelRepresentation = 16, 16, 15, 0
        item.PixelData = np.ascontiguousarray(array[:, :, min(index, count - 1)].T).astype("<u2").tobytes()
        for name, value in fields.items():
            setattr(item, name, value)
        path = folder / f"IM{1000 - index:04d}"
        item.save_as(path, enforce_file_format=True)
        paths.append(path)
    return paths
