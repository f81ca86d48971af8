"""Find, read, merge and override the YAML files behind the configuration models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from tesla_med.config.explaining import QUOTE, explained
from tesla_med.config.models import PipelineConfig, Section, SiteConfig, merge
from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name

S = TypeVar("S", bound=Section)
SEARCH_PATH_VARIABLE = "TESLA_MED_CONFIG_PATH"
YAML_SUFFIXES = (".yaml", ".yml")


def search_roots() -> list[Path]:
    """Return the folders that may hold ``site_configs/`` and ``pipelines/``, first wins.

    The working folder, then those in ``TESLA_MED_CONFIG_PATH``, then the package's own.
    """
    extra = [user_path(item) for item in os.environ.get(SEARCH_PATH_VARIABLE, "").split(os.pathsep) if item]
    inside = Path(__file__).parent.parent
    shipped = inside if (inside / "pipelines").is_dir() else inside.parent
    roots: list[Path] = []
    for root in [Path.cwd(), *extra, shipped]:
        resolved = root.resolve()
        if resolved not in roots:
            roots.append(resolved)
    return roots


def pipeline_files(roots: Iterable[Path] | None = None) -> dict[str, Path]:
    """Return every pipeline by name."""
    return yaml_files([root / "pipelines" for root in (roots or search_roots())])


def site_files(folder: str, roots: Iterable[Path] | None = None) -> dict[str, Path]:
    """Return every site of ``site_configs/<folder>`` by id."""
    return yaml_files([root / "site_configs" / folder for root in (roots or search_roots())])


def site_folders(roots: Iterable[Path] | None = None) -> list[str]:
    """Return the names of the folders in ``site_configs/``."""
    found = {
        entry.name
        for root in (roots or search_roots())
        if (root / "site_configs").is_dir()
        for entry in (root / "site_configs").iterdir()
        if entry.is_dir()
    }
    return sorted(found)


def is_yaml(name: str) -> bool:
    """Whether a name is that of a YAML file, and not the name of what one describes."""
    return name.lower().endswith(YAML_SUFFIXES)


def yaml_files(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the YAML files of folders by name without extension, first wins; hidden ones are left out.

    Raises:
        ConfigError: a folder has two files of one name, ``F.yaml`` and ``F.yml``.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        here: dict[str, Path] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not is_yaml(path.name) or path.name.startswith("."):
                continue
            if path.stem in here:
                raise ConfigError(f"{here[path.stem]} and {path.name} have one name; keep one of them")
            here[path.stem] = path
        found = {**here, **found}
    return dict(sorted(found.items()))


def readable(files: Mapping[str, Path], load: Callable[[str], S]) -> tuple[dict[str, S], dict[Path, str]]:
    """Return what the files hold, by name, and the reason for each file that cannot be used.

    Args:
        files: path by name.
        load: reads what has a name; its ConfigError is the reason.
    """
    found: dict[str, S] = {}
    broken: dict[Path, str] = {}
    for name, path in files.items():
        try:
            found[name] = load(name)
        except ConfigError as error:
            broken[path] = str(error)
    return found, broken


def load_pipeline(
    name: str,
    overrides: Iterable[str] = (),
    roots: Iterable[Path] | None = None,
    given: Mapping[str, Any] | None = None,
) -> PipelineConfig:
    """Read a pipeline by name or by the path of a YAML file.

    Args:
        name: a name in the search path, or a path ending in ``.yaml``.
        overrides: ``key.sub=value`` texts; values are parsed as YAML. Keys that start
            with ``site.`` are for the site and ignored here.
        roots: folders to search instead of :func:`search_roots`.
        given: content that takes the place of the file's, such as what weights say of their network.

    Raises:
        ConfigError: unknown name, unreadable YAML, unknown key, wrong type or value.
    """
    roots = list(roots) if roots is not None else search_roots()
    path = _pipeline_path(name, roots)
    content = _with_parents(path, roots, ())
    content = merge(content, given or {})
    content["name"] = path.stem
    own = [text for text in overrides if not text.startswith("site.")]
    return _validate(PipelineConfig, apply_overrides(content, own), path, own)


def _pipeline_path(name: str, roots: list[Path]) -> Path:
    if is_yaml(name):
        path = user_path(name)
        if not path.is_file():
            raise ConfigError(f"no pipeline file at {path}")
        return path
    known = pipeline_files(roots)
    if name not in known:
        raise ConfigError(unknown_name("pipeline", name, list(known)))
    return known[name]


def _with_parents(path: Path, roots: list[Path], seen: tuple[Path, ...]) -> dict[str, Any]:
    if path in seen:
        chain = " -> ".join(item.stem for item in (*seen, path))
        raise ConfigError(f"{path}: 'extends' is circular: {chain}")
    content = read_yaml(path)
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: 'extends' must be the name of a pipeline, got {parent!r}")
    return layered(_with_parents(_pipeline_path(parent, roots), roots, (*seen, path)), content)


def load_site(
    name: str,
    pipeline: str | None = None,
    overrides: Iterable[str] = (),
    roots: Iterable[Path] | None = None,
) -> SiteConfig:
    """Read a site by ``id`` (if unique), ``folder/id``, or the path of a YAML file.

    Args:
        name: the site.
        pipeline: a ``site_configs`` folder to search in, or None for all of them.
        overrides: ``site.key=value`` texts; others are ignored.
        roots: folders to search instead of :func:`search_roots`.

    Raises:
        ConfigError: unknown or ambiguous name, unreadable YAML, unknown key, wrong type.
    """
    roots = list(roots) if roots is not None else search_roots()
    path, folder = _site_path(name, pipeline, roots)
    content = read_yaml(path)
    for key, value in (("id", path.stem), ("pipeline", folder)):
        if content.setdefault(key, value) != value:
            text = f"{path}: key {key!r} is {content[key]!r} but the file's path says {value!r}"
            raise ConfigError(text if isinstance(content[key], str) else f"{text}; {QUOTE}")
    own = [text.removeprefix("site.") for text in overrides if text.startswith("site.")]
    return _validate(SiteConfig, apply_overrides(content, own), path, own)


def _site_path(name: str, pipeline: str | None, roots: list[Path]) -> tuple[Path, str]:
    if is_yaml(name):
        path = user_path(name)
        if not path.is_file():
            raise ConfigError(f"no site file at {path}")
        return path, pipeline or path.resolve().parent.name
    folder, _, site = name.rpartition("/")
    folders = [folder] if folder else ([pipeline] if pipeline else site_folders(roots))
    found = {item: files[site] for item in folders if site in (files := site_files(item, roots))}
    if len(found) == 1:
        return next((path, item) for item, path in found.items())
    if found:
        choices = " or ".join(f"{item}/{site}" for item in found)
        raise ConfigError(f"site {site!r} exists in more than one pipeline: give {choices}")
    known = [f"{item}/{key}" for item in folders for key in site_files(item, roots)]
    if folder and folder not in site_folders(roots):
        raise ConfigError(unknown_name("site folder", folder, site_folders(roots)))
    raise ConfigError(
        unknown_name("site", name, known) + " Add one as site_configs/<pipeline>/<id>.yaml "
        "in the folder in which you call tesla-med."
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping with the safe loader.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(content).__name__}")
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{path}: expected a mapping of texts to values, got key {wrong[0]!r}; {QUOTE}")
    return content


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe loader that refuses a key given twice (YAML would silently keep the last)."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    hashable = [key for key in keys if isinstance(key, str | int | float | bool)]
    repeated = sorted({str(key) for key in hashable if hashable.count(key) > 1})
    if repeated:
        raise yaml.constructor.ConstructorError(
            None, None, f"key given twice: {', '.join(repeated)}", node.start_mark
        )
    content: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return content


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def apply_overrides(content: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return ``content`` with ``a.b=value`` texts applied; values are parsed as YAML.

    Raises:
        ConfigError: a text without ``=`` or with an empty key, or a value that is not YAML.
    """
    over: dict[str, Any] = {}
    for text in overrides:
        key, separator, raw = text.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise ConfigError(f"--set {text!r}: expected key=value, for example train.steps=500")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text!r}: the value is not valid YAML: {error}") from None
        nested: Any = value
        for part in reversed(parts):
            nested = {part: nested}
        over = merge(over, nested)
    return layered(content, over)


