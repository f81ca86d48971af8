from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from by_hand import plain_ece

from tesla_med.errors import DataError
from tesla_med.scoring.areas import (
    BOUNDARY_WIDTH,
    boundary_band,
    calibration_region,
    count_case,
    count_region,
)
from tesla_med.scoring.calibration import (
    MODELS,
    CalibrationCounts,
    count_binary,
    count_flat,
    count_items,
    joined_bins,
    meaning_of,
)
from tesla_med.scoring.summary import bootstrap_intervals, merge, summarise


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=0))
    return (shifted / shifted.sum(axis=0)).astype(np.float32)


def make_case(seed, shape=(9, 8, 5), classes=3, sharpness=2.0):
    rng = np.random.default_rng(seed)
    reference = rng.integers(0, classes, shape)
    both = [softmax(sharpness * rng.normal(size=(classes, *shape))) for _ in range(2)]
    return both[0], both[1], reference, rng.random(shape) > 0.5


def loop_oracle(probs, reference, chosen, bins, target):
    """One voxel at a time: ECE, Brier and log-loss of one class index, or of "all"."""
    cells = [[0, 0.0, 0] for _ in range(bins)]
    brier = nll = voxels = 0
    for place in np.argwhere(chosen):
        vector = [float(value) for value in probs[(slice(None), *place)]]
        truth = int(reference[tuple(place)])
        if target == "all":
            confidence, hit = max(vector), vector.index(max(vector)) == truth
            brier += sum((p - (c == truth)) ** 2 for c, p in enumerate(vector))
            nll -= math.log(vector[truth])
        else:
            confidence, hit = vector[target], target == truth
            brier += (confidence - hit) ** 2
            nll -= math.log(confidence if hit else 1 - confidence)
        index = next(b for b in range(bins) if b == bins - 1 or confidence <= (b + 1) / bins)
        cells[index][0] += 1
        cells[index][1] += confidence
        cells[index][2] += hit
        voxels += 1
    ece = sum(n / voxels * abs(hits / n - total / n) for n, total, hits in cells if n)
    return ece, brier / voxels, nll / voxels, [cell[0] for cell in cells]


@pytest.mark.parametrize("bins", [2, 10, 15])
@pytest.mark.parametrize("seed", range(2))
def test_figures_match_a_plain_loop(seed, bins):
    source, adapted, reference, region = make_case(seed)
    values = (0, 2, 5)
    boundary = np.random.default_rng(seed + 50).random(region.shape) > 0.7
    summary = summarise(merge([count_case(source, adapted, reference, region, values, bins, boundary)]))
    for model, probs in (("source", source), ("adapted", adapted)):
        for area, chosen in (("region", region), ("boundary", boundary), ("all", np.ones_like(region))):
            for key, target in (("all", "all"), ("0", 0), ("2", 1), ("5", 2)):
                figures = summary[area][model][key]
                ece, brier, nll, counts = loop_oracle(probs, reference, chosen, bins, target)
                assert figures["ece"] == pytest.approx(ece, abs=1e-9)
                assert figures["brier"] == pytest.approx(brier, rel=1e-6)
                assert figures["nll"] == pytest.approx(nll, rel=1e-6)
                assert figures["bins"]["count"] == counts
                assert figures["voxels"] == np.count_nonzero(chosen)


def test_region_alone_is_counted_as_with_everything_else():
    _, adapted, reference, region = make_case(3)
    whole = count_case(adapted, adapted, reference, region, (0, 2, 5), 10)
    alone = count_region(adapted, reference, region, 10)
    assert alone.to_json() == whole["adapted"]["region"]["all"]
    with pytest.raises(DataError, match="differ in shape"):
        count_region(adapted, reference, region[:-1], 10)


def test_confidence_of_one_shares_the_last_bin():
    counts = count_binary(np.array([0.95, 1.0]), np.array([True, False]), bins=10)
    assert counts.ece == pytest.approx(0.475)
    assert counts.count.tolist() == [0] * 9 + [2]


