"""Whether a model divides over the ranks: matrices by TP, the sequence by TP and CP; and whether Transformer Engine can
multiply what lies on one rank in fp8 or fp4.
"""

import math
from collections.abc import Iterator

from models.config import ModelConfig
from models.costs.parameters import Parameter, block_parameters, mtp_parameters
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import expert_tensor_parallel_size


def split_problems(shape: GPTShape, tp: int) -> list[str]:
    """Whether every matrix that TP splits can be, with the sizes that would work."""
    by_tp = f"parallel.tensor_model_parallel_size {tp}"
    found = (_head_problems(shape, tp, by_tp) if shape.has_attention else []) + _mixer_problems(shape, tp, by_tp)
    has_mlp = any("-" in symbols for symbols in shape.blocks) or not shape.hybrid_layer_pattern
    if has_mlp and shape.ffn_hidden_size % tp:
        found.append(
            f"model.ffn_hidden_size {shape.ffn_hidden_size} is not divisible by {by_tp}. "
            f"Use {nearest(shape.ffn_hidden_size, tp)}."
        )
    if shape.make_vocab_size_divisible_by % tp:
        found.append(
            f"model.make_vocab_size_divisible_by {shape.make_vocab_size_divisible_by} is not divisible by "
            f"{by_tp}, so the vocabulary cannot be split. Use {math.lcm(128, tp)}."
        )
    return found


def _head_problems(shape: GPTShape, tp: int, by_tp: str) -> list[str]:
    heads, groups, found = shape.num_attention_heads, shape.num_query_groups, []
    rows = shape.query_size + 2 * shape.kv_size
    if heads % tp:
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        found.append(
            f"model.num_attention_heads {heads} is not divisible by {by_tp}. "
            f"TP sizes that divide the heads: {', '.join(map(str, sizes))}."
        )
    if groups % tp and tp % groups:
        sizes = [size for size in range(1, heads + 1) if not heads % size and not (size % groups and groups % size)]
        found.append(
            f"model.num_query_groups {groups} neither divides nor is divided by {by_tp}; one must hold. "
            f"TP sizes that suit heads and groups: {', '.join(map(str, sizes))}."
        )
    elif not heads % tp and rows % tp:
        found.append(
            f"model: queries, keys and values of {groups} groups make {rows} rows, not divisible by "
            f"{by_tp}. Use a smaller TP or more model.num_query_groups."
        )
    if shape.qk_layernorm_full_width and groups < tp:
        found.append(
            f"model.qk_layernorm_full_width norms the keys of all model.num_query_groups {groups} together, of which "
            f"each rank of {by_tp} has a part: there must be {tp} or more. Use a smaller TP."
        )
    return found


def _mixer_problems(shape: GPTShape, tp: int, by_tp: str) -> list[str]:
    """Mamba-2's heads and groups, and gated delta nets' heads."""
    numbers = {}
    if "M" in shape.hybrid_layer_pattern:
        numbers = {"mamba_num_heads": shape.mamba_heads, "mamba_num_groups": shape.mamba_num_groups}
    if any(shape.linear_blocks):
        numbers["linear_num_key_heads"] = shape.linear_num_key_heads
    return [
        f"model.{name} {number} is not divisible by {by_tp}: each TP rank has heads, and groups of them, of its own. "
        f"TP sizes that divide them: {', '.join(str(n) for n in range(1, number + 1) if number % n == 0)}."
        for name, number in numbers.items()
        if number % tp
    ]


