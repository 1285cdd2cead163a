"""Bytes of weights, gradients and optimizer, parameter by parameter: what models/costs is compared with."""

from dataclasses import dataclass

from models.costs.stage_parameters import StageParameters
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout


@dataclass(slots=True, frozen=True)
class Bytes:
    """Bytes that a rank holds throughout a step: for one parameter, or for all of its own."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(precision: PrecisionConfig, parallel: ParallelConfig, shards: int) -> Bytes:
    """Weights, main gradients, and AdamW's fp32 state, which the distributed optimizer splits over ``shards`` ranks.

    The table in megatron-core's user guide, "Distributed Optimizer": 6 + 12/d for bf16 with fp32 gradients,
    8 + 8/d for fp32. Gradients that are not fp32 have an fp32 copy while the optimizer steps. Under fp8 and
    fp4 weights have copies by rows and by columns, in fp4 with a scale of 8 bits for 16 values.
    """
    fp8_copies = 2 if precision.fp8 and not precision.fp8_param_gather else 0
    weights = (4 if precision.dtype == "fp32" else 2) + (1.125 if precision.fp4 else fp8_copies)
    gradients = 4 if precision.dtype == "fp32" or precision.grad_reduce_in_fp32 else 2
    main_weights = 0 if precision.dtype == "fp32" else 4
    main_gradients = 0 if gradients == 4 else 4
    divisor = shards if parallel.use_distributed_optimizer else 1
    return Bytes(weights, gradients, (main_weights + main_gradients + 8) / divisor)


def rank_bytes(stage: StageParameters, precision: PrecisionConfig, parallel: ParallelConfig, layout: Layout) -> Bytes:
    """What a rank of ``stage`` holds. Optimizer state is split over the ranks that hold the same parameters.

    These are DP x CP; of experts, what EP x ETP leaves of TP x CP x DP.
    """
    rest = bytes_per_parameter(precision, parallel, layout.dp * layout.cp)
    expert = bytes_per_parameter(precision, parallel, layout.edp)
    experts = stage.expert_parameters_per_rank
    others = stage.parameters_per_rank - experts
    return Bytes(
        weights=others * rest.weights + experts * expert.weights,
        gradients=others * rest.gradients + experts * expert.gradients,
        optimizer=others * rest.optimizer + experts * expert.optimizer,
    )