def test_as_the_definition_says_with_ones_and_zeros_among_the_rest():
    generator = np.random.default_rng(0)
    probability = generator.choice([0.0, 0.1, 0.5, 0.95, 1.0, *generator.random(20)], 500)
    truth = generator.random(500) < probability**2
    assert count_binary(probability, truth, 15).ece == pytest.approx(plain_ece(probability, truth, 15))


def test_confidence_of_one_in_the_figures_of_a_case():
    foreground = np.array([0.95, 1.0], np.float32).reshape(1, 2, 1)
    probs = np.stack([1 - foreground, foreground])
    reference = np.array([1, 0]).reshape(1, 2, 1)
    counts = count_case(probs, probs, reference, np.ones((1, 2, 1), bool), (0, 1), 10)
    found = counts["adapted"]["region"]["1"]
    assert found["count"][-1] == 2
    assert abs(found["correct"][-1] - found["confidence"][-1]) / 2 == pytest.approx(0.475)


def test_a_value_of_five_is_an_error_and_nothing_is_guessed_from_the_range():
    probability, truth = np.array([0.2, 0.4]), np.array([False, False])
    assert count_binary(probability, truth, 10).ece == pytest.approx(0.3)
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        count_binary(np.append(probability, 5.0), np.append(truth, True), 10)


@pytest.mark.parametrize("value", [5.0, -0.5, np.nan])
def test_either_model_of_a_case_is_looked_at(value):
    probs = np.full((2, 2, 2, 1), 0.5, np.float32)
    broken = probs.copy()
    broken[1, 0, 0, 0] = value
    reference, region = np.zeros((2, 2, 1), int), np.ones((2, 2, 1), bool)
    for pair in ((probs, broken), (broken, probs)):
        with pytest.raises(DataError):
            count_case(*pair, reference, region, (0, 1))


@pytest.mark.parametrize("size", [1, 7, 30])
def test_batches_of_any_size_give_the_same(size):
    generator = np.random.default_rng(0)
    probability = generator.random(60)
    truth = generator.random(60) < probability
    whole = count_binary(probability, truth, 10)
    parts = [
        count_binary(probability[start : start + size], truth[start : start + size], 10)
        for start in range(0, 60, size)
    ]
    total = sum(parts[1:], start=parts[0])
    assert total.ece == pytest.approx(whole.ece)
    assert (total.brier, total.nll) == (pytest.approx(whole.brier), pytest.approx(whole.nll))


def test_counts_of_half_precision_do_not_overflow():
    counts = count_binary(np.full((512, 512), 0.75, np.float16), np.ones((512, 512), bool), 15)
    assert counts.voxels == 512 * 512
    assert counts.ece == pytest.approx(0.25)
    assert counts.summary()["brier"] == pytest.approx(0.0625)


def test_edges_of_bins():
    counts = count_binary(np.array([0.0, 0.5, 0.75, 1.0]), np.ones(4, bool), bins=4)
    assert counts.count.tolist() == [1, 1, 1, 1]
    assert counts.summary()["bins"]["edges"] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_merging_equals_counting_at_once_in_any_order():
    cases = [make_case(seed, shape=(6, 5, 4)) for seed in range(3)]
    parts = [count_case(*case, values=(0, 1, 2)) for case in cases]
    whole = count_case(
        *(np.concatenate([case[i] for case in cases], axis=-1) for i in range(4)), values=(0, 1, 2)
    )
    forward, backward = summarise(merge(parts)), summarise(merge(reversed(parts)))
    assert forward["scored_cases"] == 3
    for area in ("region", "all"):
        for model in ("source", "adapted"):
            for key in ("all", "0", "1", "2"):
                expected = summarise(merge([whole]))[area][model][key]
                for result in (forward, backward):
                    got = result[area][model][key]
                    assert got["bins"]["count"] == expected["bins"]["count"]
                    for figure in ("ece", "brier", "nll"):
                        assert got[figure] == pytest.approx(expected[figure], rel=1e-9)


def test_merge_leaves_its_inputs_alone_and_counts_survive_json():
    parts = [count_case(*make_case(seed), values=(0, 1, 2)) for seed in range(2)]
    before = json.dumps(parts)
    direct = merge(parts)
    assert json.dumps(parts) == before
    assert merge(json.loads(before)) == direct


