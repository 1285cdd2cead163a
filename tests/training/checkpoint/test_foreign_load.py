"""checkpoint.load of other programs: refused with the command, or converted once; the way there and back."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_parts import Parts, configuration, on_ranks, sizes
from models.config import ModelConfig
from models.families import TINY
from models.resolve import resolve
from parallel.errors import UserError
from programs import Program
from runs import DEBUG
from tests.tools import deepspeed_folders
from tests.tools.hf_folders import write_folder
from tests.tools.mp_rank_folders import save_ranks
from tests.tools.reshard_sources import as_torch_reads, save
from tools.reshard.__main__ import main as reshard
from training.checkpoint import converting
from training.checkpoint.folders import checkpoints, find, latest
from training.checkpoint.foreign import recognise
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.verify import damages
from training.config import recipe

SEVEN = ("--train.train_iters", "7", "--log.tensorboard", "False", "--log.report", "False")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of TP2 at iteration 2: torch_dist with the optimizer, and mp_rank folders."""
    root = tmp_path_factory.mktemp("megatron")

    def save_both(parts: Parts) -> None:
        parts.train(2)
        save(parts, root / "dist/iter_0000002", "fully_reshardable")
        save_ranks(parts, root / "ranks/iter_0000002")

    on_ranks(2, configuration(sizes(2), shape="debug"), save_both)
    for name in ("dist", "ranks"):
        (root / name / "latest_checkpointed_iteration.txt").write_text("2\n")
    return root


def run(run_dir: Path, load: Path, *flags: str) -> Program:
    given = [str(DEBUG), "--run_dir", str(run_dir), "--checkpoint.load", str(load), *SEVEN, *flags]
    return Program(given, run_dir.with_name(f"{run_dir.name}_out"))


def ended(program: Program) -> tuple[int | None, str, str]:
    out, err = program.communicate()
    return program.returncode, out, err


def trained(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["iteration"] for line in lines if "loss" in line]


# ---- refused


def test_the_refusal_names_the_command_that_works(megatron: Path, tmp_path: Path) -> None:
    """The command is taken from the message and run; what it makes is trained for 5 steps; then to Megatron again."""
    code, _, said = ended(run(tmp_path / "run", megatron / "dist", "--model.seq_length", "32"))
    assert code == 2
    assert "Megatron's torch_dist folder. Convert it" in said
    command = next(line for line in said.splitlines() if line.strip().startswith("python -m tools."))
    program, flag, module, *arguments = shlex.split(command)
    assert (program, flag, module) == ("python", "-m", "tools.reshard")
    assert reshard(arguments) == 0
    target = re.search(r"--checkpoint\.load (\S+):", said)
    assert target
    assert arguments[1] == target[1]
    code, out, err = ended(run(tmp_path / "run", Path(target[1]), "--model.seq_length", "32"))
    assert code == 0, out + err
    assert trained(tmp_path / "run") == [3, 4, 5, 6, 7]
    assert reshard([str(tmp_path / "run"), str(tmp_path / "back"), "--format", "megatron", "--verify"]) == 0
    theirs = as_torch_reads(tmp_path / "back/iter_0000007")
    ours = latest(checkpoints(tmp_path / "run"))
    assert ours
    with FileReader(ours) as reader:
        states = [key for key in reader.tensors if key.startswith("optimizer.state.")]
        assert len(states) > 50
        for key in states:
            assert np.array_equal(reader.whole(key), theirs[key].view(torch.uint32).numpy())


