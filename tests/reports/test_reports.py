from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import (
    SPACING,
    case,
    drive,
    failed,
    failed_tile,
    probabilities,
    run_context,
    tile,
    tile_context,
    unscored,
)

from tesla_med.config.models import LabelClass, QualityConfig
from tesla_med.errors import ConfigError
from tesla_med.io.nifti import slice_axis
from tesla_med.records import CaseResult, ClassScore
from tesla_med.reports import _content, _run_content, overlays, slices
from tesla_med.reports.base import REPORTS, make_reports
from tesla_med.reports.calibration import reliability_png, summarise_results
from tesla_med.scoring.areas import boundary_band, calibration_region, count_case
from tesla_med.scoring.summary import merge, summarise
from tesla_med.tasks.base import TASKS
from tesla_med.types import CaseView

MODELS = ("source", "adapted")
RAS, LPS = np.diag([1.0, 1.0, 2.0, 1.0]), np.diag([-1.0, -1.0, 2.0, 1.0])


def write(name, run, pairs):
    (report,) = make_reports([name], run)
    return drive(report, pairs)


def page(run, pairs):
    (path,) = write("html", run, pairs)
    return path.read_text(encoding="utf-8")


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<style.*?</style>", "", html)))


def scored(name, dice, source, status="ok"):
    score = ClassScore(label=1, name="prostate", dice=dice, dice_source=source, voxels=5, voxels_reference=5)
    return CaseResult(
        case=name,
        site="F",
        method="tesla",
        protocol="N-O",
        seed=0,
        status=status,
        used="adapted",
        scores=(score,),
    )


# ---------------------------------------------------------------- registry


def test_unknown_report_is_named_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown report 'htlm'.*'html'"):
        make_reports(["htlm"], run_context(tmp_path))


def test_reports_are_made_once_in_order(tmp_path):
    made = make_reports(["table", "calibration", "table"], run_context(tmp_path))
    assert [report.name for report in made] == ["table", "calibration"]
    assert all(report.run.out == tmp_path for report in made)


def test_default_reports_of_every_task_exist():
    for _, task in TASKS.items():
        assert {*task.reports, *task.always} <= set(REPORTS.names())


# ---------------------------------------------------------------- table


def test_table_has_the_stated_columns_and_blanks(tmp_path):
    run = run_context(tmp_path, 3)
    (path,) = write("table", run, [case(run, 1, shift=2), (failed("Case,90"), None), unscored(run)])
    assert path == tmp_path / "report/metrics.csv"
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    header = (
        "case,site,method,protocol,seed,label,dice,dice_source,hd95_mm,assd_mm,nsd,volume_ml,volume_ml_source,"
        "used,status,share,trusted,scaling,reason,predicted_dice,predicted_low,predicted_high"
    )
    assert path.read_text().splitlines()[0] == header
    assert [(row["case"], row["label"], row["status"]) for row in rows] == [
        ("HK/Case01", "1", "ok"),
        ("HK/Case01", "2", "ok"),
        ("Case,90", "1", "failed"),
        ("Case,90", "2", "failed"),
        ("HK/Case80", "1", "unscored"),
        ("HK/Case80", "2", "unscored"),
    ]
    result, _ = case(run, 1, shift=2)
    assert float(rows[0]["dice"]) == pytest.approx(result.scores[0].dice, rel=1e-5)
    assert float(rows[0]["hd95_mm"]) == pytest.approx(result.scores[0].hd95_mm, rel=1e-5)
    assert float(rows[0]["nsd"]) == pytest.approx(result.scores[0].value("nsd"), rel=1e-5)
    figures = ("dice", "dice_source", "hd95_mm", "assd_mm", "nsd", "volume_ml", "volume_ml_source")
    assert [rows[2][key] for key in figures] == [""] * 7
    assert [rows[4][key] for key in figures[:5]] == [""] * 5
    assert float(rows[4]["volume_ml"]) > 0