def test_probability_zero_of_the_truth_is_finite_and_counted():
    probs = np.zeros((2, 2, 1, 1), np.float32)
    probs[0] = 1.0
    reference = np.array([[[1]], [[0]]])
    everywhere = np.ones(reference.shape, bool)
    figures = summarise(merge([count_case(probs, probs, reference, everywhere, (0, 1))]))["all"]["adapted"]
    assert figures["all"]["nll"] == pytest.approx(-math.log(1e-12) / 2)
    assert figures["all"]["clipped"] == 1
    assert figures["all"]["brier"] == pytest.approx(1.0)  # (1 + 1 + 0 + 0) / 2
    assert figures["1"]["brier"] == pytest.approx(0.5)


@pytest.mark.parametrize("value", [1.01, -0.01, 5.0, np.nan, np.inf])
def test_values_that_are_no_probabilities_are_refused(value):
    source, adapted, reference, region = make_case(0)
    adapted[1, 0, 0, 0] = value
    for chosen in (region, ~region):
        with pytest.raises(DataError, match=r"expected probabilities in \[0, 1\]"):
            count_case(source, adapted, reference, chosen, (0, 1, 2))


def test_a_small_probability_is_not_clipped():
    assert count_binary(np.array([1e-9, 1.0]), np.array([True, True]), 10).clipped == 0


def test_rounding_noise_about_one_is_accepted():
    counts = count_binary(np.array([1.0 + 5e-5, -5e-5]), np.array([True, False]), bins=10)
    assert counts.ece == 0.0
    assert counts.count.tolist() == [1] + [0] * 8 + [1]


def test_background_does_not_hide_the_structure():
    # 100,000 voxels, 0.5 % foreground, 0.5 % false positives at p = 0.6
    foreground = np.full(100_000, 0.001, np.float32)
    reference = np.zeros(100_000, np.int64)
    reference[:500] = 1
    foreground[:1000] = 0.6
    region = np.zeros(100_000, bool)
    region[:1000] = True
    shape = (100, 100, 10)
    probs = np.stack([1 - foreground, foreground]).reshape(2, *shape)
    counts = count_case(probs, probs, reference.reshape(shape), region.reshape(shape), (0, 1), 10)
    summary = summarise(merge([counts]))
    assert summary["region"]["adapted"]["1"]["ece"] == pytest.approx(0.1, abs=1e-6)
    assert summary["all"]["adapted"]["1"]["ece"] == pytest.approx(0.002, abs=1e-4)
    assert summary["region"]["adapted"]["1"]["voxels"] == 1000


@pytest.mark.parametrize(("confidence", "everywhere", "region"), [(0.6, 0.002, 0.1), (0.99, 0.006, 0.49)])
def test_the_region_shows_what_all_voxels_hide(confidence, everywhere, region):
    """100,000 voxels, 0.5 % foreground and 0.5 % false positives of one confidence, background near 0."""
    reference = np.zeros((100, 100, 10), np.uint8)
    reference[10:20, 10:20, :5] = 1
    mask = reference.copy()
    mask[50:60, 50:60, :5] = 1
    foreground = np.where(mask, confidence, 0.001).astype(np.float32)
    probs = np.stack([1 - foreground, foreground])
    inside = calibration_region(reference, mask, dilation=0)
    found = summarise(merge([count_case(probs, probs, reference, inside, (0, 1), 10)]))
    assert found["all"]["adapted"]["1"]["ece"] == pytest.approx(everywhere, abs=2e-4)
    for key in ("all", "1"):
        assert found["all"]["adapted"][key]["ece"] < everywhere + 2e-4
        assert found["all"]["adapted"][key]["voxels"] == 100_000
        assert found["region"]["adapted"][key]["ece"] == pytest.approx(region, abs=1e-5)
        assert found["region"]["adapted"][key]["voxels"] == 1000


def test_perfect_and_empty_region():
    reference = np.array([0, 1, 1, 0]).reshape(4, 1, 1)
    probs = np.stack([reference == 0, reference == 1]).astype(np.float32)
    counts = count_case(probs, probs, reference, np.zeros(reference.shape, bool), (0, 1))
    summary = summarise(merge([counts]))
    assert summary["all"]["adapted"]["all"]["ece"] == 0.0
    assert summary["region"]["adapted"]["all"]["ece"] is None
    assert summary["region"]["adapted"]["all"]["voxels"] == 0
    json.dumps(summary, allow_nan=False)


