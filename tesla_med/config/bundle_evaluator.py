"""What a MONAI bundle runs its network with, where that is something else than is done here."""

from __future__ import annotations

from tesla_med.config.bundle_config import BundleConfig

_OWN = ("iteration_update", "prepare_batch", "decollate_fn")


def evaluator_notes(config: BundleConfig) -> list[str]:
    """Return remarks on the evaluator of a bundle, of which there may be none."""
    _, node = config.at("evaluator") or ("", None)
    if not isinstance(node, dict):
        several = len(config.evaluators()) > 1
        return (
            ["the bundle has several evaluators; its parts are taken from their usual keys"]
            if several
            else []
        )
    target = str(node.get("_target_", "SupervisedEvaluator"))
    found = []
    if target.rpartition(".")[2] != "SupervisedEvaluator":
        found.append(
            f"the bundle predicts with {target[:100]}; here one network does, as in SupervisedEvaluator"
        )
    found += [f"{key} of the bundle's evaluator is not used" for key in _OWN if node.get(key) is not None]
    if "_target_" in node and node.get("inferer") is None and config.at("inferer") is not None:
        found.append("the bundle's evaluator names no inferer; the one under the key 'inferer' is used")
    return found
