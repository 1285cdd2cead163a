"""The builder: padding, RoPE, norms' names, and the guards against what megatron-core does silently wrong."""

import dataclasses
import math
from typing import Any

import pytest
import torch

import campaign
from models.config import ModelConfig
from models.costs.parameters import parameters
from models.families import SHAPES
from models.init import fill_normal, std_of
from models.names import canonical
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from parallel.regions import boxes_of, whole_tensors
from program.errors import UserError
from ranks import run_ranks

FP32 = PrecisionConfig(dtype="fp32")
FEW = [f"{name}_tiny" for name in (
    "gpt2", "pythia", "olmo2", "gemma2", "glm4", "apertus", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4", "glm45",
    "mamba2", "nemotron_h", "nemotron3", "qwen35_moe",
)]  # fmt: skip
"""Each kind of layer, norm, bias, tensor."""
OTHERS = [name for name in SHAPES if name == "debug" or (name.endswith("_tiny") and name not in FEW)]


def build(
    ranks: Any, model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig = FP32, recompute: Any = None
) -> list[Any]:
    from models import gpt

    blueprint = gpt.Blueprint(
        model=model, shape=resolve(model, 257), parallel=parallel, precision=precision,
        recompute=recompute or gpt.Recompute(),
    )  # fmt: skip
    return gpt.build(blueprint, ranks)


def on_ranks(world_size: int, parallel: ParallelConfig, check: Any, *args: Any) -> None:
    """Call ``check(ranks, parallel, *args)`` on every rank of a layout."""

    def run(identity: Identity) -> None:
        from parallel import groups

        with groups.start(layout_of(parallel, world_size), identity, device="cpu", seed=1) as ranks:
            check(ranks, parallel, *args)

    run_ranks(world_size, run)


# ---- names and weights


def _all_names(ranks: Any, parallel: ParallelConfig, shapes: list[str]) -> None:
    for shape in shapes:
        _names(ranks, parallel, shape)


def _names(ranks: Any, parallel: ParallelConfig, shape: str) -> None:
    model = ModelConfig(shape=shape, seq_length=64)
    (chunk,) = build(ranks, model, parallel)
    found: dict[str, int] = {}
    for box in boxes_of(whole_tensors(chunk)):
        name = canonical(box.key)
        found[name] = found.get(name, 0) + box.data.numel()
    listed = resolve(model, 257)
    biases = {name for name in found if name.endswith("router.expert_bias")}  # state that no gradient moves
    assert len(biases) == (sum(listed.moe_blocks) + listed.mtp_num_layers) * listed.moe_router_enable_expert_bias
    trained = {name: size for name, size in found.items() if name not in biases}
    assert trained == {parameter.name: parameter.size for parameter in parameters(listed)}, shape


@pytest.mark.parametrize("shapes", [FEW, campaign.param(OTHERS)], ids=["few", "others"])
def test_a_model_has_exactly_the_parameters_that_its_shape_lists(shapes: list[str]) -> None:
    """Of each family, with the names of Transformer Engine's fused norms, whichever spec built it."""
    on_ranks(1, ParallelConfig(), _all_names, shapes)


def _initial_values(ranks: Any, parallel: ParallelConfig, shape: str) -> None:
    (chunk,) = build(ranks, ModelConfig(shape=shape, seq_length=64), parallel)
    std = SHAPES[shape].init_method_std
    for name, param in chunk.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert bool((param == 1).all()), name
        elif name.endswith("bias"):
            assert bool((param == 0).all()), name
        else:
            residual = "linear_proj.weight" in name or "linear_fc2.weight" in name
            expected = std / math.sqrt(8) if residual else std
            assert abs(param.std().item() / expected - 1) < 5 / math.sqrt(2 * param.numel()), name  # 5 standard errors


@pytest.mark.parametrize("shape", ["gpt2_tiny", "deepseek_v3_tiny"])
def test_initial_values(shape: str) -> None:
    on_ranks(1, ParallelConfig(), _initial_values, shape)


def _each_rank_s_own(ranks: Any, parallel: ParallelConfig) -> None:
    (chunk,) = build(ranks, ModelConfig(shape="gpt_oss_tiny", seq_length=32), parallel)
    params = dict(chunk.named_parameters())
    sinks = [param for name, param in params.items() if name.endswith("softmax_offset")]
    biases = [param for name, param in params.items() if ".local_experts." in name and name.endswith("fc2.bias")]
    assert len(sinks) == 4 and len(biases) == 4 * 2
    assert all(param.shape == (2,) and param.tensor_model_parallel for param in sinks)
    assert not any(getattr(param, "sequence_parallel", False) for param in biases)