def sequence_problems(model: ModelConfig, shape: GPTShape, parallel: ParallelConfig) -> list[str]:
    """Whether the sequence can be cut: into 2 x CP pieces (a rank holds two), and a rank's share by TP."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    by_cp, by_tp = 2 * cp if cp > 1 else 1, cp * tp if parallel.sequence_parallel else 1
    piece, found = math.lcm(by_cp, by_tp), []
    if model.seq_length % piece:
        why = {f"2 x CP {cp}": by_cp, f"TP {tp} x CP {cp} (parallel.sequence_parallel)": by_tp}
        factors = " and by ".join(name for name, size in why.items() if size > 1)
        found.append(
            f"model.seq_length {model.seq_length} is not divisible by {factors}. Use "
            f"{nearest(model.seq_length, piece)}, or change parallel.context_parallel_size or "
            "parallel.tensor_model_parallel_size."
        )
    positions = shape.max_position_embeddings
    if shape.position_embedding_type == "learned_absolute" and model.seq_length > positions:
        found.append(
            f"model.seq_length {model.seq_length} exceeds model.max_position_embeddings {positions} of "
            f"learned positions. Use model.seq_length = {positions} or less, or more positions."
        )
    return found


def expert_problems(shape: GPTShape, parallel: ParallelConfig) -> list[str]:
    """Whether experts and their matrices divide over the ranks, and whether what moves tokens can do so."""
    ep, etp = parallel.expert_model_parallel_size, expert_tensor_parallel_size(parallel)
    if not shape.num_moe_experts:
        if ep == 1 and parallel.expert_tensor_parallel_size is None:
            return []
        return [
            "parallel.expert_model_parallel_size and .expert_tensor_parallel_size need a model with experts: set "
            "model.num_moe_experts, or leave them out."
        ]
    found = []
    if shape.num_moe_experts % ep:
        sizes = [size for size in range(1, shape.num_moe_experts + 1) if shape.num_moe_experts % size == 0]
        found.append(
            f"model.num_moe_experts {shape.num_moe_experts} is not divisible by parallel.expert_model_parallel_size "
            f"{ep}. EP sizes that divide the experts: {', '.join(map(str, sizes))}."
        )
    if shape.add_bias_linear and etp > 1:
        found.append(
            f"model.add_bias_linear is not supported with parallel.expert_tensor_parallel_size {etp}: megatron-core "
            "has no biases for experts whose matrices are split. Set parallel.expert_tensor_parallel_size = 1."
        )
    widths = {
        "model.moe_ffn_hidden_size": (shape.expert_ffn_hidden_size, etp, "expert_tensor_parallel_size"),
        "model.moe_shared_expert_intermediate_size": (
            shape.moe_shared_expert_intermediate_size,
            parallel.tensor_model_parallel_size,
            "tensor_model_parallel_size",
        ),
    }
    found += [
        f"{name} {width} is not divisible by parallel.{field} {size}. Use {nearest(width, size)}."
        for name, (width, size, field) in widths.items()
        if width % size
    ]
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        found.append(
            "a model with experts on parallel.tensor_model_parallel_size > 1 needs parallel.sequence_parallel: without "
            "it every TP rank would send the same tokens to the experts."
        )
    return found


def latent_problems(shape: GPTShape, tp: int) -> list[str]:
    """Whether MLA's down projections divide over TP: without Transformer Engine they are split."""
    if not shape.multi_latent_attention:
        return []
    by_tp, found = f"parallel.tensor_model_parallel_size {tp}", []
    if shape.q_lora_rank % tp:
        found.append(
            f"model.q_lora_rank {shape.q_lora_rank} is not divisible by {by_tp}. Use {nearest(shape.q_lora_rank, tp)}."
        )
    if (shape.kv_lora_rank + shape.qk_pos_emb_head_dim) % tp:
        found.append(
            f"model.kv_lora_rank {shape.kv_lora_rank} + model.qk_pos_emb_head_dim {shape.qk_pos_emb_head_dim} is not "
            f"divisible by {by_tp}. Use a sum of {nearest(shape.kv_lora_rank + shape.qk_pos_emb_head_dim, tp)}."
        )
    return found


def context_problems(shape: GPTShape, parallel: ParallelConfig) -> list[str]:
    """Whether every context rank gets heads of its own, where these are what is exchanged (a2a)."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    found = _mamba_context_problems(shape, tp, cp)
    if any(shape.linear_blocks) and shape.linear_num_key_heads % tp == 0 and shape.linear_num_key_heads % (tp * cp):
        found.append(
            f"parallel.context_parallel_size {cp} deals heads of gated delta nets to context ranks, but "
            f"model.linear_num_key_heads {shape.linear_num_key_heads} is not divisible by TP {tp} x CP {cp} = "
            f"{tp * cp}. Use a smaller parallel.context_parallel_size."
        )
    if cp == 1 or parallel.cp_comm_type != "a2a" or not shape.has_attention:
        return found
    name = "num_attention_heads" if shape.multi_latent_attention else "num_query_groups"
    heads = getattr(shape, name)
    if heads % (tp * cp) == 0:
        return found
    return [
        *found,
        f'parallel.cp_comm_type "a2a" deals heads to context ranks, but model.{name} {heads} is not divisible by '
        f'TP {tp} x CP {cp} = {tp * cp}. Use "p2p" or "all_gather", or a smaller parallel.context_parallel_size.',
    ]


def _mamba_context_problems(shape: GPTShape, tp: int, cp: int) -> list[str]:
    """Whether every context rank gets Mamba heads of its own, and whole groups or a part of one."""
    heads, groups = shape.mamba_heads, shape.mamba_num_groups // tp
    if cp == 1 or "M" not in shape.hybrid_layer_pattern or (heads % tp == 0 and shape.mamba_num_groups % tp):
        return []
    if heads % (tp * cp) == 0 and (groups % cp == 0 or cp % groups == 0):
        return []
    return [
        f"parallel.context_parallel_size {cp} deals Mamba heads to context ranks: model.mamba_num_heads {heads} must "
        f"be divisible by TP {tp} x CP {cp} = {tp * cp}, and the {groups} groups of a TP rank must divide CP or be "
        "divided by it. Use a smaller parallel.context_parallel_size."
    ]


def nearest(size: int, piece: int) -> str:
    """The multiples of ``piece`` around ``size``, as text."""
    below, above = size // piece * piece, -(-size // piece) * piece
    return " or ".join(str(near) for near in dict.fromkeys((below, above)) if near > 0)


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
