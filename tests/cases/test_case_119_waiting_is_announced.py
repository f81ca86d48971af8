"""Before the first case a run says how long a case and all of it will take, how much memory the process will
need, and what would be faster; then it tells of every update, and of how to go on after an interrupt.
"""

import io
import json
import re
import shlex
import subprocess
import sys

import pytest
import small_site as small
import tile_site
from lines import adapt, run, sets, work_there, write_site
from moments import ctrl_c, slow_clock

CASE = 119
INTERRUPTED = 130
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
TIME = r"[\d.]+ (?:s|min|h)"
MEMORY = r"memory of the process ([\d.]+) ([MG])iB"
CASES = rf"Estimate: (?:under 1 s|{TIME}) per case, {TIME} in all for (\d) cases? on cpu; {MEMORY}"
TILES = rf"Estimate: {TIME} per 1000 tiles, {TIME} in all for 24 tiles on cpu; {MEMORY}"


def cases(text):
    """Return the number of cases that an estimate speaks of; None without one."""
    found = re.search(CASES, text)
    return None if found is None else int(found[1])


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 2)


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    tile_site.make_tiles(tmp_path / "nii", 6)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def long(monkeypatch):
    """Everything takes so long that a run is measured, and ways to a faster one are named."""
    slow_clock(monkeypatch, 100)


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_time_and_memory_are_said_before_the_first_case(place, small_weights, capsys, protocol):
    assert adapt(small_weights, "--protocol", protocol) == 0
    said = capsys.readouterr().err
    before, _, after = said.partition("cases 1/2")
    assert cases(before) == 2
    assert "Estimate" not in after
    assert "Faster" not in said
    assert adapt(small_weights, "--protocol", protocol, "--dry-run", out="dry") == 0
    assert re.search(CASES, capsys.readouterr().out)


@pytest.mark.parametrize("protocol", ["N-O", pytest.param("N-M", marks=pytest.mark.slow)])
def test_tiles(tiles, tile_weights, capsys, long, protocol):
    assert adapt(tile_weights, "--protocol", protocol, pipeline="kather") == 0
    said = capsys.readouterr().err
    assert re.search(TILES, said)
    assert adapt(tile_weights, "--protocol", protocol, "--dry-run", pipeline="kather", out="dry") == 0
    assert re.search(TILES, capsys.readouterr().out)


