"""Expressions of MONAI configurations: operators over numbers, texts, references; nothing that runs."""

import pytest

from tesla_med.config.expressions import NotPlain, threshold, work_out

KNOWN = {"a": 3, "b::0": 2.0, "root": "/x", "many": [1, 2, 3], "yes": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("@a + 1", 4),
        ("-@a // 2 ** 2", -1),
        ("@b::0 * 1.5 if @yes else 0", 3.0),
        ("@b#0", 2.0),
        ("@root + '/models/model.pt'", "/x/models/model.pt"),
        ("[1.0, @a] + @many[:1]", None),
        ("@many[1]", 2),
        ("@many[-1] > 2 and not @yes is False", True),
        ("[64] * 3", [64, 64, 64]),
        ("torch.float32", "float32"),
        ("np.uint8", "uint8"),
    ],
)
def test_plain_expressions_are_worked_out(text, value):
    if value is None:
        with pytest.raises(NotPlain):
            work_out(text, KNOWN.__getitem__)
    else:
        assert work_out(text, KNOWN.__getitem__) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "os.getcwd()",
        "torch.load('x')",
        "torch.os",
        "(1).__class__",
        "@a.__class__",
        "[x for x in @many]",
        "lambda: 1",
        "f'{@a}'",
        "10 ** 10 ** 10",
        "2 ** 1000",
        "'a' * 10",
        "'%s' % 1",
        "[0] * 1000",
        "1 / 0",
        "@missing",
        "(yield)",
        "a := 1",
        "1" * 2000,
        "(" * 900,
        "@a @ @a",
        "import os",
        "1e999",
    ],
)
def test_everything_else_is_not(text):
    with pytest.raises(NotPlain):
        work_out(text, KNOWN.__getitem__)


def test_functions_of_a_foreground_are_understood():
    assert threshold("lambda x: x > 0") == 0
    assert threshold("lambda x: x > -500.5") == -500.5
    assert threshold("lambda x: y > 0") is None
    assert threshold("lambda x: x > 0 and f()") is None
