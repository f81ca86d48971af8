"""AdaContrast: neighbours, contrast, memories, and pixels in the place of images."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from tesla_med.models.monai import MonaiNetwork, MonaiParams
from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params, ViT, ViTParams
from tesla_med.tta._shared import neighbours
from tesla_med.tta._shared.features import head_features, in_frame_of, rows
from tesla_med.tta._shared.neighbours import Memory, info_nce, neighbour_mean

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 4, "refine_stride": 4, "pixels_per_slice": 16, "queue_size": 200}


@pytest.fixture
def make_adacontrast(make_tta):
    def make(network=None, *, seed=0, **params):
        return make_tta("adacontrast", network, seed=seed, **(QUICK | params))

    return make


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def running(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def moved(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def unit(*shape, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(values, dim=1)


# ------------------------------------------------------------ parts


@pytest.mark.parametrize("count", [1, 3, 40])
def test_neighbours(count, monkeypatch):
    monkeypatch.setattr(neighbours, "CHUNK", 4)
    queries, features = unit(10, 5), unit(20, 5, seed=1)
    probs = torch.rand(20, 3, generator=torch.Generator().manual_seed(2)).softmax(dim=1)
    found = neighbour_mean(queries, features, probs, count)
    for index, query in enumerate(queries):
        angles = torch.tensor([float(query @ feature) for feature in features])
        nearest = sorted(range(20), key=lambda row: -angles[row])[:count]
        assert torch.allclose(found[index], probs[nearest].mean(dim=0), atol=1e-6)


def test_contrast_by_hand():
    queries, positives, keys = unit(4, 6), unit(4, 6, seed=1), unit(7, 6, seed=2)
    labels, key_labels = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 1, 0, 1, 0])
    found = info_nce(queries, positives, labels, (keys, key_labels), 0.2)
    total = 0.0
    for query, positive, label in zip(queries, positives, labels, strict=True):
        top = torch.exp(query @ positive / 0.2)
        others = sum(
            torch.exp(query @ key / 0.2) for key, k in zip(keys, key_labels, strict=True) if k != label
        )
        total += -torch.log(top / (top + others))
    assert float(found) == pytest.approx(float(total) / 4, rel=1e-5)


def test_contrast_without_negatives():
    queries = unit(4, 6).requires_grad_(True)
    labels, keys = torch.zeros(4, dtype=torch.long), unit(7, 6, seed=2)
    for memory in ((), (keys, torch.zeros(7, dtype=torch.long))):
        loss = info_nce(queries, unit(4, 6, seed=1), labels, memory, 0.07)
        assert float(loss.detach()) == 0
        (gradient,) = torch.autograd.grad(loss, queries)
        assert torch.isfinite(gradient).all()


def test_memory_is_first_in_first_out():
    memory = Memory(5)
    for start in (0, 3, 6):
        values = torch.arange(start, start + 3)
        memory.push(values[:, None].float(), values)
    assert memory.columns[0].flatten().tolist() == [4, 5, 6, 7, 8]
    assert memory.columns[1].tolist() == [4, 5, 6, 7, 8]
    memory.push(torch.arange(9.0)[:, None], torch.arange(9))
    assert memory.columns[1].tolist() == [4, 5, 6, 7, 8]


def one_hot(*winners, classes=3, rest=0.1):
    labels = torch.full((len(winners), classes), rest)
    for row, winner in enumerate(winners):
        labels[row, winner] = 1 - (classes - 1) * rest
    return labels


def test_balanced_memory_keeps_the_newest_of_each_class():
    memory = Memory(2, balanced=True)
    values = torch.arange(7.0)
    memory.push(values[:, None], one_hot(0, 1, 0, 0, 2, 0, 1))
    assert memory.columns[0].flatten().tolist() == [1, 3, 4, 5, 6]
    for step in range(7, 12):
        memory.push(torch.tensor([[float(step)]]), one_hot(0))
    keys, probs = memory.columns
    assert keys.flatten().tolist() == [1, 4, 6, 10, 11]  # class 0 pushed none of the others out
    assert torch.equal(probs, one_hot(1, 2, 1, 0, 0))
    memory.push(torch.tensor([[12.0], [13.0], [14.0]]), one_hot(2, 2, 2))
    assert memory.columns[0].flatten().tolist() == [1, 6, 10, 11, 13, 14]


def test_memory_is_restored_by_copy():
    for balanced in (False, True):
        memory = Memory(2, balanced=balanced)
        memory.push(unit(5, 4), one_hot(0, 1, 1, 0, 1))
        kept = memory.copied()
        memory.push(unit(3, 4, seed=1), one_hot(1, 0, 2))
        memory.restore(kept, torch.device("cpu"))
        assert all(torch.equal(*pair) for pair in zip(memory.columns, kept, strict=True))
        kept[0].zero_()
        assert memory.columns[0].abs().sum() > 0


def test_rows_are_image_by_image():
    maps = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    found = rows(maps, torch.tensor([0, 7]))
    assert torch.equal(found, torch.stack([maps[i, :, a, b] for i in (0, 1) for a, b in ((0, 0), (1, 2))]))
    tiles = torch.rand(3, 6)
    assert torch.equal(rows(tiles, torch.tensor([0])), tiles)


@pytest.mark.parametrize("size", [(32, 32), (20, 23), (50, 33)])
def test_features_enter_the_head_where_the_logits_are(size, make_network, make_images):
    network, images = make_network(), make_images(3, *size)
    with torch.no_grad(), head_features(network) as found:
        logits = network(images)
    features = in_frame_of(logits, found[0])
    assert features.shape[2:] == size
    assert torch.allclose(network.head(features), logits, atol=1e-5)
    with torch.no_grad():
        network(images)
    assert len(found) == 1  # nothing is collected outside the block


def test_a_head_that_enlarges(make_images):
    arguments = {"channels": [4, 8, 16], "strides": [2, 2], "num_res_units": 0, "norm": "batch"}
    network = MonaiNetwork.build(MonaiParams(class_name="UNet", arguments=arguments, divisor=4), 1, 2)
    with torch.no_grad(), head_features(network) as found:
        logits = network(make_images(2, 30, 34))
    assert in_frame_of(logits, found[0]).shape[2:] == (30, 34)


# ------------------------------------------------------------ the grid


def test_every_pixel_has_its_turn(make_adacontrast):
    method = make_adacontrast(refine_stride=3)
    grids = [method._grid((10, 7)) for _ in range(200)]
    assert torch.equal(torch.cat(grids).unique(), torch.arange(70))
    for grid in grids:
        down, across = grid // 7, grid % 7
        assert set(down.unique().diff().tolist()) == {3}
        assert set(across.unique().diff().tolist()) == {3}


def test_a_stride_beyond_the_image(make_adacontrast, make_images):
    method = make_adacontrast(refine_stride=100, pixels_per_slice=5)
    assert len(method._grid((8, 6))) == 1
    assert torch.isfinite(method.adapt(make_images(4))["loss/self_training"])


def test_views_of_a_pixel_show_it_in_one_place(make_adacontrast, make_images):
    method, images = make_adacontrast(static_magnitude=1.0), make_images(6)
    assert method.augmentation.ops
    assert {op.kind for op in method.augmentation.ops} == {"intensity"}
    draw = method.augmentation.draw(tuple(images.shape))
    view = method.augmentation.apply_draw(images, draw)
    assert torch.equal(view.theta, torch.eye(2, 3).expand(6, 2, 3))
    assert not torch.equal(view.images, images)


# ------------------------------------------------------------ an update


def test_labels_of_the_nearest_pixel_are_its_own(make_adacontrast, make_network, make_images):
    everything = {"neighbours": 1, "pixels_per_slice": 10_000, "queue_size": 10_000}
    method, images = make_adacontrast(make_network(width=8), **everything), make_images(4)
    logits, _ = method._look(method.student, images, None)
    grid, chosen, labels = method._pseudo_labels(images)
    assert sorted(chosen.tolist()) == list(range(len(grid)))
    own = logits.flatten(2)[:, :, grid].argmax(dim=1)
    assert 0.02 < own.float().mean() < 0.98
    assert len(method.features.columns[0]) == own.numel()
    assert (labels == own).float().mean() > 0.98  # a length of 1 hides how far a feature reaches


def test_labels_follow_the_memory(make_adacontrast, make_network, make_images):
    params = {"queue_size": 5000, "pixels_per_slice": 1, "neighbours": 3}
    method, images = make_adacontrast(make_network(width=8), **params), make_images(4)
    logits, features = method._look(method.student, images, None)
    everywhere = torch.arange(32 * 32)
    remembered = functional.normalize(rows(features, everywhere), dim=1)
    turned = 1 - logits.softmax(dim=1)  # a memory that says the opposite
    method.features.push(remembered, rows(turned, everywhere))
    grid, _, labels = method._pseudo_labels(images)
    own = logits.flatten(2)[:, :, grid].argmax(dim=1)
    assert (labels != own).float().mean() > 0.9


def test_one_update_by_hand(make_adacontrast, make_network, make_images):
    network, images = make_network(), make_images(4)
    quiet = {"static_magnitude": 0.0, "op_set": "intensity_artefacts", "policy_size": 1}
    weak = {"weak_scale": 1, "weak_shift": 0, "weak_flip": "none"}
    params = {"learning_rate": 0.1, "momentum": 0, "weight_decay": 0, "teacher_momentum": 0.9}
    method = make_adacontrast(network, **quiet, **weak, **params)
    method.augmentation.ops = tuple(op for op in method.augmentation.ops if op.identity is not None)
    twin = make_adacontrast(network, **quiet, **weak, **params)
    weak, _ = twin._weak_view(images)
    assert torch.allclose(weak, images, atol=1e-5)
    grid, _, labels = twin._pseudo_labels(weak)
    logits, _ = twin._look(twin.student, weak, None)
    loss = functional.cross_entropy(logits.flatten(2)[:, :, grid], labels)
    mean = logits.softmax(dim=1).mean(dim=(0, 2, 3))
    loss = loss + (mean * mean.log()).sum()
    loss.backward()  # no contrast: the first update has no negatives
    scalars = method.adapt(images)
    assert float(scalars["loss/contrast"]) == 0
    assert float(sum(scalars.values())) == pytest.approx(float(loss.detach()), abs=1e-4)
    for name, value in twin.student.named_parameters():
        want = value - 0.1 * value.grad
        assert torch.allclose(method.student.get_parameter(name), want, atol=1e-4), name
    head = method.student.head.conv.weight
    assert not torch.equal(head, network.head.conv.weight)
    want = 0.9 * network.head.conv.weight + 0.1 * head
    assert torch.allclose(method.teacher.head.conv.weight, want, atol=1e-6)


def test_the_loss_is_the_weighted_sum_of_its_terms(make_adacontrast, make_images):
    method = make_adacontrast(contrast_weight=0.7, diversity_weight=1.3)
    method.adapt(make_images(4, seed=1))  # the first update has no negatives
    loss, scalars = method.objective(make_images(4))
    terms = [float(scalars[f"loss/{name}"]) for name in ("self_training", "contrast", "diversity")]
    assert terms[1] > 0.1 > 0 > terms[2]
    assert float(loss.detach()) == pytest.approx(terms[0] + 0.7 * terms[1] + 1.3 * terms[2], rel=1e-5)


def test_contrast_draws_queries_to_their_keys():
    queries, positives, keys = unit(6, 5), unit(6, 5, seed=1), unit(9, 5, seed=2)
    labels, others = torch.zeros(6, dtype=torch.long), torch.ones(9, dtype=torch.long)
    queries.requires_grad_(True)
    for _ in range(60):
        loss = info_nce(functional.normalize(queries, dim=1), positives, labels, (keys, others), 0.2)
        (gradient,) = torch.autograd.grad(loss, queries)
        with torch.no_grad():
            queries -= 0.5 * gradient
    ended = functional.normalize(queries.detach(), dim=1)
    assert (ended * positives).sum(dim=1).mean() > (unit(6, 5) * positives).sum(dim=1).mean() + 0.3
    assert (ended @ keys.T).mean() < (unit(6, 5) @ keys.T).mean()


def test_memories_fill_and_stay_within_their_size(make_adacontrast, make_images):
    method = make_adacontrast(queue_size=100)
    for done in (1, 2):
        scalars = method.adapt(make_images(4, seed=done))
        for memory in (method.features, method.keys):
            assert {len(column) for column in memory.columns} == {min(64 * done, 100)}
            assert not any(column.requires_grad for column in memory.columns)
    assert float(scalars["loss/contrast"]) > 0
    lengths = method.keys.columns[0].norm(dim=1)  # 0 where no feature is above 0
    assert ((lengths - 1).abs() < 1e-5).float().mean() > 0.9
    assert lengths.max() < 1 + 1e-5


@pytest.mark.parametrize("size", [1000, 90])
def test_the_memory_is_filled_over_the_target_before_the_first_pass(
    size, make_adacontrast, make_images, same_state
):
    batches = [make_images(4, seed=seed) for seed in range(3)]
    method = make_adacontrast(fill_memory=True, queue_size=size)
    before = method.state_dict()
    method.start_epoch(0, iter(batches))
    features, probs = method.features.columns
    assert features.shape == (min(3 * 4 * 16, size), 4)
    assert same_state(before["modules"], method.state_dict()["modules"])  # the statistics too
    lengths = features.norm(dim=1)
    assert ((lengths - 1).abs() < 1e-5).float().mean() > 0.9
    wanted = []
    for images in batches:
        logits, found = method._look(method.teacher, images, None)
        every = torch.arange(32 * 32)
        pairs = functional.normalize(rows(found, every), dim=1), rows(logits, every).softmax(dim=1)
        wanted.append(torch.cat(pairs, dim=1))
    exact = "donot_use_mm_for_euclid_dist"
    gaps = torch.cdist(torch.cat([features, probs], dim=1), torch.cat(wanted), compute_mode=exact).min(dim=1)
    assert gaps.values.max() < 1e-4  # pixels of the target, each with its own probabilities
    for index in range(3):  # of all batches alike, in random order
        share = (gaps.indices[:90] // (4 * 1024) == index).float().mean()
        assert 0.1 < share < 0.6
    method.start_epoch(1, iter(batches))
    assert len(method.features.columns[0]) == len(features)  # once is enough
    plain = make_adacontrast()
    plain.start_epoch(0, iter(batches))
    assert plain.features.columns == ()
    assert method.passes(8) == plain.passes(8) + 8


def test_without_neighbours_every_class_is_as_likely():
    queries = functional.normalize(torch.rand(3, 5), dim=1)
    found = neighbour_mean(queries, torch.empty(0, 5), torch.empty(0, 4), 2)
    assert torch.equal(found, torch.full((3, 4), 0.25))


def test_learns_nothing_at_learning_rate_0(make_adacontrast, make_images):
    method, images = make_adacontrast(learning_rate=0), make_images(4)
    before, statistics = weights(method.student), running(method.student)
    for _ in range(2):
        method.adapt(images)
    assert not moved(before, weights(method.student))
    assert not moved(before, weights(method.teacher))
    assert moved(statistics, running(method.student)) == list(statistics)


def test_every_parameter_learns(make_adacontrast, make_images):
    method = make_adacontrast(learning_rate=0.01)
    before = weights(method.student)
    for _ in range(2):
        method.adapt(make_images(4))
    assert moved(before, weights(method.student)) == list(before)


@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_the_student_predicts_and_prediction_leaves_no_trace(
    statistics, make_adacontrast, make_images, batch_mode_probs, same_state
):
    method = make_adacontrast(predict_statistics=statistics, learning_rate=0.01)
    images = make_images(6)
    method.adapt(images[:4])
    state = method.state_dict()
    probs = method.predict(images)
    assert same_state(state, method.state_dict())
    student = copy.deepcopy(method.student)
    with torch.no_grad():
        want = student(2 * images - 1).softmax(dim=1)
    if statistics == "volume":
        want = batch_mode_probs(student, images)[1]
    assert torch.allclose(probs, want, atol=1e-5)


def test_state_in_the_middle(make_adacontrast, make_images, same_state):
    images = make_images(6)
    one, two = make_adacontrast(), make_adacontrast(seed=5)
    one.adapt(images[:4])
    state = one.state_dict()
    two.load_state_dict(state)
    for method in (one, two):
        method.adapt(images[2:])
    assert same_state(one.state_dict(), two.state_dict())
    assert not same_state(state, one.state_dict())  # a copy, which the update has not changed
    one.reset()
    assert one.features.columns == ()
    assert same_state(one.state_dict(), make_adacontrast().state_dict())


# ------------------------------------------------------------ tiles


@pytest.mark.parametrize("kind", ["mobilenet_v2", "vit_b_16"])
def test_tiles(kind, make_adacontrast):
    torch.manual_seed(0)
    if kind == "mobilenet_v2":
        network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    else:
        network = ViT.build(ViTParams(image_size=32, layers=1, heads=2, width=32), 3, 4).eval()
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    method = make_adacontrast(network, queue_size=6)
    assert {op.kind for op in method.augmentation.ops} == {"intensity", "geometric"}
    for _ in range(2):
        scalars = method.adapt(images)
    assert all(torch.isfinite(value) for value in scalars.values())
    features, probs = method.features.columns
    assert features.shape == (6, method.student.head.in_features)
    assert probs.shape == (6, 4)
    for part in (images, images[:1]):
        assert method.predict(part).shape == (len(part), 4)
