"""Launch scripts as people write them: which command starts Megatron-LM, with which flags, on how many ranks."""

import io
import resource
from pathlib import Path

import pytest

from campaign import some
from program.errors import UserError
from tools.from_megatron.__main__ import main
from tools.from_megatron.convert import convert, find, read_back
from tools.from_megatron.ranks import ranks
from tools.from_megatron.shell import run
from tools.from_megatron.unknown import ScriptWord

RUN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
RUN += " --global-batch-size 8 --train-iters 100 --lr 1e-3 --swiglu --tokenizer-type NullTokenizer --vocab-size 99"

CLUSTER = r"""#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1

# What every node needs
export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG=WARN
set -euo pipefail

GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-29500}   # any free one
WORLD=$((GPUS_PER_NODE * NNODES))
MICRO=2
LAYERS="24"; HIDDEN=1024
USE_MOE=${USE_MOE:-no}

mkdir -p logs 2>/dev/null || echo "no logs folder"
if [ $# -lt 1 ]; then
  echo "usage: $0 CHECKPOINTS"
  exit 1
fi
CHECKPOINTS=$1

DISTRIBUTED=(
    --nproc-per-node $GPUS_PER_NODE
    --nnodes $NNODES   # all of them
    --rdzv-endpoint "${MASTER_ADDR}:${MASTER_PORT}"
)

MODEL=(
    --num-layers ${LAYERS}   # deep
    # --hidden-size 2048
    --hidden-size "$HIDDEN"
    --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --vocab-size 1000
    --no-such-thing "two words"
)
TRAIN="--micro-batch-size $MICRO \
       --global-batch-size $((MICRO * WORLD * 4)) \
       --lr 3e-4 --train-iters 5000 --bf16"

if [[ "$USE_MOE" == "yes" && -n "$LAYERS" ]]; then
    MODEL+=(--num-experts 8)
elif [[ $LAYERS -gt 12 ]]; then
    MODEL+=(--swiglu)
    if [ "$HIDDEN" = 512 ]; then MODEL+=(--seed 1); else MODEL+=(--seed 99); fi
else
    MODEL+=(--squared-relu)
fi
[ "$MICRO" -eq 2 ] && TRAIN+=" --eval-interval 7"
[ "$MICRO" -eq 3 ] && TRAIN+=" --eval-interval 8"

torchrun "${DISTRIBUTED[@]}" \
    pretrain_gpt.py \
    "${MODEL[@]}" \
    $TRAIN \
    --save "$CHECKPOINTS" \
    --data-path /data/my_text_document 2>&1 | tee logs/$SLURM_JOB_ID.log
"""


def flags(script: str, **given: str) -> list[ScriptWord]:
    return find(script, given)[0].flags


def readable(words: list[ScriptWord]) -> list[str]:
    return [str(word) for word in words]


def launched(command: str, **given: str) -> int | None:
    return ranks(find(f"{command} pretrain_gpt.py {RUN}", given)[0])


def value(words: list[ScriptWord], flag: str) -> ScriptWord:
    return words[words.index(flag) + 1]


def test_a_cluster_script_is_followed() -> None:
    launch, others = find(CLUSTER, {"1": "/ckpt"})
    words = launch.flags
    assert (value(words, "--num-layers"), value(words, "--hidden-size"), value(words, "--micro-batch-size")) == (
        "24",
        "1024",
        "2",
    )
    assert value(words, "--global-batch-size") == "256"
    assert value(words, "--no-such-thing") == "two words"
    assert value(words, "--eval-interval") == "7" and words.count("--eval-interval") == 1
    assert value(words, "--seed") == "99" and words.count("--seed") == 1
    assert "--swiglu" in words and "--num-experts" not in words and "--squared-relu" not in words
    assert value(words, "--save") == "/ckpt"
    assert words[-2:] == ["--data-path", "/data/my_text_document"]
    assert (ranks(launch), others) == (32, [])


def test_what_is_given_wins_over_a_default_and_decides_an_if() -> None:
    words = flags(CLUSTER, USE_MOE="yes", SLURM_NNODES="2")
    assert "--num-experts" in words and "--swiglu" not in words
    assert value(words, "--global-batch-size") == "128"


