"""Axes in the order and the sense of another grid: every voxel keeps its place."""

from itertools import permutations, product

import numpy as np
import pytest

from tesla_med.io.geometry import Grid, grid_difference, turned_to

TARGET = np.array([[0.8, -0.9, 0, 7], [0.6, 1.2, 0, -4], [0, 0, 3, 2], [0, 0, 0, 1.0]])
SHAPE = (3, 4, 5)


def stored(axes, senses):
    """Return an array on TARGET as a file with other axes has it."""
    array = np.arange(60).reshape(SHAPE)
    turn = np.eye(4)
    for axis, backwards in enumerate(senses):
        if backwards:
            array = np.flip(array, axis)
            turn[axis, axis], turn[axis, 3] = -1, SHAPE[axis] - 1
    return array.transpose(axes), (TARGET @ turn)[:, [*axes, 3]]


@pytest.mark.parametrize("axes", list(permutations(range(3))))
@pytest.mark.parametrize("senses", list(product((False, True), repeat=3)))
def test_all_ways_to_store_one_grid_come_back(axes, senses):
    array, affine = turned_to(*stored(axes, senses), TARGET)
    assert np.array_equal(array, np.arange(60).reshape(SHAPE))
    assert np.allclose(affine, TARGET)


def test_what_lies_between_axes_or_elsewhere_is_seen():
    array, affine = stored((2, 0, 1), (True, False, True))
    far = affine.copy()
    far[:3, 3] += TARGET[:3, 2]  # one slice
    turned, own = turned_to(array, far, TARGET)
    assert "origin" in grid_difference("a", Grid(turned.shape, own), "b", Grid(SHAPE, TARGET))
    skewed = TARGET.copy()
    skewed[:3, 1] = -2 * skewed[:3, 0]
    same, own = turned_to(array, skewed, TARGET)
    assert same is array
    assert own is skewed