def layered(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` on top, as :func:`merge` does.

    A parameter under ``methods`` of ``over`` also goes over what ``base`` has for it under ``protocols``:
    the upper layer has the last word.
    """
    protocols, methods = base.get("protocols"), over.get("methods")
    if isinstance(protocols, Mapping) and isinstance(methods, Mapping):
        left = {name: _without(cells, methods) for name, cells in protocols.items()}
        base = {**base, "protocols": left}
    return merge(base, over)


def _without(cells: Any, methods: Mapping[str, Any]) -> Any:
    """Return ``method: parameters`` of one protocol without the parameters that ``methods`` has."""
    if not isinstance(cells, Mapping):
        return cells
    result = dict(cells)
    for method, parameters in cells.items():
        given = methods.get(method)
        if isinstance(parameters, Mapping) and isinstance(given, Mapping):
            result[method] = {key: value for key, value in parameters.items() if key not in given}
    return result


def _validate(model: type[S], content: Mapping[str, Any], path: Path, overrides: Iterable[str]) -> S:
    where = str(path) + (f" with --set {' '.join(overrides)}" if overrides else "")
    return validate(model, content, where)


def validate(model: type[S], content: Mapping[str, Any], where: str) -> S:
    """Check ``content`` against ``model``.

    Raises:
        ConfigError: with ``where``, each key, what was expected, and what came.
    """
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        lines = dict.fromkeys(explained(model, item) for item in error.errors())
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None
