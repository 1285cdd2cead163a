"""A tiny model and its optimizer on forked ranks: trained, saved, restored, and looked at as global tensors."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.loader import Batch, to_batch
from models.config import ModelConfig
from models.names import canonical
from models.resolve import resolve
from parallel import groups, launch, local_ranks, output
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.groups import Ranks
from parallel.launch import Identity
from training import checkpoint
from training.checkpoint import optimizer_state
from training.checkpoint.model_state import model_boxes
from training.config.lr_schedule import ScheduledRates
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.step import RankParts, StepRequests, train_step

VOCABULARY, SEQ_LENGTH, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 257, 16, 8, 2
DENSE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 176}
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 88}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}


def configuration(parallel: ParallelConfig, **model: Any) -> RunConfig:
    """A Llama-like model in fp32; ``model`` as in DENSE, TINY and EXPERTS."""
    return RunConfig(
        device="cpu",
        parallel=parallel,
        model=ModelConfig(seq_length=SEQ_LENGTH, vocab_size=VOCABULARY, **model),
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, seed=7),
    )


@dataclass
class FaultTrainer:
    """A rank's part of a model, and how far it has come."""

    parts: RankParts
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.ranks, self.chunks, self.optimizer = self.parts.ranks, self.parts.chunks, self.parts.optimizer

    def train(self, until: int) -> list[float]:
        """Losses of the iterations up to ``until``, on batches that are the same in every layout."""
        losses = []
        while self.progress.iteration < until:
            microbatches = batches(self.progress.iteration, self.ranks)
            result = train_step(self.parts, microbatches, ScheduledRates(3e-3, 0.1), StepRequests())
            iteration = self.progress.iteration + 1
            self.progress = Progress(iteration=iteration, consumed_samples=iteration * GLOBAL_BATCH_SIZE)
            losses.append(result.loss)
        return losses

    def save(self, root: Path, contents: checkpoint.Contents) -> Path:
        """A checkpoint of this moment, in the foreground."""
        return checkpoint.save(root, self.progress, self.chunks, self.optimizer, self.ranks, contents)


def batches(iteration: int, ranks: Ranks) -> list[Batch | None]:
    """This data rank's share of a global batch of random tokens."""
    generator = torch.Generator().manual_seed(iteration)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    mine = tokens.chunk(ranks.layout.dp)[ranks.at.dp]
    return [to_batch(rows.int(), ranks.device) for rows in mine.split(MICRO_BATCH_SIZE)]


@contextlib.contextmanager
def started(config: RunConfig, identity: Identity, console_fd: int | None = None) -> Iterator[FaultTrainer]:
    """Groups, model and optimizer of this rank."""
    layout = config.layout(identity.world_size)
    with groups.start(layout, identity, device="cpu", seed=config.train.seed, console_fd=console_fd) as ranks:
        yield FaultTrainer(build_parts(config, resolve(config.model, VOCABULARY), ranks))


def on_ranks(world_size: int, logs: Path, run: Callable[[Identity], None]) -> str | None:
    """Call ``run`` on forked ranks; what went wrong on the one that failed first, or None."""

    def rank(identity: Identity) -> int:
        with output.own_output(logs, identity, every_rank=False):
            run(identity)
        return 0

    code, failure = local_ranks.fork_ranks(world_size, rank)
    if failure is not None:
        return f"rank {failure.rank}: {failure.text}"
    return f"exit code {code}" if code else None


def as_launcher(logs: Path) -> contextlib.AbstractContextManager[int | None]:
    """For the process that forks: libraries' noise goes to a file."""
    return output.own_output(logs, launch.Identity(), every_rank=False)


# ---- what a rank holds, as global tensors


Held = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def held(trainer: FaultTrainer) -> Iterator[Held]:
    """(name, global shape, offset, data) of every piece of weights, and of the optimizer's three states."""
    for box in model_boxes(trainer.chunks, trainer.ranks):
        yield canonical(box.key), box.global_shape, box.offset, box.data
    for box in optimizer_state.optimizer_boxes(trainer.chunks, trainer.optimizer, trainer.ranks):
        state, key = box.key.removeprefix(optimizer_state.PREFIX).split(".", 1)
        yield f"{state} of {canonical(key)}", box.global_shape, box.offset, box.data


def own_digest(trainer: FaultTrainer) -> str:
    """Of all that this rank holds. No communication."""
    digest = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for name, _, offset, data in held(trainer):
            digest.update(f"{name} {offset}".encode())
            digest.update(data.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def global_digests(trainer: FaultTrainer) -> dict[str, str]:
    """On rank 0: name -> digest of each global tensor. Collective.

    Raises ValueError where copies of an element on different ranks differ, or no rank holds it.
    """
    with checkpoint.settled(trainer.chunks), torch.no_grad():
        own = [(name, shape, offset, data.detach().clone()) for name, shape, offset, data in held(trainer)]
    everybody: list[Any] = [None] * trainer.ranks.identity.world_size
    dist.gather_object(own, everybody if trainer.ranks.rank == 0 else None)
    if trainer.ranks.rank:
        return {}
    pieces: dict[str, list[Held]] = {}
    for piece in (piece for rank in everybody for piece in rank):
        pieces.setdefault(piece[0], []).append(piece)
    return {name: _digest(_whole(found)) for name, found in pieces.items()}


def _whole(pieces: list[Held]) -> torch.Tensor:
    name, shape, _, first = pieces[0]
    whole = torch.zeros(shape, dtype=first.dtype)
    filled = torch.zeros(shape, dtype=torch.bool)
    for _, _, offset, data in pieces:
        place = tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))
        if not bool((~filled[place] | (whole[place] == data)).all()):
            raise ValueError(f"copies of {name} differ")
        whole[place] = data
        filled[place] = True
    if not bool(filled.all()):
        raise ValueError(f"{name} is not held whole")
    return whole


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
