"""With reset case a mask is the same, byte for byte, whichever case came before: all state of a method is
reset.
"""

import json

import pytest
import small_site as small
from lines import run

CASE = 43
N = ("N-O", "N-M")
METHODS = {
    "adacontrast": N,
    "adacontrast+teaa": N,
    "bn": N,
    "cotta": N,
    "opttta": N,
    "pl": N,
    "shot": N,
    "shot+teaa": N,
    "tent": N,
    "tent+teaa": N,
    "tesla": N,
    "tesla_s": ("Y-O", "Y-M"),
    "ttac": ("Y-O", "Y-M"),
    "ttt_pp": ("Y-O", "Y-M"),
    "vesta": N,
}


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


PAIRS = [(name, protocol) for name, protocols in METHODS.items() for protocol in protocols]
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


def test_every_method_that_adapts_is_among_these(capsys):
    assert run(["list", "methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["methods"]
    found = {item["method"]: tuple(item["protocols"].split(", ")) for item in listed}
    found.pop("source")
    assert found == METHODS
