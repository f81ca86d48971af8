"""Resolve what a run will do before anything is written: configuration, cases, weights, settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from tesla_med.config.files import apply_overrides, load_pipeline, load_site, site_files, validate
from tesla_med.config.models import Files, PipelineConfig, Protocol, Reset, Section, SiteConfig
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.io.cases import find_cases
from tesla_med.io.files import sha256
from tesla_med.models.base import Network, default_device
from tesla_med.models.checkpoint import ModelCard, versions
from tesla_med.models.loading import load_model
from tesla_med.registry import unknown_name
from tesla_med.training.measure import GivenStatistics, statistics_for
from tesla_med.tta.base import METHODS, MethodContext, TTAMethod, make_method
from tesla_med.types import Case

S = TypeVar("S", bound=Section)
log = logging.getLogger(__name__)
RESETS: tuple[Reset, ...] = ("never", "site", "case")
NO_SITE = "every_image"
NOT_A_DEVICE = "Not a medical device: for research use only."


@dataclass(frozen=True)
class Plan:
    """A run, resolved.

    Attributes:
        site: the site.
        pipeline: the pipeline, following the weights' card.
        cases: what will be done, in order.
        skipped: files that will not be used, with the reason.
        folder: the folder that case names are relative to.
        weights: path of the source weights.
        weights_sha256: their hash.
        model: the source network.
        card: of the weights, or None.
        method: name.
        protocol: N-O, N-M, Y-O or Y-M.
        reset: never, site or case.
        seed: of every generator.
        device: where to compute.
        out: output folder.
        notes: remarks for the whole run.
        save_probs: also write class probabilities.
        save_uncertainty: also write normalised entropy.
        statistics: of the source features, for the Y protocols; None under N.
    """

    site: SiteConfig
    pipeline: PipelineConfig
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Path, str], ...]
    folder: Path
    weights: Path
    weights_sha256: str
    model: Network
    card: ModelCard | None
    method: str
    protocol: Protocol
    reset: Reset
    seed: int
    device: torch.device
    out: Path
    notes: tuple[str, ...]
    save_probs: bool = False
    save_uncertainty: bool = False
    statistics: GivenStatistics | None = None

    @cached_property
    def context(self) -> MethodContext:
        """What methods are told."""
        return MethodContext(
            device=self.device,
            seed=self.seed,
            model_range=self.pipeline.preprocessing.model_range,
            precision=self.pipeline.precision,
            predict_batch=self.pipeline.predict_batch,
            cuda_graphs=self.pipeline.cuda_graphs,
            statistics=None if self.statistics is None else self.statistics.moments,
        )

    def make_method(self, name: str) -> TTAMethod:
        """Return a method on its own copy of the source model.

        Raises:
            ConfigError: its parameters do not fit.
            AdaptationError: it cannot adapt this model.
        """
        return make_method(name, self.model, self.method_params(name), self.context)

    def method_params(self, name: str) -> dict[str, Any]:
        """Return the parameters of a method: the pipeline's, for ``source`` over those of the card."""
        params = self.pipeline.method_params(name, self.protocol)
        needed = self.card.extra.get("predict", {}) if self.card is not None and name == "source" else {}
        return {**needed, **params}

    def settings(self) -> dict[str, Any]:
        """Return everything that must be the same for a run to be resumed."""
        return {
            "site": self.site.model_dump(mode="json"),
            "pipeline": self.pipeline.model_dump(mode="json", exclude={"reports"}),
            "method": self.method,
            "protocol": self.protocol,
            "reset": self.reset,
            "seed": self.seed,
            "device": self.device.type,
            "weights_sha256": self.weights_sha256,
            "statistics_sha256": None if self.statistics is None else self.statistics.sha256,
            "cases": [case.name for case in self.cases],
            "save_probs": self.save_probs,
            "save_uncertainty": self.save_uncertainty,
        }

    def manifest(self) -> dict[str, Any]:
        """Return what a reader needs to judge and repeat the run."""
        params = self.method_params(self.method)
        method = METHODS.get(self.method)
        return {
            "notice": NOT_A_DEVICE,
            "terms": self.site.terms,
            "versions": versions(),
            "device": device_name(self.device),
            "weights": self.weights.name,
            "weights_sha256": self.weights_sha256,
            "statistics": None if self.statistics is None else self.statistics.record(),
            "seed": self.seed,
            "method": {"name": self.method, "citation": method.citation}
            | {"parameters": method.Params.model_validate(params).model_dump(mode="json")},
            "protocol": self.protocol,
            "reset": self.reset,
            "skipped": [{"file": path.name, "reason": reason} for path, reason in self.skipped],
            "notes": list(self.notes),
        }


