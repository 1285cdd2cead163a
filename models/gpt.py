"""One rank's pipeline chunks of a GPT, on mcore's HybridModel.

HybridModel builds a model from a pattern of one symbol per sublayer ("*-" is a block: attention, then MLP) with "|"
between pipeline chunks, and places the chunks itself. Its deprecated sibling GPTModel gets critical fixes only.
"""

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from models.activations import ACTIVATIONS
from models.config import ModelConfig
from models.init import initialise, parameters_without_memory
from models.layers import (
    chunked_losses,
    compiled,
    cross_entropy,
    cuda_graphs,
    fine_grained_offload,
    mtp,
    offload,
    recomputed,
    routing,
    scaling,
    wgrad,
)
from models.layers.attention import SDPAttention, check_supported, mark_softmax_offsets
from models.layers.fp8 import resolve_recipe
from models.layers.fp8_weights import plain_weights
from models.layers.spec import provider, stack_spec, with_own_attention
from models.layers.token_counts import no_step, set_token_counts
from models.owned_fields import RECOMPUTED_BY_TRANSFORMER_ENGINE
from models.rope import inv_freq
from models.shape_fields import Part, megatron_settings
from models.shapes import GPTShape
from models.sublayers import (
    bf16_sublayers,
    hybrid_layer_pattern,
    num_sublayers,
    per_sublayer,
    recompute_num_sublayers,
    sublayers_per_block,
)
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.groups import Ranks
from parallel.megatron_fields import checked
from parallel.precision import transformer_settings
from parallel.regions import whole_tensors
from parallel.stages import layers_per_chunk
from program.errors import SharedMistake


@dataclass(kw_only=True, slots=True, frozen=True)
class Recompute:
    """Which activations the backward pass recomputes; Megatron's fields, counted in blocks."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    sublayers: tuple[frozenset[int], ...] = ()
    """Without granularity: of each of this rank's chunks, numbers within its stack, as HybridModel counts them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Kernels:
    """What computes a model."""

    backend: BackendSpecProvider | None = None
    """Whose modules to build from. None: Transformer Engine's where it can be used, else ours."""
    fusions: frozenset[str] = frozenset()
    """Fields of the section ``kernels`` that are on (models/kernels.py)."""
    attention_backend: str = "auto"
    """That field's value."""
    deterministic: bool = False
    """train.deterministic_mode."""
    compile_blocks: bool = False
    """train.compile."""
    max_logits: bool = False
    """Core attentions collect their heads' largest logits (models/layers/max_logits.py)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Blueprint:
    """What is built."""

    model: ModelConfig
    shape: GPTShape
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    seed: int = 1
    """Of initial weights."""
    kernels: Kernels = field(default_factory=Kernels)
    recompute: Recompute = field(default_factory=Recompute)
    offloaded_blocks: int = 0
    """train.cpu_offloading_num_layers."""
    offload_modules: tuple[str, ...] = ()
    """That field of train."""
    own_loss: cross_entropy.TokenLoss | None = None
    """A user's, instead of cross entropy."""
    loss_chunk_tokens: int | None = None
    """train.cross_entropy_chunk_tokens."""


