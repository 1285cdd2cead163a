"""What the training program does, as far as memory or time depends on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from models.sublayers import OffloadModule

OFFLOADED_MODULES: tuple[str, ...] = get_args(OffloadModule)


@dataclass(kw_only=True, frozen=True)
class Software:
    """What a run, or the planner, sets of pretrain_gpt.py; by default, with Transformer Engine."""

    cuda: bool = True
    """CUDA's context, libraries and NCCL's buffers come on top."""
    transformer_engine: bool = True
    """Its modules keep what they need; False: this project's own, on the CPU, keep every intermediate result."""
    fused: bool = True
    """Norms, activations and residuals run as few kernels (Transformer Engine, torch.compile)."""
    gradient_bytes: int = 4
    """Of a gradient element as it is reduced."""
    main_gradient_bytes: int = 4
    """Of a gradient element as it is held while microbatches add to it, and of the 16-bit one beside where it stays."""
    main_weight_bytes: int = 2
    """Of a weight as it is held; 0 where sharded weights are the optimizer's fp32 ones, gathered in 16 bits."""
    main_param_bytes: float = 4.0
    """Of a weight as the optimizer holds it on the GPU, beside the 16-bit one."""
    moment_bytes: float = 8.0
    """Of both moments on the GPU."""
    muon_steps: int = 0
    """Newton-Schulz iterations of a matrix, which has one moment, 4 bytes, where AdamW keeps two (optimizer.optimizer =
    "muon"). 0: AdamW has it."""
    average_bytes: float = 0.0
    """Of averages of a weight on the GPU (train.ema_decay)."""
    host_average_bytes: float = 0.0
    """The same in the host's memory."""
    host_state: float = 0.0
    """Share of the optimizer's state that lies in the host's memory, and is updated there. With ZeRO-2 and
    -3: 1 where all shards lie there, else 0."""
    loss_bytes: int = 6
    """Per 16-bit logit while the loss is computed: it, and an fp32 copy that softmax and its gradient overwrite."""
    offloaded_blocks: int = 0
    """Of each pipeline chunk, the first ones: blocks whose activations wait in the host's memory
    (train.cpu_offloading_num_layers)."""
    offloaded_modules: int = 0
    """Modules whose inputs wait in the host's memory (train.offload_modules), by ``encoded``."""
    offloaded_module_share: float = 1.0
    """Of these, what is sent (activation_offload_fraction in model.megatron)."""
    loss_chunk_tokens: float = math.inf
    """Tokens whose logits are there at once (train.cross_entropy_chunk_tokens)."""
    recompute_budget: float = math.inf
    """Bytes that a rank may hold before sublayers are computed again (train.recompute)."""
    kept_blocks: float = 0.0
    """Share of the blocks that the layout's recomputation leaves out (train.recompute_method = "block")."""
    keeps_fp32_gradients: bool = True
    """Gradients in 16 bits have an fp32 copy while the optimizer steps."""
    fp8_weights: bool = False
    """Weights are held in fp8 alone, not beside 16-bit ones."""
    gathers_fp8: bool = True
    """Weights that products take in fp8 are gathered in it; False: in 16 bits."""
    by_unit: bool = False
    """FSDP2, unit by unit: each has collectives of its own, in buffers beside its weights and gradients."""
    reduces_every_microbatch: bool = False
    """FSDP without no_sync: gradients are reduced after each microbatch, not once a step."""
    accumulate_bytes: float = 4.0
    """Moved per parameter and microbatch to add gradients up, beyond what the products themselves write."""
    card_age: float = math.inf
    """Years from the launch of its card's generation to this software: kernels are tuned for a card in the years after
    it came out."""
    compiled: bool = False
    """Blocks are torch.compile's (train.compile), around Transformer Engine's modules. They are taken to keep the same
    bytes, as dense ones do."""
    graphed: bool = False
    """Attention and the router, at least, run as CUDA graphs: few launches are left to hold up a layer of experts."""


