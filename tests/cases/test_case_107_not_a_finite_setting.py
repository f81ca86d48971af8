"""An infinite setting or one that is not a number is refused before anything is written, by every command."""

import pytest
import small_site as small
from lines import run, sets, write_site

CASE = 107
VALUES = ("inf", ".inf", "-.inf", ".nan", "nan", "1e999")
KEYS = ("methods.tesla.learning_rate", "guard.head_start", "train.learning_rate", "scaling.unsteady")


@pytest.fixture
def words(small_weights, tmp_path):
    """Return the words of a command that would run, but for its setting."""
    small.make_volumes(tmp_path / "nii", 1)
    path = write_site(tmp_path)
    where = ["--volumes", str(tmp_path / "nii"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    weights = ["--weights", str(small_weights)]
    commands = {
        "adapt": ["--site", str(path), *weights],
        "predict": ["--site", str(path), *weights],
        "train": ["--pipeline", "prostate", "--sites", str(path)],
        "compare": ["--pipeline", "prostate", "--sites", str(path), *weights],
    }
    settings = sets(*small.SMALL)
    return lambda command: [command, *commands[command], *where, *settings]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES)
def test_it_is_refused(key, value, words, tmp_path, capsys):
    assert run([*words("adapt"), "--set", f"{key}={value}"]) == 2
    said = capsys.readouterr().err
    assert key.rsplit(".", 1)[1] in said
    assert "finite" in said or "number" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["predict", "train", "compare"])
def test_by_every_command(command, words, tmp_path, capsys):
    assert run([*words(command), "--set", "guard.head_start=.inf"]) == 2
    assert "head_start" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
