"""Source statistics in use: pooled moments, divergences, and the methods of the Y protocols."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import small_site
import torch

from tesla_med.config.files import load_pipeline
from tesla_med.errors import CheckpointError, ConfigError, OutputError
from tesla_med.io.files import sha256
from tesla_med.models.normalisation import batch_statistics
from tesla_med.models.statistics import load_statistics, save_statistics, statistics_path
from tesla_med.training.measure import compute_statistics
from tesla_med.tta import METHODS, MethodContext, make_method
from tesla_med.tta._shared.features import head_features, rows
from tesla_med.tta._shared.gaussians import Anchors, Moments
from tesla_med.tta._shared.replay import Replay

pytestmark = pytest.mark.usefixtures("one_thread")
Y_METHODS = [
    name for name, method in METHODS.items() if any(item.startswith("Y") for item in method.protocols)
]


def features(count, seed=0, size=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator) @ torch.randn(size, size, generator=generator) + 2


def seen_by(network, images):
    """Return features (P, D) at the head's input and logits (P, L) of all pixels, under batch statistics."""
    with torch.no_grad(), batch_statistics(network, momentum=None), head_features(network) as found:
        logits = network(2 * images - 1)
    pixels = torch.arange(logits[0, 0].numel())
    return rows(found[0], pixels), rows(logits, pixels)


def one_group(vectors):
    return Moments.of(vectors, torch.ones(len(vectors), 1))


def test_moments_are_mean_and_covariance_of_each_group():
    vectors = features(200)
    groups = torch.arange(200) % 3
    membership = torch.nn.functional.one_hot(groups, 4).float()
    moments = Moments.of(vectors, membership)
    for index in range(3):
        part = vectors[groups == index]
        assert moments.weight[index] == len(part)
        assert torch.allclose(moments.mean[index], part.mean(dim=0), atol=1e-5)
        assert torch.allclose(moments.covariance[index], torch.cov(part.T, correction=0), atol=1e-4)
    assert moments.weight[3] == 0
    assert not moments.mean[3].any()
    assert torch.isfinite(moments.covariance).all()


def test_pooled_moments_are_those_of_the_whole():
    first, second = features(120), 3 * features(50, seed=1) - 1
    pooled = one_group(first).pooled(one_group(second))
    whole = one_group(torch.cat([first, second]))
    assert pooled.weight == 170
    assert torch.allclose(pooled.mean, whole.mean, atol=1e-4)
    assert torch.allclose(pooled.covariance, whole.covariance, rtol=1e-4, atol=1e-3)
    empty = Moments.empty(1, 5, torch.device("cpu"))
    assert torch.allclose(empty.pooled(one_group(first)).covariance, one_group(first).covariance)
    assert torch.isfinite(empty.pooled(empty).mean).all()


def test_memory_bounds_the_weight_of_the_past():
    old, new = torch.zeros(1000, 2), torch.ones(10, 2)
    for memory, expected in ((0, 1.0), (10, 0.5), (1000, 10 / 1010)):
        pooled = one_group(old).remembered(memory).pooled(one_group(new))
        assert pooled.mean[0, 0] == pytest.approx(expected)


def test_divergence_is_that_of_the_library():
    from torch.distributions import MultivariateNormal, kl_divergence

    from tesla_med.tta._shared.gaussians import JITTER, RIDGE

    moments = [one_group(features(300)), one_group(1.5 * features(200, seed=4) - 1)]
    anchors = Anchors(moments[0].mean, moments[0].covariance, torch.device("cpu"))
    ridge = RIDGE * float(moments[0].covariance.max()) * torch.eye(5)
    gaussians = [
        MultivariateNormal(
            item.mean[0],
            item.covariance[0] + ridge + JITTER * float(item.covariance[0].trace()) * torch.eye(5),
        )
        for item in moments
    ]
    expected = (kl_divergence(*gaussians) + kl_divergence(*gaussians[::-1])) / 2 / 5
    assert float(anchors.divergence(moments[1])) == pytest.approx(float(expected), rel=1e-4)


