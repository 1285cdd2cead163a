"""A checkpoint that a tool computes with: found, its configuration and tokenizer read, and a layout for its ranks.

Nothing here needs torch: what is wrong shows before ranks start. ``loaded_model`` goes on from here.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.tokenizers import base
from data.tokenizers.base import Tokenizer
from models.kernels import KernelsConfig
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import launch
from parallel.config import ParallelConfig
from program.errors import UserError
from program.schema import JSON
from tools.parity.layouts import with_layout
from tools.shared.checked_checkpoint import read_config
from tools.shared.held_checkpoint import HeldCheckpoint, deleted_is_said
from training.checkpoint.chosen_weights import ChosenWeights, prefix_of
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.imported import IMPORTED, STAND_INS
from training.checkpoint.state import read_state
from training.cli import parse
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig


@dataclass(kw_only=True)
class ModelFlags:
    """Which model, and on which ranks. A tool's own flags inherit from it."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR_OR_CHECKPOINT")]
    """A run's folder or a folder of checkpoints, of which the newest is taken, or one checkpoint."""

    layout: str | None = None
    """How the model is divided, such as tp2, pp2, tp2sp, pp2vpp2, ep2, dp2zero3 (names of tools.parity), whatever
    layout trained it. None: a whole model on each rank; one rank, or those of torchrun or srun."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the node has GPUs, else cpu."""

    dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Number format of weights and activations. None: precision.dtype of the run; never fp8 or fp4."""

    weights: ChosenWeights = "trained"
    """ema, average_last: an average of the weights, which train.ema_decay and train.average_last keep."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OpenedCheckpoint:
    """A checkpoint, and the configuration that it is computed with."""

    held: HeldCheckpoint
    """Its files."""
    config: RunConfig
    """The run's, but for what is of training alone; ``parallel``, ``device`` and ``precision`` as they are to be."""
    shape: GPTShape
    tokenizer: Tokenizer | None
    """The checkpoint's own; None where it carries none that can be used, see ``tokenizer_problem``."""
    tokenizer_problem: str
    entries: Mapping[str, JSON]
    """What else its state.json notes."""
    world_size: int
    """Ranks that ``config.parallel`` needs."""
    weights: ChosenWeights
    prefix: str
    """What keys of the trained weights begin with that are taken (training/checkpoint/chosen_weights.py)."""

    @property
    def folder(self) -> Path:
        """The checkpoint itself: iter_..., or an imported one."""
        return self.held.folder


def open_checkpoint(flags: ModelFlags, world_size: int | None = None) -> OpenedCheckpoint:
    """world_size: ranks that a launcher has started; None: as many as the layout needs.

    Raises UserError for a path without a checkpoint, a configuration that cannot be read, and a layout that this model
    cannot have.
    """
    held = HeldCheckpoint.of(flags.checkpoint)
    with deleted_is_said(held.folder):
        config = read_config(held.folder)
        try:
            entries = read_state(held.folder).entries
            prefix = prefix_of(flags.weights, held.folder)
        except DamagedError as error:
            raise UserError(f"checkpoint {held.folder} is damaged: {error}") from None
        tokenizer, problem = _tokenizer(config, held.folder, entries)
    if tokenizer is None and config.model.vocab_size is None:
        raise UserError(f"{problem} Its vocabulary is not known without it.")
    placed, needed = with_layout(config, flags.layout or "tp1")
    parallel, world_size = _without_gradients(placed.parallel), world_size or needed
    config = _to_compute(config, parallel, flags, world_size)
    parse.check(config, world_size)
    return OpenedCheckpoint(
        held=held,
        config=config,
        shape=resolve(config.model, tokenizer.vocab_size if tokenizer and config.model.vocab_size is None else None),
        tokenizer=tokenizer,
        tokenizer_problem=problem,
        entries=entries,
        world_size=world_size,
        weights=flags.weights,
        prefix=prefix,
    )


def _tokenizer(config: RunConfig, folder: Path, entries: Mapping[str, JSON]) -> tuple[Tokenizer | None, str]:
    """The checkpoint's own tokenizer, or None and why."""
    if config.data.tokenizer in STAND_INS and IMPORTED in entries:
        return None, f"{folder}: the folder that it was imported from had no tokenizer that Triplane reads."
    try:
        return base.load(config.data, folder, lambda _: None), ""
    except UserError as error:
        return None, f"{folder}: its tokenizer cannot be opened: {error}"


def _without_gradients(parallel: ParallelConfig) -> ParallelConfig:
    """The same division of weights, with nothing for gradients."""
    plain = dataclasses.replace(
        parallel, use_distributed_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False
    )
    if plain.fully_sharded:
        return plain
    return dataclasses.replace(plain, data_parallel_sharding_strategy=None, ddp_bucket_size=None)


def _to_compute(config: RunConfig, parallel: ParallelConfig, flags: ModelFlags, world_size: int) -> RunConfig:
    """The run's configuration without what is of training, of its own layout, or of its own device."""
    replicas = 1
    if world_size % (replica := parallel.tensor_model_parallel_size * parallel.context_parallel_size) == 0:
        replicas = max(1, world_size // (replica * parallel.pipeline_model_parallel_size))
    precision = config.precision.without_products()
    device = "cpu" if flags.device == "auto" and not launch.count_gpus(os.environ) else flags.device
    return RunConfig(
        device=device,
        parallel=parallel,
        model=config.model,
        kernels=KernelsConfig(attention_backend=config.kernels.attention_backend),
        precision=dataclasses.replace(precision, dtype=flags.dtype or precision.dtype, loss_scale=None),
        data=config.data,
        train=TrainConfig(
            seed=config.train.seed,
            global_batch_size=replicas * parallel.pipeline_model_parallel_size,
        ),
    )
