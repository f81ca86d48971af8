"""The review page: what it shows, who may see it, and a person who uses it in a real browser."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import small_site as small

from tesla_med.actions.export import export
from tesla_med.errors import DataError, OutputError
from tesla_med.io.cases import find_cases
from tesla_med.io.files import sha256
from tesla_med.io.volumes import read_volume
from tesla_med.review import content as content_module
from tesla_med.review.content import Content
from tesla_med.review.server import make_app, serve
from tesla_med.runs.decisions import read_decisions

pytest.importorskip("starlette")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def finished(one_thread, tmp_path_factory):
    """A run of three cases with references, whose masks are balls, so that there is something to see."""
    folder = tmp_path_factory.mktemp("review")
    small.make_volumes(folder / "nii", 3)
    weights = small.train_weights(folder / "weights")
    small.run(folder / "nii", weights, folder / "run", save_uncertainty=True)
    for index, path in enumerate(sorted((folder / "run" / "masks").glob("*.nii.gz"))):
        image = nib.load(path)
        grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side) for side in image.shape], indexing="ij"))
        ball = (np.square(grid).sum(axis=0) < 0.2 + 0.1 * index).astype(np.uint8)
        nib.save(nib.Nifti1Image(ball, image.affine, image.header), path)
    return folder


@pytest.fixture
def place(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run", finished / "nii"


@pytest.fixture
def client(place):
    from starlette.testclient import TestClient

    run, volumes = place
    return TestClient(make_app(Content(run, volumes, "ann"), "secret"), base_url="http://127.0.0.1")


# ------------------------------------------------------------ who may see it


@pytest.mark.parametrize("path", ["/", "/static/review.js", "/api/cases", "/api/volumes/0/image.nii"])
def test_nothing_without_the_token(client, path):
    assert client.get(path).status_code == 403
    assert client.get(f"{path}?token=wrong").status_code == 403
    assert client.get("/?token=secret", follow_redirects=False).status_code == 303
    assert client.get(path).status_code == 200
    assert client.get("/?token=wrong").status_code == 403


def test_decisions_need_the_token_too(client, place):
    body = {"key": 0, "decision": "accept", "comment": ""}
    assert client.post("/api/decisions", json=body).status_code == 403
    assert read_decisions(place[0]) == []


def test_other_hosts_and_forms_are_refused(client):
    client.get("/?token=secret")
    assert client.get("/api/cases", headers={"host": "evil.example"}).status_code == 400
    posted = client.post("/api/decisions", content="key=0", headers={"content-type": "text/plain"})
    assert posted.status_code == 415
    answer = client.get("/api/cases")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"key": 0, "decision": "perhaps"},
        {"key": 99, "decision": "accept"},
        [1],
        {"key": "0", "decision": "edit"},
        {"key": 0, "decision": "accept", "comment": ""},
    ],
)
def test_a_decision_that_says_nothing_is_refused_and_not_saved(client, place, body):
    client.get("/?token=secret")
    answer = client.post("/api/decisions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert read_decisions(place[0]) == []


def test_a_decision_is_on_the_mask_that_was_shown(client, place):
    client.get("/?token=secret")
    item = client.get("/api/cases").json()["cases"][0]
    body = {"key": item["key"], "decision": "accept", "comment": "", "mask_sha256": item["mask_sha256"]}
    path = place[0] / "masks" / f"{item['title']}_mask.nii.gz"
    kept = path.read_bytes()
    shutil.copy(place[0] / "source_masks" / path.name, path)
    answer = client.post("/api/decisions", json=body)
    assert answer.status_code == 400
    assert "has changed since it was shown" in answer.json()["error"]
    path.unlink()
    assert len(client.get("/api/cases").json()["cases"]) == 3  # the others can still be looked at
    assert read_decisions(place[0]) == []
    path.write_bytes(kept)
    assert client.post("/api/decisions", json=body).status_code == 200
    assert [made.mask_sha256 for made in read_decisions(place[0])] == [item["mask_sha256"]]


# ------------------------------------------------------------ what it shows


def test_cases_come_worst_first_with_what_is_known(client):
    client.get("/?token=secret")
    cases = client.get("/api/cases").json()["cases"]
    assert {item["title"] for item in cases} == {"Case00", "Case01", "Case02"}
    known = [
        (item["trusted"], 2.0 if item["predicted_dice"] is None else item["predicted_dice"]) for item in cases
    ]
    assert known == sorted(known)
    assert cases[0]["layers"] == ["image", "adapted", "source", "reference", "entropy"]
    assert [item["name"] for item in cases[0]["classes"]] == ["background", "prostate"]
    assert cases[0]["decision"] is None


def test_volumes_lie_on_one_grid_and_are_what_the_run_saw(client, place, tmp_path):
    client.get("/?token=secret")
    item = client.get("/api/cases").json()["cases"][0]
    found = {}
    for layer in item["layers"]:
        plain = layer in ("image", "reference")
        path = tmp_path / f"{layer}.nii{'' if plain else '.gz'}"
        path.write_bytes(client.get(f"/api/volumes/{item['key']}/{path.name}").content)
        found[layer] = nib.load(path)
    image = read_volume(place[1] / f"{item['title']}.nii.gz")
    assert np.array_equal(np.asarray(found["image"].dataobj), image.array[0])
    for layer in found.values():
        assert np.allclose(layer.affine, image.affine, atol=1e-5)
        assert layer.shape == image.array.shape[1:]
    mask = nib.load(place[0] / "masks" / f"{item['title']}_mask.nii.gz")
    assert np.array_equal(np.asarray(found["adapted"].dataobj), np.asarray(mask.dataobj))
    assert set(np.unique(np.asarray(found["reference"].dataobj))) <= {0, 1}
    assert "no layer" in client.get(f"/api/volumes/{item['key']}/secrets.nii").json()["error"]


def test_several_runs_are_one_list(place, tmp_path):
    run, volumes = place
    (tmp_path / "study").mkdir()
    shutil.copytree(run, tmp_path / "study" / "F" / "one")
    shutil.copytree(run, tmp_path / "study" / "F" / "two")
    content = Content(tmp_path / "study", volumes, "ann")
    assert len(content.entries) == 6
    assert {item.title.split(":")[0] for item in content.entries} == {"F/one", "F/two"}
    key = next(item.key for item in content.entries if item.title == "F/two: Case01")
    content.decide(key, "accept", "", sha256(content.entries[key].mask))
    assert read_decisions(tmp_path / "study" / "F" / "one") == []
    assert [item.case for item in read_decisions(tmp_path / "study" / "F" / "two")] == ["Case01"]


def test_a_folder_of_images_is_searched_once_for_all_runs_of_a_site(place, tmp_path, monkeypatch):
    run, volumes = place
    for name in ("one", "two", "three"):
        shutil.copytree(run, tmp_path / "study" / name)
    searched = []
    monkeypatch.setattr(content_module, "find_cases", lambda *given: searched.append(1) or find_cases(*given))
    assert len(Content(tmp_path / "study", volumes, "ann").entries) == 9
    assert len(searched) == 1


def test_bad_folders_are_named(place, tmp_path):
    run, volumes = place
    with pytest.raises(OutputError, match="holds no run"):
        Content(volumes, volumes, "ann")
    (tmp_path / "other").mkdir()
    shutil.copy(volumes / "Case00.nii.gz", tmp_path / "other" / "Case77.nii.gz")
    with pytest.raises(DataError, match="holds none of the images"):
        Content(run, tmp_path / "other", "ann")


# ------------------------------------------------------------ a person


def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    return sync_api, path


@pytest.mark.slow
def test_a_person_looks_rejects_accepts_and_comes_back(place, tmp_path):
    sync_api, path = browser()
    run, volumes = place
    address: list[str] = []
    there = threading.Event()

    def ready(found):
        address.append(found)
        there.set()

    content = Content(run, volumes, "ann")
    threading.Thread(target=serve, args=(content, 0, ready), daemon=True).start()
    assert there.wait(10)
    asked: list[str] = []
    flags = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-quic"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address[0])
        page.wait_for_selector("body[data-ready='0']", timeout=60000)
        first = page.inner_text("#title")
        before = page.screenshot(path=tmp_path / "first.png")
        page.hover("#view")
        page.mouse.wheel(0, 240)
        time.sleep(0.5)
        assert page.screenshot() != before  # another slice
        scrolled = page.screenshot()
        page.keyboard.press("1")  # the adapted mask off
        time.sleep(0.5)
        assert page.is_checked("#show-adapted") is False
        assert page.screenshot() != scrolled
        page.keyboard.press("1")
        page.fill("#comment", "spills into the bladder")
        page.click("[data-decision=reject]")
        page.wait_for_selector("[data-decision=reject][aria-pressed=true]")
        page.keyboard.press("n")
        page.wait_for_selector("body[data-ready='1']", timeout=60000)
        second = page.inner_text("#title")
        page.keyboard.press("a")
        page.wait_for_selector("[data-decision=accept][aria-pressed=true]")
        page.reload()  # the third, which is the first that is not decided
        page.wait_for_selector("body[data-ready='2']", timeout=60000)
        assert "2 of 3 decided by ann" in page.inner_text("#progress")
        page.click("#cases li:first-child button")
        page.wait_for_selector("body[data-ready='0']", timeout=60000)
        assert page.input_value("#comment") == "spills into the bladder"
        assert page.get_attribute("[data-decision=reject]", "aria-pressed") == "true"
        assert page.inner_text("#message") == ""
        chromium.close()
    assert errors == []
    assert asked
    outside = [url for url in asked if not url.startswith(("http://127.0.0.1:", "blob:", "data:"))]
    assert outside == []
    assert {item.case: item.decision for item in read_decisions(run)} == {first: "reject", second: "accept"}
    result = export(run, "zip", out=tmp_path / "out", accepted=True)
    assert result.cases == (second,)
    assert result.skipped[first] == "rejected by ann"
    assert sorted(result.skipped.values()) == ["not reviewed", "rejected by ann"]


def test_what_was_accepted_leaves_and_the_sources_mask_where_it_was_chosen(place, tmp_path):
    run, volumes = place
    content = Content(run, volumes, "ann")
    keys = {item.title: item.key for item in content.entries}
    content.decide(keys["Case00"], "source", "", sha256(content.entries[keys["Case00"]].mask))
    content.decide(keys["Case01"], "accept", "", sha256(content.entries[keys["Case01"]].mask))
    result = export(run, "itksnap", out=tmp_path / "out", accepted=True)
    assert result.cases == ("Case00", "Case01")
    assert result.skipped == {"Case02": "not reviewed"}
    taken = Path(result.out / "Case00_mask.nii.gz").read_bytes()
    assert taken == (run / "source_masks" / "Case00_mask.nii.gz").read_bytes()
    other = Content(run, volumes, "bob")
    other.decide(keys["Case01"], "edit", "a slice is missing", sha256(other.entries[keys["Case01"]].mask))
    again = export(run, "itksnap", out=tmp_path / "again", accepted=True)
    assert again.cases == ("Case00",)
    assert "disagree" in again.skipped["Case01"]
    told = json.loads((tmp_path / "again" / "export.json").read_text(encoding="utf-8"))
    assert told["cases"] == ["Case00"]


def test_a_port_that_is_taken_is_named(place):
    run, volumes = place
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OutputError, match="cannot be used"):
            serve(Content(run, volumes, "ann"), taken.getsockname()[1], lambda _: None)


def test_the_viewer_is_the_one_that_the_page_names():
    import hashlib
    from importlib.resources import files

    static = files("tesla_med.review") / "static"
    digest = hashlib.sha256((static / "niivue.umd.js").read_bytes()).hexdigest()
    page = Path(__file__).parents[2] / "docs" / "how-to" / "review-masks.md"
    assert digest in page.read_text(encoding="utf-8")
    assert "BSD 2-Clause" in (static / "niivue.LICENSE.txt").read_text(encoding="utf-8")


def test_tiles_are_refused_and_the_reviewer_has_a_name(monkeypatch):
    from tesla_med.cli.reviewing import _user
    from tesla_med.errors import ConfigError
    from tesla_med.tasks.base import TASKS

    with pytest.raises(ConfigError, match="review: not for tiles"):
        TASKS.get("classification").refuse({"review"})
    monkeypatch.setattr("getpass.getuser", lambda: (_ for _ in ()).throw(KeyError("uid")))
    assert _user() == "reviewer"
