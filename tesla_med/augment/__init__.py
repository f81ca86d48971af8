"""Augmentations: differentiable operations, one warp, the learned adversarial policy."""
