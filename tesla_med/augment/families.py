"""The named sets of training augmentation: what a family does, how often, and how strongly.

``none`` leaves images as they are, ``mild`` varies them as patients and sessions on one scanner do, and
``robust`` randomises whatever another scanner may change, so that a network cannot rely on it. Every figure
of a family is a field of :class:`Family`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Ranges and probabilities of one family; each image of a batch draws its own.

    Attributes:
        flip: probability of a left-right flip.
        rotation: largest angle in degrees.
        zoom: largest absolute log of the zoom.
        shift: largest shift, as a share of the field.
        elastic: probability, and standard deviation of the displacement of 6 x 6 control points, in half
            fields.
        gamma: probability, and largest absolute log of the exponent.
        inverted_gamma: the same on 1 - image.
        bezier: probability of a monotone cubic Bezier map of [0, 1] (Zhou et al., Models Genesis, 2019).
        inversion: probability that such a map falls instead of rises.
        convolution: probability of random shallow convolutions, and whether two are blended by a smooth
            field (GIN and IPA: Ouyang et al., Causality-inspired single-source domain generalization, 2022;
            four layers, two hidden channels).
        random_filter: probability of one random convolution of kernel 1, 3, 5 or 7 (RandConv: Xu et al.,
            2021).
        bias: probability, and largest standard deviation of the log field's 3 x 3 control points.
        hot_spot: probability, and largest gain of a receive coil beside the object (1 + gain at its centre).
        clipping: probability that the range is set anew by percentiles of the slice, and the largest share
            in percent cut at either end.
        blur: probability and largest standard deviation in pixels.
        sharpen: probability and largest factor of the unsharp mask.
        coarse: probability of a lower resolution, and the smallest; images of a batch have the same.
        noise: probability and largest standard deviation.
        contrast: largest absolute log of the factor about the mean.
        brightness: largest shift.
    """

    flip: float = 0.5
    rotation: float = 10.0
    zoom: float = 0.1
    shift: float = 0.05
    elastic: tuple[float, float] = (0.0, 0.0)
    gamma: tuple[float, float] = (0.0, 0.0)
    inverted_gamma: tuple[float, float] = (0.0, 0.0)
    bezier: float = 0.0
    inversion: float = 0.0
    convolution: float = 0.0
    random_filter: float = 0.0
    bias: tuple[float, float] = (0.0, 0.0)
    hot_spot: tuple[float, float] = (0.0, 0.0)
    clipping: tuple[float, float] = (0.0, 0.0)
    blur: tuple[float, float] = (0.0, 0.0)
    sharpen: tuple[float, float] = (0.0, 0.0)
    coarse: tuple[float, float] = (0.0, 1.0)
    noise: tuple[float, float] = (0.0, 0.0)
    contrast: float = 0.0
    brightness: float = 0.0


MILD = Family(
    gamma=(1.0, 0.22),
    blur=(0.3, 0.8),
    noise=(1.0, 0.03),
    contrast=0.15,
    brightness=0.08,
)

ROBUST = Family(
    rotation=15.0,
    zoom=0.25,
    shift=0.08,
    elastic=(0.4, 0.04),
    gamma=(0.7, 0.7),
    inverted_gamma=(0.2, 0.7),
    bezier=0.2,
    inversion=0.0,
    convolution=0.3,
    random_filter=0.1,
    bias=(0.6, 0.5),
    hot_spot=(0.35, 6.0),
    clipping=(0.7, 2.0),
    blur=(0.35, 1.5),
    sharpen=(0.25, 3.0),
    coarse=(0.25, 0.4),
    noise=(0.6, 0.08),
    contrast=0.35,
    brightness=0.1,
)

FAMILIES: dict[str, Family | None] = {"none": None, "mild": MILD, "robust": ROBUST}
