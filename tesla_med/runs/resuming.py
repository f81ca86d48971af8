"""The ledger of a run: which units are done, what going on from here needs, what an earlier attempt left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tesla_med.runs.folder import RunFolder
from tesla_med.runs.state import Saved, copied_to_host
from tesla_med.types import Earlier, Elsewhere, Progress, Ref

Intact = Callable[[Ref, Sequence[Any], str], bool]
"""Whether the records of a unit, with the digest of its input, still describe what is on disk."""


class Ledger:
    """What a run has done so far, in memory and on disk.

    Args:
        folder: of the run.
        refs: its units in order.
        kind: class of the records.
        independent: units do not depend on each other, so there is no state to keep.
        keep_every: seconds between two savings of the state; 0 saves it after every unit.

    Attributes:
        records: of each unit that is done, by its name, in the order in which they were done.
        passes: passes over the site that are done.
        whole: everything was done before, or elsewhere: nothing is adapted, nothing saved.
        alone: no other process adapts to the same site, from which a state would be of no use.
        agreed: says whether this process writes the site's weights, given whether its own units used them.
    """

    def __init__(
        self, folder: RunFolder, refs: Sequence[Ref], kind: Any, *, independent: bool, keep_every: float
    ) -> None:
        self.folder, self.refs, self.kind = folder, refs, kind
        self.independent, self.keep_every = independent, keep_every
        self.records: dict[str, list[Any]] = {}
        self.passes = 0
        self.whole, self.alone = False, True
        self.agreed: Callable[[bool], bool] = bool
        self._steps = 0.0
        self._saved_at = time.monotonic()

    @property
    def todo(self) -> list[Ref]:
        """The units that are not done."""
        return [ref for ref in self.refs if ref.name not in self.records]

    @property
    def done_before(self) -> list[tuple[Ref, list[Any]]]:
        """The units that are done, with their records, in the order of the run."""
        return [(ref, self.records[ref.name]) for ref in self.refs if ref.name in self.records]

    def taken(
        self,
        elsewhere: Elsewhere | None,
        on_step: Callable[[int, Mapping[str, float]], None],
        progress: Progress = lambda *_: None,
    ) -> Iterator[tuple[Ref, list[Any]]]:
        """Yield the units that are done with their records, then those that other processes do now.

        Args:
            elsewhere: has units done; None: there are no other processes.
            on_step: called with the updates of such a unit, numbered over the whole run.
            progress: called as such units are done.
        """
        begun = not self.independent and (self.passes > 0 or bool(self.records))
        elsewhere = None if begun else elsewhere  # which would begin anew, where this run goes on
        yield from self.done_before
        told = 0
        for ref, steps, kept in () if elsewhere is None else self._found(elsewhere(self.todo, progress)):
            for _, scalars in steps:
                on_step(told, scalars)
                told += 1
            self.records[ref.name] = kept
            yield ref, kept
        self.whole |= elsewhere is not None and not self.independent and not self.todo

    def _found(self, done: Iterable[tuple[Ref, list[Any]]]) -> Iterator[tuple[Ref, list[Any], list[Any]]]:
        """Yield units that were done with their steps and records; of one model's units all or none."""
        found: Iterable[tuple[Ref, list[Any], Any]] = (
            (ref, steps, self.folder.kept(ref.name, self.kind)) for ref, steps in done
        )
        if not self.independent:
            found = list(found)
            if any(kept is None for *_, kept in found):
                return
        yield from ((ref, steps, kept[0]) for ref, steps, kept in found if kept is not None)

    @property
    def earlier(self) -> Earlier:
        """What of an earlier attempt stays."""
        items = frozenset(item.case for records in self.records.values() for item in records)
        return Earlier(items, None if self.independent else math.inf if self.whole else self._steps)

    @property
    def weights_due(self) -> bool:
        """Whether the weights of the whole site are to be written by this process, at the end."""
        carried_on = not (self.independent or self.whole)
        return carried_on and self.agreed(bool(self.used - {"source", "corrected"}))

    @property
    def seen(self) -> Iterable[str]:
        """The units that the weights were adapted to, by the time at which they are written."""
        return self.records if self.alone else [ref.name for ref in self.refs]

    @property
    def items_done(self) -> int:
        """How many items are done."""
        return sum(len(records) for records in self.records.values())

    @property
    def used(self) -> set[str]:
        """Which models made the results so far."""
        return {item.used for records in self.records.values() for item in records if item.used}

    def results(self, names: Sequence[str]) -> list[Any]:
        """Return the records of the items with these names, in this order."""
        by_name = {item.case: item for records in self.records.values() for item in records}
        return [by_name[name] for name in names]

    def count(self, holds: Callable[[Any], bool]) -> int:
        """Return for how many units something holds of every item."""
        return sum(all(map(holds, records)) for records in self.records.values())

    def take_over(self, intact: Intact) -> Saved | None:
        """Take over what an earlier attempt did; return the state that it was in, if it is needed."""
        arguments = self.folder, self.refs, self.kind, intact
        found = _independent_units(*arguments) if self.independent else _stream_of_units(*arguments)
        if found is None:
            self.folder.states.clear()
            return None
        self.records, self.whole = found.records, found.whole
        if found.saved is not None:
            self.passes = found.saved.cursor["passes"]
            self._steps = float(found.saved.cursor["driver"]["told"])
        return found.saved

    def done(self, name: str, records: list[Any], digest: str) -> None:
        """Record a finished unit."""
        self.folder.keep(name, records, digest)
        self.records[name] = records

    def due(
        self, state: Callable[[], Mapping[str, Any]], *, changed: bool = True, now: bool = False
    ) -> dict[str, Any] | None:
        """Return what is to be kept of the method's state, on the CPU; None where that was done a moment ago.

        Args:
            state: gives the method's state.
            changed: the method is not what it was last time; else its generators alone are kept.
            now: whenever the last time was.
        """
        if (
            self.independent
            or not self.alone
            or not (now or time.monotonic() - self._saved_at >= self.keep_every)
        ):
            return None
        self._saved_at = time.monotonic()
        content = dict(state())
        kept: dict[str, Any] = copied_to_host(content if changed else {"generators": content["generators"]})
        return kept

    def keep_state(self, state: dict[str, Any] | None, driver: Mapping[str, Any]) -> None:
        """Keep what going on from here needs.

        Args:
            state: as :meth:`due` returned it; with None nothing is kept.
            driver: state of the driver at that time.
        """
        if state is None:
            return
        cursor = {"done": list(self.records), "passes": self.passes, "driver": dict(driver)}
        cursor["generators"] = state["generators"]
        self.folder.states.save(cursor, state if len(state) > 1 else None)


