"""The mask is that of the adapted model after its last update, stored beside the source model's; reports
name both.
"""

import numpy as np
import pytest
import small_site as small

import tesla_med

CASE = 53
ONE_LARGE_STEP = (
    *("protocols.N-O.tesla.updates_per_case=1", "methods.tesla.learning_rate=0.1"),
    *("methods.tesla.teacher_momentum=0.0", "reports=[table,html]"),
)


@pytest.fixture
def adapted(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    return small.run(
        tmp_path / "nii", small_weights, tmp_path / "out", reports=(), overrides=ONE_LARGE_STEP, reset="case"
    )


def test_one_large_step_shows_in_the_mask_and_not_in_the_source_mask(adapted, small_weights, tmp_path):
    ours, source = (small.labels(adapted.out, "Case00", part) for part in ("masks", "source_masks"))
    assert (ours != source).any()
    frozen = {
        "source": small_weights,
        "adapted": adapted.out / "checkpoints/Case00.safetensors",
    }
    for name, weights in frozen.items():
        again = tesla_med.predict(
            tmp_path / "nii",
            weights,
            site=small.site(),
            out=tmp_path / name,
            device="cpu",
            overrides=(*small.SMALL, *small.BARE),
        )
        assert np.array_equal(small.labels(again.out, "Case00"), source if name == "source" else ours)


def test_reports_name_both(adapted):
    (case,) = small.record(adapted.out)["cases"]
    assert (case["used"], case["share"]) == ("adapted", 1.0)
    header, row = (line.split(",") for line in (adapted.out / "report/metrics.csv").read_text().splitlines())
    figures = dict(zip(header, row, strict=True))
    assert figures["used"] == "adapted"
    assert figures["dice"] != figures["dice_source"] != ""
    page = (adapted.out / "report/report.html").read_text(encoding="utf-8")
    assert f"{float(figures['dice_source']):.3f} → {float(figures['dice']):.3f}" in page
