"""Figures in reasons differ where the sentence says that they do."""

import pytest

from tesla_med.engine.wording import trusted_against


@pytest.mark.parametrize(
    ("ours", "other", "words"),
    [
        (3.5, 3.09, "more than it (3.50 against 3.09)"),
        (3.094, 3.0921, "more than it (3.094 against 3.092)"),
        (3.09412, 3.09401, "more than it (3.0941 against 3.0940)"),
        (3.094123, 3.094122, "as much as it (3.09)"),
        (3.09, 3.09, "as much as it (3.09)"),
    ],
)
def test_as_many_digits_as_it_takes(ours, other, words):
    assert trusted_against(ours, other, "it") == f"is trusted {words}"