def test_what_each_tp_rank_has_of_its_own_is_not_taken_for_a_copy() -> None:
    """Heads' softmax logits: norms of gradients count all of them. Experts' last biases: no sum over TP mixes them."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    on_ranks(2, parallel, _each_rank_s_own)


def _experts_differ(ranks: Any, parallel: ParallelConfig) -> None:
    """Rank 0 of EP 2 has the first half of the experts, rank 1 the second."""
    model = ModelConfig(shape="mixtral_tiny", seq_length=64)
    shape = resolve(model, 257)
    experts = shape.num_moe_experts
    (chunk,) = build(ranks, model, parallel)
    name = "layers.1.mlp.experts.linear_fc2.weight"
    held = [box for box in boxes_of(whole_tensors(chunk)) if canonical(box.key) == name]
    assert len(held) == experts // parallel.expert_model_parallel_size
    for box in held:
        expected = torch.empty_like(box.data)
        fill_normal(expected, 1, name, (experts, *box.data.shape[1:]), box.offset, std_of(name, shape) or 0.0)
        assert torch.equal(box.data, expected)
    assert len({box.offset[0] for box in held}) == len(held)
    assert all(box.offset[0] // len(held) == ranks.rank % parallel.expert_model_parallel_size for box in held)


@pytest.mark.parametrize("ep", [1, 2])
def test_each_expert_starts_from_numbers_of_its_own_wherever_it_is(ep: int) -> None:
    on_ranks(ep, ParallelConfig(expert_model_parallel_size=ep), _experts_differ)


# ---- padded vocabulary


def _padding(ranks: Any, parallel: ParallelConfig) -> None:
    (chunk,) = build(ranks, ModelConfig(seq_length=64), parallel)
    tokens = torch.arange(64)[None] * 4
    logits = chunk(tokens, torch.arange(64)[None], None)
    local = logits.shape[-1]
    assert local == 384 // ranks.layout.tp
    first_padding = max(0, min(local, 257 - ranks.at.tp * local))
    assert bool((logits[..., first_padding:] == torch.finfo(torch.float32).min).all())
    assert bool((logits[..., :first_padding].abs() < 10).all())
    loss = chunk(tokens, torch.arange(64)[None], None, labels=tokens)
    assert abs(loss.mean().item() - math.log(257)) < 0.2  # log(384) = 5.95 where padding takes part


@pytest.mark.parametrize("tp", [1, 2])
def test_padded_logits_get_no_probability(tp: int) -> None:
    on_ranks(tp, ParallelConfig(tensor_model_parallel_size=tp), _padding)


def test_padding_does_not_depend_on_the_layout() -> None:
    assert resolve(ModelConfig(), 257).padded_vocab_size == 384  # Megatron: 128 x TP


# ---- rotary positions


def _late_rope(ranks: Any, parallel: ParallelConfig) -> None:
    from models.gpt import set_inv_freq

    (chunk,) = build(ranks, ModelConfig(seq_length=64), parallel)
    tokens, positions = torch.arange(64)[None], torch.arange(64)[None]
    before = chunk(tokens, positions, None)
    stretched = dataclasses.replace(SHAPES["debug"], rope_scaling="linear", rope_scaling_factor=8.0)
    set_inv_freq(chunk, stretched, ranks.device)
    assert not torch.equal(before, chunk(tokens, positions, None))


def test_rope_set_after_a_forward_takes_effect() -> None:
    """mcore caches cos and sin, and would go on with the old ones without a word."""
    on_ranks(1, ParallelConfig(), _late_rope)


def _rope_stays_fp32(ranks: Any, parallel: ParallelConfig) -> None:
    from megatron.core.transformer.module import Float16Module

    (chunk,) = build(ranks, ModelConfig(seq_length=64), parallel, PrecisionConfig(dtype="bf16"))
    module = Float16Module(chunk.config, chunk).module
    assert module.rotary_pos_emb.inv_freq.dtype == torch.float32
    assert not any("inv_freq" in key for key in chunk.state_dict())


def test_rope_stays_fp32_under_bf16_and_out_of_the_checkpoint() -> None:
    on_ranks(1, ParallelConfig(), _rope_stays_fp32)


# ---- guards


def _interleaved(ranks: Any, parallel: ParallelConfig) -> None:
    config = build(ranks, ModelConfig(seq_length=64), parallel)[0].config
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert (config.num_layers, config.is_hybrid_model, config.calculate_per_token_loss) == (8, True, True)


def test_the_interleaved_schedule_always_overlaps_its_sends() -> None:
    """With PP 2 and no overlap megatron-core 0.19.2 swaps two messages: loss wrong by 3e-2, no error."""
    on_ranks(2, ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), _interleaved)


@pytest.mark.parametrize(
    "entry",
    [
        "overlap_p2p_comm=False",
        "window_attn_skip_freq=2",
        "moe_layer_freq=2",
        "no_rope_freq=4",
        "num_moe_experts=8",
        "cross_entropy_loss_fusion=True",
        "is_hybrid_model=False",
        "distribute_saved_activations=True",
    ],
)
def test_what_would_be_silently_wrong_is_refused(entry: str) -> None:
    """Integer frequencies count sublayers; fused cross entropy rounds to bf16; experts need symbols in the pattern."""
    assert ModelConfig(megatron=(entry,)).problems()


def _unknown_field(ranks: Any, parallel: ParallelConfig) -> None:
    with pytest.raises(UserError, match=r'no field .softmax_scal.\. Did you mean "softmax_scale"'):
        build(ranks, ModelConfig(seq_length=64, megatron=("softmax_scal=2",)), parallel)
    with pytest.raises(UserError, match="apply_query_key_layer_scaling needs Transformer Engine"):
        build(ranks, ModelConfig(seq_length=64, megatron=("apply_query_key_layer_scaling=True",)), parallel)


def test_a_megatron_field_is_checked_and_nothing_is_ignored() -> None:
    on_ranks(1, ParallelConfig(), _unknown_field)


def _recompute(ranks: Any, parallel: ParallelConfig) -> None:
    from models.gpt import Recompute

    config = build(
        ranks,
        ModelConfig(seq_length=64),
        parallel,
        recompute=Recompute(granularity="full", method="block", num_layers=3),
    )[0].config
    assert config.recompute_num_layers == 6


def test_recompute_counts_blocks_where_mcore_counts_sublayers() -> None:
    on_ranks(1, ParallelConfig(), _recompute)


# ---- dropout


def _dropout(ranks: Any, parallel: ParallelConfig, model: ModelConfig) -> None:
    import torch.distributed as dist

    (chunk,) = build(ranks, model, parallel)
    seen = []
    if model.attention_dropout:
        core = chunk.decoder.layers[0].self_attention.core_attention
        core.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    else:  # which elements of the MLP's output were dropped, whatever the embedding's own dropout made of its input

        def dropped(_module: object, _inputs: object, kwargs: dict[str, Any], output: Any) -> None:
            seen.append((output[0] == kwargs["hidden_states"]).float())

        chunk.decoder.layers[1].register_forward_hook(dropped, with_kwargs=True)
    with torch.no_grad():
        for param in chunk.parameters():
            param.fill_(0.02)  # every head and every position computes the same, but for dropout
    chunk(torch.zeros(1, 64, dtype=torch.int64), torch.arange(64)[None], None)
    mine = seen[0].contiguous()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=ranks.pgs.tp)
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_on_different_tp_ranks_drop_different_attention_weights(sequence_parallel: bool) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    on_ranks(2, parallel, _dropout, ModelConfig(seq_length=64, attention_dropout=0.5, position_embedding_type="none"))


def test_sequence_shards_drop_different_elements() -> None:
    """HybridStack alone draws from one common generator, so that both halves of a sequence lose the same elements."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    on_ranks(
        2,
        parallel,
        _dropout,
        ModelConfig(seq_length=64, hidden_dropout=0.5, attention_dropout=0.0, position_embedding_type="none"),
    )


def _no_gradient(ranks: Any, parallel: ParallelConfig) -> None:
    from parallel import ddp

    chunks = build(ranks, ModelConfig(seq_length=64), parallel)
    chunks[0].spare = torch.nn.Parameter(torch.ones(3))
    (wrapped,) = ddp.wrap(chunks, parallel, FP32, ranks)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    wrapped(tokens, torch.arange(64)[None], None, labels=tokens).sum().backward()
    with pytest.raises(RuntimeError, match=r"1 parameter\(s\) got no gradient in this step: spare"):
        chunks[0].config.finalize_model_grads_func([wrapped], None)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_gradient_is_named_not_waited_for(overlap: bool) -> None:
    on_ranks(1, ParallelConfig(overlap_grad_reduce=overlap), _no_gradient)
