"""TensorBoard: the policy as one picture, settings of runs side by side, one display window for all cases."""

from __future__ import annotations

import dataclasses
import io
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import case, run_context, tile, tile_context
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tesla_med.config.models import Intensity, ScalingChoice
from tesla_med.reports._hparams import hparams_of
from tesla_med.reports._policy import MOST_COLUMNS, VALUES, PolicyHistory, _scale
from tesla_med.reports.tensorboard import TensorboardReport
from tesla_med.types import Earlier

OPS = ("gamma", "blur", "shift")


def board(folder):
    everything = {"images": 0, "scalars": 0, "tensors": 0}
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def scalars(step, count=100):
    """Return what a policy tells that moves from its first operation to its last."""
    share = step / count
    probability = dict(zip(OPS, (1 - share, 0.0, share), strict=True))
    return {
        "loss/policy": 1.0,
        "policy/learned": 0.5,
        **{f"policy/probability/{name}": value for name, value in probability.items()},
        **{f"policy/magnitude/{name}": 0.25 for name in OPS},
    }


def started(run):
    report = TensorboardReport()
    report.start(run)
    return report


# ------------------------------------------------------------ the policy


def test_the_table_behind_the_picture():
    history = PolicyHistory()
    for step in range(1000):
        others, summary = history.take(step, scalars(step, 1000))
        assert others == {"loss/policy": 1.0, "policy/learned": 0.5}
        assert summary.value[0].tag == VALUES
    tables = history._tables()
    assert list(tables) == ["probability", "magnitude"]
    names, table = tables["probability"]
    assert names == list(OPS)
    assert table.shape == (3, MOST_COLUMNS)
    assert table[0] == pytest.approx(1 - table[2], abs=1e-6)
    assert (np.diff(table[2]) > 0).all()
    assert table[2].mean() == pytest.approx(0.5, abs=0.01)
    assert tables["magnitude"][1] == pytest.approx(np.full((3, MOST_COLUMNS), 0.25))
    assert history.take(1000, {"loss/total": 1.0}) == ({"loss/total": 1.0}, None)


def test_operations_that_are_not_told_of_are_left_blank():
    history = PolicyHistory()
    history.take(0, {"policy/kept/gamma": 1.0})
    history.take(1, {"policy/kept/blur": 0.5})
    names, table = history._tables()["kept"]
    assert names == ["gamma", "blur"]
    assert np.array_equal(table, [[1.0, np.nan], [np.nan, 0.5]], equal_nan=True)
    assert history.picture().shape[2] == 3


def test_probabilities_are_told_from_those_at_the_start():
    table = np.array([[0.2, 0.5], [0.2, 0.1]], np.float32)
    colours, lowest, highest, remark = _scale("probability", table)
    assert (lowest, highest) == pytest.approx((-0.1, 0.5))
    assert "start" in remark
    assert _scale("probability", np.full((2, 3), 0.2, np.float32))[1:3] == pytest.approx((0.18, 0.22))
    assert _scale("magnitude", table) == ("viridis", 0.0, 1.0, "")
    assert colours != "viridis"


