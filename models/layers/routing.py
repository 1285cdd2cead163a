"""Group-limited routing as DeepSeek-V2 has it (arXiv:2405.04434, section 2.2.2), a softmax with a bias as ERNIE-4.5 has
it, and what routing leaves behind."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as route
from torch import Tensor


def install() -> None:
    """Let mcore's router, which calls it by its name in its own module, use ours."""
    router.topk_routing_with_score_function = topk_routing_with_score_function


def let_go_after_use(chunk: torch.nn.Module) -> None:
    """Take the routing weights from mcore's dispatchers, which keep the last ones, once they have been read.

    They hold on to the graph that made them, beyond its backward pass, and where a block or its experts are recomputed,
    that graph to its input and the gradient of that: 88 of 1181 MiB of activations of a stage of 12 blocks
    (qwen3_30b_a3b, PP 4, EP 8, 2048 tokens, fully recomputed; tools.plan trace). Not after the layer's forward: mcore
    recomputes, and captures as graphs, parts of it.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.combine_postprocess = _letting_go(dispatcher, dispatcher.combine_postprocess)


def _letting_go(dispatcher: Any, last: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """last: what reads them last, in every dispatcher of mcore 0.19.2."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        found = last(*args, **kwargs)
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name, value in dict(vars(owner) if owner is not None else {}).items():
                if isinstance(value, Tensor) and value.requires_grad:
                    setattr(owner, name, None)
        return found

    return call


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    *,
    num_groups: int | None = None,
    group_topk: int | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    router_replay: Any = None,
    fused: bool = False,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Weights and map [tokens, E] of the experts that each token is sent to; logits [tokens, E].

    mcore 0.19.2 rates a group by the sum of its best topk / group_topk experts, whatever the scores. That is
    DeepSeek-V3's rule for its sigmoid scores (arXiv:2412.19437, section 2.1.2: the best 2, as 8 experts come from 4
    groups). V2, with a softmax, takes the groups that hold the highest scores: for its 6 of 160 experts from 3 of 8
    groups, mcore would send one token in three (of normal logits) to other experts. Softmax scores with groups are
    rated here: fused routing (moe_router_fusion), which sums too, then serves the balancing loss alone.

    mcore adds an expert bias to sigmoid scores only. ERNIE-4.5 chooses by softmax and bias: so does this.
    """
    own = group_topk or expert_bias is not None
    if score_function != "softmax" or not own:
        return route(
            logits,
            topk,
            num_groups=num_groups,
            group_topk=group_topk,
            score_function=score_function,
            expert_bias=expert_bias,
            router_replay=router_replay,
            fused=fused,
            **settings,
        )
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = scores if expert_bias is None else scores + expert_bias
    choose = best_of_best_groups if group_topk else _best
    if router_replay is None:
        _, indices = choose(scores, topk, num_groups, group_topk)
    else:
        _, indices = router_replay.get_replay_topk(scores, topk, num_groups, group_topk, choose)
    return route(logits, topk, score_function=score_function, precomputed_indices=indices, **settings)


def _best(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> tuple[Tensor, Tensor]:
    return scores.topk(topk, dim=-1)


def best_of_best_groups(
    scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best scores, and their experts [tokens, topk], of the ``group_topk`` groups that hold the best ones.

    scores: [tokens, E], not negative; groups are runs of E / num_groups experts.
    """
    assert num_groups and group_topk
    groups = scores.unflatten(-1, (num_groups, -1))
    chosen = groups.amax(dim=-1).topk(group_topk, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, chosen, True)
    return groups.masked_fill(~kept[..., None], -1.0).flatten(-2).topk(topk, dim=-1)


@contextlib.contextmanager
def drop_no_token(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within, experts take all tokens that choose them: a capacity counts on a training batch, and would make a text
    depend on what is computed beside it."""
    owners = [module.config for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                owners += [module.token_dispatcher, getattr(module.token_dispatcher, "_comm_manager", None)]
    limits = {"moe_expert_capacity_factor": None, "capacity_factor": None, "drop_and_pad": False}
    kept = [(owner, name, vars(owner)[name]) for owner in owners if owner for name in limits if name in vars(owner)]
    for owner, name, _ in kept:
        setattr(owner, name, limits[name])
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
