"""A truncated file fails its case by name before anything is adapted; the other cases go on."""

import pytest
import small_site as small

CASE = 19
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_half_a_file(weights, tmp_path, share):
    paths = small.make_volumes(tmp_path / "nii", 3)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[: int(share * len(data))])
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    assert "Case01.nii.gz" in result.results[1].reason
    assert not list((tmp_path / "out").rglob("*Case01_mask*"))
    assert len(list((tmp_path / "out" / "masks").glob("*.nii.gz"))) == 2
