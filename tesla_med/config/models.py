"""Configuration: what a site is, how a task is done. Frozen, unknown keys refused.

Facts live in ``site_configs/<pipeline>/<site>.yaml``, recipes in ``pipelines/<name>.yaml``.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tesla_med.config.bundle import BundlePreprocessing as BundlePreprocessing
from tesla_med.config.judging import Candidate as Candidate
from tesla_med.config.judging import GuardConfig as GuardConfig
from tesla_med.config.judging import QualityConfig as QualityConfig
from tesla_med.config.nnunet import NnunetPreprocessing as NnunetPreprocessing
from tesla_med.config.section import Section as Section
from tesla_med.config.sites import Files as Files
from tesla_med.config.sites import MaskLayer as MaskLayer
from tesla_med.config.sites import Region as Region
from tesla_med.config.sites import Scanner as Scanner
from tesla_med.config.sites import SiteConfig as SiteConfig

Protocol = Literal["N-O", "N-M", "Y-O", "Y-M"]
Reset = Literal["never", "site", "case"]
PROTOCOLS: tuple[Protocol, ...] = ("N-O", "N-M", "Y-O", "Y-M")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` on top; mappings are merged, everything else replaced."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        result[key] = merge(known, value) if both else value  # type: ignore[arg-type]
    return result


class LabelClass(Section):
    """One class: its value in masks, its name, its colour in pictures, its concept in SNOMED CT."""

    value: int = Field(ge=0, le=65535)
    name: str
    color: str = Field("#e6550d", pattern=r"^#[0-9a-fA-F]{6}$")
    snomed: str = Field(
        "", pattern=r"^([0-9]{6,18})?$", description="concept of SNOMED CT, for exported segmentations"
    )


class Intensity(Section):
    """Whole-volume scaling to [0, 1]: by extremes, by percentiles with clipping, or to a given histogram."""

    scaling: Literal["minmax", "percentile", "histogram"] = "minmax"
    lower: float = Field(0.5, ge=0, le=100)
    upper: float = Field(99.5, ge=0, le=100)
    bias_correction: bool = Field(
        False, description="first divide every slice by its receive field, itself after strong blurring"
    )
    quantiles: tuple[tuple[Annotated[float, Field(ge=0, le=1)], ...], ...] = Field(
        (), description="for histogram: evenly spaced quantiles to be matched, of each channel"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Intensity:
        if self.lower >= self.upper:
            raise ValueError("lower must be below upper")
        given = [item for item in self.quantiles if len(item) > 1 and list(item) == sorted(item)]
        if (self.scaling == "histogram") != bool(self.quantiles) or len(given) < len(self.quantiles):
            raise ValueError("scaling 'histogram', and no other, needs rising quantiles of each channel")
        return self

    def __str__(self) -> str:
        """Return the scaling in words."""
        names = {"minmax": "min-max", "histogram": "the histogram of the source"}
        text = names.get(self.scaling, f"percentiles {self.lower:g} to {self.upper:g}")
        return text + (", receive field divided out" if self.bias_correction else "")


class FillConfig(Section):
    """Fill: voxels of one value, joined to the border, that hold no measurement."""

    enabled: bool = Field(
        False, description="find fill; keep it out of range, adaptation, judgement, calibration and mask"
    )
    least_share: float = Field(
        0.05, gt=0, le=1, description="share of the volume from which on such voxels count as fill"
    )


class Preprocessing(Section):
    """From a volume on its native grid to 2-D slices in [0, 1]; undone exactly afterwards."""

    orientation: str = Field("RAS", pattern=r"^[LRAPSI]{3}$")
    intensity: Intensity = Intensity()
    fill: FillConfig = FillConfig()
    spacing: tuple[float, float, float] | None = Field(
        None, description="resample to this voxel size in mm; 0 keeps an axis"
    )
    size: tuple[Annotated[int, Field(ge=8)], Annotated[int, Field(ge=8)]] | None = Field(
        None, description="resize every slice to this many pixels"
    )
    anti_aliasing: bool = False
    model_range: tuple[float, float] = Field((-1.0, 1.0), description="[0, 1] is mapped to this range")
    nnunet: NnunetPreprocessing | None = Field(
        None, description="of an nnU-Net: its plans, in place of orientation, intensity, spacing and size"
    )
    bundle: BundlePreprocessing | None = Field(
        None,
        description="of a MONAI bundle: its transforms, in place of orientation, intensity, spacing, size",
    )
    stain_normalisation: bool = Field(
        False, description="for tiles: normalise haematoxylin and eosin to those of a reference (Macenko)"
    )
    least_tissue: float = Field(
        0.05, ge=0, le=1, description="for tiles: share of pixels that show tissue, below which one is blank"
    )
    least_side: int = Field(
        16, ge=1, description="for tiles: pixels of the shorter side, below which one fails"
    )

    @field_validator("orientation")
    @classmethod
    def _axes(cls, value: str) -> str:
        if {frozenset("LR"), frozenset("AP"), frozenset("SI")} != {
            pair for letter in value for pair in map(frozenset, ("LR", "AP", "SI")) if letter in pair
        }:
            raise ValueError("needs one letter of each pair L/R, A/P, S/I")
        return value

    @field_validator("spacing")
    @classmethod
    def _not_negative(cls, value: Any) -> Any:
        if value is not None and any(step < 0 for step in value):
            raise ValueError("voxel sizes must be 0 (keep) or positive")
        return value


class ScalingChoice(Section):
    """Choice of each volume's scaling to [0, 1], without labels, before any method sees the volume."""

    candidates: tuple[Intensity, ...] = Field(
        (), description="scalings beside the one that the network was trained with; none: that one is taken"
    )
    shifted: float = Field(
        0.1,
        ge=0,
        description="distance of a volume's normalisation statistics from the network's above which "
        "another scaling is considered",
    )
    gain: float = Field(
        0.5, ge=0, le=1, description="share of this distance below which that of another scaling must be"
    )
    unsteady: float = Field(
        0.5, ge=0, le=1, description="the same without batch norm: Dice with the mask of zoomed slices"
    )
    steadier: float = Field(0.25, ge=0, le=1, description="by how much that Dice must be higher with it")
    slices: int = Field(16, ge=1, description="the most slices that are looked at, evenly spaced")


