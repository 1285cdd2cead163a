"""megatron-core 0.19.2's private spots that have no extension point, and one probe for each.

A probe fails loudly when the pinned version moves and a spot is no longer what the replacement was written for.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel.cpu import uneven

MCORE_VERSION = "0.19.2"


def install() -> None:
    """Replace the RNG accessors of ``tensor_parallel.random``, which ask for a CUDA generator by index.

    And let data-parallel ranks exchange weights and gradients in the buffers where they are, and give gloo what the
    dispatchers of experts need.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    check_once()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    buffers.dist_all_gather_func = all_gather_in_place
    buffers.dist_reduce_scatter_func = reduce_scatter_in_place
    mappings._gather_along_first_dim = uneven.where_uneven(mappings._gather_along_first_dim, uneven.gather)
    mappings._reduce_scatter_along_first_dim = uneven.where_uneven(
        mappings._reduce_scatter_along_first_dim, uneven.reduce_scatter
    )
    token_dispatcher.maybe_move_tensor_to_cpu = counts_on_host


def all_gather_in_place(output: torch.Tensor, local: torch.Tensor, *, group: Any, **_: Any) -> None:
    """``all_gather_into_tensor`` of an ``output`` [n], in which ``local`` [n / ranks] mostly lies already.

    A broadcast of each rank's part, several times as fast as gloo's own, which goes through fresh memory of n elements.
    """
    parts = output.chunk(group.size())
    if parts[group.rank()].data_ptr() != local.data_ptr():
        parts[group.rank()].copy_(local)
    if group.size() > 1:
        works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
        for work in works:
            work.wait()


def reduce_scatter_in_place(
    output: torch.Tensor, whole: torch.Tensor, *, op: dist.ReduceOp, group: Any, **_: Any
) -> None:
    """``reduce_scatter_tensor`` into ``output`` [n / ranks] from ``whole`` [n], of which all is reduced in its place.

    gloo's own is the same reduction on a copy, and slower: bit by bit the same sums.
    """
    if group.size() > 1:  # not dist.all_reduce: within Megatron's _coalescing_manager that, too, makes a copy
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([whole], options).wait()
    part = whole.chunk(group.size())[group.rank()]
    if part.data_ptr() != output.data_ptr():
        output.copy_(part)


def counts_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts for a collective's split sizes, as NumPy where asked; mcore's own converts CUDA tensors only."""
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@functools.cache
def check_once() -> None:
    """``check``, which reads long in Megatron's sources; ranks that are forked later need not do it again."""
    check()


def check() -> None:
    """Raises RuntimeError naming each spot that is not as megatron-core 0.19.2 has it."""
    moved = [name for name, probes in PROBES.items() if not all(probe() for probe in probes)]
    if moved:
        import megatron.core

        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} differs from {MCORE_VERSION} where Triplane touches it: "
            f"{', '.join(moved)}. Install megatron-core=={MCORE_VERSION}."
        )


Probe = Callable[[], bool]
"""What each of the following makes is one. where: behind megatron.core, with a colon before what is in a module."""


def _named(where: str) -> Any:
    module, _, path = where.partition(":")
    return functools.reduce(getattr, filter(None, path.split(".")), importlib.import_module(f"megatron.core.{module}"))


def _arguments(where: str) -> str:
    return " ".join(inspect.signature(_named(where)).parameters)


def _says(where: str, *texts: str, ordered: bool = False) -> Probe:
    """Its source has these texts. ordered: and in this order."""

    def probe() -> bool:
        source = inspect.getsource(_named(where))
        places = [source.find(text) for text in texts]
        return -1 not in places and (not ordered or places == sorted(places))

    return probe


def _takes(where: str, arguments: str) -> Probe:
    return lambda: _arguments(where) == arguments


def _begins(where: str, arguments: str) -> Probe:
    return lambda: _arguments(where).startswith(arguments)


def _knows(where: str, arguments: str) -> Probe:
    return lambda: {*arguments.split()} <= {*_arguments(where).split()}


def _has(where: str, *names: str) -> Probe:
    return lambda: all(hasattr(_named(where), name) for name in names)


