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
# # From scans to guarded masks
#
# This notebook makes its own data: a scanner on whose images a small model is trained, and another scanner on which that model is poor. It adapts
# the model to the other scanner, looks at what the guard says, and opens a case. It takes about two minutes on a laptop without a GPU. With images
# and a model of your own start at [Adapt](#Adapt), with `volumes="./nii"`, `weights="source.safetensors"` and the site as a YAML file, or None.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import nibabel as nib
import numpy as np
import tesla_med
from tesla_med.demo.volumes import make_site, preset

folder = Path(mkdtemp(prefix="tesla-med-"))

# %% [markdown]
# ## Two scanners
#
# A site is a YAML file. It says which files are images, which are references, and what they mean. References are optional, and are read after the
# masks are final.

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
for name, count in (("source", 7), ("hard", 4)):
    make_site(folder / "volumes" / name, "prostate", preset("prostate", name), count, seed=1)
    path = folder / "prostate" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SITE.format(name=name), encoding="utf-8")
    sites[name] = tesla_med.load_site(str(path))

# %% [markdown]
# ## A source model
#
# A narrow U-Net on small images, for the sake of time; `tesla-med train` does the same from the command line. Without such overrides the
# pipeline `prostate` has 256x256 pixels, a width of 64 and 8,000 steps.

# %%
small = ["preprocessing.size=[64,64]", "model.params.width=8"]
training = ["train.steps=300", "train.batch_size=8", "train.learning_rate=0.005", "train.augment=mild"]
pipeline = tesla_med.load_pipeline("prostate", [*small, *training])
source = tesla_med.train_source(
    pipeline, [sites["source"]], folder / "volumes", folder / "source", seed=0, device="cpu"
)
print(f"held-out Dice on its own scanner: {100 * source.validation_dice:.1f} %")

# %% [markdown]
# ## Adapt
#
# Case by case (protocol N-O), without looking at a reference and without the images of the source.

# %%
result = tesla_med.adapt_site(
    sites["hard"], folder / "volumes", weights=source.weights, out=folder / "run", seed=1, device="cpu", overrides=small
)
print(f"mean Dice {100 * result.mean_dice_source:.1f} %, adapted {100 * result.mean_dice:.1f} %")

# %% [markdown]
# Every case has the guard's verdict: whether the adapted mask was taken, a part of the way, or the source's, and why. The predicted Dice needs
# no reference. It is what a site without labels has.

# %%
for case in result.results:
    score = case.scores[0]
    print(
        f"{case.case}: {case.used:8} Dice {100 * score.dice_source:5.1f} -> {100 * score.dice:5.1f} %, "
        f"predicted {100 * score.predicted_dice:.0f} %  {case.reason}"
    )

# %% [markdown]
# ## Look at a case
#
# Masks lie on the grid of their images, voxel by voxel. The report (`report/report.html` in the folder of the run) shows every slice.

# %%
worst = min(result.results, key=lambda case: case.scores[0].dice)
image = next((folder / "volumes" / "hard").rglob(f"{Path(worst.case).name}.nii.gz"))
masks = {name: folder / "run" / name / f"{worst.case}_mask.nii.gz" for name in ("source_masks", "masks")}
volume = np.asarray(nib.load(image).dataobj)
found = {name: np.asarray(nib.load(path).dataobj) for name, path in masks.items()}
middle = int(found["masks"].sum(axis=(0, 1)).argmax())

figure, axes = plt.subplots(1, 2, figsize=(8, 4))
for axis, (name, mask) in zip(axes, found.items(), strict=True):
    axis.imshow(volume[:, :, middle].T, cmap="gray")
    axis.contour(mask[:, :, middle].T > 0, levels=[0.5], colors=["orange"])
    axis.set(title={"source_masks": "source", "masks": "adapted"}[name], xticks=[], yticks=[])
figure.suptitle(f"{worst.case}, slice {middle + 1}")

# %%
assert result.mean_dice > result.mean_dice_source
assert volume.shape == found["masks"].shape
print("report:", folder / "run" / "report" / "report.html")
