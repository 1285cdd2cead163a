"""megatron-core 0.19.2's private spots that have no extension point, and one probe for each.

A probe fails loudly when the pinned version moves and a spot is no longer what the replacement was written for.
"""

import functools
import inspect
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
    moved = [name for name, probe in PROBES.items() if not probe()]
    if moved:
        import megatron.core

        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} differs from {MCORE_VERSION} where Triplane touches it: "
            f"{', '.join(moved)}. Install megatron-core=={MCORE_VERSION}."
        )


def _arguments(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def _rng_accessors() -> bool:
    from megatron.core.tensor_parallel import random as mcore_random

    return _arguments(mcore_random._set_cuda_rng_state) == ["new_state", "device", "graph_safe"] and _arguments(
        mcore_random._get_cuda_rng_state
    ) == ["device", "clone", "graph_safe"]


def _buffer_collectives() -> bool:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = buffers._ParamAndGradBucketGroup
    gather, scatter = inspect.getsource(group.start_param_sync), inspect.getsource(group.start_grad_sync)
    return "dist_all_gather_func(" in gather and "= dist_reduce_scatter_func(" in scatter


def _schedule_timers() -> bool:
    from megatron.core.pipeline_parallel import schedules

    forward, loss, backward = map(
        inspect.getsource, (schedules.forward_step, schedules.forward_step_calc_loss, schedules.backward_step)
    )
    table = _arguments(schedules.get_schedule_table)
    return (
        "config.timers('forward-compute', log_level=2).start()" in forward
        and "config.timers('forward-compute').stop()" in loss
        and "config.timers('backward-compute', log_level=2).start()" in backward
        and "config.timers('backward-compute').stop()" in backward
        and table == ["num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"]
    )


def _adam_names() -> bool:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    return all(
        hasattr(module, name)
        for module, name in [
            (optimizer, "Adam"),
            (optimizer, "USING_PYTORCH_OPTIMIZER"),
            (distributed, "Adam"),
            (distributed, "HAVE_APEX_OR_TE"),
        ]
    )


def _adam_made() -> bool:
    import megatron.core.optimizer as optimizer

    source = inspect.getsource(optimizer._get_megatron_optimizer_based_on_param_groups)
    return (
        "adam_cls = Adam" in source
        and "optimizer = adam_cls(**kwargs)" in source
        and '"params": param_groups' in source
    )


def _range_maps() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    source = inspect.getsource(DistributedOptimizer)
    return (
        "self.gbuf_ranges" in source
        and '"param_map"' in source
        and 'self.optimizer.param_groups[group_index]["params"][group_order]' in source
    )


def _host_optimizer() -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    source = inspect.getsource(HybridDeviceOptimizer)
    return (
        "self.param_to_inner_param[param] = inner_param" in source
        and "self.cpu_optimizers" in source
        and isinstance(HybridDeviceOptimizer.sub_optimizers, property)
        and _arguments(HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo) == ["self"]
    )


def _final_norm() -> bool:
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    source = inspect.getsource(HybridStack.__init__)
    return "post_layer_norm" in _arguments(HybridStack.__init__) and "self.final_norm = TENorm(" in source


def _rope_cache() -> bool:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return hasattr(RotaryEmbedding.forward, "cache_clear") and "self.inv_freq" in inspect.getsource(RotaryEmbedding)


def _uneven_collectives() -> bool:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    return (
        _arguments(mappings._gather_along_first_dim) == ["input_", "group", "output_split_sizes", "use_global_buffer"]
        and _arguments(mappings._reduce_scatter_along_first_dim)[:3] == ["input_", "group", "input_split_sizes"]
        and _arguments(token_dispatcher.maybe_move_tensor_to_cpu) == ["tensor", "as_numpy", "record_stream"]
    )


def _mtp_loss() -> bool:
    from megatron.core.models.hybrid import hybrid_model

    passed = "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training".split()
    known = _arguments(hybrid_model.process_mtp_loss)
    return known[:10] == [*passed, "compute_language_model_loss", "config", "cp_group"]


def _latent_down_projection() -> bool:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    source = inspect.getsource(MLASelfAttention.get_query_key_value_tensors)
    return "self._qkv_down_projection(hidden_states)" in source and _arguments(
        MLASelfAttention._qkv_down_projection
    ) == ["self", "hidden_states"]


def _latent_norms() -> bool:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    return _arguments(MLASelfAttention._resolve_qk_norm_config) == ["self", "submodules"]


def _losses_and_weight_gradients() -> bool:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import layers

    forward, backward = inspect.getsource(HybridModel), inspect.getsource(layers)
    return (
        _arguments(HybridModel.compute_language_model_loss) == ["self", "labels", "logits"]
        and "self.compute_language_model_loss(labels, logits)" in forward
        and "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(" in backward
        and "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(" in backward
        and "gradient_accumulation_fusion=self.gradient_accumulation_fusion" in backward
    )


def _routing() -> bool:
    from megatron.core.transformer.moe import moe_utils, router

    names = {"logits", "topk", "num_groups", "group_topk", "score_function", "router_replay", "fused"}
    called = inspect.getsource(router.TopKRouter)
    return names <= set(_arguments(moe_utils.topk_routing_with_score_function)) and (
        "= topk_routing_with_score_function(" in called
    )


def _checkpoint_spots() -> bool:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer

    sharded, whole = inspect.getsource(DistributedOptimizer), inspect.getsource(Float16OptimizerWithFloat16Params)
    return (
        _arguments(DistributedOptimizer._copy_main_params_to_model_params) == ["self"]
        and "self.distributed_optimizer_instance_id" in sharded
        and "self.init_state_fn = init_state_fn" in inspect.getsource(MegatronOptimizer)
        and "self.float16_groups" in whole
        and "param.main_param" in whole
        and "self.remove_forward_pre_hook_handles" in inspect.getsource(DistributedDataParallel)
    )


def _step_parts() -> bool:
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules

    source = inspect.getsource(ChainedOptimizer.step)
    places = [
        source.find(call) for call in ("self.prepare_grads()", "self.get_grad_norm()", "self.step_with_ready_grads()")
    ]
    return -1 < places[0] < places[1] < places[2] and all(
        "config.finalize_model_grads_func(" in inspect.getsource(schedule)
        for schedule in (
            schedules.forward_backward_no_pipelining,
            schedules.forward_backward_pipelining_with_interleaving,
            schedules.forward_backward_pipelining_without_interleaving,
        )
    )


def _loss_weights() -> bool:
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.router import TopKRouter

    by_all_tokens = "aux_loss * num_local_tokens * self.tp_cp_group.size()"
    return (
        "if num_tokens is not None:" in inspect.getsource(finalize_model_grads)
        and "moe_grad_scale_func()" in inspect.getsource(schedules._get_moe_loss_scale)
        and by_all_tokens in inspect.getsource(TopKRouter.attach_and_log_load_balancing_loss)
    )


def _gradient_norm() -> bool:
    from megatron.core.optimizer import ChainedOptimizer, clip_grads

    chained, summed = (
        inspect.getsource(ChainedOptimizer.get_grad_norm),
        inspect.getsource(clip_grads.get_grad_norm_fp32),
    )
    return (
        "self.grads_states_parallel_group_is_shared()" in chained
        and "optimizer.get_grads_for_grad_norm()" in chained
        and "math.sqrt(sum([x**2 for x in grad_norms]))" in chained
        and "total_norm = grad_norm**norm_type" in summed
    )


def _gathered_once() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    source = inspect.getsource(DistributedOptimizer.step_with_ready_grads)
    return "self, '_defer_param_sync', False" in source and "start_param_sync_for_bucket_group_subset()" in source


def _loss_scale() -> bool:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    # attributes are replaced, never written into: a copy of them is what was there
    source = inspect.getsource(DynamicGradScaler.update)
    unscale = inspect.getsource(MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan)
    return (
        "self._scale = torch.max(" in source
        and not any(word in source for word in (".fill_(", ".copy_(", ".mul_("))
        and "self._copy_model_grads_to_main_grads()" in inspect.getsource(MixedPrecisionOptimizer.prepare_grads)
        and "main_grads = self._collect_main_grad_data_for_unscaling()" in unscale
        and "main_grads, self.found_inf, self.grad_scaler.inv_scale" in unscale
    )


def _sharp_group() -> bool:
    from megatron.core import parallel_state

    source = inspect.getsource(parallel_state.initialize_model_parallel)
    return "group=get_data_parallel_group(with_context_parallel=True)," in source and "with_gtp_remat" in _arguments(
        parallel_state.get_data_parallel_group
    )


def _sharded_gradients() -> bool:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

    module = inspect.getmodule(finalize_model_grads)
    assert module is not None
    source = inspect.getsource(module)
    return (
        "weight, grad_attr, _reshard_if_dtensor(grad, orig_grad)" in source
        and 'hasattr(param, "main_grad")' in source
        and "param.grad = param.main_grad" in inspect.getsource(FP32Optimizer.prepare_grads)
        and "self.grad_stats_parallel_group" in inspect.getsource(MegatronOptimizer.get_grad_stats_parallel_group)
    )


def _activation_offload() -> bool:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    chunk, manager = offload.ChunkOffloadHandler, inspect.getsource(offload.PipelineOffloadManager)
    pop = inspect.getsource(chunk.tensor_pop)
    return (
        "cur_chunk = ChunkOffloadHandler(" in manager
        and "self._cur_forward_chunk.finish_all_groups(name)" in manager
        and "tensor = self.offload_groups[group_id - 1].pop_tensor(tensor_tag)" in pop
        and "self.cpu_tensor_pool.free(cpu_backup)" in inspect.getsource(chunk.reload)
        and _arguments(chunk.on_group_commit_forward) == ["self", "name", "forced_released_tensors"]
        and "self.bulk_offload(name, forced_released_tensors)" in inspect.getsource(chunk.on_group_commit_forward)
        and _arguments(chunk.find_next_group) == ["self", "name"]
    )


def _generation() -> bool:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.moe import router, token_dispatcher
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    model, latent = inspect.getsource(HybridModel), inspect.getsource(MLASelfAttention)
    return (
        "rotary_pos_emb = self.rotary_pos_emb(\n" in model
        and "mtp_forward_ran = self.mtp_process and" in model
        and "= self.rotary_pos_emb(rotary_seq_len, packed_seq=thd_packed_seq)" in latent
        and "apply_module(self.core_attention)(" in inspect.getsource(Attention)
        and "if self.config.moe_expert_capacity_factor is not None" in inspect.getsource(router)
        and "self.drop_and_pad = self.config" in inspect.getsource(token_dispatcher)
    )


PROBES = {
    "core_attention, rotary_pos_emb, mtp_process and the experts' capacity, which models/layers/kv_cache.py, "
    "models/layers/routing.py and training/generation/forward.py set while text is generated": _generation,
    "ChunkOffloadHandler, in whose place models/layers/fine_grained_offload.py has its own": _activation_offload,
    "main_grad and grad_stats_parallel_group, by which parallel/fsdp.py shows shards": _sharded_gradients,
    "ChainedOptimizer.step, as training/step.py calls it, and the schedules' finalize_model_grads_func, which "
    "training/forward_backward.py replaces": _step_parts,
    "finalize_model_grads without a token count, moe_grad_scale_func and what routers multiply their losses by, which "
    "training/loss_weights.py counts on": _loss_weights,
    "ChainedOptimizer.get_grad_norm and get_grad_norm_fp32, whose sums training/forward_backward takes": _gradient_norm,
    "DistributedOptimizer._defer_param_sync, which training/optimizer.py sets": _gathered_once,
    "DynamicGradScaler's attributes and prepare_grads, which training/forward_backward repeats": _loss_scale,
    "timers of the schedules, and get_schedule_table, by which training/profile measures passes": _schedule_timers,
    "parallel_state.get_data_parallel_group, which parallel/groups.py replaces for SHARP": _sharp_group,
    "tensor_parallel.random._set/_get_cuda_rng_state": _rng_accessors,
    "param_and_grad_buffer.dist_all_gather_func and dist_reduce_scatter_func": _buffer_collectives,
    "optimizer.Adam and distrib_optimizer.Adam": _adam_names,
    "optimizer.Adam as it is called, in whose place training/optimizer_class.py is": _adam_made,
    "DistributedOptimizer.gbuf_ranges and its map of parameters to those of its optimizer": _range_maps,
    "HybridDeviceOptimizer's inner parameters and optimizers": _host_optimizer,
    "the optimizers' main parameters, as training/checkpoint reads them": _checkpoint_spots,
    "mappings._gather/_reduce_scatter_along_first_dim and maybe_move_tensor_to_cpu": _uneven_collectives,
    "hybrid_model.process_mtp_loss": _mtp_loss,
    "HybridModel.compute_language_model_loss, and layers.fused_weight_gradient_mlp_cuda": _losses_and_weight_gradients,
    "MLASelfAttention._qkv_down_projection": _latent_down_projection,
    "MLASelfAttention._resolve_qk_norm_config": _latent_norms,
    "router.topk_routing_with_score_function": _routing,
    "HybridStack.final_norm": _final_norm,
    "RotaryEmbedding.inv_freq and its cache": _rope_cache,
}
