"""The student learns from soft labels of the teacher, averaged over other views, never from its own
output.
"""

import pytest
import torch

from tesla_med import losses

CASE = 54


@pytest.fixture
def seen(monkeypatch):
    """Write down what the losses of the student are given."""
    found = []
    for name in ("flipped_cross_entropy", "distillation"):
        original = getattr(losses, name)

        def watched(logits, labels, weight=None, *, name=name, original=original):
            value = original(logits, labels, weight)
            found.append((name, logits.detach(), labels, float(value.detach())))
            return value

        monkeypatch.setattr(losses, name, watched)
    return found


def test_targets_of_the_first_step(make_tta, make_images, seen):
    method = make_tta("tesla", weak_views=4)
    method.adapt(make_images(4))
    assert [item[0] for item in seen] == ["flipped_cross_entropy", "distillation"]
    for _, logits, labels, loss in seen:
        own = logits.softmax(dim=1)
        hard = torch.nn.functional.one_hot(own.argmax(1), 2).movedim(-1, 1).float()
        assert not labels.requires_grad
        assert torch.allclose(labels.sum(dim=1), torch.ones(()), atol=1e-5)
        assert (labels - own).abs().max() > 0.01  # another view, though student and teacher are still equal
        assert (labels - hard).abs().mean() > 0.01
        assert loss > 0.001


def test_the_teacher_gives_them_and_not_the_student(make_tta, make_images, seen):
    """A teacher that is certain of class 1 everywhere is believed."""
    method = make_tta("tesla", weak_views=3)
    with torch.no_grad():
        head = method.teacher.head
        bias = next(module for module in head.modules() if isinstance(module, torch.nn.Conv2d)).bias
        bias.copy_(torch.tensor([-50.0, 50.0]))
    method.adapt(make_images(4))
    for _, logits, labels, _ in seen:
        assert labels[:, 1].min() > 0.99
        assert logits.softmax(dim=1)[:, 1].min() < 0.9
