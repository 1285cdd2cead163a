"""Every flag of Megatron-LM: translated, irrelevant or unsupported, and never silent."""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from models.kernels import FUSIONS
from program.errors import UserError
from tests.tools.megatron_scripts import DEEPSEEK_V3, EXPERTS, GPT3_175B, LLAMA3_8B, SMALLEST, drafted
from tools.from_megatron import flags_translated as table
from tools.from_megatron.flags import known
from training.config.recipe import names

ROOT = Path(__file__).resolve().parents[2]


def listed() -> Iterator[str]:
    lines = (ROOT / "tests/tools/megatron_flags.txt").read_text().splitlines()
    return (line for line in lines if not line.startswith("#"))


def test_every_flag_of_megatron_has_one_fate_and_no_other_flag_has() -> None:
    assert sorted(name for name, flag in known().items() if not flag.fork) == sorted(listed())
    assert all(flag.reason for flag in known().values() if flag.fate != "translated")


def test_every_field_that_tables_name_exists() -> None:
    tables = (table.FIELDS, table.EXPERT_FIELDS, table.LATENT_FIELDS, table.PREDICTION_FIELDS, table.SWITCHES)
    fields = {field for entries in (*tables, table.EXPERT_SWITCHES) for field, _ in entries.values()}
    assert fields <= set(names())
    assert {*table.KERNELS_OFF.values(), *table.KERNELS_ON.values()} == {*FUSIONS}


def test_what_goes_to_megatron_core_by_name_exists_there_and_is_not_ours() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.parallel_state import initialize_model_parallel
    from megatron.core.transformer import TransformerConfig

    from models.owned_fields import OWNED
    from parallel.config import OF_GROUPS, OWNED_DDP_FIELDS
    from training.config.optimizer_config import OWNED_OPTIMIZER_FIELDS

    for hatch, (target, owned) in {
        "model.megatron": (TransformerConfig, OWNED),
        "parallel.megatron": (DistributedDataParallelConfig, OWNED_DDP_FIELDS),
        "optimizer.megatron": (OptimizerConfig, OWNED_OPTIMIZER_FIELDS),
    }.items():
        fields = {entry.partition("=")[0] for entry in table.MEGATRON_FIELDS[hatch].values()} - {*OF_GROUPS}
        assert fields <= {field.name for field in dataclasses.fields(target)} - owned
    assert {*OF_GROUPS} <= {*inspect.signature(initialize_model_parallel).parameters}


def test_rules_look_at_every_flag_that_is_said_to_be_translated() -> None:
    drafts = [drafted(flags) for flags in (SMALLEST, f"{SMALLEST} {EXPERTS}", GPT3_175B, DEEPSEEK_V3, LLAMA3_8B)]
    drafts.append(drafted(f"{SMALLEST} --lr-warmup-fraction 0.1 --wandb-project p --optimizer muon --qk-clip"))
    drafts.append(drafted(f"{SMALLEST} --fim-data --fim-eod-token x"))
    looked = set().union(*(draft.arguments.asked for draft in drafts))
    assert looked >= {name for name, flag in known().items() if flag.fate == "translated" and not flag.fork}


def test_a_flag_that_is_not_translated_is_named() -> None:
    silent, others = [], [name for name, flag in known().items() if flag.fate != "translated"]
    values = {"0": 0, "1": 1, "3": 3, "+": 2, "*": 2}
    for some in itertools.batched(others, 12):
        draft = drafted(" ".join([SMALLEST, *(f"--{name}{' 7' * values[known()[name].arity]}" for name in some)]))
        said = set(re.findall(r"--([\w-]+)", " ".join(draft.irrelevant + draft.unsupported + draft.other_model)))
        silent += [*(set(some) - said), *draft.not_understood]
    assert silent == []