def test_one_picture_in_place_of_a_card_per_operation(tmp_path):
    run = run_context(tmp_path)
    report = started(run)
    for step in range(100):
        report.step(step, scalars(step))
        if step % 10 == 9:
            report.unit([case(run, step)[0]], None)
    report.finish([])
    found = board(tmp_path)
    policy = [tag for tag in found.Tags()["scalars"] if tag.startswith("policy/")]
    assert policy == ["policy/learned"]
    pictures = found.Images("policy/heat_map")
    assert [item.step for item in pictures] == [
        19,
        39,
        79,
        99,
    ]  # whenever twice as much is known, and at last
    shown = np.asarray(Image.open(io.BytesIO(pictures[-1].encoded_image_string)).convert("RGB"))
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) > 100
    assert (shown[: len(shown) // 2] != shown[len(shown) // 2 : len(shown) // 2 * 2]).any()


def test_a_run_without_a_policy_has_no_picture_of_it(tmp_path):
    run = run_context(tmp_path)
    report = started(run)
    report.step(0, {"loss/total": 1.0})
    report.finish([])
    assert "policy/heat_map" not in board(tmp_path).Tags()["images"]


def test_a_resumed_run_draws_the_updates_that_stand(tmp_path):
    """The second case is done again: its first attempt is no part of the picture; the first case is."""
    first, second = (case(run_context(tmp_path), number)[0] for number in (1, 2))
    run = replace(run_context(tmp_path), names=(first.case, second.case))
    whole = started(replace(run, out=tmp_path / "whole"))
    broken = started(replace(run, out=tmp_path / "broken"))
    for report in (whole, broken):
        for step in range(20):
            report.step(step, scalars(step, 40))
        report.unit([first], None)
    for step in range(20, 40):
        whole.step(step, scalars(step, 40))
        broken.step(step, scalars(0, 40))
    whole.unit([second], None)
    whole.finish([first, second])
    broken.close()
    again = TensorboardReport()
    here = replace(run, out=tmp_path / "broken")
    again.resume(here, Earlier(frozenset([first.case]), None))
    again.start(here)
    again.unit([first], None)
    for step in range(20):
        again.step(step, scalars(20 + step, 40))
    again.unit([second], None)
    again.finish([first, second])
    pictures = [board(tmp_path / name).Images("policy/heat_map")[-1] for name in ("whole", "broken")]
    assert pictures[0].encoded_image_string == pictures[1].encoded_image_string
    assert {item.step for item in pictures} == {39}
    steps = [item.step for item in board(tmp_path / "broken").Tensors(VALUES)]
    assert sorted(steps) == list(range(40))


# ------------------------------------------------------------ settings side by side


def told(folder):
    """Return the metrics, the settings and the name of the trial that the HParams tab is given."""
    found = board(folder)
    content = found.PluginTagToContent(metadata.PLUGIN_NAME)
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    session = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert metadata.SESSION_END_INFO_TAG in content
    columns = {item.name for item in experiment.hparam_infos}
    first = {item.name for item in experiment.hparam_infos if item.differs}
    assert first == {"method", "protocol", "scaling", "seed", "site"}
    settings = {name: value.string_value or value.number_value for name, value in session.hparams.items()}
    assert {*settings} <= columns
    return [item.name.tag for item in experiment.metric_infos], settings, session.group_name


def test_runs_are_compared_by_settings_and_headline_figures(tmp_path):
    parameters = {"learning_rate": 0.002, "updates_per_case": 8, "epochs": None, "batch_slices": 4}
    made = {"weights": "source.safetensors", "method": {"name": "tesla", "parameters": parameters}}
    run = replace(run_context(tmp_path), seed=3, manifest=made)
    results = [case(run, number, shift=number)[0] for number in (1, 2)]
    score = results[0].scores[0].model_copy(update={"predicted_dice": 0.75})
    results[0] = results[0].model_copy(update={"scores": (score,)})
    report = started(run)
    for result in results:
        report.unit([result], None)
    report.finish(results)
    metrics, settings, trial = told(tmp_path)
    found = board(tmp_path)
    figures = {tag: found.Scalars(tag)[-1].value for tag in metrics}
    assert figures == {
        "site_mean/dice_source": pytest.approx(np.mean([item.mean_dice_source for item in results])),
        "site_mean/dice_adapted": pytest.approx(np.mean([item.mean_dice for item in results])),
        "site_mean/predicted_dice": pytest.approx(0.75),
    }
    assert settings == {
        "site": "F",
        "pipeline": "prostate",
        "method": "tesla",
        "protocol": "N-O",
        "reset": "case",
        "guard": "on" if run.pipeline.guard.enabled else "off",
        "scaling": "min-max",
        "weights": "source.safetensors",
        "seed": 3.0,
        "learning_rate": 0.002,
        "updates_per_case": 8.0,
        "batch_slices": 4.0,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d F tesla N-O seed 3", trial)


def test_a_scaling_that_is_chosen_by_case_is_told_apart(tmp_path):
    run = run_context(tmp_path)
    scaling = ScalingChoice(candidates=(Intensity(scaling="percentile"),))
    chosen = replace(run, pipeline=run.pipeline.model_copy(update={"scaling": scaling}))
    assert hparams_of(run)["scaling"] == "min-max"
    assert hparams_of(chosen)["scaling"] == "by case, of 2 (min-max first)"


def test_runs_on_tiles_are_compared_by_accuracy(tmp_path):
    run = tile_context(tmp_path)
    records = [tile(run, number, shift=number % 2)[0] for number in range(8)]
    report = started(run)
    report.unit(records, None)
    report.finish(records)
    metrics, settings, _ = told(tmp_path)
    found = board(tmp_path)
    assert metrics == ["running/accuracy_source", "running/accuracy_adapted"]
    assert found.Scalars(metrics[1])[-1].value == pytest.approx(np.mean([item.correct for item in records]))
    assert settings["method"] == "tesla"
    assert not {"guard", "scaling"} & {*settings}


# ------------------------------------------------------------ one window


def windows(folder, factors):
    """Return the display window of each case, whose intensities are multiplied, and what is said of it."""
    run = run_context(folder)
    report = started(run)
    results = []
    for number, factor in enumerate(factors, 1):
        result, view = case(run, number)
        report.unit([result], dataclasses.replace(view, image=view.image * np.float32(factor)))
        results.append(result)
    report.finish(results)
    found, said = board(folder), []
    for result in results:
        (text,) = found.Tensors(f"overlay/{result.case}/text_summary")
        line = text.tensor_proto.string_val[0].decode()
        said.append((re.search(r"display window (\S+ to \S+),", line)[1], "for every case" in line))
    return said


def test_cases_share_the_window_of_the_first(tmp_path):
    first, second, third = windows(tmp_path, (1.0, 1.3, 0.8))
    assert first[0] == second[0] == third[0]
    assert [said for _, said in (first, second, third)] == [True] * 3


def test_a_case_on_another_scale_keeps_its_own_window(tmp_path):
    first, second, third = windows(tmp_path, (1.0, 1000.0, 1.1))
    assert second[0] != first[0]
    assert not second[1]
    assert third == first
