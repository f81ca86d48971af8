"""TeSLA's soft pseudo-label refinement on tiles: averaged features, balanced memory, neighbours."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from tesla_med.errors import AdaptationError, ConfigError
from tesla_med.models.torchvision import (
    MobileNetV2,
    MobileNetV2Params,
    ResNet50,
    ResNet50Params,
    ViT,
    ViTParams,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 6, "weak_views": 2, "policy_size": 2, "op_set": "generic"}
NETWORKS = {
    "mobilenet_v2": lambda: MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4),
    "resnet50": lambda: ResNet50.build(ResNet50Params(width=4, depth=(1, 1, 1, 1)), 3, 4),
    "vit_b_16": lambda: ViT.build(ViTParams(image_size=32, layers=1, heads=2, width=32), 3, 4),
}


@pytest.fixture
def make_tesla(make_tta):
    def make(kind="mobilenet_v2", *, seed=0, **params):
        torch.manual_seed(0)
        network = NETWORKS[kind]().eval()
        with torch.no_grad():  # else an untrained network says the same of every tile
            network.head.weight.mul_(20)
        return make_tta("tesla", network, seed=seed, **(QUICK | params))

    return make


def tiles(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(count, 3, 1, 1, generator=generator)
    return (colours + 0.4 * torch.rand(count, 3, 32, 32, generator=generator) - 0.2).clamp(0, 1)


def remembered(queue, features, labels, size):
    """Append rows to the lists of their classes, the oldest of a full one out."""
    for feature, label in zip(features, labels, strict=True):
        rows = queue.setdefault(int(label.argmax()), [])
        rows.append((feature, label))
        del rows[: max(len(rows) - size, 0)]


def nearest_mean(queue, feature, count):
    rows = [row for rows in queue.values() for row in rows]
    rows.sort(key=lambda row: -float(functional.cosine_similarity(feature, row[0], dim=0)))
    return torch.stack([label for _, label in rows[:count]]).mean(dim=0)


@pytest.mark.parametrize(("neighbours", "size"), [(3, 2), (2, 8), (50, 3)])
def test_labels_by_hand(neighbours, size, make_tesla):
    method, queue = make_tesla(neighbours=neighbours, queue_size=size), {}
    twin = make_tesla(neighbours=neighbours, queue_size=size)
    for seed in range(3):
        images = tiles(seed=seed)
        labels, _, features = twin._averaged(images)
        remembered(queue, features, labels, size)
        refined, reference = method._pseudo_labels(images)
        want = torch.stack([nearest_mean(queue, feature, neighbours) for feature in features])
        assert torch.allclose(refined, want, atol=1e-6)
        assert (refined - labels).abs().max() > 1e-3
        assert torch.allclose(refined.sum(dim=1), torch.ones(len(images)), atol=1e-5)
        assert reference
    assert len(queue) > 1
    assert len(method.memory.columns[0]) == sum(len(rows) for rows in queue.values())


@pytest.mark.parametrize("kind", NETWORKS)
def test_features_are_averaged_over_the_weak_views(kind, make_tesla):
    method = make_tesla(kind, neighbours=2, queue_size=4, weak_views=3)
    seen = []
    handle = method.teacher.head.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    _, _, features = method._averaged(tiles())
    handle.remove()
    assert len(seen) == 3
    assert features.shape == (6, method.student.head.in_features)
    assert torch.allclose(features, sum(seen) / 3, atol=1e-5)
    assert not torch.allclose(features, seen[0], atol=1e-5)


def test_one_neighbour_is_off(make_tesla):
    one, other = make_tesla(), make_tesla(neighbours=1, queue_size=64)
    assert one._averaged(tiles())[2] is None
    one.reset()
    for method in (one, other):
        method.adapt(tiles())
        assert method.memory.columns == ()
    for pair in zip(one.teacher.parameters(), other.teacher.parameters(), strict=True):
        assert torch.equal(*pair)


def test_the_student_learns_what_the_memory_says(make_tesla):
    """A memory that puts every tile into class 2 draws the student there."""
    images, found = tiles(), []
    for opposed in (False, True):
        method = make_tesla(neighbours=4, queue_size=8, learning_rate=0.01, marginal_weight=0, weak_views=1)
        if opposed:
            _, _, features = method._averaged(images)
            certain = functional.one_hot(torch.full((6,), 2), 4).float()
            for _ in range(3):
                method.memory.push(functional.normalize(features, dim=1), certain)
        for _ in range(3):
            method.adapt(images)
        found.append(method.probabilities(method.student, images)[:, 2].mean())
    assert found[1] > found[0] + 0.05


def test_state_in_the_middle(make_tesla, same_state):
    params = {"neighbours": 3, "queue_size": 4, "learning_rate": 1e-3}
    one, two = make_tesla(**params), make_tesla(seed=5, **params)
    one.adapt(tiles())
    state = one.state_dict()
    kept = copy.deepcopy(state)
    assert {len(column) for column in state["memory"]} == {len(one.memory.columns[0])}
    two.load_state_dict(state)
    for method in (one, two):
        method.adapt(tiles(seed=1))
    assert same_state(one.state_dict(), two.state_dict())
    assert same_state(state, kept)
    assert not same_state(state, one.state_dict())
    one.reset()
    assert one.memory.columns == ()
    assert same_state(one.state_dict(), make_tesla(**params).state_dict())


def test_pixels_are_refused(make_tta):
    with pytest.raises(AdaptationError, match=r"neighbours is 4, but .* segments pixels; set .* to 1"):
        make_tta("tesla", neighbours=4, queue_size=32)
    assert make_tta("tesla", neighbours=1, queue_size=32).memory.columns == ()


# ------------------------------------------------------------ optimisers


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_one_step_of_each_optimizer(name, kind, make_tesla):
    params = {"learning_rate": 0.01, "weight_decay": 0.1, "sgd_momentum": 0.5, "clip_norm": None}
    method = make_tesla(optimizer=name, **params)
    assert type(method.optimizer) is kind
    before = {key: value.detach().clone() for key, value in method.student.named_parameters()}
    method.adapt(tiles())
    weight = next(key for key, value in before.items() if value.dim() > 1 and "classifier" not in key)
    gradient = method.student.get_parameter(weight).grad
    decayed = gradient + 0.1 * before[weight]
    want = {
        "sgd": before[weight] - 0.01 * decayed,
        "adam": before[weight] - 0.01 * decayed / (decayed.abs() + 1e-8),
        "adamw": before[weight] * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8),
    }[name]
    assert torch.allclose(method.student.get_parameter(weight), want, atol=1e-5)
    assert method.optimizer.param_groups[0].get("momentum", 0.5) == 0.5


def test_an_unknown_optimizer_is_refused(make_tesla):
    with pytest.raises(ConfigError, match="optimizer"):
        make_tesla(optimizer="lion")