def test_table_writes_six_significant_digits(tmp_path):
    run = run_context(tmp_path)
    (path,) = write("table", run, [(scored("a", 2 / 3, 1e-7 / 3), None)])
    assert ",0.666667,3.33333e-08," in path.read_text()


# ---------------------------------------------------------------- calibration


def test_calibration_leads_with_the_region_and_matches_its_cases(tmp_path):
    run = run_context(tmp_path, 3)
    pairs = [case(run, number) for number in range(2)]
    data, picture = write("calibration", run, [*pairs, unscored(run), (failed(), None)])
    content = json.loads(data.read_text())
    assert list(content).index("region") < list(content).index("all")
    assert content["scored_cases"] == 2
    voxels = sum(result.calibration["adapted"]["region"]["1"]["voxels"] for result, _ in pairs)
    assert content["region"]["adapted"]["1"]["voxels"] == voxels
    assert set(content["region"]["source"]) == {"all", "0", "1", "2"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_organ_painted_where_there_is_none_is_the_worst_change():
    """Its Dice is 0 and the source's none, so no difference of two Dice shows it."""
    figures = {"good": (0.9, 0.9, 100, 100), "painted": (None, 0.0, 0, 5000), "empty": (None, None, 0, 0)}
    results = [
        CaseResult(
            case=name,
            site="F",
            status="ok",
            used="adapted",
            scores=(
                ClassScore(
                    label=1, name="organ", dice_source=before, dice=after, voxels=voxels,
                    voxels_reference=reference,
                ),
            ),
        )
        for name, (before, after, reference, voxels) in figures.items()
    ]  # fmt: skip
    assert [item.dice_change for item in results] == [0.0, -1.0, None]
    means, worst = _content.tiles(results, {})[1:3]
    assert (means.value, means.detail) == ("0.900 → 0.450", "−0.500 over 2 of 3 cases")
    assert (worst.value, worst.detail) == ("−1.000", "painted")
    (row,) = _content.class_summary(results)
    assert (row["change"], row["worse"], row["false_positive"]) == ("−0.500", "1", "1")
    worst_first = sorted(results, key=lambda item: _content.severity(item, QualityConfig()))
    assert worst_first[0].case == "painted"


def test_tiles_and_rows_lead_with_the_region():
    reference = np.zeros((100, 100, 10), np.uint8)
    reference[10:20, 10:20, :5] = 1
    mask = reference.copy()
    mask[50:60, 50:60, :5] = 1
    foreground = np.where(mask, 0.6, 0.001).astype(np.float32)
    probs = np.stack([1 - foreground, foreground])
    region = calibration_region(reference, mask, dilation=0)
    found = summarise(merge([count_case(probs, probs, reference, region, (0, 1), 10)]))
    (tile,) = (item for item in _content.tiles([], found) if item.label == "ECE")
    assert "0.100" in tile.value
    assert "region" in tile.detail
    classes = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate"))
    rows = _run_content.calibration_rows(found, classes)
    assert rows[0]["area"] == "calibration region"
    assert [(row["name"], row["voxels"]) for row in rows[:2]] == [
        ("all classes", "1,000"),
        ("prostate", "1,000"),
    ]
    assert rows[-1]["voxels"] == "100,000"


def with_boundary(run, number, **changes):
    """Return a made-up case whose counts have all three areas."""
    result, view = case(run, number, **changes)
    classes, rng = len(run.pipeline.classes), np.random.default_rng(number)
    probs = [probabilities(mask, classes, rng) for mask in (view.source_mask, view.mask)]
    region = calibration_region(view.reference, view.source_mask, view.mask)
    band = boundary_band(view.reference)
    counts = count_case(*probs, view.reference, region, run.pipeline.values, 15, band)
    return result.model_copy(update={"calibration": counts}), view


def test_calibration_of_the_boundary_with_intervals(tmp_path):
    run = run_context(tmp_path, 3)
    pairs = [with_boundary(run, number) for number in range(3)]
    content = json.loads(write("calibration", run, pairs)[0].read_text())
    assert "3 voxels of an edge" in content["definitions"]["boundary"]
    assert content["intervals"]["draws"] == 1000
    bands = sum(int(boundary_band(view.reference).sum()) for _, view in pairs)
    for key in ("all", "0", "1", "2"):
        figures = content["boundary"]["adapted"][key]
        assert figures["voxels"] == bands
        assert len(figures["bins"]["count"]) == 15
        change = content["boundary"]["difference"][key]
        for name in ("ece", "brier", "nll"):
            low, high = figures[f"{name}_interval"]
            assert 0 < low < high
            assert change[name] == pytest.approx(
                figures[name] - content["boundary"]["source"][key][name], abs=1e-12
            )
            assert len(change[f"{name}_interval"]) == 2


def test_calibration_of_older_records_has_no_boundary(tmp_path):
    run = run_context(tmp_path)
    pairs = [with_boundary(run, 0), case(run, 1)]
    content = json.loads(write("calibration", run, pairs)[0].read_text())
    assert "boundary" not in content
    assert "boundary" not in content["definitions"]
    assert content["region"]["adapted"]["all"]["ece_interval"] is not None
    assert "boundary all classes" not in text_of(page(run, pairs))


def test_page_shows_the_three_areas_with_intervals(tmp_path):
    run = run_context(tmp_path, 3)
    pairs = [with_boundary(run, number) for number in range(4)]
    summary = summarise_results([result for result, _ in pairs])
    text = text_of(page(run, pairs))
    for area, title in (
        ("region", "calibration region"),
        ("boundary", "boundary"),
        ("all", "all voxels"),
    ):
        row, change = f"{title} all classes", f"{title} change"
        for figure in ("ece", "brier", "nll"):
            for model in ("source", "adapted"):
                figures = summary[area][model]["all"]
                low, high = figures[f"{figure}_interval"]
                row += f" {figures[figure]:.3f} {low:.3f} to {high:.3f}"
            figures = summary[area]["difference"]["all"]
            low, high = map(_content.signed, figures[f"{figure}_interval"])
            change += f" {_content.signed(figures[figure])} ({low} to {high})"
        assert row in text
        assert change in text
        figures = [summary[area][model]["2"]["ece"] for model in ("source", "adapted")]
        assert f"{title} central zone {figures[0]:.3f} {figures[1]:.3f}" in text


def test_cases_without_a_trusted_mask_come_first_and_are_not_called_ok(tmp_path):
    run = run_context(tmp_path, 3)
    pairs = [case(run, number) for number in (1, 2)]
    pairs[1] = (pairs[1][0].model_copy(update={"trusted": False}), pairs[1][1])
    html = page(run, pairs)
    names = [pairs[1][0].case, pairs[0][0].case]
    places = [html.index(f">{name}</") for name in names]
    assert places == sorted(places)
    first, second = html[places[0] : places[1]], html[places[1] : html.index("<h2>Slices")]
    assert "please review" in first
    assert 'class="chip ok"' not in first
    assert 'class="chip ok"' in second
    text = text_of(html)
    assert "In doubt 1 1 not trusted" in text
    assert "then those of which no mask is trusted" in text


def test_intervals_of_a_single_case_are_not_applicable(tmp_path):
    run = run_context(tmp_path)
    text = text_of(page(run, [with_boundary(run, 1)]))
    ece = [summarise_results([with_boundary(run, 1)[0]])["boundary"][m]["all"]["ece"] for m in MODELS]
    title = "boundary"
    assert f"{title} all classes {ece[0]:.3f} n/a {ece[1]:.3f} n/a" in text
    assert f"{title} change {_content.signed(ece[1] - ece[0])} (n/a)" in text


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(-0.3, -0.1, "good"), (0.1, 0.3, "bad"), (-0.1, 0.1, ""), (-0.1, -0.0001, ""), (0.0, 0.2, "")],
)
def test_a_change_is_coloured_where_its_interval_leaves_zero_out(low, high, wanted):
    difference = {"ece": (low + high) / 2, "ece_interval": [low, high]}
    assert _run_content._change(difference, "ece")[2] == wanted
    assert _run_content._change({"ece": 0.2, "ece_interval": None}, "ece") == ("+0.200", "n/a", "")
    assert _run_content._change({"ece": None, "ece_interval": None}, "ece") == ("–", "", "")


