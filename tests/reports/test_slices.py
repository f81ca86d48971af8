"""Every slice beside the page: outlines hold exactly the mask, files follow the records, a person looks."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import re
import shutil
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from made_up_runs import SHAPE, case, drive, failed, run_context, unscored
from PIL import Image

from tesla_med.config.models import LabelClass
from tesla_med.reports import html as page_module
from tesla_med.reports import overlays, slices
from tesla_med.reports.base import make_reports
from tesla_med.types import CaseView

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ONE = (LabelClass(value=1, name="prostate", color="#00ff00"),)


def write(run, pairs):
    (report,) = make_reports(["html"], run)
    (path,) = drive(report, pairs)
    return path.read_text(encoding="utf-8")


def with_entropy(view, value=0.5):
    return dataclasses.replace(view, entropy=np.full(view.image.shape, value, np.float32))


def decoded(address):
    kind, content = address.split(";base64,")
    assert kind in ("data:image/jpeg", "data:image/png")
    return Image.open(io.BytesIO(base64.b64decode(content)))


def filled(path, shape):
    """Return the pixels whose middle lies inside a path, by the even-odd rule."""
    from matplotlib.path import Path

    rows, columns = np.mgrid[: shape[0], : shape[1]]
    middles = np.stack([2 * columns.ravel() + 1, 2 * rows.ravel() + 1], axis=1)
    inside = np.zeros(shape[0] * shape[1], int)
    for part in re.findall(r"M([^M]*)z", path):
        start, moves = part.split("l")
        numbers = np.array(re.findall(r"-?\d+", moves), int).reshape(-1, 2)
        corners = np.vstack([np.array(start.split(), int), numbers]).cumsum(axis=0)
        inside += Path(np.vstack([corners, corners[:1]])).contains_points(middles)
    return (inside % 2 == 1).reshape(shape)


# ------------------------------------------------------------ one slice


def test_outlines_hold_exactly_the_mask():
    mask = np.zeros((20, 30), np.uint8)
    mask[2:12, 3:18] = 1
    mask[5:8, 6:9] = 0  # a hole
    mask[15:, 25:] = 1  # at the edge
    mask[0, 0] = 1  # a single pixel, in a corner
    mask[10:14, 20:24] = 7  # not a class
    (path,) = slices._outlines(mask, ONE, "adapted").values()
    assert np.array_equal(filled(path, mask.shape), mask == 1)
    assert slices._outlines(np.zeros_like(mask), ONE, "adapted") == {}


def test_outlines_of_random_shapes():
    rng = np.random.default_rng(0)
    for _ in range(10):
        mask = (rng.random((12, 14)) > 0.6).astype(np.uint8)
        (path,) = slices._outlines(mask, ONE, "source").values()
        assert np.array_equal(filled(path, mask.shape), mask == 1)


def test_speckle_is_a_picture_of_the_mask(monkeypatch):
    monkeypatch.setattr(slices, "MOST_EDGES", 50)
    mask = (np.random.default_rng(0).random((20, 30)) > 0.5).astype(np.uint8)
    found = slices._outlines(mask, ONE, "adapted")
    picture = np.asarray(decoded(found["1"]).convert("RGBA"))
    assert np.array_equal(picture[..., 3] > 0, mask == 1)
    assert tuple(picture[mask == 1][0][:3]) == tuple(bytes.fromhex(slices.ROLES["adapted"][1:]))


@pytest.mark.parametrize("flip", [1, -1])
def test_slices_are_laid_out_as_overlays_are(tmp_path, flip):
    _, view = case(run_context(tmp_path), 1, affine=np.diag([0.8 * flip, 0.8, 3.0, 1.0]))
    content = slices.draw_slices(with_entropy(view), 2, ONE)
    plane = overlays.layout(view.affine, view.spacing, 2)
    assert content["count"] == len(content["slices"]) == SHAPE[2]
    assert content["layers"] == ["source", "adapted", "reference", "entropy"]
    assert (content["height"], content["width"]) == plane.cut(view.mask, 0).shape
    low, high = overlays.display_window(view)
    for index in (4, 6):
        item = content["slices"][index]
        grey = np.clip((plane.cut(view.image, index) - low) / (high - low), 0, 1) * 255
        assert np.abs(np.asarray(decoded(item["image"]), float) - grey).mean() < 8
        for role, mask in (
            ("source", view.source_mask),
            ("adapted", view.mask),
            ("reference", view.reference),
        ):
            wanted = plane.cut(mask, index) == 1
            assert np.array_equal(filled(item[role]["1"], wanted.shape), wanted), role
        heat = np.asarray(decoded(item["entropy"]).convert("RGBA"))
        assert len(np.unique(heat.reshape(-1, 4), axis=0)) == 1
    empty = content["slices"][0]
    assert empty["adapted"] == {}
    assert empty["dice"] == {"source": "n/a", "adapted": "n/a"}


def test_entropy_is_seen_where_it_is_high():
    low, high = (
        np.asarray(decoded(slices._heat(np.full((4, 4), value, np.float32))).convert("RGBA"))
        for value in (0.0, 1.0)
    )
    assert low[..., 3].max() == 0
    assert high[..., 3].min() > 200
    assert tuple(high[0, 0, :3]) == slices.RAMP[-1]


def test_large_slices_are_stored_smaller_and_outlined_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(slices, "LONGEST", 32)
    _, view = case(run_context(tmp_path), 1)
    content = slices.draw_slices(view, 2, ONE, [6])
    (item,) = content["slices"]
    assert max(decoded(item["image"]).size) == 32
    shape = content["height"], content["width"]
    assert max(shape) > 32
    assert filled(item["adapted"]["1"], shape).sum() == (view.mask[..., 6] == 1).sum()


def test_ignored_voxels_are_no_part_of_the_dice_of_a_slice(tmp_path):
    _, view = case(run_context(tmp_path), 1, shift=0, source_shift=3)
    ignored = view.source_mask != view.reference
    hidden = CaseView(
        *(view.image, view.source_mask, view.mask, np.where(ignored, 0, view.reference), view.affine),
        *(view.spacing, ignored),
    )
    (item,) = slices.draw_slices(hidden, 2, ONE, [6])["slices"]
    assert item["dice"] == {"source": "1.00", "adapted": "1.00"}


# ------------------------------------------------------------ files and page


def test_every_slice_of_every_case_lies_beside_the_page(tmp_path):
    run = run_context(tmp_path, max_cases_with_overlays=1)
    names = ["P1/Case 1 ä & <b>", "not text \udcff", "P2/a,b;=1+1"]
    pairs = [case(run, number, name=name) for number, name in enumerate(names)]
    html = write(run, [*pairs, (failed(), None), unscored(run)])
    addresses = re.findall(r'data-slices="([^"]*)"', html)
    assert len(addresses) == 4
    files = {
        os.fsencode(path.relative_to(tmp_path / "report")) for path in (tmp_path / "report").rglob("*.js")
    }
    assert {unquote_to_bytes(address) for address in addresses} == files
    for name in names:
        content = slices.read_slices(slices.file_of(tmp_path / "report", name))
        assert len(content["slices"]) == SHAPE[2]
        assert content["used"] == "adapted"
    assert html.count("All 12 slices") == 4
    assert html.count("data:image/jpeg") == 3  # the worst case only
    assert len(re.findall(r"<script>", html)) == 1
    assert not re.search(r"<script[^>]*\ssrc", html)


def test_the_files_are_scripts_that_call_one_function(tmp_path):
    run = run_context(tmp_path)
    write(run, [case(run, 1)])
    text = slices.file_of(tmp_path / "report", "HK/Case01").read_text(encoding="ascii")
    found = re.fullmatch(r"showSlices\((\{.*\})\);\n", text)
    assert json.loads(found[1])["width"] > 0
    assert "HK/Case01" not in text


def test_slices_can_be_switched_off_and_the_page_keeps_its_own(tmp_path):
    run = run_context(tmp_path, slices=False, max_cases_with_overlays=1, overlays_per_case=2)
    html = write(run, [case(run, 1, shift=0), case(run, 2, shift=5), case(run, 3, shift=1)])
    assert not (tmp_path / "report/slices").exists()
    assert html.count("data:image/jpeg") == 2
    assert "<h3>HK/Case02</h3>" in html
    assert "data-slices" not in html
    assert "<script" not in html


def test_a_page_that_would_be_too_large_leaves_the_better_cases_out(tmp_path, monkeypatch):
    run = run_context(tmp_path)
    pairs = [case(run, number, shift=number) for number in (1, 2, 3)]
    sizes = slices.encoded_size(slices.draw_slices(pairs[0][1], 2, ONE, [5, 6, 7]))
    monkeypatch.setattr(page_module, "MOST_BYTES", int(2.5 * sizes))
    html = write(run, pairs)
    assert html.count("data:image/jpeg") == 6
    assert "The 2 worst of 3 cases" in html
    assert "so is what fits into a page" in html


def test_a_mask_that_was_undone_is_the_sources_on_its_slices(tmp_path):
    run = run_context(tmp_path)
    (first, view), (second, other) = case(run, 1), case(run, 2)
    write(run, [(first, with_entropy(view)), (second, with_entropy(other))])
    undone = first.model_copy(update={"used": "source"})
    html = write(run, [(undone, None), (second, None)])
    changed, kept = (
        slices.read_slices(slices.file_of(tmp_path / "report", name)) for name in ("HK/Case01", "HK/Case02")
    )
    assert changed["used"] == "source"
    assert all(item["adapted"] == item["source"] for item in changed["slices"])
    assert all(item["dice"]["adapted"] == item["dice"]["source"] for item in changed["slices"])
    assert not any("entropy" in item for item in changed["slices"])
    assert "entropy" not in changed["layers"]
    assert any(item["adapted"] != item["source"] for item in kept["slices"])
    assert kept["layers"][-1] == "entropy"
    assert html.count("data:image/jpeg") == 6  # both keep their pictures
    assert "finished in an earlier run" not in html


def test_slices_of_a_case_that_fails_now_go(tmp_path):
    run = run_context(tmp_path)
    write(run, [case(run, 1)])
    assert slices.file_of(tmp_path / "report", "HK/Case01").exists()
    html = write(run, [(failed("HK/Case01"), None)])
    assert not slices.file_of(tmp_path / "report", "HK/Case01").exists()
    assert "data-slices" not in html


@pytest.mark.parametrize("text", ["showSlices({", "showSlices([]);\n", ""])
def test_a_damaged_file_is_no_slices(tmp_path, text):
    path = tmp_path / "x.js"
    path.write_text(text)
    assert slices.read_slices(path) is None
    assert slices.read_slices(tmp_path / "none.js") is None


# ------------------------------------------------------------ a person


def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    return sync_api, path


@pytest.fixture(scope="module")
def opened():
    sync_api, path = browser()
    flags = [
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def report(tmp_path):
    run = run_context(tmp_path, 3, max_cases_with_overlays=1)
    pairs = [case(run, number, shift=number) for number in (1, 2)]
    write(run, [(result, with_entropy(view)) for result, view in pairs])
    return tmp_path / "report" / "report.html"


@pytest.mark.slow
def test_a_person_opens_a_case_and_switches_layers(opened, report):
    asked, errors = [], []
    page = opened.new_page(viewport={"width": 1280, "height": 800})
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    assert not [url for url in asked if url.endswith(".js")]  # nothing until a case is opened
    page.click("td.case a >> nth=1")  # the name in the table opens its slices
    page.wait_for_selector("section[data-ready='12']")
    assert [url for url in asked if url.endswith(".js")] == [(report.parent / "slices/HK/Case01.js").as_uri()]
    section = page.locator("section[data-ready]")
    first = section.locator("output").inner_text()
    before = section.locator(".frame").screenshot()
    section.get_by_label("Next slice").click()
    assert section.locator("output").inner_text() != first
    assert section.locator(".frame").screenshot() != before
    for key, layer in (("1", "adapted"), ("2", "source"), ("3", "reference"), ("4", "entropy")):
        was = section.locator(f"svg.slice .{layer}").first.is_visible()
        page.keyboard.press(key)
        assert section.locator(f"svg.slice .{layer}").first.is_visible() is not was, layer
        page.click(f"label:has(#layer-{layer})")
        assert section.locator(f"svg.slice .{layer}").first.is_visible() is was, layer
    page.uncheck("#class-2")
    assert not section.locator("svg.slice .adapted .c2").first.is_visible()
    assert section.locator("svg.slice .adapted .c1").first.is_visible()
    small = section.locator("svg.slice").get_attribute("viewBox")
    page.check("#whole")
    assert section.locator("svg.slice").get_attribute("viewBox") != small
    section.locator(".all-at-once").check()
    assert section.locator(".sheet svg.slice").count() == 12
    section.locator(".sheet button >> nth=2").click()
    assert section.locator("output").inner_text().startswith("Slice 3 of 12")
    assert section.locator(".sheet svg.slice").count() == 0
    assert errors == []
    assert all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.slow
def test_the_page_alone_says_where_its_slices_are(opened, report, tmp_path):
    alone = tmp_path / "sent on" / "report.html"
    alone.parent.mkdir()
    shutil.copy(report, alone)
    page = opened.new_page()
    page.goto(alone.as_uri())
    assert page.locator(".stills svg.slice path").first.is_visible()
    page.click("details.all > summary >> nth=1")
    page.wait_for_selector(".trouble")
    text = page.inner_text(".trouble")
    assert "slices/HK/Case01.js is missing beside this page" in text
    shutil.copytree(report.parent / "slices", alone.parent / "slices")
    (alone.parent / "slices/HK/Case02.js").write_text("showSlices(")
    page.click("details.all > summary >> nth=0")
    page.wait_for_selector(".trouble >> text=damaged")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_adapted_dice_is_seen_at_once(opened, report, width, scheme):
    context = opened.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = page.locator("tbody.case .strong")
    assert found.count() == 4
    for place in range(4):
        box = found.nth(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    for element in page.locator(".chip").all():
        assert element.bounding_box()["width"] <= width / 2 + 10
    dark = "rgb(20, 25, 31)"
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == dark) == (scheme == "dark")
    context.close()
