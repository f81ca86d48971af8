"""Studies on real schedulers and workers of Dask, on this machine: what kills do, and what SLURM is told.

A cluster of SLURM is played by two small programs: ``sbatch`` runs the job script in the background.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_site as small
import study_site

import tesla_med
from tesla_med.cli.app import run
from tesla_med.config.study import SlurmConfig
from tesla_med.study import schedulers

pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="killing needs POSIX signals"),
]
ROOT = Path(tesla_med.__file__).resolve().parent.parent
STUDY = [sys.executable, "-m", "tesla_med", "study", "study.yaml", "--device", "cpu"]
KILLED = """
import os, signal, sys
def stop(event, arguments):
    if event == "os.rename" and "/masks/Case" in str(arguments[1]) and "tesla-N-O" in str(arguments[1]):
        try:
            os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(stop)
"""
"""Kills the first process that is about to give its name to a mask of tesla N-O."""


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    """A study of 8 cells that was done in this process."""
    return study_site.do_study(tmp_path_factory.mktemp("whole"), weights)


@pytest.fixture
def environment(tmp_path):
    """Environment of processes that are started: this package, and what ``tmp_path/hooks`` puts before it."""
    (tmp_path / "hooks").mkdir()
    paths = os.pathsep.join([str(tmp_path / "hooks"), str(ROOT)])
    return os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "DASK_TEMPORARY_DIRECTORY": str(tmp_path),
    }


def until(holds, seconds=100.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.05)
    return found


def cells_done(out):
    return sorted((out / "cells").glob("*/[!.]*/cell.json"))


def same_as_one_process(out, whole):
    assert study_site.results(out) == study_site.results(whole / "one")
    assert study_site.rows(out) == study_site.rows(whole / "one")
    assert study_site.record(out)["complete"]
    assert not list(out.rglob(".tmp-*"))


# ------------------------------------------------------------ kills


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_cell(whole, environment, tmp_path):
    (tmp_path / "hooks" / "sitecustomize.py").write_text(KILLED, encoding="utf-8")
    out = tmp_path / "out"
    (whole / "killed").unlink(missing_ok=True)
    line = [*STUDY, "--jobs", "2", "--out", str(out)]
    done = subprocess.run(line, cwd=whole, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert (whole / "killed").is_file()
    assert "Dashboard: http://127.0.0.1:" in done.stderr
    assert "cells 8/8" in done.stderr
    assert "8 cells done now, 0 before, of 8" in done.stdout
    same_as_one_process(out, whole)


@pytest.mark.slow
def test_a_study_whose_client_was_killed_goes_on(whole, environment, tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    out = tmp_path / "out"
    line = [*STUDY, "--jobs", "1", "--out", str(out)]
    with (tmp_path / "log").open("w") as log:
        client = subprocess.Popen(line, cwd=whole, env=environment, stdout=log, stderr=log)  # noqa: S603
    until(lambda: len(cells_done(out)) >= 2)
    workers = psutil.Process(client.pid).children(recursive=True)
    client.send_signal(signal.SIGKILL)
    client.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []  # they do not go on without it
    before = {path: path.stat().st_mtime_ns for path in cells_done(out)}
    assert 2 <= len(before) < 8
    assert not (out / "study.csv").exists()
    monkeypatch.chdir(whole)
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", str(out)]) == 0
    after = {path: path.stat().st_mtime_ns for path in cells_done(out)}
    assert len(after) == 8
    assert before.items() <= after.items()
    same_as_one_process(out, whole)


# ------------------------------------------------------------ a scheduler behind an address


@pytest.mark.slow
def test_a_scheduler_behind_an_address_and_a_cell_that_fails(whole, weights, environment, tmp_path):
    for name in ("nii", "site_configs"):
        shutil.copytree(whole / name, tmp_path / name)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(weights.read_bytes()[:1000])
    study_site.write_study(tmp_path, weights, weights=[str(broken), str(weights)])
    (tmp_path / "elsewhere").mkdir()
    dask, known = [sys.executable, "-m", "dask"], str(tmp_path / "scheduler.json")
    programs = [
        [
            *dask,
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            known,
        ],
        [
            *dask,
            "worker",
            "--scheduler-file",
            known,
            "--nthreads",
            "2",
            "--host",
            "127.0.0.1",
            "--no-dashboard",
        ],
    ]
    started = [
        subprocess.Popen(line, cwd=tmp_path / "elsewhere", env=environment, stderr=subprocess.DEVNULL)  # noqa: S603
        for line in programs
    ]
    try:
        until(lambda: Path(known).is_file() and Path(known).stat().st_size > 0)
        address = json.loads(Path(known).read_text(encoding="utf-8"))["address"]
        line = [*STUDY, "--scheduler", address, "--out", "out"]
        done = subprocess.run(  # noqa: S603
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        for process in started[::-1]:
            process.terminate()
            process.wait(30)
    assert done.returncode == 1, done.stderr
    out, one = study_site.results(tmp_path / "out"), study_site.results(whole / "one")
    assert out == one
    assert done.stderr.count("Set aside: ") == 8
    assert "broken-" in done.stderr.partition("Set aside: ")[2]
    assert "CheckpointError" in done.stderr
    errors = [cell["error"] for cell in study_site.record(tmp_path / "out")["cells"] if not cell["done"]]
    assert len(errors) == 8
    assert all("broken.safetensors" in text for text in errors)


def test_a_cell_whose_worker_is_lost_again_and_again_is_explained():
    from distributed.scheduler import KilledWorker, WorkerState

    worker = WorkerState(
        address="tcp://node7:4711", status="closed", pid=1, name="w", nthreads=1, memory_limit=0,
        local_directory="", nanny="", server_id="w",
    )  # fmt: skip
    reason = schedulers._reason(KilledWorker("cell", worker, 3))
    assert "its worker was lost 4 times, the last at tcp://node7:4711" in reason


def test_that_there_is_no_worker_is_said_once(monkeypatch):
    monkeypatch.setattr(schedulers, "LOOK_EVERY_SECONDS", 0.01)
    workers, said = {"w": {}}, []

    class Client:
        def scheduler_info(self):
            return {"workers": workers}

    with schedulers._watched(Client(), said.append):
        time.sleep(0.3)
        assert said == []
        workers.clear()
        until(lambda: said)
        time.sleep(0.3)
        assert len(said) == 1
        assert "No worker for" in said[0]
        workers["w"] = {}
        time.sleep(0.3)
        workers.clear()
        until(lambda: len(said) == 2)


def test_a_worker_for_each_visible_card(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert schedulers.visible_cards("auto") == ["0", "1", "2"]
    assert schedulers.visible_cards("cpu") == []
    assert schedulers.visible_cards("cuda:1") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1f2e,7")
    assert schedulers.visible_cards("cuda") == ["5", "GPU-1f2e", "7"]


# ------------------------------------------------------------ SLURM


CLUSTER = {
    "jobs": 4,
    "memory": "16GB",
    "walltime": "08:00:00",
    "cpus": 4,
    "gpus": 1,
    "partition": "gpu",
    "account": "radiology",
    "directives": ("--qos=long",),
    "prologue": ("module load cuda", "export TMPDIR=$SLURM_TMPDIR"),
    "python": "/shared/venv/bin/python",
}


def test_the_job_script_of_slurm(tmp_path):
    pytest.importorskip("dask_jobqueue")
    with schedulers.slurm_cluster(SlurmConfig(**CLUSTER), tmp_path / "out") as cluster:
        lines = cluster.job_script().splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "-J tesla-med",
        f"-e {tmp_path}/out/logs/tesla-med-%J.err",
        f"-o {tmp_path}/out/logs/tesla-med-%J.out",
        "-p gpu",
        "-A radiology",
        "-n 1",
        "--cpus-per-task=4",
        "--mem=15G",
        "-t 08:00:00",
        "--gres=gpu:1",
        "--qos=long",
    ]
    worker = lines[-1]
    assert lines[-3:-1] == ["module load cuda", "export TMPDIR=$SLURM_TMPDIR"]
    assert worker.startswith("/shared/venv/bin/python -m distributed.cli.dask_worker tcp://")
    assert "--nthreads 1" in worker
    assert worker.endswith("--memory-limit 0")  # the last one counts


PROGRAMS = {
    "sbatch": """