@dataclass(kw_only=True, frozen=True)
class Published:
    """What the programs of published runs do otherwise than pretrain_gpt.py: tests alone set it.

    Properties of a program, not its name: what its kernels fuse, and what it does at the same time.
    """

    flash_attention: bool = True
    """False: scores are written to memory, masked, normalised and read again."""
    newest_attention: bool = True
    """Attention kernels written for Hopper and later (cuDNN's, FlashAttention 3); False: FlashAttention 2's kind."""
    tp_overlap: bool = False
    """Collectives of tensor parallelism run beside the matrix products that need them, piece by piece."""
    p2p_overlap: bool = True
    """Sends between pipeline stages run while others compute (interleaved schedules of Megatron)."""
    all_reduces: bool = False
    """Gradients are all-reduced although each rank needs its shard only."""
    keeps_stage_ends: bool = False
    """A stage keeps what it took and what it sent of each microbatch in flight, beside what its blocks keep."""
    bucket_bytes: float = 0.0
    """That collectives of gradients and weights are collected in, beside both."""
    gathers_once: bool = False
    """FSDP whose weights, once gathered for a forward pass, stay until the backward pass has used them."""
    stops_early: bool = False
    """Recomputation ends when the backward pass has what it needs: a block's last product is not repeated."""
    waits_for_kernels: bool = False
    """Every kernel is waited for before the next is launched (CUDA_LAUNCH_BLOCKING=1)."""
    slow_host: float = 1.0
    """Times the step takes where its host is badly set up, as its owners found later."""
    power_share: float = 1.0
    """Clock that is left under a power limit below the card's own."""
    fused_experts: bool = False
    """Experts' products, gated activation and casts to mxfp8 in one kernel each way."""
    slow_bias_gradients: bool = False
    """The kernel in which fused experts have the gradients of activation and biases is cudnn-frontend 1.24's."""
    recomputes_norms: bool = False
    """Norms are computed again in the backward pass, beside what the layout recomputes; so are the next two."""
    recomputes_expert_activation: bool = False
    """What stands between experts' two products."""
    recomputes_latents: bool = False
    """Of latent attention: queries, keys and values, from their latents."""
    waits_for_counts: bool = True
    """The host reads how many tokens each expert has got; False: whole iterations run as one CUDA graph."""
    fused_dispatch: bool = False
    """Tokens are sorted by expert while they are sent (DeepEP, HybridEP), not by kernels before and after."""
    sends_once: bool = False
    """A token goes once to each rank, or domain, that has experts for it; False: once for each expert."""
    overlaps_dispatch: bool = False
    """Tokens of a microbatch travel while another one computes."""
    fp8_attention: bool = False
    """Attention multiplies in fp8, too."""
    fp8_head: bool = False
    """The output layer multiplies in fp8, too."""
    balanced_experts: bool = False
    """A benchmark that forces every expert to get as many tokens."""


OURS = Software()
"""pretrain_gpt.py with Transformer Engine."""
AS_OURS = Published()


def sharded(own: Software, zero: int) -> Software:
    """pretrain_gpt.py under a ZeRO stage; of stages 2 and 3, what parallel/fsdp.py does: shards are fp32, the
    optimizer's own, and so are their gradients; weights are gathered in 16 bits."""
    if zero < 2:
        return own
    return replace(
        own,
        main_gradient_bytes=4,
        main_param_bytes=4.0,
        moment_bytes=8.0,
        host_state=float(own.host_state > 0),
        main_weight_bytes=0 if zero == 3 else own.main_weight_bytes,
        gathers_fp8=False,
        reduces_every_microbatch=True,
        by_unit=True,
    )


def encoded(modules: Sequence[str]) -> int:
    """Modules as a number, for a column of cases: a bit of each."""
    return sum(1 << OFFLOADED_MODULES.index(module) for module in modules)
