"""How large a model's outputs are, and how far training moves them, on one rank."""

from pathlib import Path

import torch
from torch import Tensor

from data.prepared import Prepared
from models.resolve import resolve
from parallel import groups
from parallel.ddp import unwrap
from parallel.launch import Identity
from parallel.layout import Layout
from tools.parity.outputs import LOGITS, Outputs, our_modules, record, record_logits
from tools.parity.probe import open_stream
from training import train
from training.config.run_config import RunConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

SAMPLES = 4


def write_changes(config: RunConfig, prepared: Prepared, output: Path) -> None:
    """Train ``config.train.train_iters`` iterations; save (losses, output -> RMS of its change in them), outputs of
    blocks, embeddings and logits for the same random tokens before and after."""
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    with groups.start(Layout(), Identity(), device="cpu", seed=config.train.seed, parallel=config.parallel) as ranks:
        parts, progress, losses = build_parts(config, shape, ranks), Progress(), list[float]()
        chunk, found = unwrap(parts.chunks[0]), Outputs()
        record(our_modules(shape, chunk), found, lambda tensor: tensor)
        logits = record_logits(chunk.output_layer, found)
        random = torch.Generator().manual_seed(1)
        tokens = torch.randint(shape.vocab_size, (SAMPLES, config.model.seq_length), generator=random)

        def outputs() -> Outputs:
            found.clear()
            logits.clear()
            with torch.no_grad():
                chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=tokens)
            return {**found, LOGITS: logits[-1][..., : shape.vocab_size]}

        before = outputs()
        stream = open_stream(config, prepared, ranks, progress)
        while progress.iteration < config.train.train_iters:
            progress, result = train.one_step(parts, stream, progress, StepRequests())
            losses.append(result.loss)
        stream.close()
        after = outputs()
        changes = {name: rms(after[name] - before[name]) for name in before}
    torch.save((losses, changes), output)


def rms(tensor: Tensor) -> float:
    """Root of the mean square."""
    return float(tensor.double().square().mean().sqrt())
