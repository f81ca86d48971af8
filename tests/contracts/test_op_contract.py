"""Every registered op keeps the contract, whatever it is called."""

from __future__ import annotations

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.augment.ops import OP_SETS, OPS, Op

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = pytest.mark.parametrize("name", OPS.names())
GEOMETRIC = pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.kind == "geometric"])


def draw_for(op, shape, seed=0):
    """Signs, noise, or nothing: one choice an entry."""
    generator = torch.Generator().manual_seed(seed)
    if op.signed:
        return [torch.ones(shape[0]), -torch.ones(shape[0]), 2.0 * torch.randint(2, shape[:1]) - 1]
    if op.noise is not None:
        return [torch.randn(op.noise(shape), generator=generator) for _ in range(2)]
    return [None]


def random_images(*shape, seed=0):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return images * torch.linspace(0.6, 1.0, shape[0]).view(-1, 1, 1, 1)


def test_there_are_ops():
    assert len(OPS.names()) >= 14


@EVERY
def test_describes_itself(name):
    op = OPS.get(name)
    assert isinstance(op, Op)
    assert op.name == name
    assert op.unit
    assert op.identity is None or 0 <= op.identity <= 1
    assert not (op.signed and op.noise), "the policy hands an op signs or noise, not both"


@EVERY
@pytest.mark.parametrize("shape", [(3, 1, 17, 23), (3, 3, 20, 9), (2, 1, 32, 32), (2, 1, 2, 3)])
@pytest.mark.parametrize("magnitude", [0.0, 0.5, 1.0])
def test_stays_in_range(name, shape, magnitude):
    op, images = OPS.get(name), random_images(*shape)
    for draw in draw_for(op, shape):
        result, theta = op(images, torch.full(shape[:1], magnitude), draw)
        assert result.shape == images.shape
        assert result.dtype == torch.float32
        assert torch.isfinite(result).all()
        assert result.min() >= 0
        assert result.max() <= 1
        assert theta.shape == (shape[0], 2, 3)
        assert torch.isfinite(theta).all()
        assert torch.isfinite(warp.invert(theta)).all()


@EVERY
@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_constant_images(name, value):
    op, images = OPS.get(name), torch.full((2, 1, 12, 13), value)
    magnitude = torch.tensor([0.3, 0.9], requires_grad=True)
    result, theta = op(images, magnitude, draw_for(op, (2, 1, 12, 13))[0])
    assert ((result >= 0) & (result <= 1)).all()
    (result.sum() + theta.sum() + magnitude.sum()).backward()
    assert torch.isfinite(magnitude.grad).all()


@EVERY
@pytest.mark.parametrize("channels", [1, 3])
def test_identity_at_the_declared_magnitude(name, channels):
    op, images = OPS.get(name), random_images(3, channels, 21, 18)
    for draw in draw_for(op, images.shape):
        if op.identity is None:
            results = [op(images, torch.full((3,), m), draw)[0] for m in (0.0, 0.25, 0.5, 0.75, 1.0)]
            assert all((result - images).abs().max() > 1e-3 for result in results)
        else:
            result, theta = op(images, torch.full((3,), op.identity), draw)
            assert (result - images).abs().max() < 1e-4
            assert torch.allclose(theta, warp.identity(3), atol=1e-6)


@EVERY
def test_does_something_elsewhere(name):
    op, images = OPS.get(name), random_images(3, 3, 21, 18)
    draw = draw_for(op, images.shape)[0]
    changes = [(op(images, torch.full((3,), m), draw)[0] - images).abs().max() for m in (0.0, 0.5, 1.0)]
    assert max(changes) > 0.05


@EVERY
def test_is_pure(name):
    op, images = OPS.get(name), random_images(3, 1, 19, 16)
    draw = draw_for(op, images.shape)[0]
    magnitude = torch.tensor([0.2, 0.6, 0.9])
    kept = [None if item is None else item.clone() for item in (images, magnitude, draw)]
    torch.manual_seed(0)
    first = op(images, magnitude, draw)
    torch.manual_seed(1)
    second = op(images, magnitude, draw)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for before, after in zip(kept, (images, magnitude, draw), strict=True):
        assert before is None or torch.equal(before, after)


@EVERY
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_independent(name, channels):
    op, images = OPS.get(name), random_images(3, channels, 15, 18)
    draw = draw_for(op, images.shape)[-1]
    magnitude = torch.tensor([0.1, 0.45, 0.95])
    whole, thetas = op(images, magnitude, draw)
    for i in range(3):
        own = None if draw is None else draw[[i]]
        single, theta = op(images[[i]], magnitude[[i]], own)
        assert torch.allclose(single[0], whole[i], atol=1e-5)
        assert torch.allclose(theta[0], thetas[i], atol=1e-6)


@EVERY
def test_kind_says_what_changes(name):
    op, images = OPS.get(name), random_images(2, 1, 16, 16)
    draw, magnitude = draw_for(op, images.shape)[0], torch.tensor([0.1, 0.9])
    if op.kind == "geometric":
        assert op.intensities(images, magnitude, draw) is images
        assert not torch.allclose(op.theta(images, magnitude, draw), warp.identity(2), atol=1e-3)
    else:
        assert torch.equal(op.theta(images, magnitude, draw), warp.identity(2))


@GEOMETRIC
@pytest.mark.parametrize("magnitude", [0.0, 0.3, 0.8, 1.0])
def test_warp_then_inverse(name, magnitude, make_images):
    op = OPS.get(name)
    images = make_images(2, 64, 48, seed=2)
    for sign in draw_for(op, images.shape)[:2]:
        view, theta = op(images, torch.full((2,), magnitude), sign)
        back = warp.from_view(view, theta)
        seen = warp.from_view(torch.ones_like(view), theta) > 0.999
        seen[..., :6, :] = seen[..., -6:, :] = seen[..., :6] = seen[..., -6:] = False
        assert seen.float().mean() > 0.3
        assert (back - images)[seen].abs().max() < 0.06
        assert (back - images)[seen].abs().mean() < 0.01


@pytest.mark.parametrize("op_set", OP_SETS)
def test_op_sets_name_registered_ops_once(op_set):
    members = OP_SETS[op_set]
    assert set(members) <= set(OPS.names())
    assert len(set(members)) == len(members)
    assert len(members) >= 3


def test_op_sets_of_the_paper_and_the_release():
    assert len(OP_SETS["generic"]) == 14
    assert len(OP_SETS["released_mri"]) == 11
    assert set(OP_SETS["generic"]) - set(OP_SETS["released_mri"]) == {"Invert", "Solarize", "Color"}
