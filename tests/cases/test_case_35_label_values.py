"""Values on disk are those of the pipeline and are named beside the masks; references use the same map,
others are named.

"""

import json

import numpy as np
import small_site as small
from small_volumes import diagonal, run_whole, write

CASE = 35
CLASSES = "classes=[{value: 0, name: background}, {value: 2, name: gland}, {value: 5, name: zone}]"
SHAPE = (32, 28, 6)


def make(folder, name, *, stranger=False):
    data = np.zeros(SHAPE, np.int16)
    data[5:15, 5:20, 1:5] = 50
    data[15:25, 5:20, 1:5] = 100
    write(folder / f"{name}.nii.gz", data, diagonal(1, 1, 3))
    labels = np.array([0, 2, 5], np.uint8)[data // 50]
    if stranger:
        labels[0, 0, 0] = 7
    write(folder / f"{name}_segmentation.nii.gz", labels, diagonal(1, 1, 3))
    return labels


def test_values_names_and_scores(known_weights, tmp_path):
    labels = make(tmp_path / "nii", "Case00")
    make(tmp_path / "nii", "Case01", stranger=True)
    files = {"image": ("Case*.nii.gz",), "masks": ({"pattern": "*_segmentation.nii.gz"},)}
    result = run_whole(
        tmp_path / "nii",
        known_weights(classes=3),
        tmp_path / "out",
        overrides=(CLASSES, "preprocessing.fill.enabled=false"),
        site=small.site(files=files),
    )
    good, bad = result.results
    assert np.array_equal(small.labels(result.out, "Case00"), labels)
    assert [(score.label, score.dice) for score in good.scores] == [(2, 1.0), (5, 1.0)]
    names = json.loads((result.out / "masks/labels.json").read_text(encoding="utf-8"))
    assert {"2": "gland", "5": "zone"}.items() <= {str(k): v for k, v in flat(names).items()}.items()
    assert bad.status == "unscored"
    assert "7" in bad.reason
    assert "Case01_segmentation.nii.gz" in bad.reason


def flat(names):
    """Return value -> name, whatever sits around it."""
    items = names.get("labels", names) if isinstance(names, dict) else names
    if isinstance(items, list):
        return {item["value"]: item["name"] for item in items}
    return {key: value if isinstance(value, str) else value["name"] for key, value in items.items()}
