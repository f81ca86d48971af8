"""Files whose names begin with a dot are skipped and counted; extensions match without regard to case."""

import pytest
import small_site as small

CASE = 24
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def test_companions_and_upper_case(weights, tmp_path):
    paths = small.make_volumes(tmp_path / "nii", 2)
    paths[1].rename(tmp_path / "nii" / "Case01.NII.GZ")
    (tmp_path / "nii" / "._Case00.nii.gz").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X")
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", method="source")
    assert [item.case for item in result.results] == ["Case00", "Case01"]
    assert not result.failed
    skipped = {path.name: reason for path, reason in result.skipped}
    assert "._Case00.nii.gz" in skipped