cp "$1" {folder}/script-$$.sh
setsid sh {folder}/script-$$.sh > {folder}/job-$$.log 2>&1 &
echo $! >> {folder}/jobs
echo "Submitted batch job $!"
""",
    "scancel": "kill -- -$1\n",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setsid") is None, reason="jobs are groups of processes here")
def test_a_study_in_jobs_of_which_one_is_lost(whole, environment, tmp_path):
    pytest.importorskip("dask_jobqueue")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        path = programs / name
        path.write_text("#!/bin/sh\n" + text.format(folder=tmp_path), encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "slurm.yaml").write_text("{jobs: 1, memory: 2GB, interface: lo}\n", encoding="utf-8")
    out, jobs = tmp_path / "out", tmp_path / "jobs"
    line = [*STUDY, "--scheduler", str(tmp_path / "slurm.yaml"), "--out", str(out)]
    environment = environment | {"PATH": os.pathsep.join([str(programs), environment["PATH"]])}
    with (tmp_path / "log").open("w") as log:
        client = subprocess.Popen(line, cwd=whole, env=environment, stdout=log, stderr=log)  # noqa: S603
    try:
        until(lambda: cells_done(out))
        os.killpg(int(jobs.read_text(encoding="utf-8")), signal.SIGKILL)
        assert client.wait(100) == 0
    finally:
        client.kill()
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert f"At most 1 job of SLURM at a time; logs: {out / 'logs'}" in said
    assert len(jobs.read_text(encoding="utf-8").split()) == 2
    same_as_one_process(out, whole)
