"""Which models are measured: published shapes, with as many of their layers as the card is predicted to hold."""

import dataclasses
import tempfile
from pathlib import Path

from models.config import ModelConfig
from models.costs.predict import Predicted, fullest
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import Role, Sizes
from training.config import recipe
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.memory.planned import Modules, as_case

SHARE = 0.90
"""Of the card, for what is predicted with CUDA's context and libraries. The rest is for what a prediction misses."""


def of_role(
    machine: GpuMachine, sizes: Sizes, role: Role, most_layers: int, precision: PrecisionConfig | None = None
) -> RunConfig:
    """A run, data-parallel over all GPUs, of the first shape of which two layers fit; at least one of the last."""
    gpus, precision = len(machine.gpus), precision or PrecisionConfig()
    for shape in sizes.shapes[role]:
        layers = min(most_layers, resolve(ModelConfig(shape=shape), None).num_layers)
        while layers > 1:
            config = run_config(sizes, shape, layers, precision, gpus)
            if predicted(machine, config).total <= SHARE * machine.memory_gib * 2**30:
                return config
            layers -= 1
    return run_config(sizes, sizes.shapes[role][-1], 1, precision, gpus)


def run_config(sizes: Sizes, shape: str, num_layers: int, precision: PrecisionConfig, gpus: int) -> RunConfig:
    """Micro-batches of one sample; gradients and weights travel beside computation where there are several GPUs."""
    overlap = gpus > 1
    train = TrainConfig(global_batch_size=sizes.microbatches * gpus, micro_batch_size=1)
    return RunConfig(
        model=with_layers(ModelConfig(shape=shape, seq_length=sizes.seq_length), num_layers),
        precision=precision,
        parallel=ParallelConfig(overlap_grad_reduce=overlap, overlap_param_gather=overlap),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
        train=train,
    )


def with_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """The first layers of a model: of one that begins with dense layers, one dense and the rest with experts."""
    shape = resolve(model, None)
    begins_dense = any(shape.moe_blocks) and not shape.moe_blocks[0]
    pattern = {"moe_layer_freq": f"[0]+[1]*{num_layers - 1}"} if begins_dense else {}
    return dataclasses.replace(model, num_layers=num_layers, **pattern)  # type: ignore[arg-type]


def predicted(machine: GpuMachine, config: RunConfig) -> Predicted:
    """Bytes of the fullest rank on this machine's GPUs."""
    modules = Modules(cuda=True, transformer_engine=machine.has_te)
    return fullest([as_case(config, len(machine.gpus), shape_of(config), modules)], shape_of(config))[0]


def shape_of(config: RunConfig) -> GPTShape:
    """With the published vocabulary."""
    return resolve(config.model, None)


def loaded(text: str) -> RunConfig:
    """A recipe that was handed over as text."""
    with tempfile.TemporaryDirectory(prefix="triplane-recipe-") as folder:
        path = Path(folder, "recipe.toml")
        path.write_text(text)
        return recipe.load(path)
