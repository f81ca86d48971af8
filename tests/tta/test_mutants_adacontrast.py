"""AdaContrast: Nesterov's momentum, as its authors have it, wherever there is momentum."""

import pytest


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_is_nesterovs(momentum, make_tta):
    (group,) = make_tta("adacontrast", momentum=momentum).optimizer.param_groups
    assert (group["momentum"], group["nesterov"]) == (momentum, momentum > 0)
