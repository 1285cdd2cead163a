"""``train.loss``: the user's function that makes each token's loss, tried on a few tokens before it is trained with."""

from collections.abc import Callable

import torch
from torch import Tensor

from data.loader import Batch
from models.layers.cross_entropy import TokenLoss
from program.errors import SharedMistake
from program.users_code import named
from training.config.import_path import load_function, raised

FIELD = "train.loss"
SAMPLES, TOKENS = 2, 8
"""Of the batch that it is tried on."""


def load_loss(path: str | None) -> TokenLoss | None:
    """The function of an import path; None of None. Raises SharedMistake where it cannot be called as a loss is."""
    if path is None:
        return None
    return named(f"your loss {path} ({FIELD})", load_function(FIELD, path, ("losses", "log_z", "batch")))


def check_loss(path: str, context_parallel: bool) -> None:
    """Try it. Raises SharedMistake where its result cannot be trained on, or would be another in another layout.

    context_parallel: samples are cut over ranks, so that a token's loss must not need the other part.
    """
    loss = load_loss(path)
    assert loss is not None
    losses, log_z, batch = _example()
    try:
        whole = loss(losses.requires_grad_(), log_z.requires_grad_(), batch)
    except Exception as error:
        raise SharedMistake(f'{FIELD} "{path}": {raised(error)}') from error
    if problem := _result_problem(whole, losses):
        raise SharedMistake(f'{FIELD} "{path}": {problem}')
    cuts = {"of the other samples of its microbatch": 0}
    if context_parallel:
        cuts["of other tokens of its sample, which lie on another context rank"] = 1
    for what, dim in cuts.items():
        if not torch.allclose(whole, _in_halves(loss, losses, log_z, batch, dim), rtol=1e-5, atol=1e-6):
            raise SharedMistake(
                f'{FIELD} "{path}": the loss of a token depends on those {what}: it would change with micro_batch_size '
                "and the layout. Make it of the token's own losses, log_z and batch."
            )


def _example() -> tuple[Tensor, Tensor, Batch]:
    """Tokens as a run may have them: losses above 0, one token masked."""
    random = torch.Generator().manual_seed(1)
    losses = 1 + 4 * torch.rand(SAMPLES, TOKENS, generator=random)
    log_z = 3 + torch.rand(SAMPLES, TOKENS, generator=random)
    tokens = torch.randint(200, (SAMPLES, TOKENS + 1), generator=random)
    mask = torch.ones(SAMPLES, TOKENS)
    mask[0, 0] = 0
    positions = torch.arange(TOKENS).expand(SAMPLES, TOKENS).contiguous()
    return losses, log_z, Batch(tokens[:, :-1], tokens[:, 1:], mask, positions)


def _result_problem(result: object, losses: Tensor) -> str | None:
    if not isinstance(result, Tensor):
        return f"expected a tensor of each token's loss, found {type(result).__name__}."
    if result.shape != losses.shape:
        return (
            f"expected a loss for each token, of the shape of losses {list(losses.shape)}, found {list(result.shape)}. "
            "The mean over unmasked tokens of the global batch is taken later."
        )
    if not result.is_floating_point() or not result.requires_grad:
        return "its result has no gradient with respect to losses and log_z. Use torch's functions, without detach."
    return None if bool(result.isfinite().all()) else "it gives NaN or Inf for finite losses."


def _in_halves(loss: Callable[..., Tensor], losses: Tensor, log_z: Tensor, batch: Batch, dim: int) -> Tensor:
    """The losses of each half of the samples, or of the tokens, by itself."""
    halves = zip(
        losses.chunk(2, dim),
        log_z.chunk(2, dim),
        *(one.chunk(2, dim) for one in batch if one is not None),
        strict=True,
    )
    return torch.cat([loss(own, z, Batch(*rest)) for own, z, *rest in halves], dim)