def build(blueprint: Blueprint, ranks: Ranks) -> list[HybridModel]:
    """This rank's chunks, first to last virtual stage, with their initial weights, on this rank's device.

    With parallel.fully_sharded their parameters have no memory ("meta") and no values: each rank gives its shards both.
    """
    shape, parallel, kernels = blueprint.shape, blueprint.parallel, blueprint.kernels
    backend = kernels.backend or provider(ranks.device)
    if shape.attn_logit_softcapping or shape.attention_chunk_size or shape.attn_scale:
        backend = with_own_attention(backend)
    config = transformer_config(blueprint, ranks, transformer_engine=backend.fuse_layernorm_and_linear())
    if backend.core_attention() is SDPAttention:
        check_supported(config)
    if shape.mtp_num_layers:
        mtp.install()
    if shape.moe_router_group_topk or shape.moe_router_enable_expert_bias:
        routing.install()
    graphed = config.cuda_graph_impl != "none"
    if graphed:
        cuda_graphs.install(config.sequence_parallel)
    if blueprint.offload_modules:
        fine_grained_offload.start()
    compiler = compiled.Compiler(ranks.device, shape.multi_latent_attention) if kernels.compile_blocks else None
    chunks = []
    for vp_stage in range(ranks.layout.vpp):
        with parameters_without_memory() if parallel.fully_sharded else contextlib.nullcontext():
            chunk = _chunk(config, blueprint, ranks, backend, vp_stage)
        if chunk.mtp_process:
            mtp.mend(chunk)
        set_inv_freq(chunk, shape, ranks.device, blueprint.model.seq_length)
        recompute_no_empty_mlp(chunk)
        if graphed and ranks.layout.pp > 1:
            cuda_graphs.separate_microbatches(chunk)
        scaling.install(chunk, shape)
        mark_softmax_offsets(chunk)
        mask_padded_logits(chunk, shape)
        cross_entropy.install(chunk, "cross_entropy_loss_fusion" in kernels.fusions, blueprint.own_loss)
        if "gradient_accumulation_fusion" in kernels.fusions:
            wgrad.fuse(chunk)
        if blueprint.loss_chunk_tokens is not None:
            chunked_losses.install(chunk, blueprint.loss_chunk_tokens)
        routing.let_go_after_use(chunk)
        if blueprint.offloaded_blocks:
            offload.install(chunk, blueprint.offloaded_blocks * sublayers_per_block(shape), ranks.device)
        if blueprint.recompute.sublayers:
            recomputed.install(chunk, blueprint.recompute.sublayers[vp_stage])
        if compiler is not None:
            compiler.install(chunk)
        if not parallel.fully_sharded:
            chunk.to(ranks.device)
            with plain_weights(chunk):  # what will be in fp8 is filled in 16 bits
                initialise(whole_tensors(chunk), shape, blueprint.seed)
        chunks.append(chunk)
    return chunks


def _chunk(
    config: TransformerConfig, blueprint: Blueprint, ranks: Ranks, backend: BackendSpecProvider, vp_stage: int
) -> HybridModel:
    shape = blueprint.shape
    return HybridModel(
        config,
        stack_spec(config, backend, shape),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        hybrid_layer_pattern=hybrid_layer_pattern(shape, layers_per_chunk(blueprint.parallel, shape.num_layers)),
        pre_process=ranks.is_first_stage and vp_stage == 0,
        post_process=ranks.is_last_stage and vp_stage == ranks.layout.vpp - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type=shape.position_embedding_type,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        pg_collection=ranks.pgs,
        vp_stage=vp_stage if ranks.layout.vpp > 1 else None,
    )


def transformer_config(blueprint: Blueprint, ranks: Ranks, transformer_engine: bool = False) -> TransformerConfig:
    """Everything mcore's modules read. One object serves all chunks of a rank.

    transformer_engine: blocks are made of its modules.
    """
    model, shape, parallel = blueprint.model, blueprint.shape, blueprint.parallel
    fusions, precision = blueprint.kernels.fusions, resolve_recipe(blueprint.precision, ranks.device)
    settings = {
        **_shape_settings(shape),
        **_expert_settings(shape, parallel, ranks, fusions),
        **_parallel_settings(parallel, ranks),
        **_recompute_settings(shape, blueprint.recompute, transformer_engine),
        **transformer_settings(precision),
        **bf16_sublayers(shape, precision),
        "perform_initialization": False,  # models/init.py does it, the same in every layout
        "use_cpu_initialization": ranks.device.type == "cpu",
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        **_fusion_settings(shape, fusions),
        **cuda_graphs.settings(shape, "cuda_graph_impl" in fusions),
        **fine_grained_offload.settings(blueprint.offload_modules, transformer_engine),
        "persist_layer_norm": False,
    }
    kind = MLATransformerConfig if shape.multi_latent_attention else TransformerConfig
    settings |= checked("model.megatron", model.megatron, kind)
    try:
        config = kind(**settings)
    except (ValueError, AssertionError, NotImplementedError, ImportError) as error:
        raise SharedMistake(f"megatron-core refuses this model: {error}") from error
    config.deterministic_mode = blueprint.kernels.deterministic  # read as a chunk is built, as are the next two
    config.attention_backend = AttnBackend[blueprint.kernels.attention_backend]
    config.log_max_attention_logit = blueprint.kernels.max_logits
    # Set behind megatron-core's own derivation, whose multiplier of logits would multiply chunked losses, and come
    # after a soft cap: models/layers/scaling.py has it. With these it scales embeddings, and marks them for rates.
    config.use_mup, config.mup_embedding_mult = shape.use_mup, shape.mup_embedding_mult
    HybridModel.mup_warning_printed = True  # "not fully validated": tests/training/test_mup.py compares
    # No fields of mcore's, but a config reaches every module, and those of models/layers read these.
    config.attn_logit_softcapping = shape.attn_logit_softcapping
    config.learned_activation = shape.activation
    config.moe_router_enable_expert_bias |= shape.num_moe_experts > 0 and _biased_softmax(shape)
    config.attention_chunk_size = shape.attention_chunk_size
    config.attn_scale, config.floor_scale = shape.attn_scale, shape.floor_scale
    config.attn_scale_all_blocks = shape.attn_scale_all_blocks
    config.rope_restarts = False  # models/layers/restarting_rope.py
    set_token_counts(config, no_step(shape.mtp_num_layers))
    config.latent_norm_epsilon = shape.latent_norm_epsilon or shape.norm_epsilon
    return config


