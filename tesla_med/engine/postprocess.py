"""What is done to a finished mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tesla_med.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor


def largest_of(mask: Tensor) -> Tensor:
    """Return (N, H, W) class indices, on any device, with the largest component of the foreground alone."""
    import torch

    found = [torch.nonzero((mask > 0).any(dim=axes)).flatten() for axes in ((1, 2), (0, 2), (0, 1))]
    if not len(found[0]):
        return mask
    box = tuple(slice(int(item[0]), int(item[-1]) + 1) for item in found)
    kept = keep_largest(mask[box].cpu().numpy())
    result = torch.zeros_like(mask)
    result[box] = torch.from_numpy(kept).to(mask)
    return result


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