def test_nothing_scored_gives_no_numbers():
    assert merge([]) is None
    summary = summarise(None)
    assert summary["scored_cases"] == 0
    assert set(summary) == {"scored_cases", "note"}


def test_inputs_that_do_not_fit_are_named():
    source, adapted, reference, region = make_case(0)
    with pytest.raises(DataError, match="source probabilities"):
        count_case(source[:2], adapted, reference, region, (0, 1, 2))
    with pytest.raises(DataError, match="region"):
        count_case(source, adapted, reference, region[:3], (0, 1, 2))
    with pytest.raises(DataError, match="boundary"):
        count_case(source, adapted, reference, region, (0, 1, 2), boundary=region[:3])
    with pytest.raises(DataError, match="class indices 0 to 2, got 0 to 5"):
        count_case(source, adapted, np.where(reference == 2, 5, reference), region, (0, 1, 2))
    one = count_case(source, adapted, reference, region, (0, 1, 2), 10)
    other = count_case(source, adapted, reference, region, (0, 1, 2), 15)
    with pytest.raises(DataError, match=r"10 bins .* 15 bins"):
        merge([one, other])


def test_large_counts_do_not_lose_precision():
    probability = np.full(3_000_000, np.float32(0.1))
    counts = count_binary(probability, np.zeros(probability.shape, bool), bins=15)
    assert counts.ece == pytest.approx(float(np.float32(0.1)), rel=1e-10)


def test_counts_add():
    one = count_binary(np.array([0.2, 0.9]), np.array([False, True]), 5)
    assert (one + one).voxels == 4
    wrong = count_binary(np.array([0.0, 0.0, 1.0]), np.array([True, True, True]), 5)
    assert [(wrong + other).clipped for other in (one, wrong)] == [2, 4]
    assert (one + one).ece == pytest.approx(one.ece)
    copy = CalibrationCounts.from_json(json.loads(json.dumps(one.to_json())))
    assert copy.summary() == one.summary()


def test_bins_of_several_sites_are_those_of_all_their_voxels():
    generator = np.random.default_rng(0)
    parts = [count_binary(values, generator.random(40) < 0.6, 4) for values in generator.random((3, 40)) / 2]
    parts.append(count_binary(np.array([0.9, 1.0]), np.array([True, False]), 4))
    joined = joined_bins([part.summary()["bins"] for part in parts])
    whole = sum(parts[1:], start=parts[0]).summary()["bins"]
    assert joined_bins([whole]) == whole
    assert joined["edges"] == whole["edges"]
    assert joined["count"] == whole["count"]
    for name in ("confidence", "accuracy"):
        assert whole[name][2] is joined[name][2] is None  # in which no part has a voxel
        assert joined[name] == [None if value is None else pytest.approx(value) for value in whole[name]]


def test_axes_say_what_is_counted():
    assert meaning_of() == (
        "highest probability of a voxel",
        "share of voxels whose most probable class is right",
    )
    assert meaning_of("gland", "tile") == ("predicted probability of gland", "share of tiles that are gland")


def test_items_are_counted_for_both_models_and_summarised_as_a_region():
    probs = np.random.default_rng(0).dirichlet((1, 1, 1), (2, 50)).astype(np.float32).transpose(0, 2, 1)
    reference = np.arange(50) % 3
    counts = count_items(*probs, reference, (0, 1, 4), bins=10)
    summary = summarise(merge([counts]))["region"]
    for model, array in zip(MODELS, probs, strict=True):
        for key, counted in count_flat(array, reference, (0, 1, 4), 10).items():
            assert summary[model][key] == summary[model][key] | counted.summary()
    assert summary["source"]["4"]["ece"] != summary["adapted"]["4"]["ece"]


