"""Pictures of a comparison beyond its table: masks side by side, features, and a check of the learned policy.

They look at finished cells. References are read here for drawing and scoring only.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tesla_med.augment import warp
from tesla_med.augment.policy import AdversarialPolicy
from tesla_med.compare.cells import Cell
from tesla_med.config.models import PipelineConfig
from tesla_med.engine.driver import Driver
from tesla_med.errors import DataError
from tesla_med.io.nifti import slice_axis
from tesla_med.io.references import read_reference, read_region_mask
from tesla_med.io.volumes import read_case, read_mask
from tesla_med.plan import Plan
from tesla_med.prepare.transforms import Preprocessor
from tesla_med.reports.overlays import choose_slices, draw
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.metrics import dice
from tesla_med.scoring.score import class_indices, parted
from tesla_med.tta.tesla import TeSLA
from tesla_med.types import Case, CaseView, Ref

PIXELS = 250
"""Pixels a class in a projection."""


def draw_site(
    wanted: Collection[str],
    name: str,
    folders: Mapping[Cell, RunFolder],
    cases: Sequence[Case],
    plan_of: Callable[..., Plan],
) -> dict[str, bytes]:
    """Return the pictures of one site by file name.

    Args:
        wanted: qualitative, projection, sanity_check.
        name: of the site.
        folders: finished cells of the site, of one protocol and seed, with their runs.
        cases: those that have a reference.
        plan_of: (cell, weights, method) -> plan of prediction, or of the method, on the site.
    """
    pictures: dict[str, bytes] = {}
    by_row = {cell.row.label: folder for cell, folder in folders.items()}
    masked = {label: item for label, item in by_row.items() if item.mask(cases[0].name).is_file()}
    first = next(iter(folders))
    if "qualitative" in wanted and masked:
        pictures[f"qualitative_{name}.png"] = qualitative(cases[0], plan_of(first), masked)
    if "projection" in wanted:
        plans = {
            cell.row.label: plan_of(cell, weights_of(folder, cases[0])) for cell, folder in folders.items()
        }
        found = {label: features_of(cases[0], plan) for label, plan in plans.items()}
        pictures[f"projection_{name}.png"] = projection(found, next(iter(plans.values())).pipeline)
    learned = [cell for cell in folders if cell.row.method == "tesla"]
    if "sanity_check" in wanted and learned:
        check = sanity_check(plan_of(learned[0], method="tesla"), cases[:2])
        pictures[f"sanity_check_{name}.png"] = sanity_png(check)
    return pictures


def qualitative(case: Case, plan: Plan, folders: Mapping[str, RunFolder]) -> bytes:
    """Return a PNG: the slice with most foreground, one panel per row and the reference last.

    Args:
        case: with a reference.
        plan: of one of the rows, for its site and pipeline.
        folders: row -> its run.
    """
    site, pipeline = plan.site, plan.pipeline
    volume = read_case(case, site)
    truth, _ = parted(read_reference(case, site.files, volume, pipeline.values))
    masks = {row: read_mask(folder.mask(case.name))[0] for row, folder in folders.items()}
    first = next(iter(masks.values()))
    view = CaseView(volume.array[0], first, first, truth, volume.affine, volume.spacing)
    axis = slice_axis(volume.affine, pipeline.preprocessing.orientation)
    index = choose_slices(view, axis, 1)[0]
    figure = draw(view, axis, index, pipeline.classes, shown={**masks, "reference": truth})
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor=figure.get_facecolor())
    return stream.getvalue()


@dataclass(frozen=True)
class Features:
    """Sampled inputs of the head: vectors (P, D) and their classes (P,)."""

    vectors: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    @property
    def silhouette(self) -> float:
        """Mean silhouette score by class, cosine distances, in [-1, 1]; higher is better separated."""
        from sklearn.metrics import silhouette_score

        return float(silhouette_score(self.vectors, self.labels, metric="cosine"))


@torch.no_grad()
def features_of(case: Case, plan: Plan, seed: int = 0) -> Features:
    """Return features of the network in ``plan`` (a ``source`` plan of a cell's weights) on one case.

    Raises:
        DataError: fewer than two classes in the reference.
    """
    images, labels = labelled_slices(case, plan.site, plan.pipeline)
    method = plan.make_method("source")
    caught: list[Tensor] = []
    handle = method.model.head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].cpu()))
    generator = np.random.default_rng(seed)
    try:
        with method.own_statistics(method.model, images, 64) if _own(plan) else _nothing():
            caught.clear()
            method.probabilities(method.model, images)
    finally:
        handle.remove()
    maps = torch.cat(caught).float()
    size = tuple(maps.shape[-2:])
    small = torch.nn.functional.interpolate(labels[:, None].float(), size, mode="nearest")[:, 0].long()
    vectors, targets = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]).numpy(), small.flatten().numpy()
    chosen = []
    for index in range(len(plan.pipeline.classes)):
        pixels = np.flatnonzero(targets == index)
        if len(pixels):
            chosen.append(generator.choice(pixels, min(PIXELS, len(pixels)), replace=False))
    if len(chosen) < 2:
        raise DataError(f"case {case.name}: its reference has one class only, so nothing can be told apart")
    kept = np.concatenate(chosen)
    return Features(vectors[kept], targets[kept])


def _own(plan: Plan) -> bool:
    return plan.method_params("source").get("statistics") == "volume"


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def projection(found: Mapping[str, Features], pipeline: PipelineConfig, seed: int = 0) -> bytes:
    """Return a PNG: the features of each row in two dimensions (t-SNE), coloured by class."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    figure = Figure(figsize=(3.4 * len(found), 3.7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    parts = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (row, item) in zip(parts, found.items(), strict=True):
        perplexity = min(30.0, (len(item.vectors) - 1) / 3)
        points = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(item.vectors)
        for index, label in enumerate(pipeline.classes):
            mine = item.labels == index
            colour = "#9aa5b1" if label.value == 0 else label.color
            axes.scatter(*points[mine].T, s=5, color=colour, label=label.name, linewidths=0)
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{row}\nsilhouette {item.silhouette:.2f}", fontsize=10)
    parts[0].legend(fontsize=8, frameon=False, markerscale=2)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def labelled_slices(case: Case, site: Any, pipeline: PipelineConfig) -> tuple[Tensor, Tensor]:
    """Return slices (N, C, H, W) in [0, 1] and class indices (N, H, W) on the model's grid."""
    volume = read_case(case, site)
    reference, _ = parted(read_reference(case, site.files, volume, pipeline.values))
    region = read_region_mask(case, volume) if site.region.kind == "mask" else None
    prepare = Preprocessor(pipeline.preprocessing, site.region, len(pipeline.classes))
    prepared = prepare(volume, region, labels=class_indices(reference, pipeline))
    return prepared.images, torch.as_tensor(prepared.labels).long()


# ------------------------------------------------------------ the learned policy


@dataclass(frozen=True)
class SanityCheck:
    """Is what the policy takes for adversarial really hard?

    Attributes:
        ranks: 1 is the sub-policy of the highest probability.
        names: ops of each.
        dice: of the student on views of it, mean over cases and classes.
        pearson: of rank and Dice; above 0 where the order of the policy agrees with the Dice.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    dice: tuple[float, ...]
    pearson: float | None


def sanity_check(plan: Plan, cases: Sequence[Case], count: int = 12) -> SanityCheck:
    """Adapt to each case, then score the student on views of sub-policies from first to last rank.

    Raises:
        DataError: the method is not ``tesla`` with a learned policy.
    """
    scores: list[list[float]] = []
    names: list[str] = []
    indices = np.array([0])
    for case in cases:
        method = plan.make_method(plan.method)
        policy = method.policy if isinstance(method, TeSLA) else None
        if not isinstance(method, TeSLA) or not isinstance(policy, AdversarialPolicy):
            raise DataError(f"method {plan.method!r} learns no policy; the sanity check is for 'tesla'")
        images, labels = labelled_slices(case, plan.site, plan.pipeline)
        unit = plan.task.load(Ref(case.name, (case.name,), case))
        seen = images if unit.images is None else unit.images
        Driver(method, plan.protocol, "case").adapt_to_case(seen, unit.fill)
        order = policy.probabilities.argsort(descending=True).cpu()
        indices = np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))
        names = names or [policy.name(int(order[index])) for index in indices]
        scores.append([_dice_under(method, policy, int(order[index]), images, labels) for index in indices])
    means = np.array(scores).mean(axis=0)
    ranks = tuple(int(index) + 1 for index in indices)
    known = len(means) > 2 and means.std() > 1e-9
    r = float(np.corrcoef(ranks, means)[0, 1]) if known else None
    return SanityCheck(ranks, tuple(names), tuple(float(value) for value in means), r)


@torch.no_grad()
def _dice_under(
    method: TeSLA, policy: AdversarialPolicy, sub_policy: int, images: Tensor, labels: Tensor
) -> float:
    """Return the student's mean foreground Dice on views of one sub-policy, in the frame of the views."""
    filled = labels.flatten(1).any(dim=1)
    images, labels = (images[filled], labels[filled]) if bool(filled.any()) else (images, labels)
    images = method.to_device(images)
    drawn = policy.draw(tuple(images.shape), by="uniform")
    chosen = torch.full_like(drawn.sub_policy, sub_policy)
    noise = {}
    for index, op in enumerate(policy.ops):
        if op.noise is not None and bool((policy.sub_policies[sub_policy] == index).any()):
            size = op.noise(tuple(images.shape))
            noise[index] = torch.randn(size, generator=policy.noise_generator, device=images.device)
    view = policy.apply_draw(images, replace(drawn, sub_policy=chosen, noise=noise))
    classes = int(method.probabilities(method.student, view.images[:1]).shape[1])
    hot = torch.nn.functional.one_hot(labels, classes).permute(0, 3, 1, 2).float().to(images.device)
    truth = warp.to_view(hot, view.theta).argmax(1).cpu().numpy()
    with method.own_statistics(method.student, view.images, 64):
        found = method.probabilities(method.student, view.images).argmax(1).cpu().numpy()
    values = [dice(truth == index, found == index) for index in range(1, classes)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def sanity_png(check: SanityCheck) -> bytes:
    """Return a PNG: Dice against rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(check.ranks, [100 * value for value in check.dice], "o-", color="#1f6f8b", markersize=5)
    axes.set_xlabel("rank of the sub-policy; 1 is the most adversarial to the policy")
    axes.set_ylabel("Dice of the student on its views, %")
    r = "n/a" if check.pearson is None else f"{check.pearson:.2f}"
    axes.set_title(f"Pearson's r of rank and Dice {r}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e8ebef")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def weights_of(folder: RunFolder, case: Case) -> Path | None:
    """Return the adapted weights that made a case's mask, None where the source's did."""
    for name in (case.name, "adapted"):
        if folder.checkpoint(name).is_file():
            return folder.checkpoint(name)
    return None
