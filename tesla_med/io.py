"""Images and masks on disk: the one door for reading and writing them.

One rule places an image: the sform if its code is above 0, else the qform if its code is,
else voxel sizes alone (then, as in nibabel, the first axis runs from right to left and the
origin is the centre). World coordinates are RAS+ in mm, arrays are in file order. Results
repeat the input's header fields bit for bit, so that no viewer places them elsewhere.
"""

from tesla_med.geometry import corner_displacement
from tesla_med.references import read_reference, read_region_mask
from tesla_med.volumes import (
    GRID_TOLERANCE_MM,
    VOLUME_SUFFIXES,
    check_same_grid,
    read_map,
    read_mask,
    read_volume,
    save_image,
    stem,
    write_map,
    write_mask,
)

__all__ = [
    "GRID_TOLERANCE_MM",
    "VOLUME_SUFFIXES",
    "check_same_grid",
    "corner_displacement",
    "read_map",
    "read_mask",
    "read_reference",
    "read_region_mask",
    "read_volume",
    "save_image",
    "stem",
    "write_map",
    "write_mask",
]
