"""A checkpoint's model on ranks of any layout, for tools that compute with it and train nothing.

    opened = open_checkpoint(flags)                  (opened_checkpoint.py)
    code = on_ranks(opened, "tools.evaluate", work)  calls work(model: LoadedModel) on every rank

Ranks are made as pretrain_gpt.py makes them: those of torchrun or srun, forked ones on the CPU, new processes on GPUs.
Only weights are restored: there is no optimizer, and no memory for gradients.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data.tokenizers.base import Tokenizer
from models.shapes import GPTShape
from parallel import cuda_environment, failures, launch, local_ranks, output
from parallel.launch import Identity
from parallel.lean_imports import lean
from program.errors import UserError
from tools.shared.opened_checkpoint import OpenedCheckpoint
from training.checkpoint.chosen_weights import ChosenWeights
from training.cli import parse
from training.config.run_config import RunConfig

if TYPE_CHECKING:  # torch loads within
    from parallel.ddp import Chunks
    from parallel.groups import Ranks
    from training.generation.texts import TextModel

Device = Literal["cpu", "cuda"]


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadedModel:
    """What every rank is given."""

    chunks: "Chunks"
    """In evaluation mode, without gradients."""
    ranks: "Ranks"
    """``ranks.say`` writes to stderr."""
    tokenizer: Tokenizer | None
    shape: GPTShape
    config: RunConfig
    folder: Path
    """The checkpoint."""
    weights: ChosenWeights
    stdout: int | None
    """On rank 0 the program's own stdout; libraries' words go elsewhere. See ``write``."""

    @property
    def numbers(self) -> str:
        """For a tool's first line: their format, and which average of the weights they are."""
        average = "" if self.weights == "trained" else f", weights {self.weights}"
        return f"{self.config.precision.dtype}{average}"

    @property
    def text_model(self) -> "TextModel":
        """For texts; of a checkpoint whose tokenizer was looked at before ranks started."""
        from training.generation.texts import TextModel

        assert self.tokenizer is not None
        return TextModel(chunks=self.chunks, ranks=self.ranks, tokenizer=self.tokenizer)

    def write(self, text: str) -> None:
        """``text`` to the program's stdout, from rank 0. Raises BrokenPipeError where nothing reads it any more."""
        data = memoryview(text.encode(errors="backslashreplace"))
        while self.stdout is not None and data:
            data = data[os.write(self.stdout, data) :]


@contextlib.contextmanager
def shown_once(environ: Mapping[str, str]) -> Iterator[None]:
    """Around a whole program: of the processes that torchrun or srun has started, which find the same mistakes of the
    user, the first one shows them."""
    try:
        yield
    except UserError as error:
        identity = launch.detect(environ)
        if identity is not None and identity.rank > 0:
            parse.fail(error, quiet=True)
        raise


def on_ranks(
    opened: OpenedCheckpoint,
    program: str,
    work: Callable[[LoadedModel], None],
    timeout_minutes: float = 10.0,
) -> int:
    """Load the model on its ranks and call ``work`` on each: the exit code. torch loads here.

    program: the module that runs; on GPUs each local rank is a process of it with the same arguments. timeout_minutes:
    how long a rank waits for another. Raises UserError, and RuntimeError with the first failing rank's traceback.
    """
    identity = launch.detect(os.environ)
    if opened.config.device != "cpu" and launch.count_gpus(os.environ):
        cuda_environment.prepare(os.environ, opened.config.parallel)
    device = launch.choose_device(opened.config.device, os.environ)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads
    if identity is None and device == "cuda" and opened.world_size > 1:
        return local_ranks.spawn_ranks(opened.world_size, [sys.executable, "-m", program, *sys.argv[1:]], os.environ)
    with tempfile.TemporaryDirectory(prefix="triplane-logs-") as scratch:
        logs = Path(scratch)
        with output.own_output(logs, Identity(), every_rank=False), lean(device):
            import training.checkpoint.weights
            import training.train  # noqa: F401  (once, for all ranks that are forked)
        run = partial(_run, opened, work, device, logs, timeout_minutes)
        if identity is not None or opened.world_size == 1:
            code, failure = failures.guard(run, identity or Identity())
        else:
            code, failure = local_ranks.fork_ranks(opened.world_size, run)
    if failure is None:
        return code
    if failure.code == 130:
        raise KeyboardInterrupt
    if failure.echo and identity is not None:
        return code  # another rank shows it
    if failure.code == 2:
        raise UserError(failure.text)
    last = failure.text.strip().rpartition("\n")[2]
    fix = " Divide the model over more GPUs: --layout." if "OutOfMemoryError" in last else ""
    raise RuntimeError(f"rank {failure.rank} of {opened.world_size} failed: {last}{fix}\n{failure.text}{failure.notes}")


def _run(
    opened: OpenedCheckpoint,
    work: Callable[[LoadedModel], None],
    device: Device,
    logs: Path,
    timeout_minutes: float,
    identity: Identity,
) -> int:
    """One rank."""
    launch.set_rendezvous(os.environ, identity)  # type: ignore[arg-type]
    stderr = os.dup(2) if identity.rank == 0 else None
    with (
        output.own_output(logs, identity, every_rank=False) as stdout,
        loaded(opened, identity, device, stderr, stdout, timeout_minutes) as model,
    ):
        work(model)
    return 0


@contextlib.contextmanager
def loaded(
    opened: OpenedCheckpoint,
    identity: Identity,
    device: Device,
    stderr: int | None = None,
    stdout: int | None = None,
    timeout_minutes: float = 10.0,
) -> Iterator[LoadedModel]:
    """The model on this rank, whose groups start and end with the context.

    stderr, stdout: descriptors for words and for results, on rank 0. Raises UserError for a checkpoint that is damaged.
    """
    from parallel import groups
    from training.config.recipe import dump

    config = opened.config
    with groups.start(
        config.layout(identity.world_size),
        identity,
        device=device,
        seed=config.train.seed,
        meeting=groups.Meeting(
            timeout_minutes=timeout_minutes,
            facts={"the checkpoint and its configuration": f"{opened.folder}\n{dump(config)}"},
        ),
        parallel=config.parallel,
        console_fd=stderr,
    ) as ranks:
        yield build(opened, ranks, stdout)


def build(opened: OpenedCheckpoint, ranks: "Ranks", stdout: int | None = None) -> LoadedModel:
    """The model with the checkpoint's weights. Raises UserError for a checkpoint that is damaged."""
    import torch

    from models import gpt
    from parallel import ddp
    from training.checkpoint.weights import restore_weights
    from training.parts.model import fusions

    config, shape = opened.config, opened.shape
    with torch.no_grad():
        blueprint = gpt.Blueprint(
            model=config.model,
            shape=shape,
            parallel=config.parallel,
            precision=config.precision,
            seed=config.train.seed,
            kernels=gpt.Kernels(
                fusions=fusions(config, shape, ranks), attention_backend=config.kernels.attention_backend
            ),
        )
        model = gpt.build(blueprint, ranks)
        for chunk in model:
            chunk.requires_grad_(False)  # for which Megatron's DDP then makes no memory
        chunks = ddp.wrap(model, config.parallel, config.precision, ranks, fill=lambda _: None)
        with opened.held.reading() as files:
            restore_weights(files, chunks, ranks, prefix=opened.prefix)
    for wrapped in chunks:
        wrapped.eval()
    return LoadedModel(
        chunks=chunks, ranks=ranks, tokenizer=opened.tokenizer, shape=shape, config=config, folder=opened.folder,
        weights=opened.weights, stdout=stdout,
    )  # fmt: skip