# Beside which flags a flag shows, and with which value; others show alone with the value 7.
SHOWS: dict[str, tuple[str, str]] = {
    "fine-grained-activation-offloading": ("--offload-modules core_attn", ""),
    "bf16": ("", ""),
    "hybrid-layer-pattern": ("", "M-M*"),
    "hybrid-override-pattern": ("", "M-M*"),
    **dict.fromkeys(
        ("mamba-state-dim", "mamba-head-dim", "mamba-num-groups", "mamba-num-heads"),
        ("--hybrid-layer-pattern M-", "16"),
    ),
    "experimental-attention-variant": ("--linear-attention-freq 4", "gated_delta_net"),
    "linear-attention-freq": ("--experimental-attention-variant gated_delta_net", "4"),
    **dict.fromkeys(
        ("linear-key-head-dim", "linear-value-head-dim", "linear-num-key-heads", "linear-num-value-heads"),
        ("--experimental-attention-variant gated_delta_net --linear-attention-freq 4", "7"),
    ),
    "accumulate-allreduce-grads-in-fp32": ("--fp16", ""),
    "grad-reduce-in-bf16": ("--bf16", ""),
    "fp8-format": ("--bf16", "hybrid"),
    "fp8-recipe": ("--bf16 --fp8-format e4m3", "mxfp8"),
    "fp4-format": ("--bf16", "e2m1"),
    "fp4-recipe": ("--bf16 --fp4-format e2m1", "nvfp4"),
    "first-last-layers-bf16": ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", ""),
    "fp8-param-gather": ("--bf16 --fp8-format e4m3 --use-distributed-optimizer", ""),
    "lr-decay-style": ("", "constant"),
    "lr-wsd-decay-style": ("", "linear"),
    "weight-decay-incr-style": ("", "cosine"),
    "normalization": ("", "RMSNorm"),
    "position-embedding-type": ("", "none"),
    "rope-type": ("--multi-latent-attention --rotary-scaling-factor 40", "rope"),
    "rope-scaling-factor": ("--use-rope-scaling", "7"),
    "yarn-beta-fast": ("--position-embedding-type yarn", "7"),
    "yarn-beta-slow": ("--position-embedding-type yarn", "7"),
    "yarn-original-max-position-embeddings": ("--position-embedding-type yarn", "7"),
    "rotary-scaling-factor": ("--multi-latent-attention", "7"),
    "no-bias-gelu-fusion": ("--swiglu", ""),
    "group-query-attention": ("--num-query-groups 2", ""),
    "num-query-groups": ("--group-query-attention", "2"),
    "window-size": ("", "7,0"),
    "moe-layer-freq": ("--num-experts 4", "2"),
    "moe-router-score-function": ("--num-experts 4", "sigmoid"),
    "moe-token-drop-policy": ("--num-experts 4", "position"),
    "moe-token-dispatcher-type": ("--num-experts 4", "alltoall"),
    "moe-router-load-balancing-type": ("--num-experts 4", "none"),
    "mtp-loss-scaling-factor": ("--mtp-num-layers 1", "7"),
    "cp-comm-type": ("", "a2a"),
    "high-priority-stream-groups": ("", "dp_cp"),
    "data-parallel-sharding-strategy": ("--use-megatron-fsdp", "optim_grads"),
    "torch-fsdp2-no-reshard-after-forward": ("--use-torch-fsdp2", ""),
    "num-distributed-optimizer-instances": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "2",
    ),
    **dict.fromkeys(
        (
            "profile-step-start",
            "profile-step-end",
            "profile-ranks",
            "use-pytorch-profiler",
            "record-shapes",
            "pytorch-profiler-collect-shapes",
            "pytorch-profiler-collect-callstack",
            "nvtx-ranges",
        ),
        ("--profile", "7"),
    ),
    "sequence-parallel": ("--tensor-model-parallel-size 2", ""),
    "num-layers-per-virtual-pipeline-stage": ("--pipeline-model-parallel-size 2", "1"),
    "pipeline-model-parallel-layout": ("--pipeline-model-parallel-size 2", "Et|t|t|tL"),
    "recompute-granularity": ("--recompute-method block --recompute-num-layers 1", "full"),
    "recompute-method": ("--recompute-granularity full --recompute-num-layers 1", "block"),
    "recompute-num-layers": ("--recompute-granularity full --recompute-method block", "7"),
    "recompute-modules": ("--recompute-activations", "mlp"),
    "offload-modules": ("--fine-grained-activation-offloading", "core_attn"),
    "train-samples": ("--train-iters", "160"),
    "lr-warmup-samples": ("--train-samples 800", "16"),
    "lr-decay-samples": ("--train-samples 800", "160"),
    "lr-wsd-decay-samples": ("--train-samples 800", "16"),
    "reset-attention-mask": ("--reset-position-ids", ""),
    "reset-position-ids": ("--reset-attention-mask", ""),
    "global-batch-size": ("--global-batch-size", "16"),
    "step-batch-size-schedule": ("--global-batch-size", "0:2"),
    "tokenizer-type": ("", "NullTokenizer"),
    "tokenizer-model": ("--tokenizer-type SentencePieceTokenizer", "a.model"),
    "vocab-file": ("", "gpt2-vocab.json"),
    "merge-file": ("--vocab-file gpt2-vocab.json", "gpt2-merges.txt"),
    "no-pad-vocab-size": ("--vocab-size 7 --vocab-file gpt2-vocab.json", ""),
    "disable-pad-vocab-size": ("--vocab-size 7 --vocab-file gpt2-vocab.json", ""),
    "no-load-rng": ("--load there", ""),
    "no-load-optim": ("--load there", ""),
    "finetune": ("--load there", ""),
    "wandb-exp-name": ("--wandb-project p", "name"),
    "manual-gc-interval": ("--manual-gc", "7"),
    "attention-backend": ("", "flash"),
    "cuda-graph-impl": ("", "local"),
    "encoder-num-layers": ("--num-layers", "7"),
    "encoder-seq-length": ("--seq-length", "7"),
    "moe-aux-loss-coeff": ("--num-experts 4", "7"),
    "optimizer": ("", "muon"),
    **dict.fromkeys(table.MUON_FLAGS, ("--optimizer muon", "7")),
    **dict.fromkeys(("muon-no-split-qkv", "muon-nesterov", "muon-use-nesterov"), ("--optimizer muon", "")),
    **dict.fromkeys(table.MUP_FIELDS, ("--use-mup", "7")),
    **dict.fromkeys(table.QK_CLIP_FIELDS, ("--qk-clip", "7")),
    **dict.fromkeys(table.FIM_FIELDS, ("--fim-data", "7")),
    **dict.fromkeys(table.LATENT_FIELDS, ("--multi-latent-attention", "7")),
    **dict.fromkeys(table.EXPERT_SWITCHES, ("--num-experts 4", "")),
}


