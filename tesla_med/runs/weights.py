"""Adapted weights of a run, and the chain that leads from each of them back to the source."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tesla_med.config.models import PipelineConfig
from tesla_med.io.files import atomic_path, sha256
from tesla_med.models.checkpoint import ModelCard, make_card, on_host, save_checkpoint
from tesla_med.models.loading import foreign_form, write_back
from tesla_med.runs.folder import RunFolder, their_form
from tesla_med.types import Unit, Verdict

if TYPE_CHECKING:
    from tesla_med.engine.predictor import Predictor
    from tesla_med.plan import Plan


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
        joins: whether batches are cut across units.
    """

    folder: RunFolder
    pipeline: PipelineConfig
    source: ModelCard | None
    source_sha256: str
    about: Mapping[str, Any]
    links: bool
    origin: Path | None = None
    joins: bool = True

    def copied(
        self,
        predict: Predictor,
        path: Path,
        name: str,
        done: Iterable[str],
        unit: Unit | None = None,
        verdict: Verdict | None = None,
    ) -> Callable[[], None]:
        """Copy the network that made the results, of one unit or as it is now; return what writes it.

        Args:
            predict: what made them.
            path: file of the weights.
            name: unit that they are named after.
            done: units that are done, when the weights are written.
            unit: the one unit that they are for.
            verdict: on it.
        """
        images, method = None if unit is None else unit.images, predict.method
        plain = verdict is not None and verdict.used == "partial"  # the guard asks its network once, as it is
        needed = {} if plain else method.deployed_params(images)
        if needed and not self.joins:  # a batch's own statistics: batches must be as large
            needed["batch_slices"] = method.params.batch_slices
        share, updates = 1.0 if verdict is None else verdict.share, method.steps
        with predict.deployed(images, verdict) as network:
            state = on_host(network.state_dict())

        def write() -> None:
            seen = list(done) if images is None else [name]
            self.save(path, state, name, seen, updates=updates, predict=needed, share=share)

        return write

    def save(
        self,
        path: Path,
        state: Mapping[str, Tensor],
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
            state: of the network, as it is to be saved, on the CPU.
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
        save_checkpoint(path, state, make_card(self.pipeline, sites, extra, acquisition))
        if self.origin is not None and path != self.folder.after(name):
            write_back(self.origin, their_form(path), state, extra)

    def _parent(self, earlier: Sequence[str]) -> str:
        """Return the hash of the weights after the last of the earlier units, or of the source."""
        files = [self.folder.after(name) for name in earlier]
        last = next((path for path in reversed(files) if path.is_file()), None)
        return self.source_sha256 if last is None else sha256(last)


def chain_of(plan: Plan, folder: RunFolder, unit: Unit | None = None) -> Chain:
    """Return where adapted weights of a run go, those of one unit or of all."""
    about: dict[str, Any] = {
        "adapted_to": plan.site.id,
        "method": plan.method,
        "protocol": plan.protocol,
        "seed": plan.seed,
    }
    task = plan.task
    if task.corrections:
        about["corrections"] = list(task.corrections)
    pipeline = plan.pipeline if unit is None else task.as_scaled(unit)
    origin = plan.weights if foreign_form(plan.weights) and pipeline.own_form else None
    known = plan.card, plan.weights_sha256, about
    return Chain(folder, pipeline, *known, task.links, origin, task.joins)


def no_weights() -> None:
    """Write nothing, where there are no weights to be kept."""


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
