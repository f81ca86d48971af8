"""Whether this machine has what tesla-med needs, for people who report or look for a fault."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.errors import TeslaMedError
from tesla_med.io.locks import system_lock
from tesla_med.scoring.text import counted

LIBRARIES = (
    "torch",
    "torchvision",
    "monai",
    "numpy",
    "nibabel",
    "SimpleITK",
    "kornia",
    "pydantic",
    "safetensors",
)
EXTRAS = {
    "dicom": ("pydicom", "highdicom"),
    "review": ("starlette", "uvicorn"),
    "study": ("dask", "distributed", "dask_jobqueue"),
    "docs": ("mkdocs", "mkdocstrings"),
}
"""Modules of each extra that can be left out."""
LOW_DISK = 2**30
"""Bytes of free disk below which it is said."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        good: False where something will not work; True also for what is only told.
        text: what was found, and what to do where it is not good.
    """

    name: str
    good: bool
    text: str


def examine(out: Path, *, self_test: bool = True) -> list[Finding]:
    """Look at the installation, the machine and a folder for results.

    Args:
        out: folder in which results are to be written.
        self_test: also adapt a tiny network to two generated slices, write a mask, read it back and draw it.
    """
    looks: list[tuple[str, Callable[[], str]]] = [
        ("tesla-med", lambda: __version__),
        ("Python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        ("libraries", _libraries),
        ("extras", _extras),
        ("processor", _processor),
        ("GPU", _gpu),
        ("folder", lambda: _folder(out)),
        ("locks", lambda: _locks(out)),
        ("fonts", _fonts),
    ]
    if self_test:
        looks.append(("self-test", _self_test))
    return [_looked(name, look) for name, look in looks]


def _looked(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except Exception as error:  # whatever it is, it is the answer
        kind = "" if isinstance(error, TeslaMedError) else f"{type(error).__name__}: "
        return Finding(name, False, f"{kind}{error}")


def _libraries() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)


def _extras() -> str:
    def there(modules: tuple[str, ...]) -> str:
        missing = [item for item in modules if importlib.util.find_spec(item) is None]
        return "installed" if not missing else f"not installed (no {', '.join(missing)})"

    return ", ".join(f"{name} {there(modules)}" for name, modules in EXTRAS.items())


def _processor() -> str:
    import torch

    threads = counted(torch.get_num_threads(), "thread")
    return f"{counted(os.cpu_count() or 1, 'core')}, {threads} of torch{_memory()}"


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return ""
    return f", {size / 2**30:.0f} GiB of memory"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "none" + (f" is seen by torch (built for CUDA {built})" if built else "; torch is a CPU build")
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        names.append(f"cuda:{index} {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
        (torch.ones(8, 8, device=f"cuda:{index}") @ torch.ones(8, 8, device=f"cuda:{index}")).sum().item()
    return "; ".join(names)


def _folder(out: Path) -> str:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out, prefix=".tesla-med-doctor-") as stream:
        stream.write(b"x")
    free = shutil.disk_usage(out).free
    text = f"{out} can be written, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK:
        raise OSError(f"{text}: too little for a run; free some space or choose another --out")
    return text


def _locks(out: Path) -> str:
    path = out / f".tesla-med-doctor-{os.getpid()}.lock"
    try:
        lock = system_lock(path)
        if lock is None:
            return "the file system has none: a file takes their place while a run is active"
        lock.release()
        return "the file system has locks"
    finally:
        path.unlink(missing_ok=True)


def _fonts() -> str:
    from matplotlib import font_manager

    return Path(font_manager.findfont("DejaVu Sans", fallback_to_default=False)).name


def _self_test() -> str:
    import numpy as np
    import torch

    from tesla_med.config.files import load_pipeline
    from tesla_med.io.nifti import encode_nifti, grid_header
    from tesla_med.io.volumes import read_mask
    from tesla_med.models.base import build_model, default_device
    from tesla_med.tta.base import MethodContext, make_method

    start = time.perf_counter()
    pipeline = load_pipeline("prostate", ("model.params.width=4",))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(pipeline)
    params = pipeline.method_params("tesla", "N-O") | {"updates_per_case": 2, "batch_slices": 2}
    device = default_device("auto")
    method = make_method("tesla", model, params, MethodContext(device, 0))
    images = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    for batch in method.batches(method.to_device(images)):
        method.adapt(batch)
    mask = method.predict(images).argmax(1).numpy().astype(np.uint8)
    if mask.shape != (2, 64, 64):
        raise RuntimeError(f"a mask of {mask.shape} instead of (2, 64, 64)")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mask.nii.gz"
        path.write_bytes(encode_nifti(mask, grid_header(np.diag([1.0, 2.0, 3.0, 1.0]))))
        if not np.array_equal(read_mask(path)[0], mask):
            raise RuntimeError("a mask that was written differs when it is read")
        _draw(Path(name) / "picture.png", mask[0])
    seconds = time.perf_counter() - start
    return f"two slices adapted to on {device.type}, a mask written, read and drawn in {seconds:.1f} s"


def _draw(path: Path, slice_: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().imshow(slice_)
    figure.savefig(path)


def as_text(findings: list[Finding]) -> str:
    """Return what was found as lines for a bug report."""
    return "\n".join(f"{'ok ' if item.good else 'BAD'} {item.name}: {item.text}" for item in findings)
