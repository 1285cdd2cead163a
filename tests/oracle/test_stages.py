"""A run through two stages against transformers, PyTorch's AdamW and Megatron's scheduler, which know no stages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import ranks
from data.shard_writer import ShardWriter
from data.source import build_source
from models.families import TINY
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from programs import Program
from tests.oracle.batches import microbatch
from tests.oracle.case import END, VOCABULARY
from tests.oracle.exported import State, assembled, exported
from tests.oracle.imported import import_models
from tests.oracle.oracle import AdamW, answer, clip_scale
from tests.oracle.reference import in_double, load
from tests.oracle.sizes import Rates
from tests.oracle.trained import weights
from training.config.recipe import load as load_recipe
from training.config.run_config import RunConfig
from training.config.stages import stages
from training.metrics.jsonl import read_jsonl
from training.parts.model import build_parts
from training.start.prepare import prepare

RECIPE = """
device = "cpu"
[model]
shape = "llama3_tiny"
seq_length = 32
[precision]
dtype = "fp32"
[data]
tokenizer = "byte"
split = "1,0,0"
paths = ["{folder}/a"]
cache_dir = "{folder}/cache"
samples_to_skip = ["5-6"]
[optimizer]
lr = 3e-3
min_lr = 1e-4
lr_warmup_iters = 1
[train]
global_batch_size = 4
iterations_to_skip = [2]
[checkpoint]
async_save = false
[log]
log_interval = 1
tensorboard = false
report = false
[[stage]]
name = "first"
until_iterations = 4
[[stage]]
name = "longer"
until_iterations = 7
model.seq_length = 48
model.rotary_base = 10000
data.paths = ["{folder}/b"]
train.global_batch_size = 2
optimizer.lr_decay_style = "linear"
optimizer.min_lr = 1e-5
"""
TAKEN = (([0, 1, 2, 3], [4, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17]), ([0, 1], [2, 3], [4, 5]))
"""Of each stage the samples of its source, iteration by iteration."""


def curve(most: float, least: float, warmup: int, decay: int, style: str) -> tuple[Any, dict[str, float]]:
    """Megatron's scheduler, lengths in samples, and the parameter group that it writes to."""
    group: dict[str, float] = {}
    parameters = SimpleNamespace(param_groups=[group])
    return OptimizerParamScheduler(parameters, 0.0, most, least, warmup, decay, style, 0.1, 0.1, 99, "constant"), group


def initial(identity: Identity, config: RunConfig, folder: Path) -> None:
    """The weights that a run begins with, under transformers' names, to ``folder``."""
    shape = resolve(config.model, VOCABULARY)
    with groups.start(config.layout(1), identity, device="cpu", seed=config.train.seed) as own:
        torch.save(exported(assembled(weights(build_parts(config, shape, own).chunks)), shape), folder / "initial.pt")


def reference(_: Identity, configs: list[RunConfig], folder: Path) -> None:
    """What plain training makes of both stages: losses and learning rates, to ``folder``."""
    found, params = list[tuple[float, float]](), torch.load(folder / "initial.pt")
    adam = AdamW(configs[0].optimizer)
    scheduler, group = curve(3e-3, 1e-4, 4, 16, "cosine")
    for number, (config, batches) in enumerate(zip(configs, TAKEN, strict=True)):
        shape, data = resolve(config.model, VOCABULARY), config.data
        if number:
            scheduler, group = curve(group["lr"], 1e-5, 0, 6, "linear")
        source = build_source(prepare(config, None), data, config.model.seq_length, config.train.seed, "train")
        for taken in batches:
            batch = microbatch(source.fetch(np.array(taken)), END, apart=False, restart=False, masked=False)
            model, rate = load(shape, params, folder), group["lr"]
            with in_double():
                theirs = answer(model, [[batch]])
            found.append((theirs.loss, rate))
            if len(found) == 2:  # train.iterations_to_skip
                continue
            scale = clip_scale(theirs.norm, config.optimizer.clip_grad)
            gradients = {name: one.float() for name, one in theirs.gradients.items()}
            updated: State = adam.updated(params, gradients, scale, Rates(rate, 0.1, None), model.words())
            params = params | updated
            scheduler.step(increment=len(taken))
    torch.save(found, folder / "found.pt")


def test_two_stages_are_plain_training_of_one_and_then_the_other(tmp_path: Path) -> None:
    import_models([TINY["llama3_tiny"]])
    for seed, name in enumerate("ab"):
        with ShardWriter(tmp_path / name, VOCABULARY) as writer:
            writer.add_documents(np.random.default_rng(seed).integers(0, END, 4000), np.full(40, 100))
    recipe = tmp_path / "staged.toml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    program = Program([str(recipe), "--run_dir", str(tmp_path / "run"), "--nproc", "1"], tmp_path / "output")
    assert program.communicate() and program.returncode == 0, program.communicate()
    lines = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if "loss" in line]
    configs = stages(load_recipe(recipe))
    ranks.run_ranks(1, initial, configs[0], tmp_path)
    ranks.run_ranks(1, reference, configs, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    assert [line["learning_rate"] for line in lines] == pytest.approx([rate for _, rate in found], rel=1e-9)
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in found], rel=2e-6)