def test_a_recipe_of_a_cluster_script_names_ranks_open_paths_and_strays() -> None:
    recipe, summary = convert(CLUSTER, "", {})
    config = read_back(recipe)
    assert (config.model.num_layers, config.train.global_batch_size, config.model.activation) == (24, 256, "swiglu")
    assert "Launched on 32 ranks" in recipe
    assert not summary.complete
    text = "\n".join(line for block in summary.blocks for line in block)
    line = CLUSTER.splitlines().index("CHECKPOINTS=$1") + 1
    assert f"run_dir: --save $1, and $1 is not set (line {line})" in text and "--set 1=VALUE" in text
    assert "--no-such-thing two words is no flag" in text


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 8", 64),
        ("torchrun --nproc-per-node=8 --nnodes=2:4", 32),
        ("python -m torch.distributed.launch --nproc_per_node 4", 4),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 NAME='a b' torchrun --nproc_per_node 2", 2),
        ("srun --nodes 2 --ntasks-per-node=8 --label python -u", 16),
        ("srun -n 24 python", 24),
        ("srun --nodes 2 torchrun --nnodes 2 --nproc-per-node 4", 8),
        ("torchrun --nproc_per_node $GPUS", None),
        ("python", None),
    ],
)
def test_ranks_of_a_launcher(command: str, count: int | None) -> None:
    assert launched(command) == count


def test_ranks_of_an_srun_from_its_directives() -> None:
    head = "#SBATCH --nodes=16\n#SBATCH --ntasks-per-node 8\n"
    assert ranks(find(f"{head}srun python pretrain_gpt.py {RUN}", {})[0]) == 128


@pytest.mark.parametrize(
    "script",
    [
        f"torchrun pretrain_gpt.py {RUN}",
        f'run_cmd="torchrun pretrain_gpt.py {RUN}"\necho ${{run_cmd}}\neval $run_cmd\nset +x',
        f'CMD="torchrun pretrain_gpt.py {RUN}"; $CMD',
        f'srun --label bash -c "cd /code && torchrun pretrain_gpt.py {RUN}"',
        f"srun sh -c 'torchrun pretrain_gpt.py {RUN}'",
        f"cd /code && torchrun pretrain_gpt.py {RUN} > log.txt 2>&1 &\nwait",
        f"(torchrun pretrain_gpt.py {RUN})",
        f"ARGS=({RUN}); torchrun pretrain_gpt.py ${{ARGS[@]}}",
        f"ARGS='{RUN}'\r\ntorchrun pretrain_gpt.py $ARGS\r\n",
        f'A=({RUN})\nB=()\nC=("${{A[@]}}" "${{B[@]}}")\ntorchrun pretrain_gpt.py ${{C[*]}}',
        f"cat > ds.json <<EOF\n{{ 'unbalanced }}\nEOF\ntorchrun pretrain_gpt.py {RUN}",
        f"torchrun pretrain_gpt.py \\\n  {RUN.replace(' --', ' \\\n  --')}",
        f"if true; then :; fi; if ! false; then torchrun pretrain_gpt.py {RUN}; fi",
        f"for f in a b; do rm $f; done\ntorchrun pretrain_gpt.py {RUN}",
        f"usage() {{\n  echo help\n}}\ntorchrun pretrain_gpt.py {RUN}",
        RUN,
        RUN.replace(" --", " \\\n --"),
    ],
)
def test_ways_to_write_the_same_command(script: str) -> None:
    launch, others = find(script, {})
    assert (launch.flags, others) == (RUN.split(), [])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("${ABSENT:-7}", "7"),
        ("${EMPTY:-7}", "7"),
        ("${SET:-7}", "3"),
        ("${SET:+5}", "5"),
        ("${LIST[1]}", "b"),
        ("${#LIST[@]}", "2"),
        ("$(( (SET + 1) * 2 - $SET % 2 ))", "7"),
        ("$((-7 / 2))", "-3"),
        ("'$SET'", "$SET"),
        ('"a $SET b"', "a 3 b"),
        ("a${SET}b", "a3b"),
        ("${NEXT:=${SET}1}", "31"),
        ("${ABSENT}", "$ABSENT"),
        ("$(nproc --all 'x y')", "$(nproc --all 'x y')"),
        ("${SET%3}4", "4"),
        ("${ABSENT%x}", "$ABSENT"),
        ("${ABSENT}/a.b", "$ABSENT/a.b"),
    ],
)
def test_expansions(expression: str, expected: str) -> None:
    words = flags(f"SET=3 EMPTY= \nexport EMPTY= SET=3\nLIST=(a b)\nx.py --num-layers {expression} --swiglu --bf16")
    assert readable(words) == ["--num-layers", expected, "--swiglu", "--bf16"]


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("[ -z $ABSENT ]", True),
        ('[[ -n "$ABSENT" ]]', False),
        ("[ $SET -ge 3 ] && [ $SET -lt 4 ]", True),
        ("[ $SET = 4 ] || [ $SET = 3 ]", True),
        ("[[ $SET == 4 || $SET != 4 ]]", True),
        ("[[ ! ( $SET == 3 ) ]]", False),
        ("[[ $SET == [0-9] ]]", True),
        ("! [ $SET = 3 ]", False),
        ("test $SET = 3", True),
    ],
)
def test_conditions(condition: str, taken: bool) -> None:
    script = f"SET=3\nA=no\nif {condition}; then\n  A=yes\nfi\nx.py --seed $A --swiglu"
    launch, others = find(script, {})
    assert (launch.flags[1] == "yes", others) == (taken, [])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("source other.sh", "line 1: another file, other.sh, is not read"),
        ("bash other.sh a b", "line 1: it starts another script, other.sh, which is not read"),
        ("sbatch <<EOF\n$(cat job.sh)\nEOF", "line 1: it starts another script, its input, which is not read"),
        ("select A in 1 2; do\n  B=$A\ndone", ""),
        ("declare -n R=A; coproc cat; echo ${!1}", ""),
        ("f() {\n  A=1\n}", ""),
        ("shift", ""),
        ("for A in 1 2; do\n  B=$A\ndone", ""),
        ("case $X in\n  a) A=1;;\n  *) A=2;;\nesac", ""),
    ],
)
def test_what_is_not_followed_is_said(lines: str, said: str) -> None:
    launch, others = find(f"{lines}\ntorchrun x.py {RUN}", {})
    assert launch.flags == RUN.split()
    assert [said in line for line in others] == [True] * bool(said)


