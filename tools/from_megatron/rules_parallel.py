"""The parallel and precision sections."""

import typing

from parallel.config import StreamGroup
from parallel.stages import layout_chunks
from program.errors import UserError
from tools.from_megatron.draft import DEFAULT, Draft
from tools.from_megatron.rules_model import num_layers

COPIES = "num-distributed-optimizer-instances"
SIZES = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")


def parallel(draft: Draft) -> None:
    """What is more than one flag's value of how the ranks are divided."""
    sizes = {part: draft.arguments.size(f"{part}-parallel-size") for part in SIZES}
    tp = sizes["tensor-model"]
    asked = draft.arguments.switch("sequence-parallel")
    draft.put("parallel.sequence_parallel", asked and tp > 1, "--sequence-parallel" if asked else DEFAULT)
    if asked and tp == 1:
        draft.irrelevant.append("--sequence-parallel: Megatron-LM switches it off where TP is 1")
    _virtual_stages(draft)
    _context(draft)
    _streams(draft)
    _sharding(draft)


def _virtual_stages(draft: Draft) -> None:
    arguments, name = draft.arguments, "parallel.virtual_pipeline_model_parallel_size"
    pp = arguments.size("pipeline-model-parallel-size")
    layout = arguments.text("pipeline-model-parallel-layout")
    each = arguments.whole("num-layers-per-virtual-pipeline-stage", least=1)
    chunks = arguments.whole("num-virtual-stages-per-pipeline-rank", least=1)
    if layout is not None:
        chunks, source = len(layout_chunks(layout)) // pp, "--pipeline-model-parallel-layout"
    elif chunks is not None:
        source = "--num-virtual-stages-per-pipeline-rank"
    elif each:
        counted = [f"account-for-{part}-in-pipeline-split" for part in ("embedding", "loss")]
        layers = num_layers(arguments) + sum(map(arguments.switch, counted))
        if layers % (pp * each):
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage: {layers} layers on {pp} stages cannot be divided into "
                f"chunks of {each}, and Megatron-LM refuses it, too. Give a divisor of {layers // pp}, or leave it out."
            )
        chunks, source = layers // pp // each, "--num-layers-per-virtual-pipeline-stage"
    if chunks is not None and chunks > 1:
        draft.put(name, chunks, source)


def _context(draft: Draft) -> None:
    kinds = list(dict.fromkeys(draft.arguments.texts("cp-comm-type")))
    if kinds and (len(kinds) > 1 or kinds[0] not in ("p2p", "a2a", "all_gather")):
        draft.unsupported.append(
            f"--cp-comm-type {' '.join(kinds)}: Triplane has one of p2p, a2a, all_gather for all layers."
        )
    elif kinds:
        draft.put("parallel.cp_comm_type", kinds[0], "--cp-comm-type")


def _streams(draft: Draft) -> None:
    groups, flag = draft.arguments.texts("high-priority-stream-groups"), "--high-priority-stream-groups"
    known = typing.get_args(StreamGroup)
    if others := [name for name in groups if name not in known]:
        draft.irrelevant.append(f"{flag} {' '.join(others)}: Triplane has no such group")
    if own := [name for name in groups if name in known]:
        draft.add("parallel.megatron", f"high_priority_stream_groups={own}", flag)


def _sharding(draft: Draft) -> None:
    """Either of Megatron-LM's FSDPs, whose defaults differ: Megatron-FSDP's shards nothing, torch's everything."""
    arguments, name = draft.arguments, "parallel.data_parallel_sharding_strategy"
    asked, copies = arguments.text("data-parallel-sharding-strategy"), arguments.size(COPIES)
    kept = arguments.switch("torch-fsdp2-no-reshard-after-forward")
    if arguments.switch("use-torch-fsdp2"):
        strategy, source = "optim_grads" if kept else "optim_grads_params", "--use-torch-fsdp2"
    elif arguments.switch("use-megatron-fsdp") or arguments.switch("use-custom-fsdp"):
        strategy = asked or "no_shard"
        source = "--data-parallel-sharding-strategy" if asked else "--use-megatron-fsdp without a strategy"
    else:
        draft.only_with("use-megatron-fsdp", ["data-parallel-sharding-strategy"])
        strategy, source = "", ""
    if strategy:
        draft.put(name, strategy, source)
    if copies == 1:
        return
    if strategy in ("optim_grads", "optim_grads_params"):
        draft.put("parallel.num_distributed_optimizer_instances", copies, f"--{COPIES}")
    else:
        draft.unsupported.append(
            f"--{COPIES} {copies}: Triplane has copies of shards with the strategies optim_grads and "
            "optim_grads_params (--use-megatron-fsdp); the optimizer's state alone is split over all data ranks."
        )


def precision(draft: Draft) -> None:
    """Number formats; without --bf16 and --fp16, Megatron-LM computes in fp32."""
    arguments = draft.arguments
    bf16, fp16 = arguments.switch("bf16"), arguments.switch("fp16")
    if bf16 and fp16:
        raise UserError("--fp16 beside --bf16: Megatron-LM refuses both. Leave one out.")
    dtype = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    draft.put("precision.dtype", dtype, f"--{dtype}" if bf16 or fp16 else DEFAULT)
    half, exact = map(arguments.switch, ("grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32"))
    if dtype == "bf16":
        draft.put("precision.grad_reduce_in_fp32", not half, "--grad-reduce-in-bf16" if half else "with --bf16")
    else:
        source = "--accumulate-allreduce-grads-in-fp32" if exact else DEFAULT
        draft.put("precision.grad_reduce_in_fp32", exact or dtype == "fp32", source)
    _recipe(draft, "fp8", "delayed", "delayed, tensorwise, mxfp8 and blockwise")
    _recipe(draft, "fp4", "nvfp4", "nvfp4")
    _weights_in_fp8(draft)
    if fp16 and arguments.text("initial-loss-scale") is None and arguments.text("loss-scale") is None:
        draft.notes.append(
            "precision.initial_loss_scale stays 65536: it multiplies sums over tokens here, where Megatron-LM's 2^32 "
            "would only skip the first iterations."
        )


def _recipe(draft: Draft, name: str, default: str, offered: str) -> None:
    """name: fp8 or fp4. default: Megatron's."""
    flag, recipe = f"--{name}-recipe", draft.arguments.text(f"{name}-recipe")
    if draft.arguments.text(f"{name}-format") is None:
        draft.only_with(f"{name}-format", [f"{name}-recipe"])
    elif recipe == "custom":
        draft.unsupported.append(f"{flag} custom: Triplane has {offered}.")
    else:
        draft.put(f"precision.{name}_recipe", recipe or default, flag if recipe else DEFAULT)


def _weights_in_fp8(draft: Draft) -> None:
    """Left out where Triplane would refuse it: the model is the same in 16 bits."""
    arguments, flag = draft.arguments, "--fp8-param-gather"
    if not arguments.switch("fp8-param-gather"):
        return
    if arguments.text("fp8-format") is None:
        draft.irrelevant.append(f"{flag}: has no effect without --fp8-format")
    elif not arguments.switch("use-distributed-optimizer"):
        draft.notes.append(f"{flag} is left out: Triplane keeps weights in fp8 with --use-distributed-optimizer only.")
    elif arguments.text("fp8-recipe") == "mxfp8" and arguments.switch("overlap-param-gather"):
        draft.notes.append(
            f"{flag} is left out: with --fp8-recipe mxfp8, Triplane does not gather weights in fp8 while others "
            "compute (--overlap-param-gather). Without the latter, set precision.fp8_param_gather = true."
        )
    else:
        draft.put("precision.fp8_param_gather", True, flag)