def test_calibration_of_nothing_has_no_figures_and_no_stale_picture(tmp_path):
    run = run_context(tmp_path)
    write("calibration", run, [case(run, 1)])
    (data,) = write("calibration", run, [unscored(run)])
    assert json.loads(data.read_text())["scored_cases"] == 0
    assert "region" not in json.loads(data.read_text())
    assert not (tmp_path / "report/reliability.png").exists()


def test_reliability_needs_voxels_in_the_region(tmp_path):
    run = run_context(tmp_path)
    assert reliability_png(summarise_results([failed()]), run.pipeline) is None


# ---------------------------------------------------------------- tensorboard


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_holds_scores_losses_and_overlays(tmp_path):
    run = run_context(tmp_path, max_cases_with_overlays=1)
    pairs = [case(run, 1, shift=2), (failed(), None), case(run, 3, shift=0)]
    write("tensorboard", run, pairs)
    found = events(tmp_path / "tensorboard")
    scalars = set(found.Tags()["scalars"])
    assert {"dice/prostate", "dice/mean", "dice_source/prostate", "site_mean/dice_adapted"} <= scalars
    assert {"loss/total", "volume_ml/prostate", "entropy/adapted"} <= scalars
    assert not [tag for tag in scalars if tag.startswith("policy/")]
    dice = found.Scalars("dice/prostate")
    assert [event.step for event in dice] == [0, 2]
    assert dice[0].value == pytest.approx(pairs[0][0].mean_dice)
    running = (pairs[0][0].mean_dice + pairs[2][0].mean_dice) / 2
    assert found.Scalars("site_mean/dice_adapted")[-1].value == pytest.approx(running)
    assert [round(event.value, 4) for event in found.Scalars("loss/total")] == [1.0, 0.5, 0.3333]
    assert found.Tags()["images"] == ["overlay/HK/Case01", "all_cases/dice", "policy/heat_map"]
    (text,) = found.Tensors("overlay/HK/Case01/text_summary")
    assert b"display window" in text.tensor_proto.string_val[0]
    assert b"source | adapted | reference" in text.tensor_proto.string_val[0]


