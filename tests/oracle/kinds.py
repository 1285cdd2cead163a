"""The kinds of thing that a case has, which the table of docs/oracle.md counts."""

from collections.abc import Iterator

from tests.oracle.case import Case


def kinds(case: Case) -> list[str]:
    """In the table's words, "group: kind"."""
    return [f"{group}: {kind}" for group, each in _GROUPS.items() for kind in each(case)]


def _data(case: Case) -> Iterator[str]:
    data = case.config.data
    if data.eod_mask_loss and case.ends:
        yield "masked tokens"
    if data.eod_mask_loss and case.ends > 0.5:
        yield "fewer than half of the tokens count"
    resets = (data.reset_attention_mask, data.reset_position_ids)
    words = {
        (True, True): "documents apart, positions restart",
        (True, False): "documents apart",
        (False, True): "positions restart",
        (False, False): "documents see one another",
    }
    yield words[resets]


def _losses(case: Case) -> Iterator[str]:
    shape = case.shape
    yield "cross entropy"
    if case.config.train.cross_entropy_chunk_tokens:
        yield "cross entropy in chunks"
    if shape.mtp_num_layers:
        yield f"multi-token prediction, {shape.mtp_num_layers} depth(s)"
    if shape.moe_router_load_balancing_type != "none" and shape.moe_aux_loss_coeff:
        yield shape.moe_router_load_balancing_type
    if shape.moe_z_loss_coeff:
        yield "z loss"
    if shape.attn_logit_softcapping or shape.final_logit_softcapping:
        yield "soft caps"


def _batch(case: Case) -> Iterator[str]:
    train, layout = case.config.train, case.config.layout(case.world_size)
    microbatches = train.global_batch_size // (train.micro_batch_size * layout.dp)
    yield "one microbatch" if microbatches == 1 else "several microbatches"
    if train.micro_batch_size > 1:
        yield "several samples in a microbatch"
    if train.rampup_batch_size:
        yield "ramp"
    if train.step_batch_size_schedule:
        yield "steps"


def _layout(case: Case) -> Iterator[str]:
    layout, parallel = case.config.layout(case.world_size), case.config.parallel
    sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "DP": layout.dp, "EP": layout.ep}
    yield from (name for name, size in sizes.items() if size > 1)
    yield from ["SP"] * parallel.sequence_parallel
    if case.world_size == 1:
        yield "one rank"


def _sharding(case: Case) -> Iterator[str]:
    parallel = case.config.parallel
    names = {"no_shard": "none", "optim": "ZeRO-1", "optim_grads": "ZeRO-2", "optim_grads_params": "ZeRO-3"}
    yield names[parallel.sharding]
    if parallel.num_distributed_optimizer_instances > 1:
        yield "copies of shards (HSDP)"
    if parallel.overlap_grad_reduce:
        yield "overlapped"


def _memory(case: Case) -> Iterator[str]:
    train = case.config.train
    if train.recompute_budget:
        yield "recomputation by budget"
    elif train.recompute_granularity == "full":
        yield f"full recomputation, {train.recompute_method}"
    elif train.recompute_granularity:
        yield "selective recomputation"
    if train.cpu_offloading_num_layers:
        yield "activations offloaded"


def _optimizer(case: Case) -> Iterator[str]:
    optimizer = case.config.optimizer
    yield optimizer.lr_decay_style
    yield optimizer.optimizer
    if optimizer.decoupled_lr is not None:
        yield "embeddings and output layer at a rate of their own"
    if optimizer.clip_grad:
        yield "clipping"
    if optimizer.qk_clip:
        yield "QK-clip"
    if optimizer.weight_decay_incr_style != "constant":
        yield "ramp of weight decay"


_GROUPS = {
    "family": lambda case: [case.config.model.shape.removesuffix("_tiny")],
    "data": _data,
    "loss": _losses,
    "batch": _batch,
    "layout": _layout,
    "sharding": _sharding,
    "memory": _memory,
    "optimizer": _optimizer,
}
