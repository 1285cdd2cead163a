"""Flags of forks: what changes the model, the data or the schedule is translated or refused, never dropped."""

from pathlib import Path

import pytest

from models.frequencies import parse_freq
from tests.tools.megatron_scripts import EXPERTS, SMALLEST, drafted
from tools.from_megatron.__main__ import main
from tools.from_megatron.flags import known


@pytest.mark.parametrize(
    "flags",
    [
        "--noop-layers 3",  # MindSpeed-LLM
        "--rope-scaling-type yarn --beta-fast 32",
        "--enable-mhc",
        "--norm-topk-prob",
        "--moe-loss-coeff 0.01",  # Megatron-DeepSpeed
        "--train-tokens 1000000 --lr-decay-tokens 900000",
        "--deepspeed_config ds.json",
        "--data-file-list files.txt",
        "--embed-layernorm",  # bigscience
        "--extra-vocab-size 421",  # Pai-Megatron-Patch
        "--attention-head-type multiquery",
        "--whatever-it-is 7",
        "--dataloader-type external",  # Megatron-LM's own, which change what is trained
        "--train-data-path a",
        "--embedding-init-method-std 0.1",
        "--lr-decay-style zigzag",
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 --num-experts 4",
    ],
)
def test_what_may_change_the_training_is_no_recipe(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{SMALLEST} {flags}"]) == 2
    refused = capsys.readouterr()
    assert flags.split()[0] in refused.err and "--allow_partial > recipe.toml" in refused.err and not refused.out
    assert main([f"{SMALLEST} {flags}", "--allow_partial"]) == 1
    assert flags.split()[0] in capsys.readouterr().out.partition("[")[0]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--use-fused-rmsnorm --use-fused-swiglu --wandb-notes x --log-loss-to-tensorboard", 0),
        ("--context-parallel-algo megatron_cp_algo --attention-mask-type causal --DDP-impl local", 0),
        ("--reuse-fp32-param --swap-attention", 1),
        ("--deepspeed --zero-stage 1 --zero-stage=1", 1),
        ("--checkpoint-activations --moe-paged-stash", 1),
        ("--save my run", 1),
    ],
)
def test_what_changes_nothing_that_is_trained_keeps_the_recipe(
    flags: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{SMALLEST} --save there {flags}"]) == code
    shown = capsys.readouterr()
    assert flags.split()[0] in shown.out.partition("[parallel]")[0] and "vocab_size = 1000" in shown.out


@pytest.mark.parametrize(
    ("fork", "own"),
    [
        ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2"),
        ("--rotary-position-embeddings-theta 500", "--rotary-base 500"),
        ("--bf16 --fp8-hybrid", "--bf16 --fp8-format hybrid"),
        ("--pad-vocab-size-to 1024", "--padded-vocab-size 1024"),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path a/b",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model a/b",
        ),
        (
            f"{EXPERTS} --n-shared-experts 2 --moe-intermediate-size 96",
            f"{EXPERTS} --moe-shared-expert-intermediate-size 192 --moe-ffn-hidden-size 96",
        ),
        (f"{EXPERTS} --first-k-dense-replace 1", f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3)"),
        (
            "--multi-head-latent-attention --n-group 4 --topk-group 2 --routed-scaling-factor 2.5",
            "--multi-latent-attention --moe-router-num-groups 4 --moe-router-group-topk 2 "
            "--moe-router-topk-scaling-factor 2.5",
        ),
    ],
)
def test_what_a_fork_spells_otherwise_is_the_same_recipe(fork: str, own: str) -> None:
    one, other = (drafted(f"{SMALLEST} {flags}") for flags in (fork, own))
    assert one.values == other.values and not one.not_understood
    names = [word[2:] for word in fork.split() if word.startswith("--") and known()[word[2:]].fork]
    assert all(any(f"--{name}" in line and "read as" in line for line in one.notes) for name in names)


def test_dense_blocks_come_first_and_then_every_nth_has_experts() -> None:
    """As mindspeed_llm/core/transformer/transformer_block.py has it: number >= k and number % frequency == 0."""
    draft = drafted(f"{SMALLEST} --num-layers 7 {EXPERTS} --first-k-dense-replace 3 --moe-layer-freq 2")
    expected = [int(number >= 3 and number % 2 == 0) for number in range(7)]
    assert parse_freq(draft.values["model.moe_layer_freq"]) == expected


@pytest.mark.parametrize(
    "flags",
    [
        "--first-k-dense-replace 1 --moe-layer-freq [0]*2+[1]*2",
        "--first-k-dense-replace x",
        "--num-key-value-heads 2 --num-query-groups 4",
        "--n-shared-experts 1",
    ],
)
def test_a_spelling_whose_meaning_is_not_certain_is_not_understood(flags: str) -> None:
    draft = drafted(f"{SMALLEST} {EXPERTS} {flags}")
    assert len(draft.not_understood) == 1 and flags.split()[0] in draft.not_understood[0]


def test_what_a_spelling_depends_on_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"x.py {SMALLEST} {EXPERTS} --first-k-dense-replace $K --num-key-value-heads $(heads) $(more)\n")
    assert main([str(script)]) == 2
    said = capsys.readouterr().err
    assert "$K (line 1): --moe-layer-freq" in said and "$(heads) (line 1): --num-query-groups" in said
    assert "$(more) (line 1): further flags" in said
    assert "--set K=VALUE" in said and "--set '$(heads)=VALUE'" in said and "--set '$(more)=VALUE'" in said
    given = ["--set", "K=2", "--set", "$(heads)=2", "--set", "$(more)=--seed 5 --bf16"]
    assert main([str(script), *given]) == 0
    recipe = capsys.readouterr().out
    assert "num_query_groups = 2" in recipe and 'moe_layer_freq = "([0]*2+[1]*2)"' in recipe and "seed = 5" in recipe


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0: everything" in said and "Exit code 1: a recipe" in said and "Exit code 2: no recipe" in said
    assert "flags of forks are" in said and "--allow_partial writes" in said
