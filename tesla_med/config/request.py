"""What a user asks for: one run, before anything of it is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tesla_med.config.effort import Effort
from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.errors import ConfigError

LARGEST_SEED = 2**63 - 1


def check_seed(seed: object) -> None:
    """Check that every random generator takes a seed.

    Raises:
        ConfigError: it is no whole number of 0 or above, or too large.
    """
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"seed: expected a whole number from 0 to {LARGEST_SEED}, got {seed!r}")


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for; every field as in :func:`tesla_med.adapt_site`.

    Without a site (``None``) every image found is a case, the whole field is used and nothing is scored.
    ``folder_name`` is the output folder below ``runs/<site>/`` where ``out`` is not given; without ``lock``
    nothing keeps a second run out of it. ``effort`` is that of :func:`tesla_med.config.effort.with_effort`.

    Raises:
        ConfigError: the seed is no whole number of 0 or above.
    """

    site: str | SiteConfig | None
    volumes: str | Path
    weights: str | Path | None = None
    statistics: str | Path | None = None
    pipeline: str | PipelineConfig | None = None
    method: str | None = None
    protocol: Protocol | None = None
    out: str | Path | None = None
    seed: int = 0
    device: str = "auto"
    reset: Reset | None = None
    guard: bool | None = None
    save_probs: bool = False
    save_uncertainty: bool = False
    overrides: Sequence[str] = ()
    trust_code: bool = False
    corrections: str | Path | None = None
    anonymise: bool = False
    key: str | Path | None = None
    folder_name: str | None = None
    lock: bool = True
    effort: Effort | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def texts(self) -> tuple[str, ...]:
        """The overrides, with what ``guard`` stands for."""
        own = () if self.guard is None else (f"guard.enabled={str(self.guard).lower()}",)
        return (*self.overrides, *own)

    @property
    def wanted(self) -> frozenset[str]:
        """What is to be written beyond the usual."""
        asked = {"probs": self.save_probs, "uncertainty": self.save_uncertainty}
        return frozenset(name for name, yes in asked.items() if yes)