@dataclass(frozen=True)
class TakenOver:
    """What need not be done again.

    Attributes:
        records: of each unit that is done, by its name.
        saved: state after the last of them, where state carries on.
        whole: everything was done before.
    """

    records: dict[str, list[Any]]
    saved: Saved | None = None
    whole: bool = False


def _independent_units(folder: RunFolder, refs: Sequence[Ref], kind: Any, intact: Intact) -> TakenOver:
    """Return every finished unit, where units do not depend on each other.

    A unit that failed, or could not be scored though it has a reference, is done again.
    """
    found: dict[str, list[Any]] = {}
    for ref in refs:
        kept = folder.kept(ref.name, kind)
        if kept is None or any(item.status in ("failed", "unscored") for item in kept[0]):
            continue
        if intact(ref, *kept):
            found[ref.name] = kept[0]
    return TakenOver(found)


def _stream_of_units(folder: RunFolder, refs: Sequence[Ref], kind: Any, intact: Intact) -> TakenOver | None:
    """Return the units before the state that was saved, where state carries on from unit to unit.

    None where that state, or anything that it rests on, is no longer there: then all is done again. A unit
    that failed may stay so, in a stream that goes on.
    """
    saved = folder.states.load()
    whole = saved is None and folder.complete()
    if saved is None and not whole:
        return None
    names = [ref.name for ref in refs] if saved is None else list(saved.cursor["done"])
    done = refs[: len(names)]
    if [ref.name for ref in done] != names:
        return None
    found: dict[str, list[Any]] = {}
    for ref in done:
        kept = folder.kept(ref.name, kind)
        if kept is None:
            return None
        lost = all(item.status == "failed" for item in kept[0])
        if whole if lost else not intact(ref, *kept):
            return None
        found[ref.name] = kept[0]
    return TakenOver(found, saved, whole)