@pytest.mark.parametrize("slice_axis", [0, 1, 2, -1])
def test_region_grows_within_slices_only(slice_axis):
    masks = [np.zeros((15, 15, 15), np.uint8) for _ in range(3)]
    for value, mask, centre in zip((1, 2, 5), masks, ((7, 7, 7), (7, 7, 8), (1, 7, 7)), strict=True):
        mask[centre] = value
    region = calibration_region(*masks, dilation=3, slice_axis=slice_axis)
    expected = np.zeros_like(region)
    for centre in ((7, 7, 7), (7, 7, 8), (1, 7, 7)):
        for place in np.ndindex(region.shape):
            offset = np.subtract(place, centre)
            if offset[slice_axis] == 0 and (offset**2).sum() <= 9:
                expected[place] = True
    assert np.array_equal(region, expected)


def test_region_without_foreground_or_dilation():
    empty = np.zeros((6, 6, 6), np.uint8)
    assert not calibration_region(empty, empty).any()
    mask = empty.copy()
    mask[2, 3, 4] = 1
    assert calibration_region(empty, mask, dilation=0).sum() == 1
    with pytest.raises(DataError, match="one shape"):
        calibration_region(empty, mask[:3])


def test_clinical_volume_is_counted_in_seconds():
    rng = np.random.default_rng(0)
    shape = (448, 448, 15)
    foreground = rng.random(shape, dtype=np.float32)
    probs = np.stack([1 - foreground, foreground])
    reference = (foreground > 0.7).astype(np.uint8)
    start = time.perf_counter()
    region = calibration_region(reference * 0, (foreground > 0.99999).astype(np.uint8))
    boundary = boundary_band(reference)
    count_case(probs, probs, reference, region, (0, 1), boundary=boundary)
    assert time.perf_counter() - start < 16.0  # about 3 s on an idle machine


# ---------------------------------------------------------------- boundary


def band_oracle(reference, width, slice_axis):
    """Compare every voxel with every other of its slice."""
    band = np.zeros(reference.shape, bool)
    voxels = [np.array(place) for place in np.ndindex(reference.shape)]
    for place in voxels:
        for other in voxels:
            offset = place - other
            if offset[slice_axis] == 0 and 0 < (offset**2).sum() <= width**2:
                band[tuple(place)] |= reference[tuple(place)] != reference[tuple(other)]
    return band


@pytest.mark.parametrize("slice_axis", [0, 1, 2, -1])
@pytest.mark.parametrize("width", [1, 3])
def test_band_matches_a_plain_loop(width, slice_axis):
    rng = np.random.default_rng(width)
    reference = np.zeros((9, 8, 7), np.uint8)
    reference[2:6, 3:, 1:4] = 1
    reference[4:8, 2:5, 2:] = 7
    reference[tuple(rng.integers(0, (9, 8, 7)))] = 44
    assert np.array_equal(
        boundary_band(reference, width, slice_axis), band_oracle(reference, width, slice_axis)
    )


def test_band_has_three_voxels_on_each_side():
    assert BOUNDARY_WIDTH == 3
    reference = np.zeros((1, 30, 2), np.uint8)
    reference[:, 10:20, 0] = 4
    band = boundary_band(reference)
    assert np.flatnonzero(band[0, :, 0]).tolist() == [*range(7, 13), *range(17, 23)]
    assert not band[:, :, 1].any()  # the next slice has no edge


def test_edge_between_two_classes_counts_and_the_rim_does_not():
    reference = np.ones((20, 20, 1), np.uint8)
    assert not boundary_band(reference).any()
    reference[10:] = 2
    assert np.flatnonzero(boundary_band(reference)[:, 0, 0]).tolist() == list(range(7, 13))


def test_band_of_nothing():
    empty = np.zeros((6, 6, 6), np.uint8)
    assert not boundary_band(empty).any()
    assert boundary_band(np.zeros((0, 4, 4), np.uint8)).shape == (0, 4, 4)
    empty[2, 2, 2] = 1
    assert not boundary_band(empty, 0).any()
    assert boundary_band(empty, 1).sum() == 5