@functools.cache
def before(flags: str) -> Mapping[str, object]:
    """The recipe's values; none where something is missing that is there with one flag more."""
    try:
        return drafted(flags).values
    except UserError:
        return {}


def test_a_translated_flag_changes_the_recipe() -> None:
    """A context that is a flag of SMALLEST stands for that flag being left out."""
    silent = []
    for name in (name for name in listed() if known()[name].fate == "translated"):
        default = ("--num-experts 4", "7") if name in table.EXPERT_FIELDS else ("", "7")
        context, value = SHOWS.get(name, default)
        flags = SMALLEST.replace("--train-iters 100", "") if "--train-samples" in context else SMALLEST
        base = re.sub(rf"{context} \S+", "", flags) if context and context in flags else f"{flags} {context}"
        values = {"0": 0, "3": 3}.get(known()[name].arity, 1)
        after = drafted(f"{base} --{name} " + " ".join([value] * values)).values
        silent += [name] if before(base) == after else []
    assert sorted(silent) == sorted((*EXPLAINED_ONLY, *table.KERNELS_ON))


EXPLAINED_ONLY = [
    "fim-eod-token",
    "fp4-recipe",
    "linear-conv-kernel-dim",
    "mock-data",
    "muon-scalar-optimizer",
    "muon-tp-mode",
    "muon-use-syrk",
    "no-bias-gelu-fusion",
    "openai-gelu",
]
"""What the recipe has without them, too; that they were given is said in words (tests of their own)."""


def test_a_hybrid_is_what_its_pattern_says() -> None:
    """In a script its stars are no files; | cuts stages."""
    flags = re.sub(r"--num-layers \S+", "", SMALLEST).replace("pretrain_gpt.py", "pretrain_mamba.py")
    given = " --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model"
    values = drafted(f"{flags}{given} --hybrid-override-pattern M-M*-'|'M- --mamba-state-dim 16").values
    assert (values["model.hybrid_layer_pattern"], values["model.num_layers"]) == ("M-M*-M-", 7)
    assert values["model.mamba_state_dim"] == 16
