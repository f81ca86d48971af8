"""Which site and pipeline a request means, and whether they belong together."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tesla_med.config.bundle_files import bundle_folder
from tesla_med.config.bundle_reader import read_bundle
from tesla_med.config.files import (
    apply_overrides,
    load_pipeline,
    load_site,
    read_yaml,
    readable,
    site_files,
    validate,
)
from tesla_med.config.models import Files, PipelineConfig, Section, SiteConfig
from tesla_med.config.nnunet import ignored_label, nnunet_folder, read_model
from tesla_med.config.paths import user_path
from tesla_med.config.trust import check_trusted, trust
from tesla_med.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Section)
NO_SITE = "every_image"
FORMATS = ("nnunet", "bundle")
"""Models that were trained elsewhere, by the names of their networks and pipelines."""


def resolve(
    site: str | SiteConfig | None,
    pipeline: str | PipelineConfig | None,
    overrides: tuple[str, ...],
    weights: str | Path | None = None,
    *,
    trust_code: bool = False,
) -> tuple[SiteConfig, PipelineConfig]:
    """Return site and pipeline configurations that belong together.

    With ``trust_code`` what a bundle needs and cannot be read as data is run by MONAI.

    Raises:
        ConfigError: unknown or ambiguous names, wrong overrides, or a site of another task.
    """
    foreign = foreign_model(weights, trust_code=trust_code)
    if foreign is not None and pipeline is None:
        pipeline = str(foreign["model"]["name"])  # the pipeline of a format has its name
    if site is None and pipeline is None:
        pipeline = _pipeline_of_card(weights)
    if isinstance(pipeline, str):
        pipeline = load_pipeline(pipeline, overrides, given=foreign)
    elif pipeline is not None:
        pipeline = _override(pipeline, [text for text in overrides if not text.startswith("site.")])
    if isinstance(site, str):
        known = None if pipeline is None or foreign is not None else pipeline.sites
        site = load_site(site, known, overrides)
    else:
        if site is None:
            assert pipeline is not None  # noqa: S101 - set above
            several = pipeline.channels > 1  # named as nnU-Net does: case_0000, case_0001
            names = [f"*_{index:04d}.nii.gz" for index in range(pipeline.channels)] if several else ["*"]
            files = Files(image=tuple(names))
            site = SiteConfig(id=NO_SITE, pipeline=pipeline.sites, institution="", files=files)
        own = [text.removeprefix("site.") for text in overrides if text.startswith("site.")]
        site = _override(site, own)
    if pipeline is None:
        pipeline = load_pipeline(site.pipeline, overrides)
    if foreign is not None:
        pipeline = pipeline.model_copy(update={"sites": site.pipeline})
        site = _ignoring(site, weights)
    if site.pipeline != pipeline.sites:
        raise ConfigError(
            f"site {site.pipeline}/{site.id} is not one of pipeline {pipeline.name!r}, "
            f"which serves site_configs/{pipeline.sites}"
        )
    return site, pipeline


def source_sites(
    pipeline: str | PipelineConfig | None,
    sites: str | SiteConfig | Sequence[str | SiteConfig],
    weights: str | Path | None = None,
) -> tuple[PipelineConfig, list[SiteConfig]]:
    """Return the pipeline and the labelled sites of a source model, which may be given by name.

    Args:
        pipeline: name, YAML path or loaded configuration; None takes that of the first site.
        sites: one or several: id, ``pipeline/id``, YAML path or loaded configuration.
        weights: of the model, where there are any: those of another framework bring their classes.

    Raises:
        ConfigError: no site, something else than the above, an unknown or ambiguous name, or a site of
            another task.
    """
    given = [sites] if isinstance(sites, str | SiteConfig) else sites
    if not isinstance(given, Sequence) or not all(isinstance(item, str | SiteConfig) for item in given):
        raise ConfigError(f"sites: expected ids, such as ['A', 'B'], or loaded configurations, got {sites!r}")
    if not given:
        raise ConfigError("sites is empty; give one or more")
    if pipeline is None or isinstance(pipeline, str):
        pipeline = resolve(given[0], pipeline, (), weights)[1]
    elif not isinstance(pipeline, PipelineConfig):
        raise ConfigError(f"pipeline: expected a name or a loaded configuration, got {pipeline!r}")
    folder = pipeline.sites
    return pipeline, [load_site(item, folder) if isinstance(item, str) else item for item in given]


def _ignoring(site: SiteConfig, weights: str | Path | None) -> SiteConfig:
    """Return the site with the label "ignore" of an nnU-Net left out of references whose values are kept."""
    folder = None if weights is None else nnunet_folder(user_path(weights))
    label = None if folder is None else ignored_label(folder)
    if label is None:
        return site
    layers = tuple(
        item.model_copy(update={"ignore": (label,)})
        if (item.write, item.values, item.ignore) == (None, None, ())
        else item
        for item in site.files.masks
    )
    return site.model_copy(update={"files": site.files.model_copy(update={"masks": layers})})


def resolve_for_check(
    site: str, weights: Path | None, overrides: tuple[str, ...], *, trust_code: bool = False
) -> tuple[SiteConfig, PipelineConfig]:
    """Return site and pipeline configurations to check files with; as :func:`resolve`.

    Raises:
        ConfigError: also where the classes come from a model, which is neither given nor named by the site.
    """
    given = weights or load_site(site, None, overrides).weights
    found, pipeline = resolve(site, None, overrides, given, trust_code=trust_code)
    preprocessing = pipeline.preprocessing
    if found.pipeline in FORMATS and preprocessing.nnunet is None and preprocessing.bundle is None:
        raise ConfigError(
            f"site {found.pipeline}/{found.id}: classes and channels come from the model; "
            "give it with --weights, or as 'weights' in the site file"
        )
    return found, pipeline


def foreign_model(weights: str | Path | None, *, trust_code: bool = False) -> dict[str, Any] | None:
    """Return what weights say of classes, network and preprocessing that no pipeline knows; None for none.

    Those are nnU-Net folders, MONAI bundles, and weights that were adapted from one, whose card says it.

    Raises:
        CheckpointError: a file of the folder cannot be read or is not supported.
    """
    if weights is None:
        return None
    path = user_path(weights)
    folder = nnunet_folder(path)
    if folder is not None and path.suffix != ".safetensors":
        return read_model(folder)
    bundle = bundle_folder(path)
    if bundle is not None and path.suffix != ".safetensors":
        trust(bundle, given=trust_code)
        return read_bundle(path, trust=trust_code)
    card = path.with_suffix(".json")
    if path.suffix != ".safetensors" or not card.is_file():
        return None
    return _foreign_card(card, trust_code)


def _foreign_card(card: Path, trust_code: bool) -> dict[str, Any] | None:
    """Return what the card of adapted weights says, if no pipeline knows their network."""
    try:
        content = json.loads(card.read_text(encoding="utf-8"))
        of = content["preprocessing"]
        if content["model"]["name"] not in FORMATS or all(of.get(name) is None for name in FORMATS):
            return None
        found = {key: content[key] for key in ("classes", "regions", "channels", "preprocessing", "model")}
        params = found["model"]["params"]
        needed = {params.get("code"), params.get("code_of_inferer"), (of.get("bundle") or {}).get("code")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what is wrong with the card is said where it is read
    for code in needed - {None}:
        trust(Path(str(code)), given=trust_code)
        check_trusted(str(code))
    return found


def _override(config: S, overrides: list[str]) -> S:
    """Return a loaded configuration with ``key=value`` texts applied."""
    if not overrides:
        return config
    content = apply_overrides(config.model_dump(), overrides)
    return validate(type(config), content, f"--set {' '.join(overrides)}")


def _no_model(folder: Path) -> str:
    """Say what is missing in a folder that was given as a model, and where one may lie."""
    below = (*folder.glob("*"), *folder.glob("*/*"))
    models = sorted(str(item) for item in below if item.is_dir() and _holds_model(item))
    hint = f"; did you mean {' or '.join(models[:3])}?" if models else ""
    return (
        f"no model at {folder}: an nnU-Net folder holds plans.json, dataset.json and fold_k, a MONAI bundle "
        f"configs/metadata.json and configs/inference.json{hint}"
    )


def _holds_model(folder: Path) -> bool:
    return nnunet_folder(folder) == folder or bundle_folder(folder) == folder


def _pipeline_of_card(weights: str | Path | None) -> str:
    """Return the pipeline that the card beside the weights names."""
    if weights is None:
        raise ConfigError(
            "give --site, or --weights and --pipeline: without them nothing says what to look for"
        )
    path = user_path(weights)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; give the weights with --weights")
    if path.is_dir():
        raise CheckpointError(_no_model(path))
    card = path.with_suffix(".json")
    if not card.is_file():
        raise ConfigError(f"{path}: these weights have no card, so give --pipeline or --site")
    try:
        return str(json.loads(card.read_text(encoding="utf-8"))["pipeline"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{card}: not a model card of tesla-med ({error}); give --pipeline or --site"
        raise CheckpointError(text) from None


def other_sites(site: SiteConfig) -> list[SiteConfig]:
    """Return the other sites of the same folder, whose images are not this site's.

    A file that cannot be used is left out with a warning; what it names is still not this site's.
    """
    files = {name: path for name, path in site_files(site.pipeline).items() if name != site.id}
    found, broken = readable(files, lambda name: load_site(f"{site.pipeline}/{name}"))
    for reason in broken.values():
        log.warning("the file of another site is left out: %s", reason)
    stand_ins = [_by_name(path, site.pipeline) for path in broken]
    return [*found.values(), *stand_ins]


def _by_name(path: Path, pipeline: str) -> SiteConfig:
    """Return what is known of a site whose file cannot be used: the names of its folder."""
    try:
        institution = read_yaml(path).get("institution")
    except ConfigError:
        institution = None
    known = institution if isinstance(institution, str) else ""
    return SiteConfig(id=path.stem, pipeline=pipeline, institution=known)
