"""What an augmentation op is: a function of images and a magnitude, and the facts that a policy needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tesla_med.augment import intensity, warp

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps images (n, C, H, W), magnitudes (n,) and a draw or signs to images, or to thetas (n, 2, 3)."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One augmentation operation.

    Attributes:
        name: its registered name.
        kind: ``geometric`` if the function returns a theta, ``intensity`` if it returns images.
        unit: what the magnitude is mapped to, and its range, in words.
        identity: the magnitude at which nothing changes; None if there is none.
        signed: whether the policy draws a sign for each image, +1 or -1, that multiplies the displacement.
        gradient: ``exact`` in the magnitude, or ``straight-through``: d(output)/d(magnitude) = 1 for every
            pixel (Sec. 3.3 of the paper).
        noise: maps the shape of the images to the shape of the standard normal draw that the op needs; None
            if it needs none.
        function: what the op does.
        in_plane: whether neighbouring pixels count, so that a volume is changed slice by slice.
        start: the magnitude from which learning starts.
    """

    name: str
    kind: Literal["geometric", "intensity"]
    unit: str
    identity: float | None
    signed: bool
    gradient: Literal["exact", "straight-through"]
    noise: Callable[[Shape], Shape] | None
    function: Function
    start: float = 0.5
    in_plane: bool = False

    def theta(self, images: Tensor, magnitude: Tensor, sign: Tensor | None = None) -> Tensor:
        """Return the (n, 2, 3) theta of a geometric op, and the identity for an intensity op."""
        if self.kind == "intensity":
            return warp.identity(images.shape[0], images.device)
        return self.function(images, magnitude, sign)

    def intensities(self, images: Tensor, magnitude: Tensor, draw: Tensor | None = None) -> Tensor:
        """Return the images as an intensity op changes them, in [0, 1]; a geometric op changes none."""
        if self.kind == "geometric":
            return images
        if images.dim() == 5:
            return self._volumes(images, magnitude, draw)
        return intensity.unit_range(self.function(images, magnitude, draw))

    def _volumes(self, images: Tensor, magnitude: Tensor, draw: Tensor | None) -> Tensor:
        """Change volumes (n, C, D, H, W), all slices of one alike."""
        if self.in_plane:
            depth = images.shape[2]
            each = None if draw is None else draw.repeat_interleave(depth, dim=0)
            changed = self.function(warp.as_slices(images), magnitude.repeat_interleave(depth), each)
            return intensity.unit_range(warp.as_volumes(changed, [depth]))
        below = draw if draw is None or draw.dim() < images.dim() else draw.flatten(-3, -2)
        changed = self.function(images.flatten(2, 3), magnitude, below)  # slices below each other
        return intensity.unit_range(changed.view_as(images))

    def __call__(
        self, images: Tensor, magnitude: Tensor, draw: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the op alone.

        Args:
            images: (n, C, H, W) float32 in [0, 1].
            magnitude: (n,) in [0, 1].
            draw: for a signed op the signs (n,), +1 by default; for a random op standard normal noise of the
                shape ``noise(images.shape)``, by default zeros, which have no effect; otherwise ignored.

        Returns:
            Images in [0, 1], resampled if the op is geometric, and the (n, 2, 3) theta.
        """
        theta = self.theta(images, magnitude, draw)
        if self.kind == "geometric":
            return warp.to_view(images.clamp(0, 1), theta).clamp(0, 1), theta
        return self.intensities(intensity.unit_range(images), magnitude, draw), theta