class ModelConfig(Section):
    """A registered network and its own parameters (checked when the network is built)."""

    name: str = "unet"
    params: dict[str, Any] = {}


class TrainConfig(Section):
    """Source-model training."""

    steps: int = Field(8000, ge=1)
    batch_size: int = Field(16, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(1e-5, ge=0)
    validation_fraction: float = Field(0.15, ge=0, lt=1)
    held_out_for: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the steps, then trained on; null: 0.5 for one or two cases",
    )
    validate_every: int = Field(250, ge=1)
    foreground_fraction: float = Field(
        0.7, ge=0, le=1, description="share of drawn slices that hold foreground"
    )
    augment: Literal["none", "mild", "robust"] = Field(
        "robust", description="how images are varied: not, as on one scanner, or as scanners differ"
    )
    intensity: Intensity | None = Field(
        Intensity(scaling="percentile"),
        description="scaling to [0, 1] of what is trained on, kept in the card; null: that of preprocessing",
    )

    @field_validator("augment", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "mild", False: "none"}.get(value, value) if isinstance(value, bool) else value


class CorrectionsConfig(Section):
    """How corrected cases take part in adaptation (``--corrections``)."""

    weight: float = Field(
        1.0, gt=0, description="of cross-entropy + soft Dice on labelled slices, beside the method's own loss"
    )
    batch_slices: int = Field(8, ge=1, description="labelled slices drawn for each update")
    first_updates: int = Field(
        200, ge=0, description="updates on labelled slices alone, from which every adaptation then starts"
    )
    first_updates_per_case: int = Field(50, ge=0, description="the most of these for each corrected case")


class ReportConfig(Section):
    """What the reports show."""

    bins: int = Field(15, ge=2, le=100)
    region_dilation: int = Field(3, ge=0, description="voxels, in-plane")
    overlays_per_case: int = Field(3, ge=1)
    max_cases_with_overlays: int = Field(50, ge=0)
    slices: bool = Field(True, description="write every slice of every case beside the page")


class PipelineConfig(Section):
    """How one task is done: classes, preprocessing, model, methods, reports.

    ``methods`` holds parameters by method name, ``protocols`` what differs by protocol;
    each method checks its own.
    """

    name: str
    title: str
    task: str = Field("segmentation", description="segmentation, classification, or another registered task")
    sites: str = Field(description="folder of site_configs/ whose sites this pipeline serves")
    classes: tuple[LabelClass, ...] = Field(min_length=2)
    channels: int = Field(1, ge=1)
    regions: bool = Field(
        False, description="classes come from overlapping regions, each painted over those before it"
    )
    preprocessing: Preprocessing = Preprocessing()
    scaling: ScalingChoice = ScalingChoice()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    method: str = "tesla"
    protocol: Protocol = "N-O"
    reset: dict[Protocol, Reset] = {}
    methods: dict[str, dict[str, Any]] = {}
    protocols: dict[Protocol, dict[str, dict[str, Any]]] = {}
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    predict_batch: int = Field(16, ge=1)
    guard: GuardConfig = GuardConfig()
    corrections: CorrectionsConfig = CorrectionsConfig()
    quality: QualityConfig = QualityConfig()
    keep_largest: bool = Field(
        False, description="keep only the largest connected component of the foreground, in masks only"
    )
    recalibrate: bool = Field(
        False, description="temperature of the probabilities, chosen without labels; masks stay as they are"
    )
    own_form: bool = Field(
        True, description="write adapted weights of somebody else's model in its own form, too"
    )
    cuda_graphs: bool = Field(True, description="on a CUDA device, replay captured passes")
    reports: tuple[str, ...] | None = Field(None, description="names of reports; none: those of the task")
    report: ReportConfig = ReportConfig()
    citation: str = ""

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: tuple[LabelClass, ...]) -> tuple[LabelClass, ...]:
        values = [item.value for item in value]
        if len(set(values)) != len(values):
            raise ValueError(f"class values repeat: {values}")
        if values[0] != 0:
            raise ValueError("the first class must be the background with value 0")
        return value

    @property
    def values(self) -> tuple[int, ...]:
        """Label value of each channel, in channel order."""
        return tuple(item.value for item in self.classes)

    @property
    def foreground(self) -> tuple[LabelClass, ...]:
        """Every class but the background; all of them where whole tiles are classified."""
        return self.classes if self.whole_images else self.classes[1:]

    @property
    def whole_images(self) -> bool:
        """Whether an image has one class, and not each of its pixels."""
        return self.task == "classification"

    def method_params(self, method: str, protocol: Protocol) -> dict[str, Any]:
        """Return the parameters of ``method``, those of ``protocol`` over the common ones."""
        return merge(self.methods.get(method, {}), self.protocols.get(protocol, {}).get(method, {}))

    def reset_for(self, protocol: Protocol) -> Reset:
        """Return when the state of a method starts afresh under ``protocol``."""
        return self.reset.get(protocol, "case" if protocol.endswith("O") else "site")
