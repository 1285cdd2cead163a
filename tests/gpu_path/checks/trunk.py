"""HybridModel against GPTModel, of the same modules and weights: docs/architecture.md, "Why HybridModel".

python trunk.py SHAPE ...: logits' losses and gradients of both, kernels launched, and, for experts on two ranks, the
same with Megatron's overlap of expert communication (combined 1F1B), which mcore 0.19.2 plans for GPTModel alone.
"""

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from models import gpt
from models.config import ModelConfig
from models.layers import spec
from models.layers.token_counts import TokenCounts, set_token_counts
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import groups, local_ranks
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.layout import layout_of
from tests.gpu_path.counters import Count, counts
from training.forward_backward import loss_sums

SEQ, BATCH, MICROBATCHES = 64, 2, 3


def hybrid_model(model: ModelConfig, shape: GPTShape, ep: int, dtype: Any, ranks: Ranks) -> torch.nn.Module:
    """As training builds it, and with a step's counts: mcore's own MTP divides each microbatch by its own tokens, which
    are as many in each here."""
    parallel = ParallelConfig(expert_model_parallel_size=ep)
    precision = PrecisionConfig(dtype=dtype)
    (chunk,) = gpt.build(gpt.Blueprint(model=model, shape=shape, parallel=parallel, precision=precision), ranks)
    counted = torch.full((), float(BATCH * SEQ), device=ranks.device)
    depths = torch.tensor([float(BATCH * (SEQ - 1 - depth)) for depth in range(shape.mtp_num_layers)])
    set_token_counts(
        chunk.config, TokenCounts(counted=counted, share=counted / counted, depths=depths.to(ranks.device))
    )
    return chunk


def gpt_model(hybrid: Any, shape: GPTShape, ranks: Ranks) -> torch.nn.Module:
    """mcore's, one layer a block, of the modules and the weights of ``hybrid``."""
    config = copy.copy(hybrid.config)  # with what is no field of mcore's
    config.num_layers, config.is_hybrid_model = shape.num_layers, False
    if shape.num_moe_experts:
        config.moe_layer_freq = [int(moe) for moe in shape.moe_blocks]
    backend = spec.provider(ranks.device)
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    attention = (spec._latent_attention_layer if shape.multi_latent_attention else spec._attention_layer)(
        config, backend, norm, shape
    )
    kinds = {False: spec._mlp_layer(backend, norm, shape), True: spec._moe_layer(config, backend, norm, shape)}
    moe_blocks = shape.moe_blocks if shape.num_moe_experts else (False,) * shape.num_layers
    blocks = [block(attention, kinds[bool(moe)]) for moe in moe_blocks]
    made = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=blocks, layer_norm=norm),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type=shape.position_embedding_type,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        pg_collection=ranks.pgs,
        mtp_block_spec=get_gpt_mtp_block_spec_for_backend(config, blocks[-1], backend=backend)
        if shape.mtp_num_layers
        else None,
    )
    gpt.set_inv_freq(made, shape, ranks.device)
    gpt.mask_padded_logits(made, shape)
    made.to(ranks.device)
    weights = parameters(hybrid)
    with torch.no_grad():
        for name, parameter in parameters(made).items():
            parameter.copy_(weights.pop(name))
    assert not weights, weights.keys()
    return made


