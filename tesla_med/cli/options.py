"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tesla_med.config.paths import user_path
from tesla_med.errors import ConfigError


def path(text: str) -> Path:
    """Return the path that an option or argument means; every one of the command line is read by this."""
    return user_path(text)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print details on standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Volumes = Annotated[
    Path,
    typer.Option(
        "--volumes",
        parser=path,
        help="Folder of images or tiles, with sub-folders, or one image. "
        "Cases are taken in natural order of their names: P1, P2, P10.",
    ),
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        help="Site by id (F, prostate/F), or a YAML file. Default: every image, whole, without references.",
    ),
]
Pipeline = Annotated[
    str | None, typer.Option("--pipeline", help="Pipeline by name, or a YAML file. Default: the site's.")
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        parser=path,
        help="Source weights: .safetensors, .pth, or the folder of an nnU-Net model or a MONAI bundle. "
        "Default: the site's.",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Let MONAI run the code of a bundle that needs it. Only for bundles whose makers you trust.",
    ),
]
Statistics = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        parser=path,
        help="Source feature statistics, for Y-O and Y-M only. Default: beside the weights.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Method = Annotated[
    str | None, typer.Option(help="Method by name (see: tesla-med list methods). Default: tesla.")
]
SaveProbs = Annotated[bool, typer.Option("--save-probs", help="Write class probabilities.")]
SaveUncertainty = Annotated[
    bool, typer.Option("--save-uncertainty", help="Write normalised entropy, 0 to 1.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random generator.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run with the same settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value overrides the pipeline, site.key=value the site; may be repeated."),
]
Reset = Annotated[
    str | None,
    typer.Option(help="When to return to the source model: never, site or case. Default: the pipeline's."),
]
Anonymise = Annotated[
    bool,
    typer.Option(
        "--anonymise",
        help="Replace the names of cases by pseudonyms in everything that is written. Which is which stands "
        "in the key file.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        parser=path,
        help="Key file of pseudonyms, not to be handed on. Default: .tesla-med/pseudonyms.csv in the home "
        "folder.",
    ),
]
RESETS = ("never", "site", "case")


def choice(option: str, value: str | None, known: Sequence[str]) -> Any:
    """Return the value of an option that must be one of ``known``, or None.

    Raises:
        ConfigError: it is another one.
    """
    if value is not None and value not in known:
        raise ConfigError(f"{option} {value!r} is not known. Known: {', '.join(known)}.")
    return value


def mapping(option: str, texts: Sequence[str] | None) -> dict[int, int]:
    """Return what texts ``FROM=TO`` say.

    Raises:
        ConfigError: one is something else, or a value is given twice.
    """
    found: dict[int, int] = {}
    for text in texts or ():
        before, _, after = (part.strip() for part in text.partition("="))
        if not (before.isdigit() and after.isdigit()):
            raise ConfigError(f"{option} takes FROM=TO, two numbers of 0 and above as in 255=1, got {text!r}")
        if found.setdefault(int(before), int(after)) != int(after):
            raise ConfigError(f"{option} gives two meanings to {before}: {found[int(before)]} and {after}")
    return found


def split(text: str | None) -> list[str]:
    """Return the parts of a list that is separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def load_sites(names: str, folder: str, overrides: Sequence[str]) -> list[Any]:
    """Return the configurations of sites, given by ids separated by commas.

    Raises:
        ConfigError: there are none, or one is unknown.
    """
    from tesla_med.config.files import load_site

    found = [load_site(name, folder, overrides) for name in split(names)]
    if not found:
        raise ConfigError("--sites is empty; give one or more site ids, separated by commas")
    return found
