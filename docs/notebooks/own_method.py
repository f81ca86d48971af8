# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A method of your own
#
# A method that learns from its own predictions is an objective and the parameters that learn. This notebook writes one in a cell, runs it on a
# generated site beside TENT and TeSLA, and looks at its losses. State, resets, the guard and the reports come from the package. How a method is
# shipped in a package of its own is told in [Add a method](../how-to/extend.md). It takes about two minutes on a laptop without a GPU.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import tesla_med
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tesla_med import losses
from tesla_med.demo.volumes import make_site, preset
from tesla_med.tta._mechanics.parameters import norm_affine
from tesla_med.tta._shared.learner import Learner, LearnerParams
from tesla_med.tta.base import METHODS

folder = Path(mkdtemp(prefix="tesla-med-"))

# %% [markdown]
# ## The method
#
# It makes single predictions certain, and keeps the mean prediction of a batch near equal shares of the classes, for scale and shift of the norm
# layers alone. `self.learning` is a pass under the statistics of the batch; `self.pixel_weight` is 0 where an image has no content.


# %%
class SpreadParams(LearnerParams):
    """Parameters of the method; the weight comes on top of those that every learner has."""

    spread: float = 0.1


@METHODS.register("spread")
class Spread(Learner):
    """Minimises the entropy of single predictions and keeps the mean prediction spread over the classes."""

    name = "spread"
    summary = "certain predictions, classes kept apart"
    citation = "this notebook"
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = SpreadParams

    def updated_parameters(self):
        """Return scale and shift of the norm layers."""
        return norm_affine(self.model, self.name)

    def objective(self, images):
        """Return the loss of a batch, and its terms for TensorBoard."""
        logits = self.learning(images).logits
        entropy = losses.entropy(logits, self.pixel_weight)
        marginal = losses.class_marginal(logits, pixel_weight=self.pixel_weight)
        return entropy + self.params.spread * marginal, {
            "loss/entropy": entropy.detach(),
            "loss/class_marginal": marginal.detach(),
        }


# %% [markdown]
# ## A site and a source model
#
# As in [From scans to guarded masks](first_adaptation.py).

# %%
SITE = """
institution: {name}
files:
  image: ["Case*.nii.gz"]
  masks:
    - {{pattern: "*_segmentation.nii.gz", write: 1}}
terms: Generated data.
"""
sites = {}
for name, count in (("source", 7), ("hard", 3)):
    make_site(folder / "volumes" / name, "prostate", preset("prostate", name), count, seed=1)
    path = folder / "prostate" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SITE.format(name=name), encoding="utf-8")
    sites[name] = tesla_med.load_site(str(path))

small = ["preprocessing.size=[64,64]", "model.params.width=8"]
training = ["train.steps=300", "train.batch_size=8", "train.learning_rate=0.005", "train.augment=mild"]
source = tesla_med.train_source(
    tesla_med.load_pipeline("prostate", [*small, *training]),
    [sites["source"]],
    folder / "volumes",
    folder / "source",
    seed=0,
    device="cpu",
)

# %% [markdown]
# ## Compare
#
# Without the guard, so that each method is seen as it is. One seed and three volumes prove nothing: `tesla-med compare` runs grids with several
# seeds and tests.

# %%
runs = {}
for method in ("source", "tent", "spread", "tesla"):
    runs[method] = tesla_med.adapt_site(
        sites["hard"],
        folder / "volumes",
        weights=source.weights,
        method=method,
        guard=False,
        out=folder / "runs" / method,
        device="cpu",
        overrides=[*small, "protocols.N-O.tesla.updates_per_case=8"],
    )
    print(f"{method:8} {100 * runs[method].mean_dice:5.1f} %")

# %% [markdown]
# ## Losses
#
# They are in the TensorBoard folder of each run.

# %%
events = EventAccumulator(str(folder / "runs" / "spread" / "tensorboard")).Reload()
for tag in ("loss/entropy", "loss/class_marginal"):
    points = events.Scalars(tag)
    plt.plot([point.step for point in points], [point.value for point in points], "o-", label=tag)
plt.gca().set(xlabel="update", ylabel="loss")
plt.legend()

# %%
assert "spread" in METHODS.names()
assert runs["spread"].mean_dice != runs["source"].mean_dice
assert len(points) == sum(len(range(0, case.slices, 16)) for case in runs["spread"].results)
