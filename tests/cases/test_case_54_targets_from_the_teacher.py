"""The student learns from soft labels of the teacher, averaged over other views, never from its own
output.
"""

import small_site as small
from events import values
from safetensors.numpy import load_file

CASE = 54
REPORTS = ("reports=[table,tensorboard]",)
OF_STUDENT = ("loss/flipped_cross_entropy", "loss/distillation")


def first_losses(weights, folder, out, *overrides):
    """Return the losses of the first update, when student and teacher are still the same network."""
    overrides = ("protocols.N-O.tesla.updates_per_case=1", *overrides)
    result = small.run(folder / "nii", weights, folder / out, overrides=overrides, reports=REPORTS)
    return {tag: value.simple_value for tag, _, value in values(result.out) if tag in OF_STUDENT}


def test_the_first_step_already_has_something_to_teach(small_weights, tmp_path):
    """The student's own soft output of the same view as a target would give a distillation loss of 0."""
    small.make_volumes(tmp_path / "nii", 1)
    found = first_losses(small_weights, tmp_path, "out", "methods.tesla.weak_views=4")
    assert set(found) == set(OF_STUDENT)
    assert all(value > 0.001 for value in found.values())


def test_targets_are_averaged_over_other_views(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    one, five = (
        first_losses(small_weights, tmp_path, f"{views}", f"methods.tesla.weak_views={views}")
        for views in (1, 5)
    )
    assert one["loss/flipped_cross_entropy"] != five["loss/flipped_cross_entropy"]


def test_the_teacher_is_followed_and_stays_what_it_is_where_its_momentum_is_one(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    moved = []
    for momentum in ("1.0", "0.0"):
        overrides = (f"methods.tesla.teacher_momentum={momentum}", "methods.tesla.learning_rate=0.1")
        result = small.run(tmp_path / "nii", small_weights, tmp_path / momentum, overrides=overrides)
        after = load_file(result.out / "checkpoints/Case00.safetensors")
        before = load_file(small_weights)
        moved.append([key for key in before if key.endswith("weight") and (before[key] != after[key]).any()])
    assert moved[0] == []
    assert len(moved[1]) > 5