def _has(shape: GPTShape, part: Part) -> bool:
    """Whether megatron-core reads the fields of ``part``."""
    return {
        "blocks": True,
        "latent": shape.multi_latent_attention,
        "mamba": "M" in shape.hybrid_layer_pattern,
        "delta_net": any(shape.linear_blocks),
        "experts": shape.num_moe_experts > 0,
        "mtp": shape.mtp_num_layers > 0,
    }[part]


def _shape_settings(shape: GPTShape) -> dict[str, Any]:
    """The architecture. Lists have an entry for each of mcore's sublayers."""
    settings: dict[str, Any] = megatron_settings(shape, partial(_has, shape)) | {
        "num_layers": num_sublayers(shape),
        "is_hybrid_model": True,  # scales output projections by sqrt(num_layers) = sqrt(2 blocks), as GPT does
        "gated_linear_unit": shape.gated,
        "activation_func": ACTIVATIONS[shape.activation].function(),
        "qk_layernorm": shape.qk_layernorm and not shape.qk_layernorm_full_width,
        "softmax_scale": shape.scores_mult,
    }
    if not shape.has_attention:  # mcore wants heads that TP divides of every model: those of the mixers do
        heads = shape.linear_num_key_heads if any(shape.linear_blocks) else shape.mamba_heads
        settings |= {"num_attention_heads": heads, "num_query_groups": heads}
    if "M" in shape.hybrid_layer_pattern:
        settings["mamba_num_heads"] = shape.mamba_heads
    if any(shape.window_blocks):
        settings |= {
            "window_size": shape.window_size,
            "window_attn_skip_freq": per_sublayer(shape, shape.window_blocks),
        }
    if any(shape.no_rope_blocks):
        settings["no_rope_freq"] = per_sublayer(shape, shape.no_rope_blocks)
    if shape.multi_latent_attention:  # it makes its own rotary embedding
        yarn = shape.rope_scaling == "yarn"
        settings |= {"rope_type": "yarn"} if yarn else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return settings


def _expert_settings(
    shape: GPTShape, parallel: ParallelConfig, ranks: Ranks, fusions: frozenset[str]
) -> dict[str, Any]:
    if not shape.num_moe_experts:
        return {}
    return {
        "moe_layer_freq": [int(symbol == "E") for symbols in shape.blocks for symbol in symbols],
        "moe_ffn_hidden_size": shape.expert_ffn_hidden_size,
        "moe_router_enable_expert_bias": shape.moe_router_enable_expert_bias and not _biased_softmax(shape),
        "moe_router_dtype": "fp32",  # which expert is best must not depend on rounding to bf16
        "moe_token_dispatcher_type": parallel.moe_token_dispatcher_type,
        "moe_grouped_gemm": "moe_grouped_gemm" in fusions,
        "moe_permute_fusion": "moe_permute_fusion" in fusions,
        "moe_router_fusion": "moe_router_fusion" in fusions,
        "moe_shared_expert_overlap": "moe_shared_expert_overlap" in fusions,
        "expert_model_parallel_size": ranks.layout.ep,
        "expert_tensor_parallel_size": ranks.layout.etp,
    }


def _biased_softmax(shape: GPTShape) -> bool:
    """mcore's configuration refuses a bias for the choice by softmax, which its router, with models/layers/routing.py,
    does: it is set afterwards."""
    return shape.moe_router_enable_expert_bias and shape.moe_router_score_function == "softmax"


