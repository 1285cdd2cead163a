"""muP's learning rates (arXiv:2203.03466, table 8), by parameter group: multiples of what a schedule says."""

from typing import Any

from megatron.core.optimizer import OptimizerConfig, ParamKey, get_mup_config_overrides


def group_overrides(config: OptimizerConfig, optimizer: str, width_mult: float) -> dict[ParamKey, Any]:
    """megatron-core's, the same in every layout: of matrices within the blocks, rate and eps over the width; with Muon
    those that stay AdamW's, without the eps. Its own keep their rate, since Newton-Schulz gives updates of one size.
    """
    found: dict[ParamKey, Any] = {}
    for key, override in get_mup_config_overrides(config, width_mult, optimizer).items():
        found[key] = {"lr_mult": override["max_lr"] / config.lr} if "max_lr" in override else {}
        found[key] |= {"eps": override["eps"]} if "eps" in override else {}
    return found
