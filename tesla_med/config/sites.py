"""What a site is: its files, its region, its scanner. Facts, in ``site_configs/<pipeline>/<site>.yaml``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tesla_med.config.section import Section


class MaskLayer(Section):
    """One reference file of a case and what its values mean.

    Exactly one of ``write`` and ``values`` may be given; with neither, values are kept.
    """

    pattern: str = Field(description="glob; its last * is the case key shared with the image")
    root: str | None = Field(
        None, description="folder of these files, if not that of the images; relative to the one searched"
    )
    write: int | None = Field(None, ge=0, le=65535, description="label painted where the file > 0")
    values: dict[int, int] | None = Field(None, description="file value -> label; other values are refused")
    ignore: tuple[int, ...] = Field((), description="file values that mean 'do not score'")

    @property
    def where(self) -> str:
        """The pattern, with the folder that it is matched in."""
        return self.pattern if self.root is None else f"{self.root.rstrip('/')}/{self.pattern}"

    @model_validator(mode="after")
    def _one_rule(self) -> MaskLayer:
        if self.write is not None and self.values is not None:
            raise ValueError("give either 'write' or 'values', not both")
        if both := set(self.ignore) & set(self.values or {}):
            raise ValueError(f"value {min(both)} is in 'values' and in 'ignore'")
        return self


class Files(Section):
    """Name patterns, matched without regard to case against file names, and the folders they hold.

    An extension in a pattern stands for every format that can be read. The text that the
    last ``*`` matches onward from the start of the name is the case key: ``Case*.nii.gz``
    and ``*_segmentation.nii.gz`` meet in ``Case07`` for ``Case07_segmentation.nii.gz``. The channels
    of a case (T2 and ADC, say) meet in the same way, the first gives the grid.
    """

    image: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description="of one channel: names that may be images; of several: one per channel",
    )
    masks: tuple[MaskLayer, ...] = ()
    combine: Literal["paint", "majority"] = Field(
        "paint", description="paint: later layers over earlier ones; majority: one vote per layer"
    )
    series_image: int | None = Field(
        None, ge=0, description="which image of a series to take, from 0; none: a series is refused"
    )

    subject: str | None = Field(
        None, description="glob for names of cases or tiles that tells whose they are, for splits in training"
    )
    series: str | None = Field(
        None, description="of DICOM, which series: a glob for SeriesDescription or ProtocolName"
    )

    @field_validator("image", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Region(Section):
    """The part of the in-plane field that the model sees.

    ``whole``: all of it. ``square``: centred, ``size_mm`` a side. ``mask``: a square about the
    in-plane centre of the mask file matching ``pattern``. ``point``: about ``point_mm`` (RAS+).
    """

    kind: Literal["whole", "square", "mask", "point"] = "whole"
    size_mm: float | None = Field(None, gt=0)
    pattern: str | None = None
    root: str | None = Field(None, description="folder of the mask files, as of a mask layer")
    point_mm: tuple[float, float, float] | None = None
    slices: Literal["all", "mask"] = Field(
        "all", description="mask: leave out slices where the region's mask is empty"
    )

    @model_validator(mode="after")
    def _complete(self) -> Region:
        needs = {
            "square": ("size_mm",),
            "mask": ("size_mm", "pattern"),
            "point": ("size_mm", "point_mm"),
        }.get(self.kind, ())
        missing = [name for name in needs if getattr(self, name) is None]
        if missing:
            raise ValueError(f"region kind {self.kind!r} needs {', '.join(missing)}")
        if self.slices == "mask" and self.kind != "mask":
            raise ValueError("slices: mask needs region kind 'mask'")
        return self


class Scanner(Section):
    """What is known of the scanner; free text for the report."""

    manufacturer: str | None = None
    model: str | None = None
    field_strength_t: float | None = Field(None, gt=0)
    sequence: str | None = None
    coil: str | None = None


class SiteConfig(Section):
    """Where one site's data come from. ``pipeline`` and ``id`` follow from the path of the file."""

    id: str
    pipeline: str
    institution: str
    description: str = ""
    scanner: Scanner = Scanner()
    spacing: Literal["header", "nominal", "nominal_if_unit"] = "header"
    files: Files = Files(image=("*",))
    tiles: dict[str, int] = Field({}, description="for tiles: folder of a class -> its value")
    region: Region = Region()
    weights: str | None = Field(None, description="source weights used when --weights is not given")
    terms: str = Field("", description="terms of the data, repeated in every report")
    citation: str = ""
