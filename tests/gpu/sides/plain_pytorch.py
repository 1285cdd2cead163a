"""Plain PyTorch's step: blocks and loss compiled, SDPA, fused AdamW, fp32 weights under autocast to 16 bits.

The residual stream is in 16 bits, too, as in models whose weights are. On several GPUs each block, and what is around
them, are FSDP2's units, whose gradients travel once a step.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from parallel.precision import params_dtype
from tests.benchmarks.step.reference import PlainGPT, build_optimizer
from tests.gpu.sides.job import Job


@contextlib.contextmanager
def steps(job: Job) -> Iterator[Callable[[], float]]:
    """One update; this rank's mean loss."""
    config, rates, device = job.config, job.config.optimizer, job.ranks.device
    dtype = params_dtype(config.precision)
    with torch.device(device):
        model = PlainGPT(job.shape, config.model.seq_length, config.train.seed)
    if device.type == "cuda":
        compile_parts(model)
    if job.ranks.layout.dp > 1:
        shard(model, job.ranks.layout.dp, device.type)
    narrow = dtype != torch.float32
    if narrow:
        model.word_embeddings.register_forward_hook(lambda _module, _given, found: found.to(dtype))
    betas = (rates.adam_beta1, rates.adam_beta2)
    optimizer = build_optimizer(model, rates.lr, betas, rates.adam_eps, rates.weight_decay)

    def step() -> float:
        losses: list[Tensor] = []
        for number, batch in enumerate(job.microbatches, start=1):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(job.microbatches))
            with torch.autocast(device.type, dtype, enabled=narrow):
                loss = model(batch.tokens, batch.labels) / len(job.microbatches)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), rates.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().item()

    yield step


def compile_parts(model: PlainGPT) -> None:
    """All blocks share what is compiled for one."""
    for block in model.layers:
        block.compile()
    model.mean_loss = torch.compile(model.mean_loss)


def shard(model: PlainGPT, ranks: int, kind: str) -> None:
    """Weights stay whole between forward and backward: they fit where Triplane's do."""
    mesh = init_device_mesh(kind, (ranks,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