@pytest.mark.parametrize(
    "method",
    ["tesla", "bn", "source", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shot", "opttta"))],
)
def test_results_do_not_depend_on_it(place, small_weights, capsys, long, method):
    more = "--method", method, "--guard"
    assert adapt(small_weights, *more, "--quiet", out="quiet") == 0
    assert capsys.readouterr().err == ""
    assert adapt(small_weights, *more) == 0
    assert re.search(CASES, capsys.readouterr().err)
    assert small.masks(place / "out") == small.masks(place / "quiet")


@pytest.mark.parametrize(
    ("protocol", "name"), [("N-O", "updates_per_case"), pytest.param("N-M", "epochs", marks=pytest.mark.slow)]
)
def test_what_would_be_faster_can_be_typed(place, small_weights, capsys, long, protocol, name):
    assert adapt(small_weights, "--protocol", protocol) == 0
    (line,) = re.findall(r"^Faster: .+$", capsys.readouterr().err, re.MULTILINE)
    assert "(--device cuda)" in line
    assert f"--set protocols.{protocol}.tesla.{name}=1" in line
    ways = re.findall(rf"\((--(?:set|method) [^)]+)\): {TIME} per case", line)
    assert len(ways) == 2
    for number, way in enumerate(ways):
        assert adapt(small_weights, "--protocol", protocol, *shlex.split(way), out=f"out-{number}") == 0


def test_no_estimate_ends_a_run(place, small_weights, capsys):
    """Nothing can be measured where no image can be read."""
    for path in (place / "nii").glob("Case0?.nii.gz"):
        small.truncate(path)
    assert adapt(small_weights) == 1
    assert "Estimate" not in capsys.readouterr().err
    assert [case["status"] for case in small.record(place / "out")["cases"]] == ["failed"] * 2


def test_the_rest_is_estimated_after_an_interrupt(place, small_weights, capsys):
    with ctrl_c("/masks/Case00"):
        assert adapt(small_weights) == INTERRUPTED
    assert cases(capsys.readouterr().err) == 2
    assert adapt(small_weights, "--resume") == 0
    assert cases(capsys.readouterr().err) == 1
    assert adapt(small_weights, "--resume") == 0
    assert "Estimate" not in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_lines_on_the_updates_of_what_takes_long(place, small_weights, capsys, monkeypatch, protocol):
    slow_clock(monkeypatch, 61)
    assert adapt(small_weights, "--protocol", protocol) == 0
    said = capsys.readouterr().err
    if protocol == "N-O":
        assert re.search(rf"^Case00: update 1/2, {TIME}, about {TIME} left$", said, re.MULTILINE)
        assert re.search(rf"^Case01: update 2, {TIME}$", said, re.MULTILINE)
    else:
        assert re.search(rf"^pass 2: update 1/3, {TIME}, about {TIME} left$", said, re.MULTILINE)
    assert re.search(r"^cases 2/2: Case01, ", said, re.MULTILINE)


def test_a_bar_moves_with_every_update(place, small_weights, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert adapt(small_weights) == 0
    assert "Estimate: " in shown.getvalue()
    assert re.search(r"updates of Case01.*2/2", shown.getvalue())


@pytest.mark.parametrize(
    ("protocol", "part"),
    [("N-O", "/masks/Case01"), pytest.param("N-M", "/.state/state-2", marks=pytest.mark.slow)],
)
def test_an_interrupt_names_resume(place, small_weights, capsys, protocol, part):
    more = "--protocol", protocol, "--reset", "site"
    assert adapt(small_weights, *more, out="whole") == 0
    with ctrl_c(part):
        assert adapt(small_weights, *more) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert (place / "out/.state").is_dir()
    assert adapt(small_weights, *more) == 2
    assert adapt(small_weights, *more, "--resume") == 0
    assert small.masks(place / "out") == small.masks(place / "whole")


def test_an_interrupted_comparison_names_resume(place, small_weights, capsys):
    words = ["compare", "--pipeline", "prostate", "--sites", str(place / "site_configs/prostate/X.yaml")]
    words += ["--volumes", "nii", "--weights", str(small_weights), "--methods", "source,tesla"]
    words += ["--seeds", "1", "--out", "out", "--device", "cpu", *sets(*small.SMALL[:4], *small.FEW)]
    with ctrl_c("tesla-N-O/seed-0/masks/Case01"):
        assert run(words) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    cells = json.loads((place / "out/cells.json").read_text(encoding="utf-8"))
    assert sorted(cell["complete"] for cell in cells.values()) == [False, True]
    assert run([*words, "--resume"]) == 0
    cells = json.loads((place / "out/cells.json").read_text(encoding="utf-8"))
    assert all(cell["complete"] for cell in cells.values())


@pytest.mark.slow
def test_memory_is_about_right(tmp_path, monkeypatch):
    """The highest memory of a whole process, of a network that is no small part of it."""
    work_there(tmp_path, monkeypatch, 1)
    train = ["train", "--pipeline", "prostate", "--sites", "site_configs/prostate/X.yaml", "--volumes", "nii"]
    big = sets("preprocessing.size=[192,192]", "model.params.width=24", "train.batch_size=1")
    assert run([*train, "--out", "source", "--steps", "1", "--device", "cpu", *big]) == 0
    words = ["adapt", "--site", "prostate/X", "--volumes", "nii", "--weights", "source/source.safetensors"]
    words += ["--out", "out", "--device", "cpu", *sets("protocols.N-O.tesla.updates_per_case=2")]
    program = (  # not of the children of this process, whose own memory would count
        "import sys; from tesla_med.cli.app import run; code = run(sys.argv[1:]); "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    used = int(done.stdout.split()[-1]) / 1024
    _, figure, unit = re.search(CASES, done.stderr).groups()
    assert float(figure) * (1024 if unit == "G" else 1) == pytest.approx(used, rel=0.2)