_ADAM = "optimizer.distrib_optimizer:DistributedOptimizer"
_HOST = "optimizer.cpu_offloading:HybridDeviceOptimizer"
_LATENT = "transformer.multi_latent_attention:MLASelfAttention"
_OFFLOAD = "pipeline_parallel.fine_grained_activation_offload"
_PASSES = "pipeline_parallel.schedules"
_ROPE = "models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_STACK = "models.hybrid.hybrid_block:HybridStack.__init__"
PROBES: Mapping[str, Sequence[Probe]] = {
    "core_attention, rotary_pos_emb, mtp_process and the experts' capacity, which models/layers/kv_cache.py, "
    "models/layers/routing.py and training/generation/forward.py set while text is generated": (
        _says(
            "models.hybrid.hybrid_model:HybridModel",
            "rotary_pos_emb = self.rotary_pos_emb(\n",
            "mtp_forward_ran = self.mtp_process and",
        ),
        _says(_LATENT, "= self.rotary_pos_emb(rotary_seq_len, packed_seq=thd_packed_seq)"),
        _says("transformer.attention:Attention", "apply_module(self.core_attention)("),
        _says("transformer.moe.router", "if self.config.moe_expert_capacity_factor is not None"),
        _says("transformer.moe.token_dispatcher", "self.drop_and_pad = self.config"),
    ),
    "ChunkOffloadHandler, in whose place models/layers/fine_grained_offload.py has its own": (
        _says(
            f"{_OFFLOAD}:PipelineOffloadManager",
            "cur_chunk = ChunkOffloadHandler(",
            "self._cur_forward_chunk.finish_all_groups(name)",
        ),
        _says(
            f"{_OFFLOAD}:ChunkOffloadHandler.tensor_pop",
            "tensor = self.offload_groups[group_id - 1].pop_tensor(tensor_tag)",
        ),
        _says(f"{_OFFLOAD}:ChunkOffloadHandler.reload", "self.cpu_tensor_pool.free(cpu_backup)"),
        _takes(f"{_OFFLOAD}:ChunkOffloadHandler.on_group_commit_forward", "self name forced_released_tensors"),
        _says(
            f"{_OFFLOAD}:ChunkOffloadHandler.on_group_commit_forward",
            "self.bulk_offload(name, forced_released_tensors)",
        ),
        _takes(f"{_OFFLOAD}:ChunkOffloadHandler.find_next_group", "self name"),
    ),
    "main_grad and grad_stats_parallel_group, by which parallel/fsdp.py shows shards": (
        _says(
            "distributed.finalize_model_grads",
            "weight, grad_attr, _reshard_if_dtensor(grad, orig_grad)",
            'hasattr(param, "main_grad")',
        ),
        _says("optimizer.optimizer:FP32Optimizer.prepare_grads", "param.grad = param.main_grad"),
        _says(
            "optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group",
            "self.grad_stats_parallel_group",
        ),
    ),
    "ChainedOptimizer.step, as training/step.py calls it, and the schedules' finalize_model_grads_func, which "
    "training/forward_backward.py replaces": (
        _says(
            "optimizer:ChainedOptimizer.step",
            *("self.prepare_grads()", "self.get_grad_norm()", "self.step_with_ready_grads()"),
            ordered=True,
        ),
        *(
            _says(f"{_PASSES}:forward_backward_{kind}", "config.finalize_model_grads_func(")
            for kind in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
        ),
    ),
    "finalize_model_grads without a token count, moe_grad_scale_func and what routers multiply their losses by, which "
    "training/loss_weights.py counts on": (
        _says("distributed.finalize_model_grads:finalize_model_grads", "if num_tokens is not None:"),
        _says(f"{_PASSES}:_get_moe_loss_scale", "moe_grad_scale_func()"),
        _says(
            "transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
            "aux_loss * num_local_tokens * self.tp_cp_group.size()",
        ),
    ),
    "ChainedOptimizer.get_grad_norm and get_grad_norm_fp32, whose sums training/forward_backward takes": (
        _says(
            "optimizer:ChainedOptimizer.get_grad_norm",
            "self.grads_states_parallel_group_is_shared()",
            "optimizer.get_grads_for_grad_norm()",
            "math.sqrt(sum([x**2 for x in grad_norms]))",
        ),
        _says("optimizer.clip_grads:get_grad_norm_fp32", "total_norm = grad_norm**norm_type"),
    ),
    "DistributedOptimizer._defer_param_sync, which training/optimizer.py sets": (
        _says(
            f"{_ADAM}.step_with_ready_grads",
            "self, '_defer_param_sync', False",
            "start_param_sync_for_bucket_group_subset()",
        ),
    ),
    "DynamicGradScaler's attributes and prepare_grads, which training/forward_backward repeats": (
        _says("optimizer.grad_scaler:DynamicGradScaler.update", "self._scale = torch.max("),
        # attributes are replaced, never written into: a copy of them is what was there
        *(
            lambda word=word: word not in inspect.getsource(_named("optimizer.grad_scaler:DynamicGradScaler.update"))
            for word in (".fill_(", ".copy_(", ".mul_(")
        ),
        _says("optimizer.optimizer:MixedPrecisionOptimizer.prepare_grads", "self._copy_model_grads_to_main_grads()"),
        _says(
            "optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
            "main_grads = self._collect_main_grad_data_for_unscaling()",
            "main_grads, self.found_inf, self.grad_scaler.inv_scale",
        ),
    ),
    "timers of the schedules, and get_schedule_table, by which training/profile measures passes": (
        _says(f"{_PASSES}:forward_step", "config.timers('forward-compute', log_level=2).start()"),
        _says(f"{_PASSES}:forward_step_calc_loss", "config.timers('forward-compute').stop()"),
        _says(
            f"{_PASSES}:backward_step",
            "config.timers('backward-compute', log_level=2).start()",
            "config.timers('backward-compute').stop()",
        ),
        _takes(f"{_PASSES}:get_schedule_table", "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage"),
    ),
    "parallel_state.get_data_parallel_group, which parallel/groups.py replaces for SHARP": (
        _says("parallel_state:initialize_model_parallel", "group=get_data_parallel_group(with_context_parallel=True),"),
        _knows("parallel_state:get_data_parallel_group", "with_gtp_remat"),
    ),
    "tensor_parallel.random._set/_get_cuda_rng_state": (
        _takes("tensor_parallel.random:_set_cuda_rng_state", "new_state device graph_safe"),
        _takes("tensor_parallel.random:_get_cuda_rng_state", "device clone graph_safe"),
    ),
    "param_and_grad_buffer.dist_all_gather_func and dist_reduce_scatter_func": tuple(
        _says(f"distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.{method}", text)
        for method, text in (
            ("start_param_sync", "dist_all_gather_func("),
            ("start_grad_sync", "= dist_reduce_scatter_func("),
        )
    ),
    "optimizer.Adam and distrib_optimizer.Adam": (
        _has("optimizer", "Adam", "USING_PYTORCH_OPTIMIZER"),
        _has("optimizer.distrib_optimizer", "Adam", "HAVE_APEX_OR_TE"),
    ),
    "optimizer.Adam as it is called, in whose place training/optimizer_class.py is": (
        _says(
            "optimizer:_get_megatron_optimizer_based_on_param_groups",
            "adam_cls = Adam",
            "optimizer = adam_cls(**kwargs)",
            '"params": param_groups',
        ),
    ),
    "DistributedOptimizer.gbuf_ranges and its map of parameters to those of its optimizer": (
        _says(
            _ADAM,
            "self.gbuf_ranges",
            '"param_map"',
            'self.optimizer.param_groups[group_index]["params"][group_order]',
        ),
    ),
    "HybridDeviceOptimizer's inner parameters and optimizers": (
        _says(_HOST, "self.param_to_inner_param[param] = inner_param", "self.cpu_optimizers"),
        lambda: isinstance(_named(_HOST).sub_optimizers, property),
        _takes(f"{_HOST}._sync_sub_optimizers_state_to_hdo", "self"),
    ),
    "the optimizers' main parameters, as training/checkpoint reads them": (
        _takes(f"{_ADAM}._copy_main_params_to_model_params", "self"),
        _says(_ADAM, "self.distributed_optimizer_instance_id"),
        _says("optimizer.optimizer:MegatronOptimizer", "self.init_state_fn = init_state_fn"),
        _says("optimizer.optimizer:Float16OptimizerWithFloat16Params", "self.float16_groups", "param.main_param"),
        _says("distributed:DistributedDataParallel", "self.remove_forward_pre_hook_handles"),
    ),
    "mappings._gather/_reduce_scatter_along_first_dim and maybe_move_tensor_to_cpu": (
        _takes("tensor_parallel.mappings:_gather_along_first_dim", "input_ group output_split_sizes use_global_buffer"),
        _begins("tensor_parallel.mappings:_reduce_scatter_along_first_dim", "input_ group input_split_sizes"),
        _takes("transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", "tensor as_numpy record_stream"),
    ),
    "hybrid_model.process_mtp_loss": (
        _begins(
            "models.hybrid.hybrid_model:process_mtp_loss",
            "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training "
            "compute_language_model_loss config cp_group",
        ),
    ),
    "HybridModel.compute_language_model_loss, and layers.fused_weight_gradient_mlp_cuda": (
        _takes("models.hybrid.hybrid_model:HybridModel.compute_language_model_loss", "self labels logits"),
        _says("models.hybrid.hybrid_model:HybridModel", "self.compute_language_model_loss(labels, logits)"),
        _says(
            "tensor_parallel.layers",
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(",
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(",
            "gradient_accumulation_fusion=self.gradient_accumulation_fusion",
        ),
    ),
    "MLASelfAttention._qkv_down_projection": (
        _says(f"{_LATENT}.get_query_key_value_tensors", "self._qkv_down_projection(hidden_states)"),
        _takes(f"{_LATENT}._qkv_down_projection", "self hidden_states"),
    ),
    "MLASelfAttention._resolve_qk_norm_config": (_takes(f"{_LATENT}._resolve_qk_norm_config", "self submodules"),),
    "router.topk_routing_with_score_function": (
        _knows(
            "transformer.moe.moe_utils:topk_routing_with_score_function",
            "logits topk num_groups group_topk score_function router_replay fused",
        ),
        _says("transformer.moe.router:TopKRouter", "= topk_routing_with_score_function("),
    ),
    "HybridStack.final_norm": (_knows(_STACK, "post_layer_norm"), _says(_STACK, "self.final_norm = TENorm(")),
    "RotaryEmbedding.inv_freq and its cache": (_has(f"{_ROPE}.forward", "cache_clear"), _says(_ROPE, "self.inv_freq")),
}
