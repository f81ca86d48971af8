"""Stains of H&E tiles in optical density, which laboratories change as scanners change intensities.

By the law of Lambert and Beer, the optical density of a pixel, -ln of its share of the light, is the sum
over stains of the concentration times the absorption of the stain in red, green and blue. The absorptions
are those of Ruifrok and Johnston, Quantification of histochemical staining by color deconvolution, Anal
Quant Cytol Histol 23, 2001, as in scikit-image's ``rgb_from_hed``; its third stain (DAB) takes up what
haematoxylin and eosin do not explain. White pixels have density 0, so that scaling a stain does not change
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

ABSORPTIONS = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))
"""The absorptions of haematoxylin, eosin and the rest, each in (red, green, blue)."""
STAINS = ("haematoxylin", "eosin", "rest")
DARKEST = 1e-6
"""The share of light that black counts as, the same as in scikit-image."""
GREY_TOLERANCE = 1e-3
"""The channels of a picture without colour differ by less than this, a quarter of an 8-bit step."""


def separate(images: Tensor) -> Tensor:
    """Return how much of each stain a pixel holds (n, 3, H, W), in units of optical density, base e.

    The stains are haematoxylin, eosin and the rest. A colour that the three cannot be mixed to has negative
    amounts; scikit-image's ``rgb2hed`` gives max(amount, 0) / ln(10^6).

    Args:
        images: (n, 3, H, W) RGB in [0, 1], in which white means no stain.
    """
    density = -images.clamp_min(DARKEST).log()
    unmix = torch.linalg.inv(torch.tensor(ABSORPTIONS, dtype=torch.float64))
    return torch.einsum("nchw,cs->nshw", density, _beside(images, unmix))


def _beside(images: Tensor, values: Tensor) -> Tensor:
    """Return values from the CPU on the device and in the type of the images, without waiting for it."""
    return values.to(device=images.device, dtype=images.dtype, non_blocking=True)


def scale_stain(images: Tensor, factor: Tensor, stain: int) -> Tensor:
    """Multiply the concentration of one stain by ``factor``, of which 1 is exactly the identity.

    Only what is there is scaled: pixels whose colour holds none of the stain, or less, stay as they are.
    Pictures that do not have three channels, and those without colour, hold no stain and stay as well.

    Args:
        images: (n, C, H, W) in [0, 1].
        factor: (n, 1, 1, 1), above 0.
        stain: the place of the stain in ``STAINS``.

    Returns:
        (n, C, H, W), differentiable in the factor. A weaker stain can brighten pixels to above 1, which the
        caller clamps.
    """
    if images.shape[1] != 3:
        return images
    held = separate(images)[:, stain : stain + 1].clamp_min(0)
    absorption = _beside(images, torch.tensor(ABSORPTIONS[stain])).view(1, 3, 1, 1)
    scaled = images * torch.exp((1.0 - factor) * held * absorption)
    return torch.where(coloured(images), scaled, images)


def coloured(images: Tensor) -> Tensor:
    """Return (n, 1, 1, 1), whether the channels of (n, 3, H, W) RGB differ anywhere."""
    spread = images.detach().amax(dim=1, keepdim=True) - images.detach().amin(dim=1, keepdim=True)
    return spread.amax(dim=(2, 3), keepdim=True) > GREY_TOLERANCE