def test_tensorboard_has_a_table_and_a_picture_of_all_cases(tmp_path):
    run = run_context(tmp_path, 3)
    pairs = [case(run, number) for number in (1, 2, 3)]
    doubted = pairs[1][0].model_copy(update={"trusted": False})
    pairs[1] = (doubted, pairs[1][1])
    write("tensorboard", run, pairs)
    found = events(tmp_path / "tensorboard")
    table = found.Tensors("all_cases/table/text_summary")[0].tensor_proto.string_val[0].decode("utf-8")
    lines = table.splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith(f"| {doubted.case} |")
    assert "**no**" in lines[2]
    assert all("**no**" not in line for line in lines[3:])
    assert [item.value for item in found.Scalars("guard/trusted")] == [1.0, 0.0, 1.0]
    assert found.Images("all_cases/dice")[0].height > 80
    assert len(found.Tensors("custom_scalars__config__")) == 1


def test_tensorboard_without_reference_has_no_dice(tmp_path):
    run = run_context(tmp_path)
    write("tensorboard", run, [case(run, 1, referenced=False)])
    scalars = events(tmp_path / "tensorboard").Tags()["scalars"]
    assert not [tag for tag in scalars if "dice" in tag]
    assert "volume_ml/prostate" in scalars


# ---------------------------------------------------------------- overlays


