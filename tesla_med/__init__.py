"""tesla-med: adapt a segmentation model to a new site at test time, without labels.

Example::

    import tesla_med

    result = tesla_med.adapt_site("prostate/F", "./nii", weights="source.safetensors", out="runs/F")
    print(result.mean_dice_source, result.mean_dice)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "adapt_site": "tesla_med.adapt",
    "SiteResult": "tesla_med.records",
    "predict": "tesla_med.actions.predict",
    "evaluate": "tesla_med.actions.evaluate",
    "train_source": "tesla_med.training.train",
    "compute_statistics": "tesla_med.training.measure",
    "rollback": "tesla_med.actions.rollback",
    "Rollback": "tesla_med.actions.rollback",
    "run_demo": "tesla_med.demo.demo",
    "load_pipeline": "tesla_med.config.files",
    "load_site": "tesla_med.config.files",
    "PipelineConfig": "tesla_med.config.models",
    "SiteConfig": "tesla_med.config.models",
    "CaseResult": "tesla_med.records",
    "ClassScore": "tesla_med.records",
    "TeslaMedError": "tesla_med.errors",
}

__all__ = [
    "CaseResult",
    "ClassScore",
    "PipelineConfig",
    "Rollback",
    "SiteConfig",
    "SiteResult",
    "TeslaMedError",
    "__version__",
    "adapt_site",
    "compute_statistics",
    "evaluate",
    "load_pipeline",
    "load_site",
    "predict",
    "rollback",
    "run_demo",
    "train_source",
]

if TYPE_CHECKING:
    from tesla_med.actions.evaluate import evaluate as evaluate
    from tesla_med.actions.predict import predict as predict
    from tesla_med.actions.rollback import Rollback as Rollback
    from tesla_med.actions.rollback import rollback as rollback
    from tesla_med.adapt import adapt_site as adapt_site
    from tesla_med.config.files import load_pipeline as load_pipeline
    from tesla_med.config.files import load_site as load_site
    from tesla_med.config.models import PipelineConfig as PipelineConfig
    from tesla_med.config.models import SiteConfig as SiteConfig
    from tesla_med.demo.demo import run_demo as run_demo
    from tesla_med.errors import TeslaMedError as TeslaMedError
    from tesla_med.records import CaseResult as CaseResult
    from tesla_med.records import ClassScore as ClassScore
    from tesla_med.records import SiteResult as SiteResult
    from tesla_med.training.measure import compute_statistics as compute_statistics
    from tesla_med.training.train import train_source as train_source


def _name_the_user() -> None:
    """Give the user a name where the system has none for it, as in a container run under any number.

    Libraries ask for one when they are imported, and cannot be imported without.
    """
    import getpass
    import os

    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        os.environ["USER"] = f"uid-{os.getuid()}" if hasattr(os, "getuid") else "user"


_name_the_user()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import tesla_med`` costs nothing."""
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'tesla_med' has no attribute {name!r}")
