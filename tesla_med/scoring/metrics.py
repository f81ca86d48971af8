"""Metrics of masks: a registry of what is measured, over pure functions of arrays and voxel sizes.

An entry of ``METRICS`` is all that a metric needs: tables, reports, comparisons and documentation take their
columns from there. The headline is the Dice of one class of one case, over the whole volume on the native
grid.

Where both masks are empty there is nothing to compare: the result is None ("n/a"), to be left out of means
and counted. Where only one is empty, Dice and surface Dice are 0 and stay in the mean; surface distances do
not exist then and are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import LabelClass
from tesla_med.errors import DataError
from tesla_med.io.masks import check_labels
from tesla_med.records import ClassScore
from tesla_med.registry import Registry
from tesla_med.scoring.grids import Doubles, checked_spacing, paired, surface_distances
from tesla_med.types import IntArray

MICROLITRES_PER_ML = 1000.0
SURFACE_TOLERANCE_MM = 1.0
"""Surfaces that are at most so far apart agree, in the normalised surface Dice."""
ROUNDING_MM = 1e-5
"""Voxel sizes of a header are rounded; this must not decide whether a distance is within a tolerance."""
Empty = Literal["skip", "one"]
"""What counts where both masks are empty: nothing, or a Dice of 1."""


@dataclass(frozen=True)
class MaskPair:
    """A mask of one class and what it is compared with; what several metrics need is computed once.

    Attributes:
        reference: (I, J, K) bool, or None.
        prediction: (I, J, K) bool.
        spacing: voxel size along each axis in mm.
        voxel_mm3: volume of a voxel, less than the product of the spacing on a sheared grid; None: that.

    Raises:
        DataError: the shapes differ.
    """

    reference: npt.NDArray[Any] | None
    prediction: npt.NDArray[Any]
    spacing: Sequence[float]
    voxel_mm3: float | None = None

    def __post_init__(self) -> None:
        if self.reference is not None:
            paired(self.reference, self.prediction)

    @property
    def both(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Reference and prediction.

        Raises:
            DataError: there is no reference.
        """
        if self.reference is None:
            raise DataError("a reference is needed to compare a mask with")
        return self.reference, self.prediction

    @cached_property
    def distances(self) -> tuple[Doubles, Doubles] | None:
        """Distances between the surfaces, see :func:`surface_distances`."""
        return surface_distances(*self.both, self.spacing)


