"""With reset case a mask is the same, byte for byte, whichever case came before: all state of a method is
reset.
"""

import pytest
import small_site as small
import torch
from test_method_contract import drive, few_steps

from tesla_med.tta.base import METHODS

CASE = 43
ADAPTING = [name for name in METHODS.names() if METHODS.get(name).adapts]


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """Patient A alone, and after B, whose contrast is another."""
    folder = tmp_path_factory.mktemp("patients")
    (image,) = small.make_volumes(folder / "alone", 1, names=["CaseA"])
    small.copy_image(image, folder / "both/CaseA.nii.gz")
    small.copy_image(image, folder / "both/Case0B.nii.gz", lambda array: array.max() - array)
    return folder


def mask_of_a(patients, weights, out, part, **options):
    result = small.run(patients / part, weights, out, save_probs=True, **options)
    assert [item.case for item in result.results][-1] == "CaseA"
    files = small.files_below(result.out)
    return files["masks/CaseA_mask.nii.gz"], files["probs/CaseA_prob.nii.gz"]


PAIRS = [(name, protocol) for name in ADAPTING for protocol in METHODS.get(name).protocols]
RUNS = [
    pytest.param(*pair, marks=() if pair[0] == "tesla" else pytest.mark.slow, id="-".join(pair))
    for pair in PAIRS
]


@pytest.mark.parametrize(("method", "protocol"), RUNS)
def test_a_alone_and_after_b(patients, small_weights, tmp_path, method, protocol):
    options = {"method": method, "protocol": protocol, "reset": "case"}
    alone = mask_of_a(patients, small_weights, tmp_path / "alone", "alone", **options)
    assert mask_of_a(patients, small_weights, tmp_path / "both", "both", **options) == alone


def test_without_a_reset_b_is_seen_in_a(patients, small_weights, tmp_path):
    alone = mask_of_a(patients, small_weights, tmp_path / "alone", "alone", reset="site")
    assert mask_of_a(patients, small_weights, tmp_path / "both", "both", reset="site")[1] != alone[1]


@pytest.mark.parametrize(("method", "protocol"), PAIRS)
def test_a_method_forgets_b(make_tta, make_images, method, protocol):
    a, b = make_images(3), 1 - make_images(3, seed=1)
    fresh, ours = (make_tta(method, **few_steps(method, protocol)) for _ in range(2))
    drive(ours, protocol, b)
    ours.reset()
    assert torch.equal(drive(ours, protocol, a), drive(fresh, protocol, a))


@pytest.mark.parametrize("method", ADAPTING)
def test_a_reset_restores_weights_buffers_optimisers_policy_memories_and_generators(
    make_tta, make_images, same_state, method
):
    few = {} if METHODS.get(method).one_network else {"first_steps": 1, "later_steps": 1, "views": 2}
    ours = make_tta(method, batch_slices=2, **few)
    start = ours.state_dict()
    images = make_images(4)
    ours.start_epoch(0, ours.batches(images))
    for batch in ours.batches(images):
        ours.adapt(batch)
    assert not same_state(ours.state_dict(), start)
    ours.reset()
    assert same_state(ours.state_dict(), start)
