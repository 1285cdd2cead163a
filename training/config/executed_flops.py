"""FLOPs per token that devices execute under a configuration."""

from models.costs.flops import hardware_flops_per_token
from models.shapes import GPTShape
from parallel.stages import layers_per_chunk
from training.config.run_config import RunConfig


def executed_flops_per_token(config: RunConfig, shape: GPTShape) -> float:
    """The model's, and what is recomputed."""
    train = config.train
    return hardware_flops_per_token(
        shape,
        config.model.seq_length,
        recompute_granularity=train.recompute_granularity,
        recompute_method=train.recompute_method,
        recompute_num_layers=train.recompute_num_layers,
        recompute_modules=train.recompute_modules,
        layers_per_chunk=layers_per_chunk(config.parallel, shape.num_layers),
        recompute_logits=train.cross_entropy_chunk_tokens is not None,
    )
