"""Megatron-Bridge's configuration in YAML (run_config.yaml, overrides of a recipe), and Megatron-LM's --yaml-cfg: their
fields as flags of Megatron-LM's."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from models.shapes import GPTShape
from program.errors import UserError
from tools.from_megatron import bridge_rules
from tools.from_megatron.bridge_fields import target_of
from tools.from_megatron.bridge_flags import BridgeFlags, add_field
from tools.from_megatron.yaml_text import YamlText, YamlValue, plain

_SECTIONS = tuple(
    "model train optimizer scheduler dataset checkpoint ddp dist logger rng tokenizer validation mixed_precision"
    " comm_overlap language_model model_parallel".split()
)
_PASSED_OVER = ("rerun_state_machine", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart",
                "tensor_inspect", "env_vars", "optimizer_config_override_provider", "peft")  # fmt: skip
"""How a job is watched and recovers, which changes nothing that is trained; and what has a rule of its own."""
_BRIDGE_MARKS = {"ddp", "dist", "logger", "rng", "scheduler", "validation", "mixed_precision", "comm_overlap", "peft"}
_PLACEHOLDER = re.compile(r"<[^<>\n]+>|\?\?\?")


def is_bridge(value: YamlValue, shape: str = "") -> bool:
    """Whether a YAML file is a configuration of Megatron-Bridge's, or a --yaml-cfg of Megatron-LM's.

    shape: the named shape that it is said to change; then it need not hold what only they have.
    """
    if not isinstance(value, dict):
        return False
    target = value.get("_target_")
    if isinstance(target, YamlText) and "megatron.bridge" in target.text:
        return True
    names = {name for name, each in value.items() if isinstance(each, dict)}
    if shape and value and value.keys() <= {*_SECTIONS, *_PASSED_OVER}:
        return True
    yaml_cfg = {"language_model", "model_parallel"} <= names
    return yaml_cfg or (
        "train" in names and bool(names & _BRIDGE_MARKS) and names <= {*_SECTIONS, *_PASSED_OVER, "peft"}
    )


def flags_of(value: YamlValue, given: Mapping[str, str], base: GPTShape | None = None) -> BridgeFlags:
    """Its fields as flags. given: what --set says. base: the model that it changes, where it does not say its own.

    Raises UserError for values that are to be filled in.
    """
    assert isinstance(value, dict)
    if unfilled := list(_unfilled(value, "")):
        raise UserError("\n  - ".join(["values that are to be filled in; write them in their places:", *unfilled]))
    config = plain(value)
    found = BridgeFlags(config=config, given=given)
    sections = {name: each for name, each in config.items() if name in _SECTIONS and isinstance(each, dict)}
    if isinstance(inner := sections.get("model", {}).get("transformer"), dict):
        sections["model"] = inner | sections["model"]
    merged: dict[str, Any] = {}
    for section in sections.values():
        merged |= {name: each for name, each in section.items() if each is not None}
    found.has_model = "num_layers" in merged and "hidden_size" in merged
    found.base = None if found.has_model else base
    bridge_rules.precision(found, config, merged)
    for section, fields in sections.items():
        for name, each in fields.items():
            if not name.startswith("_") and name not in bridge_rules.BY_RULE and section != "mixed_precision":
                add_field(found, section, name, each)
    _beside_sections(found, config, sections)
    bridge_rules.model(found, sections, merged)
    bridge_rules.data(found, sections, merged)
    bridge_rules.profiling(found, config.get("profiling"))
    return found


def _unfilled(value: YamlValue, name: str) -> Iterator[str]:
    """Values such as <path to the data>, and OmegaConf's ???."""
    if isinstance(value, YamlText):
        if _PLACEHOLDER.fullmatch(value.text.strip()):
            yield f"line {value.line}: {name}: {value.text.strip()}"
        return
    for key, each in value.items() if isinstance(value, dict) else ((str(at), one) for at, one in enumerate(value)):
        yield from _unfilled(each, f"{name}.{key}".lstrip("."))


def _beside_sections(found: BridgeFlags, config: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """What stands beside the sections: of a --yaml-cfg, the rest of its flags."""
    for name, each in config.items():
        if name in (*sections, *_PASSED_OVER, "mixed_precision") or name.startswith("_"):
            continue
        add_field(found, "", name, each)
    provider = target_of(config.get("optimizer_config_override_provider")).rpartition(".")[2]
    if provider not in ("", "OptimizerConfigOverrideProvider"):
        found.not_understood.append(f"optimizer_config_override_provider: {provider} may train some weights otherwise.")
    if isinstance(config.get("peft"), dict):
        found.other_model.append("peft: low-rank adapters (LoRA) are trained, not the model.")


def of_shape(shape: GPTShape, flags: BridgeFlags) -> dict[str, list[str]]:
    """Flags of the named shape that the rules need beside those given: sizes, and what others mean something with."""
    given = {str(word) for word in flags.words}
    length = "--train-samples" if any(flag.endswith("-samples") for flag in given) else "--train-iters"
    found: dict[str, list[str]] = {
        "--num-layers": [str(shape.num_layers)], "--hidden-size": [str(shape.hidden_size)],
        "--num-attention-heads": [str(shape.num_attention_heads)],
        "--seq-length": [str(shape.max_position_embeddings)],
        "--max-position-embeddings": [str(shape.max_position_embeddings)],
    }  # fmt: skip
    if not given & {"--train-iters", "--train-samples"}:
        found[length] = [str(10**9)]
    if not given & {"--bf16", "--fp16"}:
        found["--bf16"] = []
    activations = {"--swiglu", "--squared-relu", "--quick-geglu"}
    switches = {
        "--disable-bias-linear": not shape.add_bias_linear,
        "--swiglu": shape.activation == "swiglu" and not given & activations,
        "--multi-latent-attention": shape.multi_latent_attention,
        "--use-rope-scaling": shape.rope_scaling == "llama3" and not shape.multi_latent_attention,
    }  # fmt: skip
    values = {
        "--num-experts": shape.num_moe_experts, "--mtp-num-layers": shape.mtp_num_layers,
        "--hybrid-layer-pattern": shape.hybrid_layer_pattern,
    }  # fmt: skip
    found |= {flag: [] for flag, on in switches.items() if on}
    found |= {flag: [str(value)] for flag, value in values.items() if value}
    if shape.num_moe_experts and shape.moe_router_load_balancing_type != "none":
        found["--moe-router-load-balancing-type"] = [shape.moe_router_load_balancing_type]
    if shape.linear_attention_freq != "0" and not shape.hybrid_layer_pattern:
        found["--experimental-attention-variant"] = ["gated_delta_net"]
        found["--linear-attention-freq"] = [shape.linear_attention_freq]
    return {flag: words for flag, words in found.items() if flag not in given}
