"""PL: the threshold of confidence itself is enough."""

import torch


def test_a_pixel_exactly_as_confident_as_the_threshold_is_kept(make_tta, make_network, make_images):
    network = make_network(classes=2)
    with torch.no_grad():
        for parameter in network.head.parameters():
            parameter.zero_()  # both classes have a probability of exactly 0.5
    method = make_tta("pl", network, confidence_threshold=0.5)
    assert float(method.adapt(make_images(2))["kept"]) == 1.0
