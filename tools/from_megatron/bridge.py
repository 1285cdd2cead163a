"""Megatron-Bridge's configuration in YAML (run_config.yaml, overrides of a recipe), and Megatron-LM's --yaml-cfg: their
fields as flags of Megatron-LM's."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.untrusted import read_text
from tools.from_megatron.flags import Flag, known
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown
from tools.from_megatron.yaml_text import YamlText, YamlValue, plain

_SECTIONS = tuple(
    "model train optimizer scheduler dataset checkpoint ddp dist logger rng tokenizer validation mixed_precision"
    " comm_overlap language_model model_parallel".split()
)
_PASSED_OVER = ("rerun_state_machine", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart",
                "tensor_inspect", "env_vars", "optimizer_config_override_provider")  # fmt: skip
"""How a job is watched and recovers, which changes nothing that is trained."""
_RENAMED = {
    "num_moe_experts": "num-experts", "layernorm_epsilon": "norm-epsilon", "fp8": "fp8-format", "fp4": "fp4-format",
    "seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor", "rope_scaling": "use-rope-scaling",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "path_to_cache": "data-cache-path", "bucket_size": "ddp-bucket-size", "nccl_ub": "use-nccl-ub",
    "average_in_collective": "ddp-average-in-collective", "use_te_rng_tracker": "te-rng-tracker",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "fully_parallel_save": "ckpt-fully-parallel-save", "fully_parallel_load": "ckpt-fully-parallel-load",
}  # fmt: skip
_UNLESS = {
    "add_bias_linear": "disable-bias-linear", "masked_softmax_fusion": "no-masked-softmax-fusion",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "bias_dropout_fusion": "no-bias-dropout-fusion", "apply_rope_fusion": "no-rope-fusion",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion", "persist_layer_norm": "no-persist-layer-norm",
    "load_optim": "no-load-optim", "load_rng": "no-load-rng", "save_optim": "no-save-optim", "save_rng": "no-save-rng",
    "fp8_wgrad": "no-fp8-wgrad", "mmap_bin_files": "no-mmap-bin-files",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
}  # fmt: skip
"""Fields whose flag says that they are false."""
_BY_RULE = frozenset(
    "activation_func gated_linear_unit num_query_groups seq_length sequence_length vocab_size should_pad_vocab blend"
    " data_path bf16 fp16 fp32 grad_reduce_in_fp32 use_distributed_optimizer bias_activation_fusion window_size"
    " pipeline_model_parallel_layout moe_layer_freq tp_comm_overlap_cfg random_seed max_position_embeddings".split()
)
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
_BRIDGE_MARKS = {"ddp", "dist", "logger", "rng", "scheduler", "validation", "mixed_precision", "comm_overlap", "peft"}
_STAGE = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_INTERPOLATION = re.compile(r"\$\{(?:oc\.env:)?([A-Za-z_]\w*)(?:,[^}]*)?\}")


@dataclass(slots=True)
class BridgeFlags:
    """A configuration as flags of Megatron-LM's."""

    words: list[ScriptWord] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Fields that no flag means, with their values."""
    other_model: list[str] = field(default_factory=list)
    has_model: bool = False
    """Whether it says the model; otherwise it overrides a recipe, which is a Python function."""
    given: Mapping[str, str] = field(default_factory=dict)
    """What --set says, for ``${oc.env:NAME}``."""

    def add(self, name: str, *values: Any) -> None:
        """A flag; the last of several wins."""
        self.words += [f"--{name}", *(self.word(value) for value in values)]

    def word(self, value: Any) -> ScriptWord:
        """A value as a word; a variable that is not given is not known."""
        text = _INTERPOLATION.sub(lambda found: self.given.get(found[1], found[0]), str(value))
        unknowns = tuple(Unknown(found[0], 0, (found[1],), "") for found in _INTERPOLATION.finditer(text))
        return OpenText(text, unknowns) if unknowns else text


def is_bridge(value: YamlValue) -> bool:
    """Whether a YAML file is a configuration of Megatron-Bridge's, or a --yaml-cfg of Megatron-LM's."""
    if not isinstance(value, dict):
        return False
    target = value.get("_target_")
    if isinstance(target, YamlText) and "megatron.bridge" in target.text:
        return True
    names = {name for name, each in value.items() if isinstance(each, dict)}
    yaml_cfg = {"language_model", "model_parallel"} <= names
    return yaml_cfg or (
        "train" in names and bool(names & _BRIDGE_MARKS) and names <= {*_SECTIONS, *_PASSED_OVER, "peft"}
    )


def flags_of(value: YamlValue, given: Mapping[str, str]) -> BridgeFlags:
    """Its fields as flags. given: what --set says."""
    assert isinstance(value, dict)
    config = plain(value)
    found = BridgeFlags(given=given)
    sections = {name: each for name, each in config.items() if name in _SECTIONS and isinstance(each, dict)}
    merged: dict[str, Any] = {}
    for section in sections.values():
        merged |= {name: each for name, each in section.items() if each is not None}
    _precision(found, config, merged)
    for section, fields in sections.items():
        for name, each in fields.items():
            if not name.startswith("_") and name not in _BY_RULE and section != "mixed_precision":
                _field(found, section, name, each)
    if "language_model" in sections:  # --yaml-cfg has the rest of its flags beside its two sections
        for name, each in config.items():
            if name not in sections and not isinstance(each, dict):
                _field(found, "", name, each)
    _model(found, sections, merged)
    _data(found, sections, merged)
    if isinstance(config.get("peft"), dict):
        found.other_model.append("peft: low-rank adapters (LoRA) are trained, not the model.")
    found.has_model = "num_layers" in merged and "hidden_size" in merged
    return found


def _field(found: BridgeFlags, section: str, name: str, value: Any) -> None:
    if value is None or isinstance(value, dict):
        return
    if name in _UNLESS:
        if value is False:
            found.add(_UNLESS[name])
        return
    flag = known().get(_RENAMED.get(name, name.replace("_", "-")))
    if flag is not None:
        _flag(found, flag, value)
    elif value is False and (negative := _negative(name)) is not None:
        found.add(negative)
    elif (
        value not in (False, "", []) and _defaults().get(name, ...) != value and section in ("model", "language_model")
    ):
        found.strays.append(f"{section}.{name} = {value}: no flag of Megatron-LM means it.")


def _flag(found: BridgeFlags, flag: Flag, value: Any) -> None:
    if flag.arity == "0":
        if value is True:
            found.add(flag.name)
    elif isinstance(value, list):
        if value and not any(isinstance(each, list | dict) for each in value):
            found.add(flag.name, *(value if flag.arity in "+*3" else [",".join(map(str, value))]))
    elif not isinstance(value, bool):
        found.add(flag.name, value)


def _negative(name: str) -> str | None:
    return next(
        (flag for before in ("no", "disable") if (flag := f"{before}-{name.replace('_', '-')}") in known()), None
    )


def _precision(found: BridgeFlags, config: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
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
        found.strays.append(f"mixed_precision = {given}: no recipe of numbers that is known here.")
    fp8 = fields.get("fp8")
    for key, each in fields.items():
        if (
            key.startswith("_")
            or key in _BY_RULE
            or (key.startswith("fp8") and not fp8)
            or not _matters(key, each, fields)
        ):
            continue
        _field(found, "mixed_precision", key, each)
    exact = fields.get("grad_reduce_in_fp32", merged.get("grad_reduce_in_fp32"))
    if bf16 and exact is False:
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


def _model(found: BridgeFlags, sections: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    model = {**sections.get("language_model", {}), **sections.get("model", {})}
    function = model.get("activation_func")
    target = function.get("_target_", "") if isinstance(function, dict) else str(function or "")
    activation = target.rpartition(".")[2]
    gated = bool(model.get("gated_linear_unit")) or activation == "swiglu"
    if gated and activation in ("silu", "swiglu", ""):
        found.add("swiglu")
    elif activation in ("squared_relu", "squaredrelu") and not gated:
        found.add("squared-relu")
    elif gated or activation not in ("gelu", ""):
        found.other_model.append(
            f"model.activation_func = {target}{' (gated)' * gated}: Triplane has swiglu, squared_relu and gelu."
        )
    if model.get("bias_activation_fusion") is False:
        found.add("no-bias-swiglu-fusion" if gated else "no-bias-gelu-fusion")
    groups, heads = model.get("num_query_groups"), model.get("num_attention_heads")
    if groups is not None and groups != heads:
        found.add("group-query-attention")
        found.add("num-query-groups", groups)
    dataset = sections.get("dataset", {})
    length = dataset.get("seq_length", dataset.get("sequence_length"))
    positions = model.get("max_position_embeddings", model.get("seq_length"))
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
    if (freq := model.get("moe_layer_freq")) is not None and model.get("num_moe_experts"):
        found.add("moe-layer-freq", str(freq))
    if layout := model.get("pipeline_model_parallel_layout"):
        found.add("pipeline-model-parallel-layout", _layout(layout))
    if merged.get("use_distributed_optimizer"):
        found.add("use-distributed-optimizer")


def _layout(layout: Any) -> str:
    """Stages as lists of their parts, or as Megatron-LM writes them."""
    if isinstance(layout, str):
        return layout
    return "|".join(
        "".join(_STAGE.get(str(part), "?") for part in stage) for stage in layout if isinstance(stage, list)
    )


def _data(found: BridgeFlags, sections: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    dataset = sections.get("dataset", {})
    target = str(dataset.get("_target_", ""))
    if "Mock" in target or dataset.get("mock"):
        found.add("mock-data")
    elif re.search(r"SFT|Finetuning|Energon|HF", target.rpartition(".")[2]):
        found.other_model.append(
            f"dataset: {target.rpartition('.')[2]}, another training than on next tokens of a text."
        )
    paths, blend = dataset.get("data_path"), dataset.get("blend")
    if paths:
        found.add("data-path", *(paths.split() if isinstance(paths, str) else paths))
    elif isinstance(blend, list) and blend and isinstance(blend[0], list):
        weights = blend[1] if len(blend) > 1 and isinstance(blend[1], list) else None
        pairs = (
            blend[0] if weights is None else [each for pair in zip(weights, blend[0], strict=False) for each in pair]
        )
        found.add("data-path", *pairs)
    if "seed" not in merged and "random_seed" in dataset:
        found.add("seed", dataset["random_seed"])


@functools.cache
def _defaults() -> dict[str, Any]:
    """Defaults of megatron-core's TransformerConfig, read from its source: it is not imported."""
    found: dict[str, Any] = {}
    for path in _sources():
        for node in ast.walk(ast.parse(read_text(path))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                try:
                    found[node.target.id] = ast.literal_eval(node.value)
                except ValueError:
                    continue
    return found


def _sources() -> Iterator[Path]:
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        core = Path(folder) / "core"
        names = ("model_parallel_config.py", "transformer/transformer_config.py")
        yield from (core / name for name in names if (core / name).exists())