def test_divergence_of_gaussians():
    mean, deviation = torch.zeros(1, 3), torch.tensor([1.0, 2.0, 3.0])
    anchors = Anchors(mean, torch.diag(deviation**2)[None], torch.device("cpu"))
    same = Moments(torch.tensor([9.0]), mean, torch.diag(deviation**2)[None])
    assert anchors.divergence(same) == pytest.approx(0.0, abs=1e-6)
    moved = Moments(torch.tensor([9.0]), mean + torch.tensor([[1.0, 0.0, 0.0]]), same.covariance)
    ridged = 1.0 + 9.0 / 30.0  # the largest variance over 30 is added
    assert anchors.divergence(moved) == pytest.approx(1.0 / ridged / 2 / 3, rel=1e-4)


@pytest.mark.parametrize("name", Y_METHODS)
def test_refused_without_statistics(name, make_network):
    with pytest.raises(ConfigError, match=rf"method '{name}' aligns features .* 'tesla-med statistics"):
        make_method(name, make_network(), {}, MethodContext(torch.device("cpu")))


@pytest.mark.parametrize("name", Y_METHODS)
def test_refused_with_statistics_of_another_width(name, make_network, make_statistics):
    statistics = make_statistics(make_network(width=8), 2)
    context = MethodContext(torch.device("cpu"), statistics=statistics)
    with pytest.raises(CheckpointError, match=r"are of 8 features, but the head of this network takes 4"):
        make_method(name, make_network(), {}, context)


@pytest.mark.parametrize(
    ("name", "term", "params"),
    [
        ("ttt_pp", "loss/mean", {"learning_rate": 1e-3, "memory": 0}),
        pytest.param(
            *("ttac", "loss/global", {"learning_rate": 1e-3, "memory": 0, "class_weight": 0.0}),
            marks=pytest.mark.slow,
        ),
        ("tesla_s", "loss/alignment", {"learning_rate": 1e-3, "memory": 0, "alignment_weight": 10.0}),
    ],
)
def test_features_come_nearer_to_the_source(name, term, params, make_tta, make_images):
    images = 1.0 - 0.7 * make_images(6)  # inverted and flat: features move away
    method = make_tta(name, **params)
    values = [float(method.adapt(images)[term]) for _ in range(25)]
    assert values[-1] < 0.7 * values[0]
    assert min(values) > 0


def test_the_objective_of_ttt_pp_by_hand(make_tta, make_network, make_images, make_statistics):
    network, images = make_network(), 1.0 - 0.7 * make_images(4)
    source = make_statistics(network, 2)
    method = make_tta("ttt_pp", network, feature_pixels=10**6, mean_weight=0.7, covariance_weight=1.3)
    features, _ = seen_by(network, images)
    mean = (features.mean(dim=0) - source.mean).square().sum() / 4
    spread = (torch.cov(features.T, correction=0) - source.covariance).square().sum() / (4 * 4**2)
    loss, scalars = method.objective(images)
    assert float(scalars["loss/mean"]) == pytest.approx(float(mean), rel=1e-4)
    assert float(scalars["loss/covariance"]) == pytest.approx(float(spread), rel=1e-4)
    assert float(spread) > 0.01 * float(mean)  # each term decides the sum
    assert float(loss.detach()) == pytest.approx(float(0.7 * mean + 1.3 * spread), rel=1e-4)


def test_the_objective_of_ttac_by_hand(make_network, make_images, make_statistics):
    """Each class is drawn to its own anchor, and both terms count."""
    network, images = make_network(), 1.0 - 0.7 * make_images(4)
    source = make_statistics(network, 2)
    apart = torch.tensor([[0.0], [1.0]]).expand(2, 4)  # anchors that cannot be taken for each other
    source = replace(source, class_mean=source.class_mean + apart)
    context = MethodContext(torch.device("cpu"), statistics=source)
    every = {"feature_pixels": 10**6, "confidence": 0.5, "class_minimum": 1}
    method = make_method("ttac", network, {**every, "class_weight": 0.7, "global_weight": 1.3}, context)
    features, logits = seen_by(network, images)
    found = logits.argmax(dim=1)
    want = []
    for vectors, mean, covariance in (
        (features[found == 0], source.class_mean[0], source.class_covariance[0]),
        (features[found == 1], source.class_mean[1], source.class_covariance[1]),
        (features, source.mean, source.covariance),
    ):
        assert len(vectors) > 100
        anchors = Anchors(mean[None], covariance[None], torch.device("cpu"))
        want.append(float(anchors.divergence(one_group(vectors))))
    loss, scalars = method.objective(images)
    assert abs(want[0] - want[1]) > 0.1 * want[0]
    assert float(scalars["loss/class"]) == pytest.approx((want[0] + want[1]) / 2, rel=1e-3)
    assert float(scalars["loss/global"]) == pytest.approx(want[2], rel=1e-3)
    both = 0.7 * (want[0] + want[1]) / 2 + 1.3 * want[2]
    assert float(loss.detach()) == pytest.approx(0.05 * 2 * 4 * both, rel=1e-3)  # both directions, 4 features


