"""What several fields of a configuration of Megatron-Bridge's mean together, as flags of Megatron-LM's."""

import itertools
import re
import typing
from collections.abc import Mapping
from typing import Any

from models.activations import ActivationName
from tools.from_megatron.bridge_fields import shown, target_of
from tools.from_megatron.bridge_flags import BridgeFlags, add_field

BY_RULE = frozenset(
    "activation_func gated_linear_unit num_query_groups seq_length sequence_length vocab_size should_pad_vocab blend"
    " data_path bf16 fp16 fp32 grad_reduce_in_fp32 use_distributed_optimizer bias_activation_fusion window_size"
    " pipeline_model_parallel_layout moe_layer_freq max_position_embeddings transformer".split()
)
"""Fields that are read here."""
_PRECISIONS = {
    "fp8_delayed_scaling": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024"
                           " --fp8-amax-compute-algo max --fp8-param-gather",
    "fp8_current_scaling": "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
                           " --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1 --fp8-param-gather",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
    "fp8_subchannel_scaling": "--fp8-format hybrid --fp8-recipe blockwise",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
}  # fmt: skip
"""Recipes by name, behind bf16_with_ or fp16_with_ and before _mixed."""
_STAGE = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_GPT = re.compile(
    r"(Bridge)?(GPT(OSS)?|MLA|Mistral(Small3)?|Mixtral|(Code)?Llama(2|3|31|32)?|Qwen(2|25|3)(MoE)?"
    r"|DeepSeek(V2|V2Lite|V3)?|Moonlight|GLM45(Air)?|KimiK2|Nemotron[34]?)(Model)?(Provider|Config)\w*"
)
"""Classes that build megatron-core's GPT from their fields alone. Others do more: Gemma's scales embeddings."""
_DATASETS = ("", "GPTDatasetConfig", "MockGPTDatasetConfig")


_OWN_NAMES = {"swiglu": "silu", "geglu": "gelu", "quick_geglu": "quick_gelu", "gelu_exact": "gelu"}
"""The function within an activation of the recipe's."""


