"""Parameters of methods: which values each of them takes, and that those beyond are refused."""

from __future__ import annotations

import pytest

from tesla_med.errors import ConfigError
from tesla_med.tta import METHODS
from tesla_med.tta.base import check_params

SWITCHED_OFF = """
    learning_rate policy_learning_rate magnitude_learning_rate weight_decay loss_scale reliability
    marginal_weight distillation_weight severity_weight contrast_weight diversity_weight pseudo_label_weight
    mean_weight covariance_weight class_weight global_weight alignment_weight entropy_weight norm_weight
    nuclear_weight memory replay corrected_certainty
"""
COUNTS = """
    batch_slices updates_per_case epochs max_slices views weak_views weak_views_first_epoch predict_views
    policy_size neighbours queue_size refine_stride pixels_per_slice prototype_pixels feature_pixels
    class_minimum iterations first_steps later_steps keep teacher_clean_moves restarts
"""
SHARES = "teacher_momentum static_magnitude weak_shift target_share restore confidence confidence_threshold"
SHARES_OF_SOMETHING = "weak_scale statistics_momentum statistics_share label_share"
PARTS = "momentum sgd_momentum"
SIZES = "clip_norm temperature"
TAKEN = {  # what takes the values between, ends included, and none of those beyond
    **dict.fromkeys(SWITCHED_OFF.split(), ((0, 1000), (-1,))),
    **dict.fromkeys(COUNTS.split(), ((1, 1000), (0,))),
    **dict.fromkeys(SHARES.split(), ((0.0, 1.0), (-0.01, 1.01))),
    **dict.fromkeys(SHARES_OF_SOMETHING.split(), ((0.01, 1.0), (0.0, 1.01))),
    **dict.fromkeys(PARTS.split(), ((0.0, 0.99), (-0.01, 1.0))),
    **dict.fromkeys(SIZES.split(), ((0.01, 1000.0), (0.0,))),
    "neighbour_share": ((0.0, 0.33), (-0.01, 0.34)),  # of a slice at most as much as of itself
}
OF_ONE_METHOD = {("opttta", "policy_size"): ((3, 7), (2, 8))}  # of seven operations


@pytest.mark.parametrize("name", METHODS.names())
def test_every_parameter_takes_the_values_up_to_its_bounds_and_none_beyond(name):
    for key, field in METHODS.get(name).Params.model_fields.items():
        if not any(hasattr(item, edge) for item in field.metadata for edge in ("ge", "gt", "le", "lt")):
            continue
        taken, refused = OF_ONE_METHOD.get((name, key), TAKEN.get(key, ((), ())))
        assert taken, f"{key} has bounds; say here which"
        for value in taken:
            assert getattr(check_params(name, {key: value}), key) == value
        for value in refused:
            with pytest.raises(ConfigError, match=rf"key '{key}'"):
                check_params(name, {key: value})
