"""What is done to a finished mask."""

from __future__ import annotations

import numpy as np

from tesla_med.types import IntArray


def keep_largest(mask: IntArray) -> IntArray:
    """Return the mask with all foreground outside the largest connected component set to 0.

    All classes together form the components; voxels that touch at a face, edge or corner belong together.

    Args:
        mask: (I, J, K) label values.
    """
    from monai.transforms import KeepLargestConnectedComponent

    labels = [int(value) for value in np.unique(mask) if value]
    if not labels:
        return mask
    largest = KeepLargestConnectedComponent(applied_labels=labels, is_onehot=False, independent=False)
    kept: IntArray = np.asarray(largest(mask[None].astype(np.int32)))[0].astype(mask.dtype)
    return kept