def test_errors_at_the_edge_show_in_the_boundary():
    # an edge that is off by two voxels and certain of it
    reference = np.zeros((60, 60, 2), np.int64)
    reference[15:45, 15:45] = 1
    probs = np.stack([np.roll(reference, 2, 0) == 0, np.roll(reference, 2, 0) == 1]).astype(np.float32)
    mask = np.roll(reference, 2, 0)
    counts = count_case(
        probs, probs, reference, calibration_region(reference, mask), (0, 1), 15, boundary_band(reference)
    )
    summary = summarise(merge([counts]))
    ece = {area: summary[area]["adapted"]["all"]["ece"] for area in ("boundary", "region", "all")}
    assert ece["boundary"] > 1.5 * ece["region"] > 1.5 * ece["all"]


def without_boundary(counts):
    older = json.loads(json.dumps(counts))
    for model in ("source", "adapted"):
        del older[model]["boundary"]
    return older


def test_older_counts_are_read_and_the_boundary_is_left_out():
    newer = [
        count_case(*make_case(seed), values=(0, 1, 2), boundary=make_case(seed + 9)[3]) for seed in range(3)
    ]
    older = [without_boundary(item) for item in newer]
    assert "boundary" in summarise(merge(newer), newer)
    expected = summarise(merge(older), older)
    assert "boundary" not in expected
    for mixed in ([newer[0], *older[1:]], [older[0], *newer[1:]]):
        assert summarise(merge(mixed), mixed) == expected
    assert expected["region"]["source"] == summarise(merge(newer), newer)["region"]["source"]


# ---------------------------------------------------------------- intervals


def sites(cases, seed=0, classes=3, shape=(7, 6, 4), bins=15):
    rng = np.random.default_rng(seed)
    counts = []
    for number in range(cases):
        reference = rng.integers(0, classes, shape)
        truth = np.arange(classes)[:, None, None, None] == reference
        source = softmax(rng.normal(size=(classes, *shape)) * 2 + truth)
        adapted = softmax(rng.normal(size=(classes, *shape)) + 2 * truth + 0.1 * number)
        areas = rng.random((2, *shape)) > 0.4
        counts.append(count_case(source, adapted, reference, areas[0], tuple(range(classes)), bins, areas[1]))
    return counts


@pytest.mark.parametrize("area", ["region", "boundary", "all"])
def test_intervals_match_merging_the_drawn_cases(area):
    cases, draws = sites(5), 60
    found = bootstrap_intervals(cases, area, draws=draws, seed=4)
    weights = np.random.default_rng(4).multinomial(5, np.full(5, 0.2), draws)
    figures = {key: [] for key in found}
    for row in weights:
        chosen = [item for item, times in zip(cases, row, strict=True) for _ in range(times)]
        assert len(chosen) == 5
        summary = summarise(merge(chosen))[area]
        for model, key in figures:
            figures[model, key].append([summary[model][key][name] for name in ("ece", "brier", "nll")])
    assert set(figures) == {
        (model, key) for model in ("source", "adapted", "difference") for key in ("all", "0", "1", "2")
    }
    for key, values in figures.items():
        low, high = np.quantile(values, [0.025, 0.975], axis=0)
        for index, name in enumerate(("ece", "brier", "nll")):
            assert found[key][name] == pytest.approx([low[index], high[index]], rel=1e-9)


def test_summary_has_intervals_beside_the_figures_and_the_difference():
    cases = sites(8)
    summary = summarise(merge(cases), cases)
    assert summary["intervals"] == {"level": 0.95, "draws": 1000, "seed": 0}
    assert summary == summarise(merge(cases), cases)
    json.dumps(summary, allow_nan=False)
    for area in ("region", "boundary", "all"):
        bounds = bootstrap_intervals(cases, area)
        for key in ("all", "0", "1", "2"):
            models = {name: summary[area][name][key] for name in ("source", "adapted", "difference")}
            for figure in ("ece", "brier", "nll"):
                change = models["adapted"][figure] - models["source"][figure]
                assert models["difference"][figure] == pytest.approx(change)
                for name, figures in models.items():
                    low, high = figures[f"{figure}_interval"]
                    assert [low, high] == bounds[name, key][figure]
                    assert low < high
                    if figure != "ece":  # means of cases lie within; ECE of resamples is larger
                        assert low <= figures[figure] <= high
            assert set(models["difference"]) == {*bounds["source", key], *INTERVAL_KEYS}


INTERVAL_KEYS = {"ece_interval", "brier_interval", "nll_interval"}


