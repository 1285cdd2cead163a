"""checkpoint.load of other programs: refused with the command, or converted once; the way there and back."""

import dataclasses
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
from program.errors import UserError
from programs import Program
from runs import DEBUG
from tests.tools import deepspeed_folders
from tests.tools.hf_folders import write_folder
from tests.tools.mp_rank_folders import save_ranks
from tests.tools.reshard_sources import as_torch_reads, save
from tools.convert.__main__ import main as convert
from tools.preprocess.__main__ import main as preprocess
from tools.reshard.__main__ import main as reshard
from training.checkpoint import converting
from training.checkpoint.folders import checkpoints, find, latest
from training.checkpoint.foreign import recognise
from training.checkpoint.foreign_model import check_before
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.verify import damages
from training.config import recipe

CONFIG = recipe.load(DEBUG)
FOUR = ("--train.train_iters", "4", "--log.tensorboard", "False", "--log.report", "False")


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
    given = [str(DEBUG), "--run_dir", str(run_dir), "--checkpoint.load", str(load), *FOUR, *flags]
    return Program(given, run_dir.with_name(f"{run_dir.name}_out"))


def ended(program: Program) -> tuple[int | None, str, str]:
    out, err = program.communicate()
    return program.returncode, out, err


def trained(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["iteration"] for line in lines if "loss" in line]


# ---- refused


@pytest.mark.campaign
def test_the_refusal_names_the_command_that_works(megatron: Path, tmp_path: Path) -> None:
    """The command is taken from the message and run; what it makes is trained on; then to Megatron again."""
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
    assert trained(tmp_path / "run") == [3, 4]
    assert reshard([str(tmp_path / "run"), str(tmp_path / "back"), "--format", "megatron", "--verify"]) == 0
    theirs = as_torch_reads(tmp_path / "back/iter_0000004")
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


@pytest.mark.campaign  # refused by the conversion: test_a_refusal_is_shown_whole
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


@pytest.mark.campaign  # tests/tools/test_reshard_flat.py converts both, test_a_run_converts_once goes on
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


# ---- a Hugging Face folder


HF = ("--checkpoint.convert", "True", "--checkpoint.finetune", "True")
BYTES = dataclasses.replace(TINY["llama2_tiny"], vocab_size=257)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary of bytes, and one shard of random tokens."""
    root = tmp_path_factory.mktemp("hf")
    write_folder(root / "Tiny-1M", BYTES, dtype=torch.float32)
    (root / "text.txt").write_text("some text, and more of it\n" * 300)
    assert preprocess([str(root / "text.txt"), "--output", str(root / "tokens"), "--tokenizer", "byte"]) == 0
    return root


def of_bytes(root: Path, run_dir: Path, *flags: str) -> Program:
    model = ("--model.shape", "llama2_tiny", "--model.vocab_size", "257", "--model.seq_length", "32")
    return run(run_dir, root / "Tiny-1M", *HF, *model, "--data.paths", str(root / "tokens"), *flags)


@pytest.mark.campaign  # tests/test_journeys.py trains from one, test_a_run_converts_once finds a copy
def test_ranks_train_five_steps_from_a_hugging_face_folder(hf: Path, tmp_path: Path) -> None:
    """Local ranks convert once; a second start finds the copy; both begin at what tools.convert makes."""
    steps = ("--train.train_iters", "5", "--nproc", "2", "--data.cache_dir", str(tmp_path / "cache"))
    for start in (1, 2):
        code, out, err = ended(of_bytes(hf, tmp_path / "run", *steps, "--parallel.tensor_model_parallel_size", "2"))
        assert code == 0, out + err
        assert f"checkpoint.load: converting {hf}/Tiny-1M" in out if start == 1 else "was converted before" in out
        assert "warning" not in out
        assert trained(tmp_path / "run") == [1, 2, 3, 4, 5] * start
        shutil.rmtree(checkpoints(tmp_path / "run"))
        (tmp_path / "run/done").unlink()
    assert convert(["import", str(hf / "Tiny-1M"), str(tmp_path / "imported"), "--no_logits"]) == 0
    with FileReader(tmp_path / "run/converted/Tiny-1M") as one, FileReader(tmp_path / "imported") as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert all(np.array_equal(one.whole(key), other.whole(key)) for key in one.tensors)


def test_another_model_is_refused_before_it_is_converted(hf: Path, tmp_path: Path) -> None:
    for flags, message in (
        (
            ("--model.num_query_groups", "2"),
            r"another model than the recipe's: model.num_query_groups 4 there, 2 here\.",
        ),
        (("--data.paths", str(hf / "text.txt")), r'data\.tokenizer = "byte": the weights of .*Tiny-1M are a published'),
    ):
        code, out, err = ended(of_bytes(hf, tmp_path / "run", *flags))
        assert code == 2
        assert re.search(message, err), err
        assert "converting" not in out


def test_the_same_weights_computed_otherwise_are_warned_of(hf: Path) -> None:
    foreign = recognise(hf / "Tiny-1M")
    assert foreign
    model = ModelConfig(shape="llama2_tiny", vocab_size=257, rotary_base=500000, hidden_dropout=0.1)
    data = dataclasses.replace(CONFIG.data, paths=[str(hf / "tokens")])
    warning = check_before(foreign, dataclasses.replace(CONFIG, model=model, data=data))
    assert warning.endswith("with the same weights: model.rotary_base 10000 there, 500000 here")


def test_a_refusal_is_shown_whole_and_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    """All lines of the program's message; of one that is killed, how it ended."""
    broken = tmp_path / "Tiny-1M"
    write_folder(broken, BYTES, tensors={"model.norm.weight": None, "model.layers.0.mlp.up_proj.weight": None})
    code, _, said = ended(of_bytes(tmp_path, tmp_path / "run", "--data.paths", str(hf / "tokens")))
    assert code == 2
    assert f"checkpoint.convert: {broken} was not converted. {broken}: this llama lacks" in said
    assert "model.norm.weight" in said and "model.layers.0.mlp.up_proj.weight" in said
    assert "Traceback" not in said
    assert {path.name for path in (tmp_path / "run/converted").iterdir()} == {
        "recipe.toml", "Tiny-1M.json", "Tiny-1M.log"
    }  # fmt: skip
    log = tmp_path / "log"
    log.write_text("import:  10%\rimport:  20%\ntools.convert: config.json has:\n  one\n  two\n")
    assert converting._complaint(log, "tools.convert", 2) == "config.json has:\n  one\n  two"
    log.write_text("import:  10%\rimport:  20%")
    killed = converting._complaint(log, "tools.convert", -9)
    assert killed == f"tools.convert was killed by signal 9; it said last: 'import:  20%'. {log} has all of it."


def test_the_command_of_a_hugging_face_folder(tmp_path: Path) -> None:
    """Its own tests run it."""
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    code, _, said = ended(run(tmp_path / "run", tmp_path / "hf", "--checkpoint.finetune", "True"))
    assert code == 2
    assert f"python -m tools.convert import {tmp_path}/hf {tmp_path}/run/converted/hf --verify" in said
    config = recipe.load(tmp_path / "run/converted/recipe.toml")
    assert config.checkpoint.load == str(tmp_path / "hf")
