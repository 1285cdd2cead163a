"""Files of other programs: recognised by what only they hold, and refused by name with what to use instead."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from program.untrusted import InputError, json_value, toml_table


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """How one program's files are known."""

    program: str
    keys: tuple[str, ...]
    """Each a word of dotted keys: all of one must be there."""
    instead: str = (
        "Write its model and its training as a recipe: slurm/recipes/ has examples, docs/configuration.md every field."
    )


_CONVERT = "python -m tools.convert import reads such a folder."
_PRIMUS = (
    "Its overrides are flags of Megatron-LM's in snake case, on top of a model and of defaults that stand in "
    "primus/configs: give a command in quotes with all flags, as Megatron-LM prints them when it starts."
)
_OF_PRIMUS = (
    "tokenizer_type", "num_layers", "hidden_size", "train_iters", "micro_batch_size", "max_position_embeddings",
    "moe_layer_freq", "group_query_attention",
)  # fmt: skip
FOREIGN = (
    ForeignFile("Primus", ("modules.pre_trainer", "modules.post_trainer", "work_group modules",
                           *(f"{base} {key}" for base in ("extends", "bases") for key in _OF_PRIMUS)), _PRIMUS),
    ForeignFile("torchtitan", ("model.flavor", "training.steps parallelism", "job.dump_folder",
                               "job.description training")),
    ForeignFile("nanotron", ("general parallelism tokens", "parallelism.tp_mode", "tokens.micro_batch_size")),
    ForeignFile("GPT-NeoX", ("pipe_parallel_size num_layers", "pipe-parallel-size", "pipe_parallel_size",
                             "train_micro_batch_size_per_gpu num_layers", "vocab_file merge_file",
                             "vocab-file merge-file", "text_gen_type", "text-gen-type")),
    ForeignFile("DeepSpeed", ("train_micro_batch_size_per_gpu", "zero_optimization",
                              "train_batch_size gradient_accumulation_steps"),
                "It says how to train, not what: give the script that starts the training."),
    ForeignFile("OLMo-core", ("train_module", "model.d_model trainer", "dataset.mix data_loader")),
    ForeignFile("OLMo", ("model.d_model max_duration", "model.d_model save_folder",
                         "global_train_batch_size model.d_model")),
    ForeignFile("Megatron-LM's list of tests", ("spec.script_setup", "spec.script products"),
                "Give the model_config.yaml of one test."),
    ForeignFile("Megatron-LM's reinforcement learning", ("agent_type",)),
    ForeignFile("NeMo", ("trainer.devices exp_manager", "exp_manager", "trainer.strategy", "model.mcore_gpt")),
    ForeignFile("NeMo Automodel", ("step_scheduler distributed", "step_scheduler model._target_")),
    ForeignFile("Hugging Face transformers", ("model_type architectures", "model_type hidden_size"), _CONVERT),
    ForeignFile("Hugging Face tokenizers", ("added_tokens model.type",), "Name it in data.tokenizer of a recipe."),
    ForeignFile("Accelerate", ("distributed_type compute_environment", "distributed_type num_processes"),
                "It says how to start ranks, not what to train: give the script that starts the training."),
    ForeignFile("LLaMA-Factory", ("finetuning_type", "stage model_name_or_path template")),
    ForeignFile("Axolotl", ("base_model sequence_len", "base_model datasets")),
    ForeignFile("LitGPT", ("out_dir train eval data", "model_name out_dir precision")),
    ForeignFile("LLM Foundry", ("train_loader max_seq_len", "model.name train_loader", "max_duration train_loader")),
    ForeignFile("Levanter", ("trainer.num_train_steps", "trainer.mp model.type")),
    ForeignFile("MaxText", ("base_emb_dim", "base_num_decoder_layers", "ici_fsdp_parallelism")),
    ForeignFile("torchtune", ("model._component_", "optimizer._component_")),
    ForeignFile("Meta Lingua", ("dump_dir model.dim", "dump_dir grad_acc_steps")),
    ForeignFile("verl", ("actor_rollout_ref",)),
    ForeignFile("a notebook", ("cells nbformat",), "Give the command that starts the training."),
    ForeignFile("Kubernetes", ("apiVersion kind",), "Give the command that its container runs, in quotes."),
)  # fmt: skip
_STARTS = (
    (r"\s*(?:#!.*python|(?:from [\w.]+ )?import [\w.]+|def \w+\(|class \w+|@\w+)", "a Python program"),
    (r"\s*FROM \S+", "a Dockerfile"),
    (r"\s*#!.*\b(?:fish|t?csh|perl|ruby|node)\b", "a script of another shell than bash"),
    (r"\s*<\?xml|\s*<!DOCTYPE|\s*<html", "a web page"),
)


def refusal(text: str, path: PurePath | None, yaml: Any) -> str | None:
    """Why a file cannot be read, if it is another program's; None where it may be a script.

    yaml: what it holds, where it is YAML; else None.
    """
    table: Any = yaml
    if table is None:
        table = _structure(text, path)
    if table is not None:
        if _has(table, "model") and (_has(table, "parallel.tensor_model_parallel_size") or _has(table, "model.shape")):
            return "a recipe of Triplane itself: python pretrain_gpt.py FILE trains it."
        for foreign in FOREIGN:
            if any(all(_has(table, key) for key in keys.split()) for keys in foreign.keys):
                return f"a file of {foreign.program}, which is not read. {foreign.instead}"
        kind = "YAML" if yaml is not None else "JSON" if text.lstrip().startswith("{") else "TOML"
        return (
            f"{kind} of no program that is known here. What is read: launch scripts and commands of Megatron-LM's, its "
            "functional tests (MODEL_ARGS), Megatron-Bridge's configuration (run_config.yaml), and FlagScale's."
        )
    code = "\n".join(
        line for line in text.splitlines()[:60] if not line.lstrip().startswith("#") or line.startswith("#!")
    )
    for pattern, what in _STARTS:
        if re.match(pattern, code.lstrip("\"' \n")) or (what == "a Python program" and path and path.suffix == ".py"):
            return f"{what}, which is not read. Give the command that starts the training, in quotes, or its script."
    return None


def _structure(text: str, path: PurePath | None) -> Any:
    """JSON or TOML, where a text is that."""
    suffix = path.suffix if path else ""
    try:
        if suffix in (".json", ".ipynb") or (text.lstrip().startswith("{") and '"' in text):
            return json_value(text, path or "the text")
        if suffix == ".toml" or re.match(r"(?:\s*(?:#[^\n]*)?\n)*\s*\[[\w.]+\]\s*(?:#[^\n]*)?\n", text):
            return toml_table(text, path or "the text")
    except InputError:
        if suffix in (".json", ".toml", ".ipynb"):
            raise
    return None


def _has(table: Any, key: str) -> bool:
    value = table[0] if isinstance(table, list) and table else table
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
