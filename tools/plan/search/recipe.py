"""A plan as a recipe for pretrain_gpt.py and the line that starts it."""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any, Literal

from models.costs.candidate import Candidate, parallel_config
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.megatron_fields import parse
from program.errors import UserError
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.request import PlanRequest
from tools.shared.written import check_new, write_new
from training.config.divisibility import context_problems
from training.config.incompatible import exchange_problems
from training.config.optimizer_config import OVERLAP, STATE_FIELDS, OptimizerConfig
from training.config.recipe import dump, dump_changed
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig

Exchange = Literal["p2p", "a2a", "all_gather"]
RECOMPUTED = {"none": None, "full": "full:uniform:1"}
"""train.recompute by a candidate's name; any other is a module of "selective"."""
EXCHANGES: tuple[Exchange, ...] = ("p2p", "all_gather")
"""Of keys and values over context ranks, whatever their number: a2a needs heads that divide by it."""


def configuration(question: PlanRequest, layout: Candidate, base: RunConfig | None = None) -> RunConfig:
    """The sections that a layout decides, over those of the recipe that the question came from."""
    model = question.model
    if base is None:  # the vocabulary that was planned for, not that of the built-in tokenizer
        base = RunConfig()
        model = dataclasses.replace(model, vocab_size=question.shape.vocab_size)
    kernels = dataclasses.replace(base.kernels, cuda_graph_impl="local") if question.cuda_graphs else base.kernels
    return dataclasses.replace(
        base,
        nproc=None,
        device="auto" if base.device == "cpu" else base.device,
        model=model,
        kernels=kernels,
        parallel=_parallel(base, layout, question),
        precision=_precision(base.precision, layout.precision),
        optimizer=dataclasses.replace(base.optimizer, **_kept_state(base.optimizer, question, layout)),
        train=_train(base.train, question, layout),
    )


def _kept_state(base: OptimizerConfig, question: PlanRequest, layout: Candidate) -> dict[str, Any]:
    if layout.zero == 0:
        return {}
    if layout.zero > 1:  # all shards, or none
        away = question.optimizer.optimizer_cpu_offload
        kept = tuple(each for each in base.megatron if not each.startswith(OVERLAP))
        return {"optimizer_cpu_offload": away, "optimizer_offload_fraction": 1.0, "megatron": kept}
    names = ("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer", *STATE_FIELDS)
    return {name: getattr(question.optimizer, name) for name in names}


def _parallel(base: RunConfig, layout: Candidate, question: PlanRequest) -> ParallelConfig:
    shape = question.shape
    planned, kept = parallel_config(layout, experts=shape.num_moe_experts > 0), base.parallel
    return dataclasses.replace(
        planned,
        moe_token_dispatcher_type=kept.moe_token_dispatcher_type,
        cp_comm_type=_exchange(planned, shape, kept.cp_comm_type),
        ddp_bucket_size=kept.ddp_bucket_size if layout.zero <= 1 else None,  # DDP's, which shards do without
        distributed_timeout_minutes=kept.distributed_timeout_minutes,
        megatron=_that_can_be(kept, planned, captured=question.cuda_graphs, experts=shape.num_moe_experts > 0),
    )


def _that_can_be(kept: ParallelConfig, planned: ParallelConfig, *, captured: bool, experts: bool) -> tuple[str, ...]:
    """The entries of ``megatron`` without those that RunConfig.problems would refuse of this layout."""
    if planned.fully_sharded:
        return tuple(each for each in kept.megatron if each not in kept.of_ddp)
    if kept.nccl_ub and (captured or (experts and planned.pipeline_model_parallel_size > 1)):
        return tuple(each for each in kept.megatron if "nccl_ub" not in parse([each]))
    return kept.megatron


def _exchange(planned: ParallelConfig, shape: GPTShape, kept: Exchange) -> Exchange:
    """How keys and values reach all context ranks: the recipe's way, or the first that can carry this attention."""
    for kind in (kept, *EXCHANGES):
        tried = dataclasses.replace(planned, cp_comm_type=kind)
        if not exchange_problems(shape, tried, "cuda") and not context_problems(shape, tried):
            return kind
    return kept


def _precision(base: PrecisionConfig, name: str) -> PrecisionConfig:
    if name == "fp8":
        return dataclasses.replace(base, dtype="bf16", fp8=base.fp8 or "hybrid", fp4=None, loss_scale=None)
    if name == base.fp4_recipe:
        own = dataclasses.replace(base, fp8=None, fp8_param_gather=False)
        return dataclasses.replace(own, dtype="bf16", fp4="e2m1", loss_scale=None)
    scale = base.loss_scale if name == "fp16" else None
    return dataclasses.replace(base.without_products(), dtype=name, loss_scale=scale)  # type: ignore[arg-type]


