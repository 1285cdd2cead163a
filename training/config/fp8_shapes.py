"""Whether Transformer Engine can multiply a model's matrices in fp8 or fp4, as they lie on one rank."""

from collections.abc import Iterator

from models.config import ModelConfig
from models.costs.parameters import Parameter, block_parameters, mtp_parameters
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import expert_tensor_parallel_size

SPLIT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight", ".out_proj.weight")
"""TP splits what these sum over; of the others it splits the rows."""
WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""On every tensor rank, in Transformer Engine's modules."""


def fp8_problems(
    model: ModelConfig, shape: GPTShape, parallel: ParallelConfig, precision: PrecisionConfig, micro_batch_size: int
) -> list[str]:
    """Sizes that are no multiples of 16 (of 32 in mxfp8 and nvfp4): of matrices, and of the tokens that weights'
    gradients sum.

    Source: assert_dim_for_fp8_exec of Transformer Engine 2.19 (16 elements of a row), cuBLAS's fp8 matrix products
    (16 of what is summed over), OCP Microscaling Formats 1.0 (blocks of 32), get_fp4_align_size of megatron-core 0.19.2
    (32 values of four bits are 16 bytes).
    """
    name = precision.products
    if name is None:
        return []
    multiple = 32 if precision.recipe in ("mxfp8", "nvfp4") else 16
    wanted = f"precision.{name} with {name}_recipe {precision.recipe} multiplies multiples of {multiple} only"
    found = _bf16_layers(shape, parallel, precision)
    for parameter in _matrices(shape):
        rows, columns = _on_a_rank(parameter, parallel)
        if rows % multiple or columns % multiple:
            kind = parameter.name.split(".", 2)[-1]
            found[kind] = (
                f"{wanted}: {kind} is {rows} x {columns} on a tensor rank. Change the sizes in [model] or the "
                "tensor parallelism."
            )
    tokens = micro_batch_size * model.seq_length // parallel.context_parallel_size
    if tokens % multiple and not shape.num_moe_experts:
        found["tokens"] = (
            f"{wanted}: a microbatch has {tokens} tokens on a rank. Change model.seq_length or train.micro_batch_size."
        )
    return list(found.values())


def _bf16_layers(shape: GPTShape, parallel: ParallelConfig, precision: PrecisionConfig) -> dict[str, str]:
    """What of ``first_last_layers_bf16`` mcore refuses, or leaves nothing in fp8 or fp4."""
    if not precision.first_last_layers_bf16:
        return {}
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    stages = parallel.pipeline_model_parallel_size
    found = {}
    for name, count in (("num_layers_at_start_in_bf16", start), ("num_layers_at_end_in_bf16", end)):
        if count > shape.num_layers // stages:
            found[name] = (
                f"precision.{name} must be at most {shape.num_layers // stages}, the {shape.num_layers} layers over "
                f"{stages} pipeline ranks; found {count}."
            )
    if start + end >= shape.num_layers:
        products = precision.products
        found["layers in bf16"] = (
            f"precision.first_last_layers_bf16 leaves none of the {shape.num_layers} layers in {products}: {start} at "
            f"the start and {end} at the end are in bf16. Lower them, or leave precision.{products} out."
        )
    return found


def _matrices(shape: GPTShape) -> Iterator[Parameter]:
    """One block of each kind; output layer, router and convolutions are computed in 16 bits or more."""
    listed = [each for kind in dict.fromkeys(shape.blocks)
              for each in block_parameters(shape, shape.blocks.index(kind))]  # fmt: skip
    listed += mtp_parameters(shape, 0) if shape.mtp_num_layers else []
    for parameter in listed:
        if len(parameter.shape) > 1 and not any(name in parameter.name for name in (".router.", ".conv1d.")):
            yield parameter


def _on_a_rank(parameter: Parameter, parallel: ParallelConfig) -> tuple[int, int]:
    rows, columns = parameter.shape[-2:]
    tp = expert_tensor_parallel_size(parallel) if parameter.of_experts else parallel.tensor_model_parallel_size
    if parameter.name.endswith(WHOLE):
        return rows, columns
    return (rows, columns // tp) if parameter.name.endswith(SPLIT_BY_COLUMNS) else (rows // tp, columns)