def test_replay_keeps_the_newest_and_their_averages():
    replay, images = Replay(5, 0.75), torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 2, 2)
    replay.push(images[:3], None)
    first = torch.full((3, 2, 2, 2), 0.5)
    before, after = replay.visit(torch.arange(3), first)
    assert not before.any()
    assert torch.equal(after, first)
    replay.push(images[3:6], torch.full((3, 2, 2), 0.0))
    assert replay.images[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert replay.weight[:, 0, 0].tolist() == [1, 1, 0, 0, 0]
    before, after = replay.visit(torch.tensor([0, 4]), torch.ones(2, 2, 2, 2))
    assert before.flatten(1).amax(dim=1).tolist() == [0.5, 0.0]
    assert after.flatten(1).amax(dim=1).tolist() == [0.25 * 0.5 + 0.75, 1.0]
    assert replay.average[:, 0, 0, 0].tolist() == [0.875, 0.5, 0.0, 0.0, 1.0]
    parts = list(replay.batches(2, torch.Generator().manual_seed(1)))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3, 4]
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    state = replay.state()
    replay.push(torch.zeros(2, 1, 3, 3), None)  # of another shape
    assert (len(replay), replay.weight, replay.average) == (2, None, None)
    replay.restore(state, torch.device("cpu"))
    assert replay.images[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    replay.push(images.repeat(2, 1, 1, 1), None)
    assert len(replay) == 16  # a batch is kept whole


@pytest.mark.parametrize(
    ("before", "now", "trusted"),
    [
        (None, (0.95, 0.05), True),
        (None, (0.85, 0.15), False),  # not certain enough
        ((0.97, 0.03), (0.95, 0.05), False),  # less certain than before
        ((0.9505, 0.0495), (0.95, 0.05), True),  # by no more than 0.001
        ((0.5, 0.5), (0.93, 0.07), False),  # nor is the average of both: 0.887
        ((0.92, 0.08), (0.93, 0.07), True),
        ((0.9, 0.1), (0.2, 0.8), False),  # another class
    ],
)
def test_labels_are_filtered_by_agreement_between_visits(before, now, trusted, make_tta):
    method = make_tta("ttac", replay=4, label_share=0.9)
    method.replay.push(torch.zeros(2, 1, 3, 3), None)
    maps = [torch.tensor(item).view(1, 2, 1, 1).expand(2, 2, 3, 3) for item in (before or (0.0, 0.0), now)]
    method.replay.average = maps[0].clone()
    method._positions = torch.tensor([1, 0])
    member = method._membership(maps[1].log())
    assert member.shape == (2, 2, 3, 3)
    assert member[:, 0].eq(float(trusted)).all()
    assert not member[:, 1].any()
    mean = maps[1] if before is None else 0.1 * maps[0] + 0.9 * maps[1]
    assert torch.allclose(method.replay.average, mean, atol=1e-6)


def test_every_batch_learns_from_the_replay(make_tta, make_images, monkeypatch):
    method, images = make_tta("ttac", replay=6, iterations=3), make_images(8)
    images[:, :, 0, 0] = torch.arange(8.0)[:, None] / 10
    seen, objective = [], method.objective

    def noted(batch):
        seen.append(sorted((batch[:, 0, 0, 0] * 10).round().long().tolist()))
        return objective(batch)

    monkeypatch.setattr(method, "objective", noted)
    numbers = []
    for start in (0, 2, 4, 6):
        method.adapt(images[start : start + 2])
        numbers.append([item for part in seen for item in part])
        assert all(len(part) <= 2 for part in seen)
        seen.clear()
    assert sorted(numbers[0]) == [0, 0, 1, 1]  # 1 + 2 / 2 passes
    assert sorted(numbers[1]) == sorted(3 * [0, 1, 2, 3])
    assert sorted(numbers[2]) == sorted(3 * [0, 1, 2, 3, 4, 5])
    assert sorted(numbers[3]) == sorted(3 * [2, 3, 4, 5, 6, 7])
    assert method.steps == 2 * 1 + 3 * 2 + 3 * 3 + 3 * 3
    assert method.pixel_weight is None
    assert make_tta("ttac", replay=6, iterations=3, batch_slices=2).passes(8) == 3 * (2 * 2 + 3 * 16) + 2 * 8
    single = make_tta("ttac", replay=0)
    single.adapt(images)
    assert (single.steps, len(single.replay)) == (1, 0)


def test_the_scale_of_the_loss_is_a_factor_of_its_gradient(make_tta, make_images):
    steps = []
    for scale in (0.05, 0.1):
        method = make_tta("ttac", replay=0, loss_scale=scale, learning_rate=1e-4, momentum=0)
        before = [value.detach().clone() for value in method.model.parameters()]
        method.adapt(make_images(4))
        pairs = zip(method.model.parameters(), before, strict=True)
        steps.append(torch.cat([(now.detach() - old).flatten() for now, old in pairs]))
    assert torch.allclose(2 * steps[0], steps[1], rtol=0.02, atol=1e-7)
    assert steps[0].abs().max() > 1e-6


def test_a_class_without_certain_pixels_is_left_out(make_tta, make_images):
    method = make_tta("ttac", confidence=1.0)
    scalars = method.adapt(make_images(3))
    assert float(scalars["loss/class"]) == 0.0
    assert float(scalars["loss/global"]) > 0.0


@pytest.mark.parametrize(("name", "apart"), [("tesla", True), ("tesla_s", False), ("ttac", False)])
def test_regions_are_classes_where_features_of_classes_are_aligned(name, apart, make_tta, make_network):
    network = make_network()
    network.regions = True
    assert make_tta(name, network).model.apart == apart


def test_without_a_replay_every_class_can_be_learned(make_tta, make_network, make_images):
    method = make_tta("ttac", make_network(classes=4), replay=0, confidence=0.0, class_minimum=1)
    logits = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    member = method._membership(logits)
    assert torch.equal(member.argmax(dim=1), logits.argmax(dim=1))
    assert torch.equal(member.sum(dim=1), torch.ones(2, 5, 5))
    assert torch.isfinite(method.adapt(make_images(3))["loss/class"])


def test_tesla_s_without_weight_learns_as_tesla(make_tta, make_images, make_network):
    images = make_images(4)
    probs = []
    for name, more in (("tesla", {}), ("tesla_s", {"alignment_weight": 0.0, "feature_pixels": 10**6})):
        method = make_tta(name, make_network(), augment="none", weak_views=1, batch_slices=None, **more)
        method.adapt(images)
        probs.append(method.predict(images))
    assert torch.allclose(*probs, atol=1e-6)


# ------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Volumes, weights, and source statistics of the weights beside them."""
    folder = tmp_path_factory.mktemp("aligned")
    small_site.make_volumes(folder / "volumes")
    weights = small_site.weights_with_statistics(folder)
    return folder / "volumes", weights, statistics_path(weights)


def test_a_run_says_which_statistics_it_used(made, tmp_path):
    volumes, weights, path = made
    result = small_site.run(volumes, weights, tmp_path / "out", method="ttac", protocol="Y-O")
    assert not result.failed
    record = small_site.record(tmp_path / "out")
    assert record["protocol"] == "Y-O"
    assert record["statistics"] == {
        "file": path.name,
        "sha256": sha256(path),
        "sites": ["X"],
        "cases": 1,
        "pixels": small_site.SLICES * 32 * 32,
    }
    plain = small_site.run(volumes, weights, tmp_path / "plain", method="source")
    assert not plain.failed
    assert small_site.record(tmp_path / "plain")["statistics"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", Y_METHODS)
@pytest.mark.parametrize("protocol", ["Y-O", "Y-M"])
def test_runs_under_y(name, protocol, made, tmp_path):
    volumes, weights, _ = made
    more = ("methods.tesla_s.weak_views=2",)
    result = small_site.run(
        volumes, weights, tmp_path / "out", method=name, protocol=protocol, overrides=more
    )
    assert [item.status for item in result.results] == ["ok", "ok"]
    rows = (tmp_path / "out" / "report" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert all(f",{protocol}," in row for row in rows[1:])


def test_the_pipelines_protocol_gives_way_to_its_counterpart(made, tmp_path):
    volumes, weights, _ = made
    small_site.run(volumes, weights, tmp_path / "out", method="ttac")
    assert small_site.record(tmp_path / "out")["protocol"] == "Y-O"
    with pytest.raises(ConfigError, match=r"method 'ttac' has no protocol 'N-O'. Known: Y-O, Y-M"):
        small_site.run(volumes, weights, tmp_path / "other", method="ttac", protocol="N-O")
    assert not (tmp_path / "other").exists()


def test_statistics_are_refused_under_n(made, tmp_path):
    volumes, weights, path = made
    with pytest.raises(ConfigError, match=r"protocol N-O uses nothing from the source but its weights"):
        small_site.run(volumes, weights, tmp_path / "out", statistics=path)
    assert not (tmp_path / "out").exists()


def test_missing_and_foreign_statistics(made, tmp_path):
    volumes, weights, path = made
    out = tmp_path / "out"
    alone = tmp_path / "alone" / weights.name
    alone.parent.mkdir()
    alone.write_bytes(weights.read_bytes())
    alone.with_suffix(".json").write_bytes(weights.with_suffix(".json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no source statistics at .*; make them with 'tesla-med stat"):
        small_site.run(volumes, alone, out, method="ttac")
    assert not small_site.run(volumes, alone, out, method="ttac", statistics=path).failed  # the same weights
    foreign = tmp_path / "foreign.statistics.safetensors"
    foreign.write_bytes(path.read_bytes())
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for changes, message in (
        ({"weights_sha256": "0" * 64}, r"measured with other weights \(sha256 000000000000"),
        ({"classes": [{**card["classes"][0], "value": 7}, card["classes"][1]]}, r"for classes \(7, 1\)"),
    ):
        foreign.with_suffix(".json").write_text(json.dumps(card | changes), encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            small_site.run(volumes, weights, tmp_path / "no", method="ttac", statistics=foreign)
    assert not (tmp_path / "no").exists()


def test_resume_refuses_other_statistics(made, tmp_path):
    volumes, weights, _ = made
    out = tmp_path / "out"
    small_site.run(volumes, weights, out, method="ttt_pp")
    again = small_site.run(volumes, weights, out, method="ttt_pp", resume=True)
    assert not again.failed
    pipeline = load_pipeline("prostate", small_site.SMALL)
    other = compute_statistics(
        weights, pipeline, [small_site.site()], volumes, tmp_path / "other.safetensors", "cpu", seed=5
    )
    moments, card = load_statistics(other)
    save_statistics(other, replace(moments, mean=moments.mean + 1), card)
    with pytest.raises(OutputError, match="statistics_sha256"):
        small_site.run(volumes, weights, out, method="ttt_pp", statistics=other, resume=True)


def test_a_case_does_not_depend_on_others_under_reset_case(made, tmp_path):
    volumes, weights, _ = made
    both = tmp_path / "both"
    small_site.run(volumes, weights, both, method="ttac", reset="case")
    second = sorted(small_site.masks(both))[1]
    name = second.split("/")[1].removesuffix("_mask.nii.gz")
    alone = tmp_path / "one"
    alone.mkdir()
    for path in volumes.glob(f"{name}*"):
        (alone / path.name).write_bytes(path.read_bytes())
    small_site.run(alone, weights, tmp_path / "single", method="ttac", reset="case")
    assert small_site.masks(tmp_path / "single")[second] == small_site.masks(both)[second]