def _train(base: TrainConfig, question: PlanRequest, layout: Candidate) -> TrainConfig:
    return dataclasses.replace(
        base,
        global_batch_size=question.global_batch_size,
        micro_batch_size=layout.mbs,
        cross_entropy_chunk_tokens=question.cross_entropy_chunk_tokens,
        cpu_offloading_num_layers=question.cpu_offloading_num_layers,
        offload_modules=question.offload_modules,
        compile=question.compile,
        recompute=RECOMPUTED.get(layout.recompute, f"selective:{layout.recompute}"),
    )


def problems(question: PlanRequest, layout: Candidate, base: RunConfig | None = None) -> list[str]:
    """What pretrain_gpt.py would refuse; empty where it would run."""
    return configuration(question, layout, base).problems(question.num_gpus)


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Length:
    """How long a run is to be, where --tokens says so."""

    train_iters: int
    save_interval: int
    why_so_often: str


PATHS = '# paths = ["shards/web*"]          # token files (.bin and .idx), JSON lines or parquet; see docs/data.md\n'
TOKENIZER = (
    '# tokenizer = "tokenizer.json"     # whose ids the token files hold: a file or a folder of Hugging Face\'s\n'
)


def write(
    path: Path, question: PlanRequest, plan: PricedLayout, base: RunConfig | None = None, length: Length | None = None,
    full: bool = False,
) -> str:  # fmt: skip
    """Writes the recipe; the sbatch line. full: all fields, not only those that are not at their defaults.

    Raises UserError where pretrain_gpt.py would refuse it.
    """
    config = lasting(configuration(question, plan.layout, base), length)
    if refused := config.problems(question.num_gpus):
        raise UserError(
            f"{plan.layout}: pretrain_gpt.py would refuse this layout, so no recipe is written:\n  "
            + "\n  ".join(refused)
            + "\nSearch for one that it accepts, or change the recipe that this one is made from."
        )
    check_new(path)
    command, low, high = sbatch(question, path), plan.interval.low, plan.interval.high
    of_card = "" if plan.fits_card else f" of {plan.memory_bytes / 2**30:.0f}"
    of_host = "" if plan.fits_host else f", {plan.host_bytes / 2**30:.0f} GiB a rank in the host's memory"
    too_much = "" if plan.fits else f"{of_card}{of_host}: more than is safe, it may run out of memory"
    head = (
        f"# {question.model.shape} on {question.num_gpus:,} x {question.cluster.gpu.name} ({question.cluster.name}): "
        f"{plan.layout}. Planned, not run.\n"
        f"# Expected: {plan.step_s:.3g} s a step ({plan.step_s * low:.3g} to {plan.step_s * high:.3g}), "
        f"{plan.total_bytes / 2**30:.0f} GiB on the fullest rank{too_much}.\n# Run: {command}\n"
    )
    text = head + (dump(config) if full else _short(config))
    if length is not None:
        why = textwrap.indent(textwrap.fill(length.why_so_often, 118, break_long_words=False), "# ")
        text = text.replace("\nsave_interval = ", f"\n{why}\nsave_interval = ", 1)
    write_new(path, text)
    return command


def _short(config: RunConfig) -> str:
    """What is not at its default; of data that there is not, comments in its place."""
    text = dump_changed(config)
    comments = "" if config.data.paths or config.data.streamed else PATHS
    comments += TOKENIZER if config.data.tokenizer == RunConfig().data.tokenizer else ""
    before, header, after = text.partition("\n[data]\n")
    if header or not comments:
        return f"{before}{header}{comments}{after}"
    before, optimizer, after = text.partition("[optimizer]\n" if "[optimizer]\n" in text else "[train]\n")
    return f"{before}[data]\n{comments}\n{optimizer}{after}"


def lasting(config: RunConfig, length: Length | None) -> RunConfig:
    """The same for so many iterations, with checkpoints that far apart; without a length, as it is."""
    if length is None:
        return config
    train = dataclasses.replace(config.train, train_iters=length.train_iters)
    checkpoint = dataclasses.replace(config.checkpoint, save_interval=length.save_interval)
    return dataclasses.replace(config, train=train, checkpoint=checkpoint)


def sbatch(question: PlanRequest, path: Path) -> str:
    """The line that starts it; a node of the script's own eight GPUs needs no further flags."""
    node = min(question.cluster.node.gpus_per_node, question.num_gpus)
    flags = [f"--nodes {-(-question.num_gpus // node)}"]
    if node != 8:
        flags.append(f"--ntasks-per-node {node} --gpus-per-node {node}")
    return f"sbatch {' '.join(flags)} slurm/pretrain.sbatch {path}"