@pytest.mark.parametrize("low", [-1000.0, 0.0])
def test_overlays_go_from_dark_to_bright_whatever_the_image_range(tmp_path, low):
    _, view = case(run_context(tmp_path), 1)
    high = 3000.0 if low else 1.0
    scaled = (view.image - view.image.min()) / np.ptp(view.image) * (high - low) + low
    view = CaseView(
        scaled.astype(np.float32), view.source_mask, view.mask, view.reference, view.affine, SPACING
    )
    picture = overlays.to_array(overlays.draw(view, 2, 6, run_context(tmp_path).pipeline.classes))
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert picture.min() < 40
    assert picture.max() > 215
    first, second = overlays.display_window(view)
    assert low <= first < second <= high


@pytest.mark.parametrize(
    ("affine", "axis", "letters"),
    [
        (RAS, 2, ("R", "L", "A", "P")),
        (LPS, 2, ("R", "L", "A", "P")),
        (RAS, 1, ("R", "L", "S", "I")),
        (RAS, 0, ("A", "P", "S", "I")),
    ],
)
def test_a_mark_at_the_right_anterior_superior_end_is_shown_at_its_letters(affine, axis, letters):
    shape = (6, 7, 8)
    plane = overlays.layout(affine, (1, 1, 2), axis)
    assert plane.letters == letters
    marked = np.zeros(shape)
    # the voxel furthest towards patient right, anterior and superior
    corner = tuple(size - 1 if affine[i, i] > 0 else 0 for i, size in enumerate(shape))
    marked[corner] = 1
    shown = plane.cut(marked, corner[axis])
    rows, columns = np.nonzero(shown)
    assert rows[0] == 0  # top: anterior or superior
    assert columns[0] == 0  # left: patient right, or anterior


def test_permuted_axes_keep_the_display():
    # file axes run superior, right, anterior
    affine = np.zeros((4, 4))
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = 2.0, 0.5, 0.7, 1.0
    assert slice_axis(affine, "RAS") == 0
    assert slice_axis(affine, "SAR") == 1
    plane = overlays.layout(affine, (2.0, 0.5, 0.7), 0)
    assert (plane.rows, plane.columns) == (2, 1)
    assert plane.aspect == pytest.approx(0.7 / 0.5)
    array = np.zeros((3, 4, 5))
    array[1, 3, 4] = 1  # right and anterior
    assert plane.cut(array, 1)[0, 0] == 1


def test_slightly_oblique_axes_take_the_nearest_direction():
    angle = np.deg2rad(20)
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    affine[1:3, 1:3] = [[np.cos(angle), -3 * np.sin(angle)], [np.sin(angle), 3 * np.cos(angle)]]
    assert [world for world, _ in overlays.axis_directions(affine)] == [0, 1, 2]


def test_slices_with_most_foreground_are_chosen_in_order(tmp_path):
    _, view = case(run_context(tmp_path), 1)
    chosen = overlays.choose_slices(view, 2, 3)
    assert chosen == sorted(chosen)
    assert len(chosen) == 3
    areas = view.foreground.sum(axis=(0, 1))
    assert int(np.argmax(areas)) in chosen
    assert all(areas[index] for index in chosen)
    assert len(overlays.choose_slices(view, 2, 99)) == np.count_nonzero(areas)
    empty = np.zeros_like(view.mask)
    blank = CaseView(view.image, empty, empty, None, view.affine, SPACING)
    assert overlays.choose_slices(blank, 2, 3) == [6]


def test_outlines_have_the_colours_of_the_classes(tmp_path):
    run = run_context(tmp_path, 2)
    _, view = case(run, 1)
    green = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate", color="#00ff00"))
    picture = overlays.to_array(overlays.draw(view, 2, 6, green))
    pure = (picture[..., 1] > 230) & (picture[..., 0] < 25) & (picture[..., 2] < 25)
    thirds = np.array_split(pure, 3, axis=1)
    assert all(part.sum() > 100 for part in thirds)
    nothing = CaseView(view.image, view.mask * 0, view.mask * 0, None, view.affine, SPACING)
    bare = overlays.to_array(overlays.draw(nothing, 2, 6, green))
    assert not ((bare[..., 1] > 230) & (bare[..., 0] < 25)).any()


