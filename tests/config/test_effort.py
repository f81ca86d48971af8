"""Effort: which parameters move, how far, and what stays."""

from __future__ import annotations

import pytest

from tesla_med.config.effort import with_effort
from tesla_med.config.files import load_pipeline
from tesla_med.errors import ConfigError


def params(pipeline, protocol="N-O", method="tesla"):
    return pipeline.method_params(method, protocol)


def test_normal_is_the_recipe():
    pipeline = load_pipeline("prostate")
    assert with_effort(pipeline, "tesla", None) is pipeline
    assert with_effort(pipeline, "tesla", "normal") is pipeline


def test_low_and_high_by_hand():
    pipeline = load_pipeline("prostate")
    usual = params(pipeline)
    assert (usual["updates_per_case"], usual["weak_views"], usual["teacher_momentum"]) == (24, 5, 0.97)
    low, high = (with_effort(pipeline, "tesla", effort) for effort in ("low", "high"))
    assert params(low) == usual | {"updates_per_case": 8, "weak_views": 2, "teacher_momentum": 0.912673}
    assert params(high) == usual | {"updates_per_case": 48, "teacher_momentum": 0.984886}
    assert params(low)["teacher_momentum"] ** 8 == pytest.approx(0.97**24, rel=1e-4), "it goes as far in all"
    assert params(high)["teacher_momentum"] ** 48 == pytest.approx(0.97**24, rel=1e-4)
    assert params(low, "N-M")["epochs"] == 2
    assert params(high, "N-M")["epochs"] == 10
    assert (low.precision, high.precision) == ("auto", "float32")
    assert params(low, method="cotta") == params(pipeline, method="cotta"), "other methods stay"


def test_what_a_user_set_stays():
    texts = ("protocols.N-O.tesla.updates_per_case=20", "precision=float32")
    low = with_effort(load_pipeline("prostate", texts), "tesla", "low", texts)
    assert params(low)["updates_per_case"] == 20
    assert params(low)["teacher_momentum"] == 0.97, "as many updates, as fast a teacher"
    assert params(low)["weak_views"] == 2
    assert low.precision == "float32"


@pytest.mark.parametrize(
    "text",
    ["methods.tesla={updates_per_case: 9}", "protocols={N-O: {tesla: {updates_per_case: 9}}}"],
)
def test_what_a_user_set_as_a_section_stays_too(text):
    low = with_effort(load_pipeline("prostate", (text,)), "tesla", "low", (text,))
    assert params(low)["updates_per_case"] == 9


@pytest.mark.parametrize("method", ["source", "bn"])
def test_a_method_without_such_parameters_is_refused(method):
    with pytest.raises(ConfigError, match=rf"--effort low: method '{method}' .* leave --effort out"):
        with_effort(load_pipeline("prostate"), method, "low")
