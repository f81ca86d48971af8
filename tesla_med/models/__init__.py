"""Networks by name. ``build_model`` makes the one a pipeline asks for.

Every network takes images already mapped to the pipeline's ``model_range``, (N, C, H, W) float,
any H and W, and returns logits (N, L, H, W). Its last layer is ``network.head``.
"""

from __future__ import annotations

from tesla_med.models.base import MODELS, Network, build_model, norm_layers

__all__ = ["MODELS", "Network", "build_model", "norm_layers"]
