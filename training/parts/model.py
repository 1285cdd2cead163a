"""This rank's model chunks and their optimizer, as the configuration asks for them."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from models import gpt
from models.costs.recompute_plan import recompute_plans
from models.init import initialise
from models.kernels import fusions_on, kernel_problems
from models.layers import cross_entropy, restarting_rope
from models.layers.fp8 import resolve_recipe
from models.layers.spec import has_transformer_engine, provider
from models.layers.userbuffers import userbuffers
from models.shapes import GPTShape
from parallel import ddp
from parallel.groups import Ranks
from program.errors import SharedMistake
from training import optimizer
from training.averages import Averages, averages_of
from training.config.divisibility import fp8_problems
from training.config.incompatible import param_gather_problems
from training.config.run_config import RunConfig, kernel_setting
from training.custom.loss import load_loss
from training.memory.measured import own_case
from training.qk_clip import QKClip
from training.step import RankParts


def with_recipe(config: RunConfig, shape: GPTShape, ranks: Ranks) -> RunConfig:
    """config with this card's fp8 recipe where it says "auto", as config.toml and checkpoints then name it.

    Raises SharedMistake where the card cannot, or where that recipe multiplies none of the model's sizes.
    """
    if ranks.device.type == "cpu":
        return config
    precision = resolve_recipe(config.precision, ranks.device)
    problems = fp8_problems(config.model, shape, config.parallel, precision, config.train.micro_batch_size)
    problems += param_gather_problems(config.parallel, precision)
    if problems:
        raise SharedMistake(problems[0])
    return replace(config, precision=precision)


def overlap_of_tp(config: RunConfig, shape: GPTShape, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """The buffers of kernels.tp_comm_overlap, for as long as the model lives; enter it before ``build_parts``."""
    if not config.kernels.tp_comm_overlap:
        return contextlib.nullcontext()
    tokens = config.train.micro_batch_size * config.model.seq_length // ranks.layout.cp
    return userbuffers(ranks, config.precision, tokens, shape.hidden_size)


def build_parts(config: RunConfig, shape: GPTShape, ranks: Ranks) -> RankParts:
    """This rank's model chunks, ready for data parallelism, and their optimizer."""
    # A CPU has no weights in fp8; of mxfp8's, Megatron would leave the gathering to code that a step here has not.
    on_cpu = ranks.device.type == "cpu"
    precision = replace(config.precision, fp8_param_gather=False) if on_cpu else config.precision
    restarts = config.data.restarts_alone and shape.position_embedding_type == "rope"
    blueprint = gpt.Blueprint(
        model=config.model,
        shape=shape,
        parallel=config.parallel,
        precision=precision,
        seed=config.train.seed,
        kernels=gpt.Kernels(
            backend=provider(ranks.device, documents=config.data.reset_attention_mask or restarts),
            fusions=fusions(config, shape, ranks),
            attention_backend=config.kernels.attention_backend,
            deterministic=config.train.deterministic_mode,
            compile_blocks=config.train.compile,
            max_logits=config.optimizer.qk_clip,
        ),
        recompute=recomputed(config, shape, ranks),
        offloaded_blocks=config.train.cpu_offloading_num_layers,
        offload_modules=config.train.offload_modules,
        own_loss=load_loss(config.train.loss),
        loss_chunk_tokens=config.train.cross_entropy_chunk_tokens,
    )
    model = gpt.build(blueprint, ranks)
    if restarts:
        restarting_rope.install(model)
    fill = partial(initialise, shape=shape, seed=config.train.seed)
    chunks = ddp.wrap(model, config.parallel, precision, ranks, fill, config.optimizer.optimizer_cpu_offload)
    tokens = config.train.micro_batch_size * config.model.seq_length // ranks.layout.cp
    optim = optimizer.build(chunks, config.optimizer, config.parallel, precision, ranks, tokens, shape.width_mult)
    if config.optimizer.optimizer == "muon":
        from training.muon.build import install  # its package is an extra

        install(optim, chunks, config.optimizer, config.parallel, ranks)
    if config.optimizer.qk_clip:
        optim.qk_clip = QKClip(optim, chunks, shape, config.optimizer, ranks)
    if averages_of(config.train):
        optim.averages = Averages(optim, config.train)
    return RankParts(config=config, chunks=chunks, optimizer=optim, ranks=ranks)


def recomputed(config: RunConfig, shape: GPTShape, ranks: Ranks) -> gpt.Recompute:
    """What this rank computes again. Raises SharedMistake where train.recompute's budget is too small for it."""
    train = config.train
    if train.recompute_budget is None:
        return gpt.Recompute(
            granularity=train.recompute_granularity,
            method=train.recompute_method,
            num_layers=train.recompute_num_layers,
            modules=train.recompute_modules,
        )
    plan = recompute_plans(own_case(config, shape, ranks), shape)[ranks.at.pp]
    if plan.whole_blocks:
        return gpt.Recompute(granularity="full", method="uniform", num_layers=1)
    return gpt.Recompute(sublayers=plan.numbers(ranks.layout.vpp))


def fusions(
    config: RunConfig, shape: GPTShape, ranks: Ranks, say: Callable[[str], None] = lambda _: None
) -> frozenset[str]:
    """Fused kernels that are on. Collective, where Transformer Engine's cross entropy could run: it is compared with
    the plain one. Raises SharedMistake for one that is asked for where it cannot run. say: why one is off."""
    has = has_transformer_engine(ranks.device)
    setting = kernel_setting(config, shape, cuda=ranks.device.type == "cuda", transformer_engine=has)
    if problems := kernel_problems(config.kernels, setting):
        raise SharedMistake("\n".join(problems))
    on = fusions_on(config.kernels, setting)
    name, columns = "cross_entropy_loss_fusion", shape.padded_vocab_size // ranks.layout.tp
    if name in on and (why := cross_entropy.disproof(ranks.pgs.tp, columns, ranks.device)):
        say(f"cross entropy is not fused: {why}")
        on -= {name}
    return on