def test_what_is_not_followed_makes_a_recipe_incomplete() -> None:
    _, summary = convert(f"source env.sh\ntorchrun x.py {RUN} --save a", "", {})
    assert not summary.complete
    assert any("env.sh, is not read" in line for block in summary.blocks for line in block)


def said_of(script: str, heading: str, **given: str) -> list[str]:
    """The lines of one block."""
    blocks = {block[0].partition(":")[0]: block[1:] for block in convert(script, "", given)[1].blocks}
    return blocks.get(heading, [])


@pytest.mark.parametrize(
    ("line", "taken", "other"),
    [
        ("if [ -f x ]; then A+=' --seed 5'; fi", "not to hold", "add --seed 5"),
        ("[ -d data ] || A+=' --seed 5'", "not to hold", "leave out --seed"),
        (
            "if nvidia-smi | grep -q H100; then A+=' --seed 5'; else A+=' --seed 6'; fi",
            "to hold",
            "change --seed from 5 to 6",
        ),
        ('case "$(uname)" in Linux) A+=" --seed 5";; esac', "not to hold", "add --seed 5"),
        ("for f in *.json; do A+=' --seed 5'; done", "to hold", "leave out --seed"),
    ],
)
def test_a_branch_that_cannot_be_decided_is_said_with_what_hangs_on_it(line: str, taken: str, other: str) -> None:
    found = said_of(f"A='{RUN}'\n{line}\nx.py $A", "Left open")
    assert len(found) == 1 and "line 2" in found[0] and taken in found[0] and other in found[0], found


def test_a_branch_that_changes_no_flag_is_not_worth_a_word() -> None:
    script = f"if [ -f x ]; then rm x; fi\nmkdir -p a && cd a || exit 1\n[ -n $DEBUG ] && set -x\nx.py {RUN} --save a"
    assert convert(script, "", {})[1].complete