def precision(found: BridgeFlags, config: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    given = config.get("mixed_precision")
    fields = given if isinstance(given, dict) else {}
    name = given.replace("-", "_") if isinstance(given, str) else ""
    bf16 = (
        name.startswith("bf16")
        or "_bf16" in name
        or bool(fields.get("bf16", merged.get("bf16") if not name else False))
    )
    fp16 = name.startswith("fp16") or bool(fields.get("fp16", merged.get("fp16") if not name else False))
    if bf16 or fp16:
        found.add("bf16" if bf16 else "fp16")
    recipe = re.sub(r"^\w*?(?:bf16|fp16)_with_|_mixed$", "", name)
    if recipe in _PRECISIONS:
        found.words += _PRECISIONS[recipe].split()
    elif name and recipe not in ("bf16", "fp16", "fp32"):
        found.not_understood.append(f"mixed_precision = {given}: no recipe of numbers that is known here.")
    fp8 = fields.get("fp8")
    for key, each in fields.items():
        if (
            key.startswith("_")
            or key in BY_RULE
            or (key.startswith("fp8") and not fp8)
            or not _matters(key, each, fields)
        ):
            continue
        add_field(found, "mixed_precision", key, each)
    exact = fields.get("grad_reduce_in_fp32", merged.get("grad_reduce_in_fp32"))
    if exact is False and (bf16 or (found.base is not None and not fp16)):
        found.add("grad-reduce-in-bf16")
    elif fp16 and exact is True:
        found.add("accumulate-allreduce-grads-in-fp32")


def _matters(name: str, value: Any, fields: Mapping[str, Any]) -> bool:
    if name.startswith("fp4") and not fields.get("fp4"):
        return False
    if name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        return bool(fields.get("fp16"))
    if name.startswith(("num_layers_at", "first_last")):
        return bool(fields.get("first_last_layers_bf16"))
    return not name.endswith("dtype") and not name.startswith("autocast")


def model(found: BridgeFlags, sections: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    model = {**sections.get("language_model", {}), **sections.get("model", {})}
    built_by = target_of(model).rpartition(".")[2]
    if built_by and not _GPT.fullmatch(built_by):
        found.other_model.append(f"model._target_ = {built_by}: a class that may build layers of its own.")
    _activation(found, model)
    groups, heads = model.get("num_query_groups"), model.get("num_attention_heads")
    if groups is not None and (groups != heads or found.base is not None):
        found.add("group-query-attention")
        found.add("num-query-groups", groups)
    dataset = sections.get("dataset", {})
    length = dataset.get("seq_length", dataset.get("sequence_length"))
    positions = model.get("max_position_embeddings", None if found.base is not None else model.get("seq_length"))
    if (length := length if length is not None else model.get("seq_length")) is not None:
        found.add("seq-length", length)
    if positions is not None:
        found.add("max-position-embeddings", positions)
    size = model.get("vocab_size")
    if size is not None and not model.get("should_pad_vocab"):
        found.add("padded-vocab-size", size)
    elif size is not None:
        found.add("no-pad-vocab-size")
        found.add("vocab-size", size)
    elif (own := sections.get("tokenizer", {}).get("vocab_size")) is not None:
        found.add("vocab-size", own)
    if (window := model.get("window_size")) is not None:
        found.add("window-size", ",".join(map(str, window)) if isinstance(window, list) else window)
    experts = model.get("num_moe_experts") or (found.base is not None and found.base.num_moe_experts)
    if (freq := model.get("moe_layer_freq")) is not None and experts:
        found.add("moe-layer-freq", str(freq))
    if layout := model.get("pipeline_model_parallel_layout"):
        found.add("pipeline-model-parallel-layout", _layout(layout))
    if merged.get("use_distributed_optimizer"):
        found.add("use-distributed-optimizer")
    elif merged.get("use_distributed_optimizer") is False:
        found.off.add("use-distributed-optimizer")


def _activation(found: BridgeFlags, model: Mapping[str, Any]) -> None:
    """Of a recipe that is changed, what is not given is the named model's."""
    function = model.get("activation_func")
    target = target_of(function) or str(function or "")
    activation, unit, base = target.rpartition(".")[2], model.get("gated_linear_unit"), found.base
    if base is not None and not activation and unit is None:
        if model.get("bias_activation_fusion") is False:
            found.add("no-bias-swiglu-fusion" if base.gated else "no-bias-gelu-fusion")
        return
    if base is not None and not activation:
        activation = _OWN_NAMES.get(base.activation, base.activation)
    gated = (base.gated if unit is None and base is not None else bool(unit)) or activation == "swiglu"
    if base is not None and activation == "gelu" and not gated and not base.activation.startswith("gelu"):
        found.not_understood.append(
            'model.activation_func = gelu: set model.activation = "gelu_exact" (by erf) or "gelu".'
        )
    elif gated and activation in ("silu", "swiglu", ""):
        found.add("swiglu")
    elif activation in ("squared_relu", "squaredrelu") and not gated:
        found.add("squared-relu")
    elif activation == "quick_gelu" and gated:
        found.add("quick-geglu")
    elif activation in ("fast_gelu", "gelu") and gated and (activation == "fast_gelu" or _fused(model)):
        found.fields["model.activation"] = "geglu"
    elif activation == "fast_gelu" or activation.lower() == "xielu":
        found.fields["model.activation"] = "gelu" if activation == "fast_gelu" else "xielu"
    elif gated or activation not in ("gelu", ""):
        found.other_model.append(
            f"model.activation_func = {target or activation}{' (gated)' * gated}: expected silu (gated), quick_gelu "
            "(gated), fast_gelu, squared_relu, xielu or gelu. Set model.activation of the recipe to one of "
            f"{', '.join(typing.get_args(ActivationName))}."
        )
    if model.get("bias_activation_fusion") is False:
        found.add("no-bias-swiglu-fusion" if gated else "no-bias-gelu-fusion")


def _fused(model: Mapping[str, Any]) -> bool:
    """Whether megatron-core's fused kernel computes GELU, by the tanh approximation whatever function is named."""
    return bool(model.get("bias_activation_fusion"))


def _layout(layout: Any) -> str:
    """Stages as lists of their parts, or as Megatron-LM writes them."""
    if isinstance(layout, str):
        return layout
    stages = (stage if isinstance(stage, list) else [stage] for stage in layout)
    return "|".join("".join(_STAGE.get(str(part), str(part)) for part in stage) for stage in stages)


def data(found: BridgeFlags, sections: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    dataset = sections.get("dataset", {})
    kind = target_of(dataset).rpartition(".")[2]
    if kind not in _DATASETS:
        found.other_model.append(f"dataset: {kind}, another training than on next tokens of a text.")
    elif "Mock" in kind or dataset.get("mock"):
        found.add("mock-data")
    paths, blend = dataset.get("data_path"), dataset.get("blend")
    if paths:
        found.add("data-path", *(paths.split() if isinstance(paths, str) else paths))
    elif blend:
        names, weights = [*blend, None][:2] if isinstance(blend, list) else (blend, None)
        pairs = zip(weights, names, strict=False) if weights and isinstance(weights, list) else None
        if not isinstance(names, list) or (weights and (pairs is None or len(weights) != len(names))):
            found.strays.append(f"dataset.blend = {shown(blend)}: expected [[paths], [weights, one for each]].")
        else:
            found.add("data-path", *(names if pairs is None else itertools.chain(*pairs)))
    if "seed" not in merged and "random_seed" in dataset:
        found.add("seed", dataset["random_seed"])


def profiling(found: BridgeFlags, fields: Any) -> None:
    fields = fields if isinstance(fields, dict) else {}
    if fields.get("use_nsys_profiler") or fields.get("use_pytorch_profiler"):
        found.add("profile")
        for name, each in fields.items():
            if name != "use_nsys_profiler" and not name.startswith("_"):
                add_field(found, "profiling", name, each)
    elif fields.get("record_memory_history"):
        found.add("record-memory-history")
