from __future__ import annotations

import pytest
import torch

from tesla_med.models.base import predicted_class


@pytest.mark.parametrize("shape", [(2, 3), (3, 2, 4, 5), (2, 4, 3, 3, 3)])
def test_the_predicted_class_is_that_of_argmax(shape: tuple[int, ...]) -> None:
    scores = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(predicted_class(scores), scores.argmax(dim=1))


def test_of_equal_scores_the_first_and_of_none_the_one_without_a_value() -> None:
    scores = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [0.1, torch.nan, 0.8]])
    assert predicted_class(scores).tolist() == [0, 1, 1]
