"""What was predicted of one unit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tesla_med.types import Verdict


@dataclass(frozen=True)
class Outcome:
    """Probabilities (N, L, H, W) of the source model and those taken, and the verdict between them.

    ``temperature`` is to be applied to finished probabilities, after the mask was made of them.
    """

    source: Tensor
    probs: Tensor
    verdict: Verdict
    temperature: float = 1.0

    def on_host(self) -> Outcome:
        """Return the same with probabilities on the CPU."""
        source = self.source.cpu()
        return replace(self, source=source, probs=source if self.probs is self.source else self.probs.cpu())
