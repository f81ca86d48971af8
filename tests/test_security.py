"""No network, no code from files, no way out of the output folder, no patient text in what is written."""

import pickle
import socket

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.config.files import load_site
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.models.checkpoint import read_state

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "Mustermann^Erika"


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def no_network(monkeypatch):
    """Let every attempt to open a connection fail loudly; return what was tried."""
    tried = []

    def refuse(*arguments, **_):
        tried.append(arguments)
        raise AssertionError(f"network access: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tried


def test_a_whole_run_opens_no_connection(weights, tmp_path, no_network):
    small.make_volumes(tmp_path / "nii", 2)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", reports=())
    assert not result.failed
    assert no_network == []


def test_the_block_works(no_network):
    with pytest.raises(AssertionError, match="network access"):
        socket.create_connection(("127.0.0.1", 9))


# ------------------------------------------------------------ patient text


def test_no_free_text_of_a_header_is_repeated_anywhere(weights, tmp_path):
    for path in small.make_volumes(tmp_path / "nii", 2):
        image = nib.load(path)
        header = image.header
        header["descrip"] = NAME.encode()
        header["aux_file"] = NAME.encode()
        header["db_name"] = NAME.encode()
        header["intent_name"] = NAME[:16].encode()
        header.extensions.append(nib.nifti1.Nifti1Extension("comment", NAME.encode()))
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), None, header), path)
        assert NAME.encode()[:10] in nib.load(path).header.binaryblock
    result = small.run(
        tmp_path / "nii", weights, tmp_path / "out", reports=(), save_probs=True, save_uncertainty=True
    )
    assert not result.failed
    for name, data in small.files_below(tmp_path / "out").items():
        if name.endswith(".nii.gz"):
            written = nib.load(tmp_path / "out" / name)
            data = written.header.binaryblock  # noqa: PLW2901 - what is compressed is looked into
            assert not written.header.extensions
        assert b"Mustermann" not in data, name


# ------------------------------------------------------------ code in files


class Harm:
    """Pickled, it would make a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt"])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_weights_never_run_code(tmp_path, suffix, form):
    path, made = tmp_path / f"weights{suffix}", tmp_path / "harm"
    content = {"state_dict": {"weight": torch.zeros(1)}, "extra": Harm(made)}
    if form == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=path.name):
        read_state(path)
    assert not made.exists()


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {made}']",
        "institution: !!python/object/apply:os.system ['touch {made}']",
        "institution: !!python/name:os.system",
    ],
)
def test_yaml_never_runs_code(tmp_path, text):
    made = tmp_path / "harm"
    path = tmp_path / "prostate" / "x.yaml"
    path.parent.mkdir()
    path.write_text(text.format(made=made))
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_site(str(path))
    assert not made.exists()


# ------------------------------------------------------------ paths


def test_nothing_is_written_outside_the_output_folder(weights, tmp_path):
    small.make_volumes(tmp_path / "nii" / "deep" / "er", 2)
    before = set(small.files_below(tmp_path))
    small.run(tmp_path / "nii", weights, tmp_path / "runs" / "out", reports=())
    new = set(small.files_below(tmp_path)) - before
    assert new
    assert all(name.startswith("runs/out/") for name in new)


def test_a_link_among_the_images_does_not_lead_outputs_elsewhere(weights, tmp_path):
    small.make_volumes(tmp_path / "elsewhere", 1)
    small.make_volumes(tmp_path / "nii", 1, seed=2)
    (tmp_path / "nii" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = set(small.files_below(tmp_path / "elsewhere"))
    small.run(tmp_path / "nii", weights, tmp_path / "out")
    assert set(small.files_below(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize("pattern", ["../*.nii.gz", "/etc/*", "a/../../b*.nii.gz"])
def test_patterns_cannot_leave_the_folder(weights, tmp_path, pattern):
    """A pattern that could only match elsewhere is refused before anything is read or written."""
    small.make_volumes(tmp_path, 1)
    small.make_volumes(tmp_path / "nii", 1, seed=2)
    files = small.site().files.model_copy(update={"image": (pattern, "Case*.nii.gz")})
    with pytest.raises(ConfigError, match="can never match"):
        small.run(tmp_path / "nii", weights, tmp_path / "out", site=small.site(files=files))
    assert not (tmp_path / "out").exists()