def test_a_speckled_mask_is_outlined_at_once(tmp_path):
    run = run_context(tmp_path)
    _, view = case(run, 1)
    speckled = np.zeros_like(view.mask)
    speckled[::2, ::2] = 1
    figure = overlays.draw(
        CaseView(view.image, speckled, speckled, None, view.affine, SPACING), 2, 6, run.pipeline.classes
    )
    outlines = [item for axes in figure.axes for item in (*axes.lines, *axes.collections)]
    assert 0 < len(outlines) < 10
    assert any(len(item.get_segments()) > 100 for item in outlines)


def test_an_outline_ends_at_its_panel(tmp_path):
    """A mask that is not among those that the crop follows, as of another row of a comparison."""
    run = run_context(tmp_path)
    _, view = case(run, 1)
    wide = np.zeros_like(view.mask)
    wide[1:-1, 1:-1] = 1
    green = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate", color="#00ff00"))
    small = {"adapted": view.mask, "reference": view.mask}
    shown = [
        overlays.draw(view, 2, 6, green, more)
        for more in ({"first": wide, **small}, {"first": view.mask, **small})
    ]
    pictures = [overlays.to_array(figure).astype(int) for figure in shown]
    width = round(overlays.PANEL_INCHES * 100)
    title = round(overlays.TITLE_INCHES * 100)
    beside = [picture[:, width + 4 :] for picture in pictures]
    above = [picture[: title - 2] for picture in pictures]
    assert np.abs(beside[0] - beside[1]).max() < 8
    assert np.abs(above[0] - above[1]).max() < 8
    assert (pictures[0] != pictures[1]).any()


def test_panels_have_physical_proportions(tmp_path):
    _, view = case(run_context(tmp_path), 1)
    square = overlays.draw(view, 2, 6, run_context(tmp_path).pipeline.classes)
    wide, high = square.get_size_inches()
    panel = (wide - 2 * overlays.GAP_INCHES) / 3
    assert (high - overlays.TITLE_INCHES) / panel == pytest.approx(1.0, abs=0.1)  # a square in mm


def test_constant_image_can_be_drawn(tmp_path):
    _, view = case(run_context(tmp_path), 1)
    flat = CaseView(np.zeros_like(view.image), view.mask, view.mask, None, view.affine, SPACING)
    figure = overlays.draw(flat, 2, 6, run_context(tmp_path).pipeline.classes)
    assert overlays.to_array(figure).shape[2] == 3
    assert slices.draw_slices(flat, 2, run_context(tmp_path).pipeline.foreground, [6])["window"] == "0 to 1"


# ---------------------------------------------------------------- html


def test_page_loads_nothing_and_carries_its_pictures(tmp_path):
    run = run_context(tmp_path)
    html = page(run, [case(run, 1), case(run, 2)])
    sources = re.findall(r'\s(?:src|href)="([^"]*)"', html)
    assert sources
    assert all(item.startswith(("data:image/", "#case-")) for item in sources)
    assert len(re.findall("<script", html)) == 1  # its own; what it loads lies beside the page
    assert re.findall(r'data-slices="([^"]*)"', html) == ["slices/HK/Case01.js", "slices/HK/Case02.js"]
    assert "url(" not in html
    assert "@import" not in html
    assert "fetch(" not in html
    assert html.count("data:image/jpeg") == 6  # two cases, three slices
    assert html.count("data:image/png") == 1
    targets = {item[1:] for item in sources if item.startswith("#")}
    assert targets == set(re.findall(r'id="(case-\d+)"', html))


def test_page_says_what_it_must(tmp_path):
    run = run_context(tmp_path, notes=("region of interest comes from the reference mask",))
    text = text_of(page(run, [case(run, 1, shift=2), (failed(), None), unscored(run)]))
    for wanted in (
        "Not a medical device. Research use only.",
        "Research use only; cite the data set.",
        "Liu et al. 2020",
        "Tomar et al., CVPR 2023",
        "region of interest comes from the reference mask",
        "Site F: tesla, protocol N-O",
        "truncated: expected 1,204 bytes, got 812",
        "differs by 2.4 mm from the image",
        "over 1 of 3 cases",
        "1 unscored",
        "in radiological display",
        "dilated by 3 voxels within slices",
        "weak_views",
    ):
        assert wanted in text, wanted


