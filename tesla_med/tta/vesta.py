"""VeSTA: TeSLA under volume-wise statistics, steadied by restarts; zoomed views of the case choose both.

TeSLA normalises every pass by the statistics of the images, its predictions by those of the volume. That is
what makes up for another scanner, and what misleads it where a volume differs from the training for reasons
of anatomy: there the first pseudo-labels are wrong, and self-training confirms them. VeSTA normalises all of
its passes, those of the teacher, the policy, the student and the prediction, by

    share * statistics of the images  +  (1 - share) * statistics of the source     (You et al., 2021),

in every layer. Before a case is learned from, the source model is asked for a mask under each of
``statistics_shares``, of the slices as they are and of the reduced and enlarged slices, and the share under
which the masks agree best is taken. Where the adapted network predicts whole sites (M), it is asked in the
same way for every case.

What TeSLA learns from a single case depends on what it draws. VeSTA learns ``restarts`` times, always from
the source model, and keeps the network whose masks of the zoomed slices agree best with its mask.

Both choices are made by ``tesla_med.engine.steadiness`` (docs/method/vesta.md). No loss asks for that
agreement. Everything else is TeSLA's. A network without batch norm has no share to choose; for tiles, which
have no masks, there are neither shares nor restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field
from torch import Tensor

from tesla_med.models.base import Network
from tesla_med.models.normalisation import Statistics, blend_running_statistics, kept_running_statistics
from tesla_med.tta.base import METHODS
from tesla_med.tta.tesla import TeSLA, TeSLAParams
from tesla_med.types import ZOOMS


class VeSTAParams(TeSLAParams):
    """Parameters of TeSLA and the shares to choose from."""

    statistics_shares: tuple[float, ...] = Field(
        (0.5, 1.0),
        min_length=1,
        description="shares of the images' own statistics, in (0, 1], of which one is chosen for each case",
    )
    restarts: int = Field(
        1, ge=1, description="times that is learned from a case, of which the steadiest is kept; tiles: once"
    )


@METHODS.register("vesta")
class VeSTA(TeSLA):
    """TeSLA with a share of the images' own statistics that is chosen case by case.

    Attributes:
        share: that is used now.
    """

    name = "vesta"
    summary = "TeSLA with a share of each volume's own statistics and one of several runs, both chosen"
    citation = f"{TeSLA.citation}; You et al., Test-time Batch Statistics Calibration, 2021"
    protocols = ("N-O", "N-M")
    Params = VeSTAParams

    def setup(self) -> None:
        """Start with the share of the parameters."""
        self.share = float(self.params.statistics_share)
        super().setup()

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares to choose from; none without batch norm, for tiles, and under running statistics."""
        masks = self.student.task == "segmentation" and self.params.predict_statistics == "volume"
        return tuple(self.params.statistics_shares) if masks and self.source_statistics else ()

    def use_share(self, share: float) -> None:
        """Normalise by this share of the images' own statistics from now on."""
        if share != self.share:
            self.share = share
            self.make_passes()

    @property
    def _mixture(self) -> tuple[float, Statistics | None]:
        mixed = self.share < 1.0 and bool(self.source_statistics)
        return (self.share, self.source_statistics) if mixed else (1.0, None)

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Provide the network as it should be saved; for no single case, with the source's statistics."""
        if images is not None or not self.shares:
            with super().deployed(images) as network:
                yield network
            return
        with kept_running_statistics(self.predictor):
            blend_running_statistics(self.predictor, self.source_statistics, 0.0)
            yield self.predictor

    def deployed_params(self, images: Tensor | None = None) -> dict[str, Any]:
        """Return the parameters of ``source`` that repeat the masks, with the shares to choose from."""
        found = super().deployed_params(images)
        return found | {"statistics_shares": self.shares} if images is None and self.shares else found

    def learning_passes(self, slices: int) -> float:
        """Return the passes of the updates of every run."""
        return super().learning_passes(slices) * self.restarts

    def predicting_passes(self, slices: int) -> float:
        """Return the forward passes of a prediction, the choices of the share and of the run included."""
        choices = len(self.shares) + (self.restarts if self.restarts > 1 else 0)
        return super().predicting_passes(slices) + choices * (2.0 + sum(zoom**2 for zoom in ZOOMS)) * slices

    def state_dict(self) -> dict[str, Any]:
        """Return TeSLA's state and the share."""
        return super().state_dict() | {"share": self.share}

    def load_state_dict(self, state: Any) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.use_share(state["share"])