def test_each_kind_is_named_with_its_command(megatron: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").touch()
    (tmp_path / "ds/global_step5").mkdir(parents=True)
    (tmp_path / "ds/latest").write_text("global_step5\n")
    (tmp_path / "ds/global_step5/mp_rank_00_model_states.pt").touch()
    for path, kind, command in (
        (tmp_path / "hf", "hf", f"python -m tools.convert import {tmp_path}/hf CONVERTED --verify"),
        (megatron / "ranks", "mp_rank", f"python -m tools.reshard {megatron}/ranks/iter_0000002 CONVERTED --recipe"),
        (megatron / "dist", "torch_dist", f"python -m tools.reshard {megatron}/dist/iter_0000002 CONVERTED --recipe"),
        (tmp_path / "dcp", "dcp", f"python -m tools.reshard {tmp_path}/dcp CONVERTED --recipe"),
        (tmp_path / "ds", "deepspeed", f"python -m tools.reshard {tmp_path}/ds/global_step5 CONVERTED --recipe"),
    ):
        found = recognise(path)
        assert found
        assert found.kind == kind
        with pytest.raises(UserError, match=re.escape(command)):
            find(str(path))
    for path in (tmp_path, megatron, tmp_path / "nothing"):
        assert recognise(path) is None


def test_weights_alone_are_to_be_asked_for(megatron: Path, tmp_path: Path) -> None:
    code, _, said = ended(run(tmp_path / "run", megatron / "ranks", "--checkpoint.convert", "True"))
    assert code == 2
    assert "weights alone" in said
    assert "--checkpoint.no_load_optim True" in said
    assert not (tmp_path / "run/converted").exists()


# ---- converted


def test_a_run_converts_once_and_goes_on(megatron: Path, tmp_path: Path) -> None:
    """mp_rank folders; a kill in the middle; a second start that has no checkpoint yet; another source; damage."""
    source, converted = tmp_path / "theirs", tmp_path / "run/converted/iter_0000002"
    shutil.copytree(megatron / "ranks", source)
    flags = ("--checkpoint.convert", "True", "--checkpoint.no_load_optim", "True")
    killed = run(tmp_path / "run", source, *flags)
    while not converted.with_name("iter_0000002.log").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    ended(killed)

    code, out, err = ended(run(tmp_path / "run", source, *flags, "--train.exit_interval", "3"))
    assert code == 0, out + err
    assert "weights alone are read" in converted.with_name("iter_0000002.log").read_text() or "before" in out
    assert trained(tmp_path / "run") == [3]
    shutil.rmtree(checkpoints(tmp_path / "run"))
    changed = (converted / "manifest.json").stat().st_mtime_ns
    code, out, err = ended(run(tmp_path / "run", source, *flags))
    assert code == 0, out + err
    assert "was converted before" in out
    assert (converted / "manifest.json").stat().st_mtime_ns == changed
    assert reshard([str(tmp_path / "run"), str(tmp_path / "back"), "--format", "megatron", "--verify"]) == 0

    foreign = recognise(source)
    assert foreign
    data = next(converted.glob("*.bin"))
    data.write_bytes(data.read_bytes()[:-7])
    converting._convert_once(foreign, converted, converted.with_name("recipe.toml"))
    assert find(str(converted)) == [converted]
    assert damages(converted, "hashes") == []
    os.utime(source / "iter_0000002/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(UserError, match=r"which is not what .* holds now\. Remove it"):
        converting._convert_once(foreign, converted, converted.with_name("recipe.toml"))


def test_what_cannot_be_converted_is_one_message(megatron: Path, tmp_path: Path) -> None:
    """A model of another size: found by the conversion, before ranks start."""
    flags = ("--checkpoint.convert", "True", "--model.shape", "llama2_tiny")
    code, _, said = ended(run(tmp_path / "run", megatron / "dist", *flags))
    assert code == 2
    assert re.search(r"checkpoint\.convert: .*the model of --recipe", said)
    assert "Traceback" not in said
    assert not (tmp_path / "run/converted/iter_0000002").exists()


def test_other_ranks_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "WAIT_S", 0.01)
    target = tmp_path / "iter_0000002"
    pid = os.fork()
    if pid == 0:
        time.sleep(0.3)
        converting._write(target.with_name("iter_0000002.json"), {"state": "failed"})
        os._exit(0)
    with pytest.raises(UserError, match="the first rank could not make"):
        converting._wait_for(target)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("trainer", ["DeepSpeed", "FSDP"])
def test_a_run_goes_on_from_other_trainers(trainer: str, tmp_path: Path) -> None:
    """5 steps on TP2 from ZeRO-3 of 3 ranks, and on PP2 from a DCP folder: weights, moments, iteration."""
    shape = resolve(ModelConfig(shape="llama2_tiny", vocab_size=257), 257)
    weights = write_folder(tmp_path / "hf", shape, dtype=torch.float32)
    weights = {name: tensor * 0.02 for name, tensor in weights.items()}
    moments = {state: {name: tensor.abs() for name, tensor in weights.items()} for state in deepspeed_folders.MOMENTS}
    step, theirs = deepspeed_folders.STEP, tmp_path / "theirs"
    if trainer == "DeepSpeed":
        deepspeed_folders.save(theirs, weights, moments, 3, 3)
        layout = ("--parallel.tensor_model_parallel_size", "2")
    else:
        states = {
            name: {"step": torch.tensor(float(step)), **{state: moments[state][name] for state in moments}}
            for name in weights
        }
        content = {"app": {"model": weights, "optim": {"state": states}}}
        dcp.save(content, checkpoint_id=theirs / f"step-{step}", no_dist=True)
        layout = ("--parallel.pipeline_model_parallel_size", "2")
    flags = ("--checkpoint.convert", "True", "--model.shape", "llama2_tiny", "--nproc", "2", *layout)
    code, out, err = ended(run(tmp_path / "run", theirs, *flags, "--train.train_iters", "10"))
    assert code == 0, out + err
    assert trained(tmp_path / "run") == list(range(step + 1, 11))


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """Only the command: its own tests run it."""
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    code, _, said = ended(run(tmp_path / "run", tmp_path / "hf", "--checkpoint.finetune", "True"))
    assert code == 2
    assert f"python -m tools.convert import {tmp_path}/hf {tmp_path}/run/converted/hf --verify" in said
    config = recipe.load(tmp_path / "run/converted/recipe.toml")
    assert config.checkpoint.load == str(tmp_path / "hf")