def test_figures_of_the_page_are_those_of_the_results(tmp_path):
    run = run_context(tmp_path)
    pairs = [case(run, number, shift=number) for number in range(3)]
    text = text_of(page(run, pairs))
    ours = np.mean([result.mean_dice for result, _ in pairs])
    source = np.mean([result.mean_dice_source for result, _ in pairs])
    assert f"Mean Dice {source:.3f} → {ours:.3f}" in text
    for result, _ in pairs:
        (score,) = result.scores
        assert f"prostate {score.dice_source:.3f} {score.dice:.3f}" in text
    ece = summarise_results([result for result, _ in pairs])["region"]["adapted"]["all"]["ece"]
    assert f"→ {ece:.3f}" in text


def test_no_reference_no_dice(tmp_path):
    run = run_context(tmp_path)
    pairs = [case(run, 1, source_shift=0, shift=0, referenced=False)]
    html = page(run, pairs)
    assert "Mean Dice" not in html
    assert "Agreement" in html
    assert "1.000" in text_of(html)  # the two masks are the same
    assert "0.000" not in text_of(html).split("How the numbers")[0]
    assert "Not measured: no case has a reference that fits." in html
    assert "data:image/png" not in html


def test_names_and_reasons_are_escaped(tmp_path):
    run = run_context(tmp_path)
    nasty = "<script>alert(1)</script>"
    result, view = case(run, 1, name=nasty)
    html = page(run, [(result, view), (failed(reason='"><img src=x onerror=y>'), None)])
    assert nasty not in html
    assert "<img src=x" not in html
    assert "&lt;script&gt;" in html


def test_cases_are_ordered_worst_first(tmp_path):
    results = [
        scored("better", 0.90, 0.80),
        scored("low", 0.50, 0.40),
        scored("small drop", 0.60, 0.65),
        scored("large drop", 0.80, 0.95),
        scored("unscored", None, None, "unscored"),
        failed("broken"),
    ]
    rows = _content.case_rows(results, {}, QualityConfig())
    names = [row.name for row in rows]
    assert names == ["broken", "unscored", "large drop", "small drop", "low", "better"]
    html = page(run_context(tmp_path), [(item, None) for item in results])
    places = [html.index(f"<b>{name}</b>") for name in names]
    assert places == sorted(places)


def test_cases_to_review_come_first(tmp_path):
    good, poor, blind = scored("good", 0.9, 0.9), scored("poor", 0.95, 0.95), scored("blind", None, None)
    results = [predicted(item, value) for item, value in ((good, 0.9), (poor, 0.6), (blind, 0.5))]
    quality = QualityConfig(intercept=0.5, review_below=0.7, fitted_on="phantoms")
    rows = _content.case_rows([*results, failed("broken")], {}, quality)
    assert [(row.name, row.review) for row in rows] == [
        ("broken", False),
        ("blind", True),
        ("poor", True),
        ("good", False),
    ]
    assert rows[1].classes[0].predicted == ("0.50", "0.40 to 0.60")
    run = run_context(tmp_path)
    html = page(run, [(item, None) for item in results])
    assert "Predicted Dice" in html
    assert "0.40 to 0.60" in html
    assert "of 2 in their 90 % interval" in html
    assert "Predicted Dice" not in page(run_context(tmp_path / "none"), [(good, None)])


def predicted(result, value):
    score = result.scores[0].model_copy(
        update={"predicted_dice": value, "predicted_low": value - 0.1, "predicted_high": value + 0.1}
    )
    return result.model_copy(update={"scores": (score, *result.scores[1:])})


