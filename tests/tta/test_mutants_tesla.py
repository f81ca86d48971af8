"""TeSLA: what a checkpoint says of how its network is to predict."""

import pytest

VIEWS = ("predict_views", "weak_scale", "weak_shift", "weak_flip")


@pytest.mark.parametrize("views", [1, 2, 3])
def test_views_are_named_where_there_are_several(views, make_tta, make_images):
    method = make_tta("tesla", predict_views=views, weak_scale=0.07)
    named = {name: value for name, value in method.deployed_params(make_images(2)).items() if name in VIEWS}
    expected = {name: getattr(method.params, name) for name in VIEWS}
    assert named == ({} if views == 1 else expected)