def _parallel_settings(parallel: ParallelConfig, ranks: Ranks) -> dict[str, Any]:
    interleaved = ranks.layout.vpp > 1
    return {
        "tensor_model_parallel_size": ranks.layout.tp,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": ranks.layout.pp,
        "virtual_pipeline_model_parallel_size": ranks.layout.vpp if interleaved else None,
        "context_parallel_size": ranks.layout.cp,
        "cp_comm_type": parallel.cp_comm_type,
        # The interleaved schedule with PP 2 and no overlap matches sends to receives in the wrong order and trains
        # silently wrong (megatron-core 0.19.2 does not check); overlap is right for every PP, and faster.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Megatron's default lets the host wait for the whole device after each exchange, against a fault of older
        # versions of torch. Work.wait orders the streams (tests/gpu_path, whenever these run).
        "batch_p2p_sync": False,
        # Once sent, only its grad_fn is needed. Interleaved, mcore then waits for a forward send at once; those of
        # gradients, and all receives, still overlap. Megatron-LM does the same.
        "deallocate_pipeline_outputs": True,
        # Transformer Engine would keep a whole copy in fp8 of weights that are whole only while they are needed.
        "disable_parameter_transpose_cache": parallel.fully_sharded,
        "calculate_per_token_loss": True,
    }


def _fusion_settings(shape: GPTShape, fusions: frozenset[str]) -> dict[str, Any]:
    """Of those that mcore's modules read. models/layers has cross entropy and the accumulation of gradients."""
    settings: dict[str, Any] = {
        "bias_activation_fusion": "bias_activation_fusion" in fusions,
        "apply_rope_fusion": "apply_rope_fusion" in fusions,
        "tp_comm_overlap": "tp_comm_overlap" in fusions,
        "masked_softmax_fusion": False,  # of mcore's own attention, which no block here is made of
        "gradient_accumulation_fusion": False,  # asks for APEX
        "cross_entropy_loss_fusion": False,
    }
    fused = ACTIVATIONS[shape.activation].fused
    if fused is not None and settings["bias_activation_fusion"]:
        settings["activation_func"] = fused()
    return settings


def _recompute_settings(shape: GPTShape, recompute: Recompute, transformer_engine: bool) -> dict[str, Any]:
    """mcore counts sublayers where Megatron users count blocks.

    Raises SharedMistake for parts whose recomputation asks Transformer Engine for its fp8 state (megatron-core 0.19.2,
    tensor_parallel/random.py:693): without it, the first forward pass would fail.
    """
    if recompute.granularity == "full":
        assert recompute.num_layers is not None
        return {
            "recompute_granularity": "full",
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute_num_sublayers(shape, recompute.num_layers),
        }
    if recompute.granularity == "selective":
        missing = sorted(RECOMPUTED_BY_TRANSFORMER_ENGINE & set(recompute.modules))
        if missing and not transformer_engine:
            raise SharedMistake(f'train.recompute "selective:{missing[0]}" needs Transformer Engine. Leave it out.')
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {}


def recompute_no_empty_mlp(chunk: HybridModel) -> None:
    """With "selective:mlp" megatron-core 0.19.2 recomputes the MLP that a sublayer of attention has not.

    In fp8 that fails: Transformer Engine leaves what is not its own to torch, which does not know the arguments.
    """
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, IdentityOp):
            layer.recompute_mlp = False


def set_inv_freq(chunk: HybridModel, shape: GPTShape, device: torch.device, seq_length: int = 0) -> None:
    """Give RoPE our frequencies. mcore caches cos and sin per sequence length, so the cache is emptied as well.

    A plain attribute, not a buffer: it stays fp32 under bf16 and out of the checkpoint.
    """
    if shape.position_embedding_type == "rope" and not shape.multi_latent_attention:
        chunk.rotary_pos_emb.inv_freq = inv_freq(shape, device, seq_length)
        chunk.rotary_pos_emb.rotary_interleaved = shape.rotary_interleaved
        type(chunk.rotary_pos_emb).forward.cache_clear()


def mask_padded_logits(chunk: HybridModel, shape: GPTShape) -> None:
    """Give vocabulary rows that are only padding no probability, whatever computes the loss from the logits.

    Rows are padded to a multiple that does not depend on TP; unmasked, they would still take part in the softmax.
    The smallest finite number, not -inf, keeps sums over TP shards that are all padding free of NaN. Written past
    autograd, which would copy all gradients to clear those of padding: behind a softmax they are 0 already.
    """
    if not hasattr(chunk, "output_layer") or shape.padded_vocab_size == shape.vocab_size:
        return
    rank, size = chunk.pg_collection.tp.rank(), chunk.pg_collection.tp.size()
    local = shape.padded_vocab_size // size

    forward = chunk.output_layer.forward

    def masked(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logits, bias = forward(*args, **kwargs)
        first = shape.vocab_size - (rank * local if logits.shape[-1] == local else 0)
        if first < logits.shape[-1]:
            with torch.no_grad():
                logits[..., max(first, 0) :] = torch.finfo(logits.dtype).min
        return logits, bias

    chunk.output_layer.forward = masked