def test_pictures_are_kept_for_the_worst_cases(tmp_path):
    run = run_context(tmp_path, max_cases_with_overlays=2, overlays_per_case=1)
    # masks moved further off the truth are worse; the best one comes first
    html = page(run, [case(run, number, shift=shift) for number, shift in ((1, 0), (2, 6), (3, 3), (4, 5))])
    assert html.count("data:image/jpeg") == 2
    shown = html.split('<section class="shown"')[1:]
    drawn = {re.search(r"<h3>(.*)</h3>", part)[1] for part in shown if "data:image/jpeg" in part}
    assert drawn == {"HK/Case02", "HK/Case04"}
    assert len(shown) == 4  # all have their slices beside the page
    assert "2 worst of 4 cases" in text_of(html)


def test_cases_of_an_earlier_run_are_said_to_have_no_pictures(tmp_path):
    run = run_context(tmp_path)
    resumed, _ = case(run, 1)
    sentence = "finished in an earlier run in this output folder"
    assert f"1 of these cases was {sentence}" in page(run, [(resumed, None), case(run, 2), (failed(), None)])
    assert sentence not in page(run, [case(run, 2), (failed(), None)])


def test_pictures_can_be_switched_off(tmp_path):
    run = run_context(tmp_path, max_cases_with_overlays=0)
    assert "data:image/jpeg" not in page(run, [case(run, 1)])


def test_counts_of_missed_and_not_applicable(tmp_path):
    def one(voxels, truth, dice):
        score = ClassScore(
            label=1, name="p", dice=dice, dice_source=dice, voxels=voxels, voxels_reference=truth
        )
        return scored("x", 1, 1).model_copy(update={"scores": (score,)})

    (row,) = _content.class_summary([one(0, 0, None), one(0, 9, 0.0), one(9, 0, 0.0), one(9, 9, 0.8)])
    assert (row["scored"], row["not_applicable"], row["missed"], row["false_positive"]) == (
        "3",
        "1",
        "1",
        "1",
    )
    assert row["dice"] == "0.267"
    html = page(run_context(tmp_path), [(one(0, 0, None), None)])
    assert "n/a" in text_of(html).split("How the numbers")[0]


def test_nominal_voxel_size_is_said(tmp_path):
    run = run_context(tmp_path)
    result, view = case(run, 1)
    blank = dict.fromkeys(("hd95_mm", "assd_mm", "volume_ml", "volume_ml_source"))
    result = result.model_copy(update={"scores": tuple(s.model_copy(update=blank) for s in result.scores)})
    text = page(run, [(result, view)])
    assert "voxel size of a file is nominal, that is, not a physical size: HD95, ASSD, NSD, Volume." in text
    assert "voxel size of a file is nominal" not in page(run, [case(run, 1)])


def test_signed_changes():
    assert _content.signed(0.0123) == "+0.012"
    assert _content.signed(-0.0123) == "−0.012"
    assert _content.signed(-0.0001) == "±0.000"


# ---------------------------------------------------------------- page of tiles


def test_the_page_of_tiles_has_counts_and_settings(tmp_path):

    made = {"method": {"name": "tesla", "parameters": {"learning_rate": 0.00125}}, "device": "cpu"}
    found = {"failed": {"TUM/90.png": "a result"}, "predicted": {"tumour": {"source": 3}}}
    run = replace(tile_context(tmp_path, notes=("weights <without> a card",)), manifest=made | found)
    pairs = [tile(run, number, shift=1 if number < 4 else 0) for number in range(12)]
    text = text_of(page(run, [*pairs, (failed_tile(), None)]))
    for number, item in enumerate(run.pipeline.classes):
        before = [int(np.argmax(record.probs_source)) for record, _ in pairs]
        ours = [int(np.argmax(record.probs)) for record, _ in pairs]
        assert f"{item.name} {before.count(number)} {ours.count(number)}" in text
    settings = text.split("Settings")[1]
    for wanted in ("learning_rate 0.00125", "device cpu", "seed 0", "pipeline kather"):
        assert wanted in settings
    assert "a result" not in settings
    assert "13 tiles, of which 1 could not be read" in text
    assert "weights &lt;without&gt; a card" in text
