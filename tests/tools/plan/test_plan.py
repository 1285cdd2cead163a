"""The command: answers, files that the program accepts, and refusals that say what would help."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.plan.__main__ import main
from training.config.recipe import load

ROOT = Path(__file__).resolve().parents[3]
ASKED = "--model llama3_8b --cluster h100_ib --num_gpus 32 --global_batch_size 128 --seq_length 8192".split()


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(list(flags)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(list(flags)) == 2
    return capsys.readouterr().err


def test_the_table_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *ASKED, "--tokens", "1e12")
    for word in (
        "step s",
        "4 of 5 runs",
        "tok/s/GPU",
        "MFU",
        "GiB",
        "bubble",
        "limited by",
        "activations",
        "USD",
        "save_interval",
    ):
        assert word in text, word


def test_a_reader_that_has_seen_enough() -> None:
    """``| head -1``: more than a pipe holds is written to one without a reader."""
    command = [sys.executable, "-m", "tools.plan", *ASKED, "--top", "2000"]
    plan = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert plan.stdout is not None and plan.stderr is not None
    plan.stdout.close()
    assert (plan.stderr.read(), plan.wait()) == (b"", 0)
    plan.stderr.close()


def test_a_written_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.toml"
    text = printed(capsys, *ASKED, "--tp", "2", "--pp", "2", "--write", str(path))
    assert f"sbatch --nodes 4 slurm/pretrain.sbatch {path}" in text
    parallel = load(path).parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", str(path), "--dry_run", "--world_size", "32"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan for 32 ranks: TP 2" in done.stdout and "vocabulary 128,256" in done.stdout
    assert "already there" in refused(capsys, *ASKED, "--write", str(path))


@pytest.mark.campaign
def test_a_recipe_keeps_what_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "again.toml"
    flags = ["--recipe", "slurm/recipes/llama3_8b.toml", "--num_gpus", "64", "--write", str(path)]
    printed(capsys, *flags)
    before, after = load(ROOT / "slurm/recipes/llama3_8b.toml"), load(path)
    assert after.optimizer == before.optimizer and after.checkpoint == before.checkpoint
    assert after.train.global_batch_size == 512 and after.problems(64) == []


def test_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "explain", "TP=8,PP=4", *ASKED)
    assert "slower than" in text and "tensor-parallel collectives" in text
    assert "rejected" in printed(capsys, "explain", "TP=1,PP=1,CP=1,mbs=4,recompute=none,zero=0", *ASKED)
    assert "does not divide 32 GPUs" in refused(capsys, "explain", "TP=3", *ASKED)
    assert "num_attention_heads" in refused(
        capsys, "explain", "TP=3", *ASKED, "--num_gpus", "66", "--global_batch_size", "66"
    )
    assert '"PQ=3" is not one of' in refused(capsys, "explain", "PQ=3", *ASKED)


@pytest.mark.parametrize(("sizes", "strategy"), [("zero=3,copies=8", "optim_grads_params"), ("zero=2", "optim_grads")])
@pytest.mark.campaign
def test_shards_are_written_as_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: str, strategy: str
) -> None:
    path = tmp_path / "sharded.toml"
    assert f"written: {path}" in printed(capsys, "explain", f"{sizes},tp=1,pp=1", *ASKED, "--write", str(path))
    config = load(path)
    assert config.parallel.data_parallel_sharding_strategy == strategy and config.problems(32) == []
    assert config.parallel.num_distributed_optimizer_instances == (8 if "copies" in sizes else 1)


def test_shards_are_not_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Use --zero 1" in refused(capsys, "trace", *ASKED, "--zero", "3")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "llama3_80b"], ["llama3_70b", "unknown"]),
        (["--cluster", "h100ib"], ["h100_ib", "unknown"]),
        (["--num_gpus", "4096", "--global_batch_size", "257"], ["257", "256"]),
        (["--model", "llama31_405b", "--num_gpus", "8"], ["fits nowhere", "GPUs would do", "GiB"]),
        (["--tp", "8", "--pp", "4", "--dp", "2"], ["TP 8", "PP 4", "DP 2", "conflict"]),
        (["--tp", "8", "--ep", "4"], ["EP 4", "impossible"]),
        (["--tp", "5"], ["TP 5 is impossible", "1, 2, 4, 8"]),
        (["--vpp", "2", "--pp", "1"], ["VPP 2", "PP 1", "conflict"]),
        (
            ["--vpp", "3", "--pp", "4"],
            ["VPP 3", "PP 4 x VPP 3 = 12 chunks", "Possible: 1, 2, 4, 8, 16 (in equal chunks"],
        ),
        (["--model", "deepseek_v3", "--num_gpus", "256", "--vpp", "5"], ["61", "PP 2 x VPP 5 = 10 chunks"]),
        (["--model", "gpt2"], ["model.seq_length 8192 exceeds", "1024 of learned positions. Use"]),
        (["--cluster", "a100_ib", "--precision", "fp8"], ["fp8", "A100", "bf16"]),
        (["--cluster", "h100_ib", "--precision", "nvfp4"], ["nvfp4", "H100", "bf16, fp16, fp32, fp8 here"]),
        (["--cluster", "t4_ethernet", "--precision", "bf16"], ["bf16", "T4", "fp16, fp32"]),
        (["--cluster", "t4_ethernet", "--precision", "fp8"], ["fp8", "T4", "fp16, fp32"]),
        (["--recompute", "ful"], ["did you mean full"]),
        (["--num_gpus", "0"], ["num_gpus", "1 or more"]),
        (["--tokens", "-1"], ["tokens", "above 0"]),
        (["--tokens", "inf"], ["tokens", "finite"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]) -> None:
    given = dict(zip(ASKED[::2], ASKED[1::2], strict=True)) | dict(zip(flags[::2], flags[1::2], strict=True))
    text = refused(capsys, *(part for pair in given.items() for part in pair))
    assert all(word in text for word in words), text


def test_learned_positions_are_the_length_of_a_sample_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model gpt2 --num_gpus 8 --global_batch_size 512".split()
    assert "512 samples x 1,024 tokens" in printed(capsys, *flags)
    text = refused(capsys, *flags, "--seq_length", "8192")
    assert text.startswith("model.seq_length 8192 exceeds") and "GPUs" not in text


def test_only_the_two_that_conflict_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *ASKED, "--tp", "2", "--mbs", "1", "--vpp", "4", "--pp", "1")
    assert "VPP 4 and PP 1 conflict" in text.replace("PP 1 and VPP 4", "VPP 4 and PP 1") and "MBS" not in text


def test_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--num_gpus" in refused(capsys)
    assert "--global_batch_size" in refused(capsys, "--model", "llama3_8b", "--num_gpus", "8")


def test_the_memory_of_each_way_to_shard(capsys: pytest.CaptureFixture[str]) -> None:
    memory = printed(capsys, "size", *ASKED, "--show", "memory")
    assert "ZeRO-3" in memory and "checkpoint: 112 GB" in memory


def test_no_torch_on_the_way(tmp_path: Path) -> None:
    published = (ROOT / "tests/planner/published.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text("\n".join(published[:40]))
    code = (
        "import sys; from tools.plan.__main__ import main\n"
        f"main({ASKED!r}); main(['--backtest', '{tmp_path}/some.csv'])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
