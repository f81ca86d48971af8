"""Adapted weights of a run, and the chain that leads from each of them back to the source."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tesla_med.config.models import PipelineConfig
from tesla_med.io.files import atomic_path, sha256
from tesla_med.models.checkpoint import ModelCard, make_card, save_checkpoint
from tesla_med.models.loading import write_back
from tesla_med.runs.folder import RunFolder, their_form


@dataclass(frozen=True)
class Chain:
    """Adapted weights of a run, each with the hash of the weights before them.

    Attributes:
        folder: the run's.
        pipeline: of the run.
        source: card of the source weights, if they have one.
        source_sha256: their hash.
        about: what the card says of the run: site, method, protocol, seed.
        links: whether the cards name the cases that the weights have seen, and their parent.
        origin: somebody else's model that the weights were read from, in whose form they are written too; or
            None.
    """

    folder: RunFolder
    pipeline: PipelineConfig
    source: ModelCard | None
    source_sha256: str
    about: Mapping[str, Any]
    links: bool
    origin: Path | None = None

    def save(
        self,
        path: Path,
        network: nn.Module,
        name: str,
        seen: Sequence[str],
        *,
        updates: int,
        predict: Mapping[str, Any],
        share: float = 1.0,
    ) -> None:
        """Write weights and their card.

        Args:
            path: file of the weights.
            network: as it is to be saved.
            name: unit that they are named after.
            seen: units that they were adapted to, in order.
            updates: number of updates in all.
            predict: parameters of ``source`` with which they repeat the results.
            share: how far they went from the source to the adapted weights.

        Raises:
            OutputError: a file cannot be written.
        """
        extra: dict[str, Any] = {**self.about, "updates": updates, "predict": dict(predict)}
        extra["source_sha256"] = self.source_sha256
        if self.links:
            extra |= {"case": name, "cases_seen": list(seen), "share": share}
            extra["parent_sha256"] = self._parent(seen[:-1])
        sites = self.source.training_sites if self.source is not None else ()
        acquisition = self.source.acquisition if self.source is not None else None
        save_checkpoint(path, network, make_card(self.pipeline, sites, extra, acquisition))
        if self.origin is not None and path != self.folder.after(name):
            write_back(self.origin, their_form(path), network.state_dict(), extra)

    def _parent(self, earlier: Sequence[str]) -> str:
        """Return the hash of the weights after the last of the earlier units, or of the source."""
        files = [self.folder.after(name) for name in earlier]
        last = next((path for path in reversed(files) if path.is_file()), None)
        return self.source_sha256 if last is None else sha256(last)


def go_back(folder: RunFolder, names: Sequence[str], kept: int) -> Path | None:
    """Make the weights after the last unit kept the current ones, and drop the later links.

    Args:
        folder: of the run.
        names: units in order.
        kept: how many of them stay as they are.

    Returns:
        The weights that are current now; None where they are the source's.
    """
    files = [folder.after(name) for name in names]
    last = next((path for path in reversed(files[:kept]) if path.is_file()), None)
    current = folder.checkpoint("adapted")
    folder.remove_copy(current)
    if last is not None:
        for suffix in (".safetensors", ".json"):
            source, target = last.with_suffix(suffix), current.with_suffix(suffix)
            with atomic_path(target) as temporary:
                shutil.copyfile(source, temporary)
    for path in files[kept:]:
        folder.remove_weights(path)
    return current if last is not None else None
