"""Settings by which results are judged without labels: the guard and the predicted Dice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from tesla_med.config.section import Section

Candidate = Literal["source", "own", "half", "part", "mixed", "adapted"]


class GuardConfig(Section):
    """Which network's mask of a volume is taken; agreements are Dice of two masks."""

    enabled: bool = False
    candidates: tuple[Candidate, ...] = Field(
        ("source", "own", "half", "part", "adapted"),
        description="whose masks are compared; 'own', 'half' and 'mixed' need batch norm",
    )
    unsupported: float = Field(
        0.5, ge=0, le=1, description="a mask is refused whose agreement with every other is below this"
    )
    largest_foreground: float = Field(
        0.6, gt=0, le=1, description="share of the field; a mask that fills more is refused"
    )
    narrowest: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the area to which a mask may narrow between two parts of a stack",
    )
    farthest: float = Field(
        4.5,
        gt=0,
        description="standard deviations that a mask may lie from where the organ lay in the training, or be "
        "larger or smaller, if the weights' card knows",
    )
    shape_cost: float = Field(
        0.5, ge=0, description="trust that an uneven area along the stack costs at most"
    )
    shrink_cost: float = Field(
        1.0,
        ge=0,
        description="trust that an adapted mask loses for every 1 by which the logarithm of its area falls "
        "more than 0.06 below that of the masks of the source's weights",
    )
    head_start: float = Field(
        0.2, ge=0, description="by how much another mask must be trusted more than the source's"
    )
    doubt: float = Field(
        0.3,
        ge=0,
        description="what the head start grows by for every 1 that the largest trust falls below 4",
    )
    least_trust: float = Field(
        0.0, ge=0, description="trust that a mask must have to be taken in place of the source's"
    )
    least_trust_without_batch_norm: float = Field(
        4.75,
        ge=0,
        description="the same for networks without batch norm, of which there are fewer masks to compare",
    )
    least_support: float = Field(
        0.6,
        ge=0,
        le=1,
        description="mean of consistency and best agreement below which no mask of a volume is trusted",
    )

    def least(self, names: Sequence[str]) -> float:
        """Return the trust that a mask needs to take the place of the source's among these candidates."""
        alone = set(names) <= {"source", "part", "adapted"}
        return self.least_trust_without_batch_norm if alone else self.least_trust

    @field_validator("candidates")
    @classmethod
    def _ends(cls, value: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        if not {"source", "adapted"} <= set(value) or len(set(value)) != len(value):
            raise ValueError("needs 'source' and 'adapted', and each name once")
        return value


class QualityConfig(Section):
    """How a Dice is predicted from what the guard saw: intercept + slope * usual Dice * support squared."""

    intercept: float | None = Field(None, description="none: no Dice is predicted")
    slope: float = Field(0.0, ge=0)
    half_width: float = Field(0.0, ge=0, description="of the 90 % interval at a predicted Dice of 1")
    growth: float = Field(
        0.0, ge=0, description="of the half width, for every 1 that the prediction is lower"
    )
    source_dice: float | None = Field(
        None, gt=0, le=1, description="Dice of the network on held-out images of its training; of its card"
    )
    review_below: float = Field(
        0.75, ge=0, le=1, description="cases whose predicted Dice is lower come first in the report"
    )
    fitted_on: str = Field("", description="data of the fit; never the sites that are judged")