def make_plan(
    site: str | SiteConfig | None,
    volumes: str | Path,
    *,
    weights: str | Path | None = None,
    statistics: str | Path | None = None,
    pipeline: str | PipelineConfig | None = None,
    method: str | None = None,
    protocol: Protocol | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    reset: Reset | None = None,
    overrides: tuple[str, ...] = (),
    default_name: str | None = None,
    save_probs: bool = False,
    save_uncertainty: bool = False,
) -> Plan:
    """Resolve a run; arguments and errors as in :func:`tesla_med.adapt_site`.

    Without a site (``None``) every image found is a case, the whole field is used and nothing is scored.
    """
    place = default_device(device)
    if reset is not None and reset not in RESETS:
        raise ConfigError(unknown_name("reset", reset, list(RESETS)))
    site_config, pipeline_config = resolve(site, pipeline, overrides, weights)
    chosen = method or pipeline_config.method
    chosen_protocol = choose_protocol(chosen, protocol, pipeline_config.protocol)
    others = other_sites(site_config) if site is not None else []
    found = find_cases(Path(volumes), site_config, others)
    path = _weights_path(weights, site_config)
    loaded = load_model(path, pipeline_config, overrides)
    for text in loaded.warnings:
        log.warning("%s", text)
    weights_sha256 = sha256(path)
    known = statistics_for(chosen_protocol, path, weights_sha256, loaded.pipeline, statistics)
    reset_at = reset or loaded.pipeline.reset_for(chosen_protocol)
    default_out = Path("runs") / site_config.id / (default_name or f"{chosen}-{chosen_protocol}")
    return Plan(
        site=site_config,
        pipeline=loaded.pipeline,
        cases=found.cases,
        skipped=found.skipped,
        folder=found.folder,
        weights=path,
        weights_sha256=weights_sha256,
        model=loaded.model,
        card=loaded.card,
        method=chosen,
        protocol=chosen_protocol,
        reset=reset_at,
        seed=seed,
        device=place,
        out=Path(out) if out is not None else default_out,
        notes=(*_site_notes(site_config), *loaded.warnings),
        save_probs=save_probs,
        save_uncertainty=save_uncertainty,
        statistics=known,
    )


def resolve(
    site: str | SiteConfig | None,
    pipeline: str | PipelineConfig | None,
    overrides: tuple[str, ...],
    weights: str | Path | None = None,
) -> tuple[SiteConfig, PipelineConfig]:
    """Return site and pipeline configurations that belong together.

    Raises:
        ConfigError: unknown or ambiguous names, wrong overrides, or a site of another task.
    """
    if site is None and pipeline is None:
        pipeline = _pipeline_of_card(weights)
    if isinstance(pipeline, str):
        pipeline = load_pipeline(pipeline, overrides)
    elif pipeline is not None:
        pipeline = _override(pipeline, [text for text in overrides if not text.startswith("site.")])
    if isinstance(site, str):
        site = load_site(site, pipeline.sites if pipeline is not None else None, overrides)
    else:
        if site is None:
            assert pipeline is not None  # noqa: S101 - set above
            files = Files(image=("*",))
            site = SiteConfig(id=NO_SITE, pipeline=pipeline.sites, institution="", files=files)
        own = [text.removeprefix("site.") for text in overrides if text.startswith("site.")]
        site = _override(site, own)
    if pipeline is None:
        pipeline = load_pipeline(site.pipeline, overrides)
    if site.pipeline != pipeline.sites:
        raise ConfigError(
            f"site {site.pipeline}/{site.id} is not one of pipeline {pipeline.name!r}, "
            f"which serves site_configs/{pipeline.sites}"
        )
    return site, pipeline


def _override(config: S, overrides: list[str]) -> S:
    """Return a loaded configuration with ``key=value`` texts applied."""
    if not overrides:
        return config
    content = apply_overrides(config.model_dump(), overrides)
    return validate(type(config), content, f"--set {' '.join(overrides)}")


def _pipeline_of_card(weights: str | Path | None) -> str:
    from tesla_med.models.checkpoint import read_card

    card = read_card(Path(weights)) if weights is not None else None
    if card is None:
        raise ConfigError("these weights have no card, so say --pipeline or --site")
    return card.pipeline


def other_sites(site: SiteConfig) -> list[SiteConfig]:
    """Return the other sites of the same folder, so that their images are not taken for this one's."""
    names = [name for name in site_files(site.pipeline) if name != site.id]
    return [load_site(f"{site.pipeline}/{name}") for name in names]


def choose_protocol(method: str, asked: Protocol | None, default: Protocol) -> Protocol:
    """Return the protocol of a run.

    Args:
        method: name of a method.
        asked: what the user said; None: the pipeline's, or where the method has only the other of N and Y,
            that with the same number of passes.
        default: the pipeline's.

    Raises:
        ConfigError: the method is not there, or does not have the protocol.
    """
    known = METHODS.get(method).protocols
    wanted = asked or default
    if asked is None and wanted not in known:
        wanted = next((item for item in known if item[-1] == default[-1]), wanted)
    if wanted not in known:
        raise ConfigError(f"method {method!r} has no protocol {wanted!r}. Known: {', '.join(known)}.")
    return wanted


def _weights_path(weights: str | Path | None, site: SiteConfig) -> Path:
    if weights is not None:
        return Path(weights)
    if site.weights is None:
        raise CheckpointError(
            f"no weights: give --weights FILE, or 'weights' in the configuration of site {site.id!r}"
        )
    return Path(site.weights)


def _site_notes(site: SiteConfig) -> tuple[str, ...]:
    notes = []
    if site.region.kind == "mask":
        what = "region of interest" + (" and slices come" if site.region.slices == "mask" else " comes")
        notes.append(f"The {what} from a reference mask ({site.region.pattern}): not available in practice.")
    if site.spacing == "nominal":
        notes.append("The voxel size of this site is nominal: figures in mm and ml are left out.")
    return tuple(notes)


def device_name(device: torch.device) -> str:
    """Return the device for the record, the GPU's model included."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type