def test_what_a_variable_from_outside_would_change_is_worth_knowing() -> None:
    script = f'A="{RUN} --data-path d --save s"\nif [[ "$MOE" == yes ]]; then A+=" --num-experts 4"; fi\nx.py $A'
    assert "--set MOE=VALUE may change that" in said_of(script, "Worth knowing")[0]
    assert "add --num-experts 4" in said_of(script, "Worth knowing")[0]
    assert flags(script, MOE="yes")[-2:] == ["--num-experts", "4"]


def test_a_script_that_ends_early_without_files_is_read_as_if_they_were_there() -> None:
    script = f"[ -f a ] || exit 1\nif [ ! -d b ]; then echo no; exit 1; fi\n[ $# -eq 2 ] || exit 2\nx.py {RUN}"
    assert flags(script) == RUN.split()


@pytest.mark.parametrize(
    "branch", ["if false; then X=7; fi", "false && X=7", "case a in b) X=7;; esac", "for i in; do X=7; done"]
)
def test_a_variable_that_is_set_only_in_a_branch_not_taken_is_empty(branch: str) -> None:
    assert flags(f"{branch}\nx.py {RUN} $X --save [$X]")[-2:] == ["--save", "[]"]


def test_what_set_gives_to_no_effect_is_said() -> None:
    assert (
        "line 1 of the script sets N itself"
        in said_of(f"N=1\nx.py {RUN} --data-path d --save s --seed $N", "Worth knowing", N="2")[0]
    )
    assert not said_of(f"N=${{N:-1}}\nx.py {RUN} --data-path d --save s --seed $N", "Worth knowing", N="2")


def test_eval_reads_quotes_once_more() -> None:
    script = f"CMD='x.py {RUN} --save \"a b\"'\neval $CMD"
    assert flags(script)[-2:] == ["--save", "a b"]


def test_comments_hold_anything() -> None:
    assert flags(f"# don't\nx.py {RUN} # can't\nA=( # won't\n1)") == RUN.split()


def test_an_array_that_is_set_anew_and_an_empty_one() -> None:
    script = f'A=(--old 1)\nA=({RUN})\nB=()\nA+=(--seed 1)\nx.py "${{A[@]}}" "${{B[@]}}"'
    assert flags(script) == [*RUN.split(), "--seed", "1"]


def test_a_further_command_is_said() -> None:
    assert "line 2: a further command" in find(f"x.py {RUN}\nx.py {RUN}", {})[1][0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("x.py --num-layers 'a", "line 1: bash says: unexpected EOF while looking for matching `''"),
        ("A=(1 2\nx.py", "line 1: bash says: unexpected EOF while looking for matching `)', in: A=(1 2"),
        ("\nif true; then\nA=1", "bash says: syntax error: unexpected end of file"),
        ("A=1\ndone", "line 2: bash says: syntax error near unexpected token `done', in: done"),
        ("while :; do A+=x; done", "a loop that does not end"),
        ("f() { f; }; f", "line 1: bash says: f: maximum function nesting level exceeded"),
        ("DATA=<path to data>\nx.py --bf16 --swiglu", "line 1: a value that is to be filled in: DATA=<path to data>"),
        ("echo $((1/0))", "line 1: bash says: 1/0: division by 0"),
        ("tools/preprocess_data.py --vocab-size 3 --tokenizer-type X", "trains nothing"),
        ("MODEL_ARGS='--num-layers 2 --bf16'", "$MODEL_ARGS holds such flags"),
        (
            "x.py --seed 1 --bf16 $MORE",
            "--hidden-size is missing: Megatron-LM does not start without it either. $MORE may hold it",
        ),
        ("x.py --num-layers 1 \\ \n --swiglu", "line 2: a command begins with --swiglu"),
        ("echo --hello", "no command was found"),
        ("eval eval eval 'eval \"$A\"'\n", "no command was found"),
    ],
)
def test_what_cannot_be_read_is_an_error(script: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run._LIMITS, resource.RLIMIT_CPU, 1)
    with pytest.raises(UserError) as caught:
        convert(script, "", {})
    assert message in str(caught.value)