def block(attention: ModuleSpec, mlp: ModuleSpec) -> ModuleSpec:
    """One layer of two sublayers."""
    second = mlp.submodules
    parts = {"pre_mlp_layernorm": second.pre_mlp_layernorm, "mlp": second.mlp, "mlp_bda": second.mlp_bda}
    return ModuleSpec(module=TransformerLayer, submodules=dataclasses.replace(attention.submodules, **parts))


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """By names that both models have: all that a switch of the two would cost the checkpoints."""

    def common(name: str) -> str:
        name = name.removeprefix("decoder.").replace("final_norm", "final_layernorm")
        if isinstance(model, GPTModel):
            return name
        name = re.sub(r"mtp_model_layer\.layers\.\d+", "mtp_model_layer", name)
        return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{int(match[1]) // 2}", name)

    return {common(name): parameter for name, parameter in model.named_parameters()}


def plan_schedules(chunk: Any) -> None:
    """What HybridModel lacks for mcore's schedule plans: the two ends, which are GPTModel's, and the plan itself."""
    chunk._preprocess = MethodType(GPTModel._preprocess, chunk)
    chunk._postprocess = MethodType(GPTModel._postprocess, chunk)
    type(chunk.decoder).final_layernorm = property(lambda decoder: decoder.final_norm)
    for layer in chunk.decoder.layers:
        for part in (layer.self_attention, layer.mlp):
            if isinstance(part, IdentityOp):
                part.backward_dw = lambda: None

    def build_schedule_plan(tokens: Tensor, positions: Tensor, _mask: None, labels: Tensor, loss_mask: Tensor) -> Any:
        ends = (None, labels, None, None, None, loss_mask, None)
        return TransformerModelChunkSchedulePlan(chunk, tokens, positions, None, *ends)

    chunk.build_schedule_plan = build_schedule_plan


def samples(shape: GPTShape, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(tokens, positions, labels, loss mask) of each microbatch of this rank."""
    random = torch.Generator().manual_seed(5 + ranks.rank)
    positions = torch.arange(SEQ, device=ranks.device).expand(BATCH, SEQ).contiguous()
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, shape.vocab_size, (BATCH, SEQ + 1), generator=random).to(ranks.device)
        yield tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous(), torch.ones_like(positions).float()


def forward_step(
    given: Iterator[Any], chunk: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """What mcore's schedules call."""
    tokens, positions, labels, loss_mask = next(given)
    forward = chunk.build_schedule_plan if return_schedule_plan else chunk
    return forward(tokens, positions, None, labels=labels, loss_mask=loss_mask), partial(loss_sums, loss_mask=loss_mask)


def trained(
    chunk: Any, shape: GPTShape, ranks: Ranks, overlap: bool = False
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, gradients and launched kernels of a global batch."""
    chunk.config.overlap_moe_expert_parallel_comm = overlap
    chunk.zero_grad(set_to_none=True)
    half = chunk.config.bf16
    before = counts()[Count.LAUNCHES]
    found = get_forward_backward_func(pp_size=1, vp_size=None)(
        forward_step_func=forward_step, data_iterator=samples(shape, ranks),
        model=[Float16Module(chunk.config, chunk) if half else chunk], num_microbatches=MICROBATCHES, seq_length=SEQ,
        micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    torch.cuda.synchronize()
    gradients = {
        name: parameter.grad.clone() for name, parameter in parameters(chunk).items() if parameter.grad is not None
    }
    return [result["sums"][0].item() for result in found], gradients, counts()[Count.LAUNCHES] - before


def same(one: tuple[list[float], dict[str, Tensor], int], other: tuple[list[float], dict[str, Tensor], int]) -> bool:
    """Bit by bit."""
    assert one[1].keys() == other[1].keys() and one[1]
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def check(identity: Identity, name: str, dtype: str, overlap: bool) -> int:
    """On each rank."""
    model = ModelConfig(shape=name, seq_length=SEQ, vocab_size=1000)
    if overlap:  # mcore plans a multi-token-prediction layer only where it is one TransformerLayer
        model = dataclasses.replace(model, mtp_num_layers=0)
    shape, ep = resolve(model, None), identity.world_size
    layout = layout_of(ParallelConfig(expert_model_parallel_size=ep), ep)
    with groups.start(layout, identity, device="cuda", seed=1) as ranks:
        hybrid = hybrid_model(model, shape, ep, dtype, ranks)
        other = gpt_model(hybrid, shape, ranks)
        ours, theirs = trained(hybrid, shape, ranks), trained(other, shape, ranks)
        assert same(ours, theirs), (ours[0], theirs[0])
        text = f"{name}, EP {ep}, {dtype}: equal bit by bit; kernels HybridModel {ours[2]}, GPTModel {theirs[2]}"
        if overlap:
            plan_schedules(hybrid)
            assert same(ours, trained(hybrid, shape, ranks, overlap=True))
            assert same(theirs, trained(other, shape, ranks, overlap=True))
            text += "; with expert overlap: both equal bit by bit"
        if identity.rank == 0:
            print(text, flush=True)
    return 0


for shape_name in sys.argv[1:]:
    expert = shape_name in ("mixtral_tiny", "qwen3_moe_tiny", "deepseek_v3_tiny")
    for ranks_, dtype_ in [(1, "fp32"), *([(2, "bf16")] if expert else [])]:
        code, failure = local_ranks.fork_ranks(
            ranks_, partial(check, name=shape_name, dtype=dtype_, overlap=ranks_ > 1)
        )
        if failure:
            sys.exit(failure.text)
