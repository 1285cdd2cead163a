"""A sample continuation of a prompt by the model being trained, in whatever layout it is trained."""

import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizers import Tokenizer
from models.layers.cuda_graphs import kernel_by_kernel
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from training.checkpoint import fp8_state, settled


@torch.no_grad()
def continuation(
    chunks: Chunks,
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    ranks: Ranks,
    *,
    seq_length: int,
    padded_vocab_size: int,
    temperature: float = 0.7,
) -> str:
    """``prompt`` and ``new_tokens`` sampled tokens as text, the same on every rank. Needs a layout with CP 1.

    No cache of keys and values: each token costs a forward pass over ``seq_length`` positions. It is meant for a look
    at a model in training, not for serving.
    """
    for chunk in chunks:
        chunk.eval()
    ids = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))
    draw = torch.Generator().manual_seed(0)
    with settled(chunks), kernel_by_kernel(chunks), fp8_state.kept(chunks):
        for _ in range(new_tokens):
            logits = last_logits(chunks, ids[-seq_length:], ranks, seq_length, padded_vocab_size)[
                : tokenizer.vocab_size
            ]
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=draw)])
    for chunk in chunks:
        chunk.train()
    return tokenizer.decode(ids.tolist())


def last_logits(chunks: Chunks, window: Tensor, ranks: Ranks, seq_length: int, padded_vocab_size: int) -> Tensor:
    """fp32 [padded vocabulary] after the last token of ``window`` [at most seq_length] int64, on every rank."""
    tokens = torch.zeros(1, seq_length, dtype=torch.int64, device=ranks.device)
    tokens[0, : len(window)] = window
    output = through_stages(chunks, tokens, ranks)
    logits = torch.empty(padded_vocab_size, device=ranks.device)
    if output is not None:
        local = output[0, len(window) - 1].float().contiguous()  # [padded vocabulary / tp]
        parts = [torch.empty_like(local) for _ in range(ranks.layout.tp)]
        dist.all_gather(parts, local, group=ranks.pgs.tp)
        logits = torch.cat(parts)
    dist.broadcast(logits, src=dist.get_global_rank(ranks.pgs.pp, ranks.layout.pp - 1), group=ranks.pgs.pp)
    # One replica decides for all, so that no rounding can make two of them part ways.
    dist.broadcast(logits, src=dist.get_global_rank(ranks.pgs.dp_cp, 0), group=ranks.pgs.dp_cp)
    return logits.cpu()


def through_stages(chunks: Chunks, tokens: Tensor, ranks: Ranks) -> Tensor | None:
    """One forward pass of ``tokens`` [1, s]: logits [1, s, vocabulary / tp] on the last stage, None elsewhere.

    Activations go from stage to stage by plain sends, and around once more for every further virtual stage.
    """
    config, stages = chunks[0].config, ranks.layout.pp
    shape = (tokens.shape[1] // (ranks.layout.tp if config.sequence_parallel else 1), 1, config.hidden_size)
    positions = torch.arange(tokens.shape[1], device=ranks.device)[None]
    before, after = (dist.get_global_rank(ranks.pgs.pp, (ranks.at.pp + way) % stages) for way in (-1, 1))
    output: Tensor | None = None
    for number, chunk in enumerate(chunks):
        first = ranks.is_first_stage and number == 0
        last = ranks.is_last_stage and number == len(chunks) - 1
        if not first:
            received = torch.empty(shape, dtype=config.params_dtype, device=ranks.device)
            dist.recv(received, src=before, group=ranks.pgs.pp)
            unwrap(chunk).set_input_tensor(received)
        output = chunk(tokens, positions, None) if first else chunk(None, None, None)
        if not last:
            dist.send(output.contiguous(), dst=after, group=ranks.pgs.pp)
            output = None
    return output
