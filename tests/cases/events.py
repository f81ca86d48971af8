"""What TensorBoard files hold, as it was written: nothing is purged or sampled."""

from __future__ import annotations


def values(out):
    """Yield (tag, step, value) of every event of a run."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted((out / "tensorboard").glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                yield value.tag, event.step, value


def points(out):
    """Return (tag, step) of every point of a run."""
    return [(tag, step) for tag, step, _ in values(out)]