def test_difference_is_one_of_pairs():
    # cases differ much, and the method is better by the same in each: only pairs can tell
    shape, cases = (10, 10, 2), []
    reference = np.zeros(shape, np.int64)
    for share in np.linspace(0.1, 0.8, 8):
        both = [np.full(shape, value, np.float32) for value in (share, share + 0.05)]
        source, adapted = (np.stack([value, 1 - value]) for value in both)
        cases.append(count_case(source, adapted, reference, reference == 0, (0, 1)))
    figures = summarise(merge(cases), cases)["region"]
    low, high = figures["difference"]["0"]["ece_interval"]
    assert low == pytest.approx(-0.05, abs=1e-6)
    assert high == pytest.approx(-0.05, abs=1e-6)
    low, high = figures["source"]["0"]["ece_interval"]
    assert high - low > 0.2


def test_same_models_differ_by_nothing():
    cases = [{**item, "adapted": item["source"]} for item in sites(4)]
    figures = summarise(merge(cases), cases)["all"]["difference"]["all"]
    assert figures["ece"] == figures["brier"] == figures["nll"] == 0.0
    assert all(figures[key] == [0.0, 0.0] for key in INTERVAL_KEYS)


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_cases_have_no_interval(number):
    cases = sites(2)[:number] or sites(3)
    given = cases if number else ()
    summary = summarise(merge(cases), given)
    for area in ("region", "boundary", "all"):
        assert bootstrap_intervals(given, area) == {}
        for model in ("source", "adapted", "difference"):
            figures = summary[area][model]["all"]
            assert figures["ece"] is not None
            assert all(figures[key] is None for key in INTERVAL_KEYS)


def test_cases_without_voxels_in_an_area():
    full = sites(3)
    probs, _, reference, region = make_case(0)
    nothing = count_case(probs, probs, reference, region & False, (0, 1, 2), 15, region & False)
    one = [full[0], nothing, nothing]
    summary = summarise(merge(one), one)
    assert summary["boundary"]["source"]["all"]["ece_interval"] is None
    assert summary["all"]["source"]["all"]["ece_interval"] is not None
    two = [full[0], full[1], nothing, nothing, nothing, nothing]  # some draws have no voxel at all
    summary = summarise(merge(two), two)
    assert all(math.isfinite(value) for value in summary["boundary"]["source"]["all"]["nll_interval"])
    none = [nothing, nothing]
    summary = summarise(merge(none), none)
    assert summary["region"]["difference"]["all"]["ece"] is None
    assert summary["region"]["difference"]["all"]["ece_interval"] is None
    json.dumps(summary, allow_nan=False)


def test_intervals_narrow_with_more_cases():
    width = []
    for number in (10, 160):
        cases = sites(number, shape=(4, 4, 2))
        low, high = bootstrap_intervals(cases, "all")["source", "all"]["brier"]
        width.append(high - low)
    assert width[1] < width[0] / 2


def test_a_hundred_cases_take_less_than_two_seconds():
    cases = sites(100, shape=(3, 3, 2), bins=15)
    merged = merge(cases)
    start = time.perf_counter()
    summarise(merged, cases)
    assert time.perf_counter() - start < 2.0  # about 0.1 s on an idle machine


def test_counting_in_slabs_changes_nothing(monkeypatch):
    from tesla_med.scoring import areas

    generator = np.random.default_rng(3)
    probs = generator.dirichlet(np.ones(3), (9, 8, 7)).astype(np.float32).transpose(3, 0, 1, 2)
    reference = generator.integers(0, 3, (9, 8, 7))
    region = generator.random((9, 8, 7)) < 0.3
    arguments = (probs, probs[[1, 0, 2]], reference, region, (0, 1, 2), 10)
    whole = areas.count_case(*arguments, boundary=region)
    monkeypatch.setattr(areas, "SLAB_VOXELS", 100)
    parts = areas.count_case(*arguments, boundary=region)
    for model in ("source", "adapted"):
        for area in ("region", "boundary", "all"):
            for key, figures in whole[model][area].items():
                for name, value in figures.items():
                    assert parts[model][area][key][name] == pytest.approx(value, rel=1e-9), (area, key, name)