def test_all_that_is_missing_is_said_at_once_with_the_command_to_type(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = "seed lr min-lr clip-grad weight-decay".split()
    words = " ".join(f"--{name} ${{{number}}}" for number, name in enumerate(names, 23))
    script = tmp_path / "a b.sh"
    script.write_text(
        f"SAVE=$1\nX=$(whoami)\nx.py {RUN} {words} --adam-eps $X --adam-beta1 $(cat f) --save $SAVE/$JOB\n"
    )
    assert main([str(script), "--set", "24=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "6 values are not known" in said and "$27 (line 3): --weight-decay" in said and "$24" not in said
    assert "and 2 values that may stay open:\n  $1 (line 1): --save\n  $JOB (line 3): --save" in said
    assert "$(cat f) (line 3): --adam-beta1" in said
    command = f"  python -m tools.from_megatron '{script}' --set 24=1e-3 --set 1=VALUE --set 23=VALUE --set 25=VALUE"
    command += " --set 26=VALUE --set 27=VALUE --set X=VALUE --set '$(cat f)=VALUE' --set JOB=VALUE"
    assert f"{command} > recipe.toml" in said
    given = [f"{name}=0.25" for name in (1, 23, 25, 26, 27, "X", "$(cat  f)", "JOB")]
    assert main([str(script), *(word for one in given for word in ("--set", one.replace("23=0.25", "23=7")))]) == 2
    assert "$24 (line 3): --lr" in capsys.readouterr().err
    assert (
        main(
            [
                str(script),
                "--set",
                "24=1",
                *(word for one in given for word in ("--set", one.replace("23=0.25", "23=7"))),
            ]
        )
        == 0
    )
    assert 'run_dir = "0.25/0.25"' in capsys.readouterr().out


def test_eval_reads_quotes_that_are_nested_in_variables() -> None:
    """As Pai-Megatron-Patch writes them, in a text and in an array; the quotes are no part of a file's name."""
    text = f"L='[0]*3+[1]*29'\nCMD=\"x.py {RUN} --moe-layer-freq '($L)' --spec \"\neval ${{CMD}}"
    array = f'A=(--moe-layer-freq "\'([0]*3+[1]*29)\'" --save \'"a*b"\')\ncmd="x.py {RUN} ${{A[@]}}"\neval $cmd'
    for script in (text, array):
        assert value(flags(script), "--moe-layer-freq") == "([0]*3+[1]*29)"
    assert value(flags(array), "--save") == "a*b"


def test_a_variable_that_holds_the_command_is_not_what_a_user_should_set(capsys: pytest.CaptureFixture[str]) -> None:
    script = f'CMD="x.py {RUN} --vocab-size 9 --data-path $(blend -p "(a)=b") --save /r/$(date +%F)"\n'
    script += 'X="$(whoami)"; srun bash -c "RANK=\\$SLURM_PROCID $CMD --load /r/$X"'
    assert main([script]) == 1
    said = capsys.readouterr().err
    assert "--set CMD" not in said and "--set X=VALUE" in said
    assert """--set '$(blend -p "(a)=b")=VALUE'""" in said and "--set '$(date +%F)=VALUE'" in said
    given = ["--set", '$(blend -p "(a)=b")=0.3 /a 0.7 /b', "--set", "$(date +%F)=d", "--set", "X=me"]
    assert main([script, *given]) == 0
    recipe = capsys.readouterr().out
    assert 'blend = { "/a" = 0.3, "/b" = 0.7 }' in recipe and 'run_dir = "/r/d"' in recipe and '"/r/me"' in recipe
    assert main([script, "--set", "$(other)=1"]) == 1
    assert "--set $(other) has no effect: the script does not read $(other)." in capsys.readouterr().err


def test_ranks_that_are_not_known_are_asked_for_where_the_batch_depends_on_them() -> None:
    script = f"torchrun --nproc_per_node $GPUS x.py {RUN}"
    assert read_back(convert(script, "", {})[0]).train.global_batch_size == 8
    with pytest.raises(UserError) as caught:
        convert(script.replace("--global-batch-size 8", ""), "", {})
    assert "$GPUS (line 1): --global-batch-size" in str(caught.value)


def test_further_flags_from_outside_are_left_open() -> None:
    script = f"x.py {RUN} --save a $EXTRA"
    assert "further flags: $EXTRA is not set" in said_of(script, "Left open")[0]
    assert flags(script, EXTRA="--seed 5 --bf16")[-3:] == ["--seed", "5", "--bf16"]


def test_an_unknown_variable_in_a_flag_that_changes_nothing_does_no_harm() -> None:
    _, summary = convert(f"x.py {RUN} --data-cache-path $PWD/cache --save runs/a", "", {})
    assert summary.complete


def test_what_is_not_known_survives_eval() -> None:
    script = f"CMD=\"x.py {RUN} --save $SAVE --load $(find . -name 'a b')\"\neval $CMD"
    words = readable(flags(script))
    assert words[-4:] == ["--save", "$SAVE", "--load", "$(find . -name 'a b')"]


def test_a_file_and_standard_input_mean_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {RUN} --save $1")
    assert main([str(script)]) == 1
    assert "--set 1=VALUE" in capsys.readouterr().err
    assert main([str(script), "--set", "1=/runs"]) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(script.read_text()))
    assert main(["--set", "1=/runs", "-"]) == 0
    assert capsys.readouterr().out.partition("#\n")[2] == from_file.partition("#\n")[2]
    assert 'run_dir = "/runs"' in from_file


def test_arguments_of_a_file_are_taken_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "words.txt"
    words.write_text(f"{RUN} \\\n  --save '$(touch {tmp_path}/there)/a b'  # flags alone\n")
    assert main(["--arguments", str(words)]) == 0
    said = capsys.readouterr()
    assert f'run_dir = "$(touch {tmp_path}/there)/a b"' in said.out and not (tmp_path / "there").exists()
    words.write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {RUN} --save a")
    assert main(["--arguments", str(words)]) == 0
    assert "Launched on 2 ranks" in capsys.readouterr().out
    for text, message in [("", "it is empty"), ("--a '", "a quote is never closed"), ("ls -l", "expected flags")]:
        words.write_text(text)
        assert main(["--arguments", str(words)]) == 2
        assert message in capsys.readouterr().err
    assert main(["--arguments", str(words), "x.sh"]) == 2 and main([]) == 2
    words.write_text(RUN)
    capsys.readouterr()
    assert main(["--arguments", str(words), "--shape", "llama3_8b"]) == 2
    assert "leave --shape out" in capsys.readouterr().err
    assert main(["--arguments", str(words), "--set", "FOO=1"]) == 0
    assert "FOO" in capsys.readouterr().err


@pytest.mark.parametrize("length", [256, 5000, 100_000])
def test_a_command_longer_than_a_file_s_name_is_a_command(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 9"
    flags += " --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --vocab-size 9"
    assert main([f"{flags} --save {'x' * length}"]) in (0, 1)
    assert "num_layers = 2" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["x" * 300, "a\0b", "no/such/" * 600])
def test_what_is_neither_a_file_nor_a_command_is_a_message(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([source]) == 2
    assert "no such file, and no command" in capsys.readouterr().err


SIZES = [
    "case $1 in 7B) L=32;; 13B) L=40;; *) exit 1;; esac",
    "SIZE=${SIZE}; case $SIZE in 7B) L=32;; 13B) L=40;; 70B) L=80;; *) echo bad; exit 1;; esac",
    'if [ "$1" = 7B ]; then L=32; elif [ "$1" = 13B ]; then L=40; else echo usage; exit 1; fi',
    '[ -z "$1" ] && exit 1\ncase $1 in 7B) L=32;; 13B) L=40;; *) exit 1;; esac',
]


@pytest.mark.parametrize("script", some(SIZES, SIZES[1:3]))
def test_a_model_is_asked_for_where_no_value_of_it_is_better_than_another(script: str) -> None:
    name = "SIZE" if "SIZE" in script else "1"
    with pytest.raises(UserError) as caught:
        convert(f"{script}\nx.py {RUN} --num-layers $L", "", {})
    assert "1 value is not known on which the training depends" in str(caught.value)
    assert f"which depends on ${name}: --num-layers" in str(caught.value) and f"--set {name}=VALUE" in str(caught.value)
    assert read_back(convert(f"{script}\nx.py {RUN} --num-layers $L", "", {name: "13B"})[0]).model.num_layers == 40


def test_each_branch_starts_a_command() -> None:
    script = f"case $1 in a) x.py {RUN} --seed 1;; b) x.py {RUN} --seed 2 --save b;; *) exit 1;; esac"
    with pytest.raises(UserError, match=r"depends on \$1: --seed"):
        convert(script, "", {})
    same_model = said_of(script.replace("seed 2", "seed 1"), "Worth knowing")
    assert "--set 1=VALUE may change that, which would add --save b" in same_model[-1]


def test_the_line_that_ends_a_script_is_said() -> None:
    with pytest.raises(UserError, match=r"With these values it ends at line 2: [*]. echo usage; exit 1"):
        convert(f"case $1 in 7B) L=32;;\n*) echo usage; exit 1;; esac\nx.py {RUN} --num-layers $L", "", {"1": "zz"})


OPTIONS = """while [[ $# -gt 0 ]]; do case $1 in --layers) L=$2; shift 2;; --moe) M=1; shift;; *) exit 1;; esac; done
x.py --num-layers ${L:-6} """


def test_what_set_gives_and_nothing_reads_is_said() -> None:
    script = f"A=${{LAYERS:-4}}; f() {{ B=$2; }}; f $1 $2\nx.py {RUN} --data-path d --save s --num-layers $A --seed $B"
    said = said_of(script, "Worth knowing", LAYER="3", **{"1": "a", "2": "4", "3": "c"})
    assert "--set LAYER has no effect: the script does not read $LAYER. Did you mean LAYERS?" in said
    assert "--set 3 has no effect: the script does not read $3." in said and len(said) == 2
    assert not said_of(f"shift\nx.py {RUN} --data-path d --save s --seed $1", "Worth knowing", **{"1": "a", "2": "4"})[
        1:
    ]


@pytest.mark.parametrize("given", ["0=x", "-1=x", "X Y=x", "=x", "X"])
def test_set_takes_names_and_numbers(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"x.py {RUN}", "--set", given]) == 2
    assert f"--set {given.partition('=')[0]}" in capsys.readouterr().err


def test_no_further_argument_changes_what_given_ones_set() -> None:
    script = f"{OPTIONS} {RUN.removeprefix('--num-layers 4')} --data-path d --save s"
    assert not said_of(script, "Worth knowing", **{"1": "--layers", "2": "9"})
    assert flags(script, **{"1": "--layers", "2": "9"})[1] == "9"
    script = script.replace("*) exit 1", "*) L=5; shift")
    assert "--set 3=VALUE may change that" in said_of(script, "Worth knowing", **{"1": "--layers", "2": "9"})[0]


@pytest.mark.campaign
def test_a_loop_that_waits_for_other_programs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run._LIMITS, resource.RLIMIT_CPU, 1)
    assert (
        flags(f"while squeue | grep -q me; do sleep 9; done; until nc -z host 1; do :; done\nx.py {RUN}") == RUN.split()
    )


@pytest.mark.parametrize(
    "script",
    [
        f"tmux new-session -d -s t 'torchrun pretrain_gpt.py {RUN}'",
        f"screen -dmS train bash -c 'torchrun pretrain_gpt.py {RUN}'",
        f"train() {{ torchrun pretrain_gpt.py {RUN} $1; }}; export -f train; srun bash -c 'train'",
        f'A=({RUN}); srun bash -c "torchrun pretrain_gpt.py $(printf \'%q \' "${{A[@]}}")"',
        f"cat > j.sh <<'EOF'\ntorchrun pretrain_gpt.py --num-layers $L {RUN.removeprefix('--num-layers 4')}\nEOF\n"
        "sbatch --export=ALL,L=4 j.sh",
    ],
)
def test_ways_to_start_it_within_another_program(script: str) -> None:
    assert readable(flags(script)) == RUN.split()


def test_a_word_that_would_start_it_is_said() -> None:
    with pytest.raises(UserError, match="line 1: what xargs does with its words is not followed"):
        convert(f"echo 1 2 | xargs -n1 -I{{}} bash -c 'torchrun pretrain_gpt.py {RUN}'", "", {})


def test_a_value_that_is_no_number_is_said_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.sh").write_text(f"x.py {RUN} --seed $((NODES * 8))\n")
    assert main([str(tmp_path / "a.sh"), "--set", "NODES=abc"]) == 2
    assert "--seed (abc is what --set NODES gives)" in capsys.readouterr().err