@dataclass(frozen=True)
class Metric:
    """What is measured of every foreground class of every case.

    Attributes:
        name: the column in tables and the tag in TensorBoard.
        title: for people.
        unit: "" (a share in [0, 1] or a number), "mm" or "ml".
        better: which values are better; None where neither is.
        what: what it is, in words.
        empty: its value where one or both masks are empty, in words.
        function: from a pair of masks to the value; None is "not applicable".
        needs_reference: whether it compares with a reference.
        physical: whether it depends on the voxel size; it is blank where that is nominal.
        of_source: whether it is measured of the unadapted mask too, as ``<name>_source``.
        digits: decimals that reports show; None takes those of the unit.
    """

    name: str
    title: str
    unit: Literal["", "mm", "ml"]
    better: Literal["higher", "lower"] | None
    what: str
    empty: str
    function: Callable[[MaskPair], float | None]
    needs_reference: bool = True
    physical: bool = False
    of_source: bool = False
    digits: int | None = None

    @property
    def source(self) -> str:
        """Column of the unadapted mask, where there is one."""
        return f"{self.name}_source"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the metric in tables of a run."""
        return (self.name, self.source) if self.of_source else (self.name,)

    @property
    def places(self) -> int:
        """Decimals that reports show."""
        return {"": 3, "mm": 1, "ml": 2}[self.unit] if self.digits is None else self.digits


class Metrics(Registry[Metric]):
    """The metrics by name, those of other distributions (entry points ``tesla_med.metrics``) included."""

    def __init__(self) -> None:
        super().__init__("metric", None, "tesla_med.metrics")

    def add(self, metric: Metric) -> Metric:
        """Store a metric under its name.

        Raises:
            ConfigError: the name is taken.
        """
        return self.register(metric.name)(metric)

    def in_order(self) -> list[Metric]:
        """Return all metrics in the order of their columns.

        Those that need a reference come first, each group in the order in which it was registered.
        """
        self._load()
        return sorted(self._entries.values(), key=lambda metric: not metric.needs_reference)


METRICS = Metrics()


def figure_columns() -> tuple[str, ...]:
    """Return the columns of all metrics in tables of a run."""
    return tuple(name for metric in METRICS.in_order() for name in metric.columns)


def compared() -> tuple[str, ...]:
    """Return the figures of a class that comparisons of methods take from a run."""
    metrics = (metric for metric in METRICS.in_order() if metric.needs_reference)
    return tuple(name for metric in metrics for name in metric.columns)


def evaluate_metrics(
    pair: MaskPair, metrics: Iterable[Metric], nominal: bool = False
) -> dict[str, float | None]:
    """Return the value of every metric by its name; None where it does not exist.

    Args:
        pair: the masks.
        metrics: what to measure.
        nominal: the voxel size is not a physical one, so what depends on it does not exist.
    """

    def exists(metric: Metric) -> bool:
        return not (nominal and metric.physical) and not (metric.needs_reference and pair.reference is None)

    return {metric.name: metric.function(pair) if exists(metric) else None for metric in metrics}


def dice(reference: npt.NDArray[Any], prediction: npt.NDArray[Any], empty: Empty = "skip") -> float | None:
    """Return 2 |R and P| / (|R| + |P|).

    Args:
        reference: mask of any shape, non-zero inside.
        prediction: mask of the same shape.
        empty: what is returned where both masks are empty: None ("skip"), or 1 ("one").

    Returns:
        A number in [0, 1]; 0 where exactly one mask is empty; None where both are, unless ``empty`` says 1.

    Raises:
        DataError: the shapes differ.
    """
    first, second = paired(reference, prediction)
    total = int(np.count_nonzero(first)) + int(np.count_nonzero(second))
    if not total:
        return 1.0 if empty == "one" else None
    return 2.0 * int(np.count_nonzero(first & second)) / total


def hd95(pair: MaskPair) -> float | None:
    """Return the larger of the two 95th percentiles of the surface distances, in mm.

    None where either mask is empty.
    """
    if pair.distances is None:
        return None
    return max(float(np.percentile(part, 95)) for part in pair.distances)


def assd(pair: MaskPair) -> float | None:
    """Return the mean of the surface distances of both directions, in mm; None where either mask is empty."""
    return None if pair.distances is None else float(np.concatenate(pair.distances).mean())


def surface_dice(pair: MaskPair, tolerance: float = SURFACE_TOLERANCE_MM) -> float | None:
    """Return the normalised surface Dice: the share of both surfaces that lies near the other one.

    Nikolov et al., "Clinically applicable segmentation of head and neck anatomy for radiotherapy",
    arXiv:1809.04430 (2018), Journal of Medical Internet Research 23(7):e26151 (2021). An element of a surface
    is a surface voxel here, as in MONAI; there it is weighted by its area.

    Args:
        pair: the masks.
        tolerance: distance in mm up to which surfaces agree, at least 0.

    Returns:
        A number in [0, 1]; 0 where exactly one mask is empty; None where both are.
    """
    if pair.distances is None:
        return 0.0 if any(mask.any() for mask in pair.both) else None
    every = np.concatenate(pair.distances)
    return float(np.count_nonzero(every <= tolerance + ROUNDING_MM) / every.size)


def volume_ml(mask: npt.NDArray[Any], spacing: Sequence[float], voxel_mm3: float | None = None) -> float:
    """Return the volume of the non-zero voxels in ml.

    Args:
        mask: (I, J, K), non-zero inside.
        spacing: voxel size along each axis in mm.
        voxel_mm3: volume of a voxel; None: the product of the spacing, as where the axes are at right angles.

    Raises:
        DataError: ``spacing`` is not one positive number an axis.
    """
    voxel = float(np.prod(checked_spacing(spacing, mask.ndim)))
    return int(np.count_nonzero(mask)) * (voxel if voxel_mm3 is None else voxel_mm3) / MICROLITRES_PER_ML


METRICS.add(
    Metric(
        name="dice",
        title="Dice",
        unit="",
        better="higher",
        what="overlap, 2 times the common volume over the sum of both, 0 to 1",
        empty="n/a where both are empty, 0 where one is",
        function=lambda pair: dice(*pair.both),
        of_source=True,
    )
)
METRICS.add(
    Metric(
        name="hd95_mm",
        title="HD95",
        unit="mm",
        better="lower",
        what="larger of the two 95th percentiles of the surface distances",
        empty="n/a where either is empty",
        function=hd95,
        physical=True,
    )
)
METRICS.add(
    Metric(
        name="assd_mm",
        title="ASSD",
        unit="mm",
        better="lower",
        what="mean of all surface distances, both directions",
        empty="n/a where either is empty",
        function=assd,
        physical=True,
        digits=2,
    )
)
METRICS.add(
    Metric(
        name="nsd",
        title="NSD",
        unit="",
        better="higher",
        what="normalised surface Dice, share of both surfaces that lies within"
        f" {SURFACE_TOLERANCE_MM:g} mm of the other, 0 to 1",
        empty="n/a where both are empty, 0 where one is",
        function=surface_dice,
        physical=True,
    )
)
METRICS.add(
    Metric(
        name="volume_ml",
        title="Volume",
        unit="ml",
        better=None,
        what="number of voxels of the mask times the size of one",
        empty="0",
        function=lambda pair: volume_ml(pair.prediction, pair.spacing, pair.voxel_mm3),
        needs_reference=False,
        physical=True,
        of_source=True,
    )
)


def score_case(
    mask: IntArray,
    source_mask: IntArray,
    reference: IntArray | None,
    classes: Sequence[LabelClass],
    spacing: Sequence[float],
    nominal: bool = False,
    voxel_mm3: float | None = None,
) -> tuple[ClassScore, ...]:
    """Score every foreground class of one case on its native grid.

    Args:
        mask: (I, J, K) label values of the method.
        source_mask: (I, J, K) label values of the unadapted model.
        reference: (I, J, K) label values, or None: then only volumes are given.
        classes: the classes; the one with value 0 is the background and left out.
        spacing: voxel size along each axis in mm.
        nominal: the voxel size is not a physical one; figures that depend on it are then None.
        voxel_mm3: volume of a voxel; None: the product of the spacing.

    Raises:
        DataError: the shapes differ, or the reference holds a label that is not a class.
    """
    if reference is not None:
        check_labels(reference, [item.value for item in classes], "the reference")
    return tuple(
        _score_class(item, mask, source_mask, reference, (spacing, voxel_mm3), nominal)
        for item in classes
        if item.value != 0
    )


def _score_class(
    item: LabelClass,
    mask: IntArray,
    source_mask: IntArray,
    reference: IntArray | None,
    size: tuple[Sequence[float], float | None],
    nominal: bool,
) -> ClassScore:
    ours, source = paired(mask == item.value, source_mask == item.value)
    truth = None if reference is None else reference == item.value
    metrics = METRICS.in_order()
    values = evaluate_metrics(MaskPair(truth, ours, *size), metrics, nominal)
    before = evaluate_metrics(
        MaskPair(truth, source, *size), [item for item in metrics if item.of_source], nominal
    )
    values |= {f"{name}_source": value for name, value in before.items()}
    return ClassScore(
        label=item.value,
        name=item.name,
        **ClassScore.placed(values),
        voxels=int(np.count_nonzero(ours)),
        voxels_source=int(np.count_nonzero(source)),
        voxels_reference=None if truth is None else int(np.count_nonzero(truth)),
    )
