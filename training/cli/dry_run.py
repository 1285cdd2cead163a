"""What ``--dry_run`` prints: the resolved recipe, then the plan as TOML comments.

The whole output is a valid recipe. Its length does not grow with the world.
"""

import contextlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from models.costs.candidate import ZERO
from models.costs.cases import MemoryCase, States
from models.costs.flops import flops_per_token
from models.costs.parameters import active_parameters, mtp_only_parameters, num_parameters
from models.costs.predict import of_parameter, of_stages, size
from models.costs.recompute_plan import described_plans, recompute_plans, recomputed_flops
from models.costs.stage_parameters import StageParameters, checkpoint_bytes, product_copies, stages
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.config import PrecisionConfig
from parallel.layout import Coordinates, Layout, bubble, smallest_world
from program.errors import UserError
from program.number_ranges import listed, read_ranges
from program.printing import columns
from training.checkpoint.folders import checkpoints
from training.checkpoint.stage_entry import position
from training.cli import parse, warnings
from training.cli.elastic import elastic_layout
from training.config.debug import debugged
from training.config.executed_flops import executed_flops_per_token
from training.config.run_config import RunConfig
from training.config.stages import of_stage
from training.config.stages import stages as stages_of_run
from training.custom.check import check
from training.memory.planned import as_case, planned_modules
from training.run_dir.kept_schedule import planned

MOST_ROWS = 16
"""Pipeline stages shown one by one; of more, the first and the last."""


def describe(config: RunConfig, explicit: frozenset[str] = frozenset()) -> str:
    """The plan of ``config.world_size`` ranks (None: nproc, else the fewest that its sizes fit).

    explicit: fields that flags have set, which win over --debug.
    Raises UserError with every problem that a run would have with it.
    """
    recipe = parse.dump(replace(config, dry_run=False, world_size=None))
    at = None
    if config.stage:
        with contextlib.suppress(UserError, OSError):  # the start says so
            at = position(checkpoints(Path(config.run_dir or "runs/run")), config.checkpoint)
    plan = stages_of_run(config, at)
    if not plan:
        recipe_config, _, parts = described(config, explicit)
        recipe = parse.dump(replace(recipe_config, dry_run=False, world_size=None))
    else:
        each = [described(one, explicit) for one in plan]
        parts = [stage_table([one[:2] for one in each])]
        for one, _, own in each:
            parts += [[f"[[stage]] {one.own_stage.first.name}"], *own]
    return recipe + "".join(f"#\n{_comment(part)}" for part in parts if part).removeprefix("#\n").rstrip("\n")


def described(config: RunConfig, explicit: frozenset[str]) -> tuple[RunConfig, Layout, list[list[str]]]:
    """A configuration as it would run, its layout, and its plan in paragraphs. Raises UserError as ``describe``."""
    given = config.world_size or config.nproc or smallest_world(config.parallel)
    debugging = debugged(config, given, explicit, {}, cuda=config.device != "cpu")
    config = debugging.config
    fitted = elastic_layout(config, given)
    with of_stage(config):
        parse.check(fitted.config, fitted.world_size)
    check(config, "cpu")
    config, world_size = replace(config, parallel=fitted.config.parallel), fitted.world_size
    layout = config.layout(world_size)
    shape = resolve(config.model, vocabulary_size(config))
    paragraphs = [
        debugging.lines,
        [*([fitted.words] if fitted.words else []), f"plan for {world_size:,} ranks: {layout}"],
        grid(layout) + (expert_grid(layout) if shape.num_moe_experts else []),
        model(config, shape),
        table(config, shape, layout),
        batches(config, layout),
        packing(config),
        compute(config, shape, world_size),
        saving(config, shape),
        [f"warning: {text}" for text in missing(config) + warnings.warnings(config, shape, layout)],
    ]
    return config, layout, paragraphs


def stage_table(planned_stages: Sequence[tuple[RunConfig, Layout]]) -> list[str]:
    """The run's ``[[stage]]`` tables, a row each; memory is that of the fullest rank."""
    rows = [("[[stage]]", "iterations", "samples", "tokens", "seq_length", "batch", "learning rate", "GiB", "layout")]
    for config, layout in planned_stages:
        shape = resolve(config.model, vocabulary_size(config))
        case = as_case(config, layout.world_size, shape, planned_modules(config))
        held = of_stages(case, shape, range(len(stages(shape, config.parallel))))
        first, end = config.own_stage.first, config.own_stage.end
        last = max(end.samples - config.train.global_batch_size, first.samples)
        rates = [config.schedule.learning_rate(at) for at in (first.samples, last)]
        rows.append(
            (first.name, f"{first.iteration + 1:,}-{end.iteration:,}", f"{end.samples - first.samples:,}",
             f"{end.tokens - first.tokens:,}",
             f"{config.model.seq_length:,}", f"{config.train.global_batch_size:,}",
             " to ".join(f"{rate:.3g}" for rate in rates), f"{max(part.total for part in held) / 2**30:.2f}",
             str(layout))
        )  # fmt: skip
    said = f"{len(planned_stages)} stages, {end.iteration:,} iterations, {end.tokens:,} tokens:"
    priced = f"python -m tools.plan stages --recipe RECIPE --num_gpus {layout.world_size} --cluster NAME"
    return [said, *columns(rows, left=(0, 8)), f"step times and price on a cluster: {priced}"]


def _comment(lines: Sequence[str]) -> str:
    """Lines as TOML comments of at most 120 columns."""
    wrapped = (textwrap.wrap(line, 118, subsequent_indent="    ", break_long_words=False) for line in lines)
    return "".join(f"# {line}\n" for lines in wrapped for line in lines)


def vocabulary_size(config: RunConfig) -> int | None:
    """The tokenizer's ids; None where they are not known on this machine."""
    name = config.data.tokenizer
    if name in ("byte", "builtin"):
        return 257 if name == "byte" else config.data.builtin_vocab_size
    from data.tokenizers.base import exists, open_named

    return open_named(name, config.data.eod_token).vocab_size if exists(name) else None


def missing(config: RunConfig) -> list[str]:
    """What a run would need and this machine, where it is only planned, has not got."""
    found = []
    if vocabulary_size(config) is None:
        counted = "Counted with the published vocabulary of model.shape"
        found.append(f"data.tokenizer: no file {config.data.tokenizer} on this machine. {counted}.")
    from data import sources

    shards = {"": config.data} if config.data.paths else {}
    for name, path in config.eval.validation_sets.items() if config.train.evaluates else ():
        shards[f"eval.validation_sets: {name}: "] = replace(config.data, paths=(), blend={path: 1.0}, blend_file=None)
    for what, data in shards.items():
        try:
            sources.inputs_of(sources.named(data)[0], data)
        except UserError as error:
            found.append(f"on this machine: {what}{str(error).removeprefix('data.blend: ')}")
    if files := tuple(name for name in config.data.streamed if not name.startswith("hf://")):
        from data.raw import inputs as raw_inputs

        try:
            raw_inputs.find(files, config.data.streamed_by, lambda left_out: None)  # training says it
        except UserError as error:
            found.append(f"on this machine: {error}")
    if config.eval.tasks:
        from training.evaluation.tasks import TaskRequest, check_names

        try:
            check_names(TaskRequest.of(config.eval, config.model.seq_length))
        except UserError as error:
            found.append(f"on this machine: {error}")
    return found


def packing(config: RunConfig) -> list[str]:
    """What best-fit packing costs of shards that are on this machine; ``missing`` says which are not."""
    if config.data.packing == "concatenate":
        return []
    from data.packing import planned

    with contextlib.suppress(UserError):
        found = planned(config.data, config.model.seq_length)
        return [f"best-fit packing of {name}: {waste}" for name, waste in found.items()]
    return []


def grid(layout: Layout) -> list[str]:
    """How rank numbers map to axes, and the first group of each axis: the others follow by the same step."""
    return _grid([("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp), ("pp", layout.pp)])


def expert_grid(layout: Layout) -> list[str]:
    """The same ranks as experts see them: EDP ranks hold the same ones, ETP a part of each of the same."""
    first, *groups = _grid([("etp", layout.etp), ("ep", layout.ep), ("edp", layout.edp), ("pp", layout.pp)])
    return [f"for experts, {first}", *(line for line in groups if not line.startswith("  PP"))]


def _grid(factors: Sequence[tuple[str, int]]) -> list[str]:
    """factors: each axis and its size, the fastest first."""
    terms, groups, step = [], [], 1
    world_size = math.prod(size for _, size in factors)
    for name, number in factors:
        if number > 1:
            terms.append(name if step == 1 else f"{step} {name}")
            ranks = range(0, step * number, step)
            count = _count(world_size // number, "group")
            groups.append(f"  {name.upper()} {number}: {_series(ranks)} is the first of {count}")
        step *= number
    return [f"rank = {' + '.join(terms) or '0'}", *groups]


def model(config: RunConfig, shape: GPTShape) -> list[str]:
    """The architecture, in a line for each of its parts."""
    return [
        f"model {config.model.title}: {shape.num_layers} layers, hidden {shape.hidden_size}, feed-forward "
        f"{shape.ffn_hidden_size} ({shape.activation}), {_attention(shape)}",
        *_parts(shape),
        f"  vocabulary {shape.vocab_size:,} (padded to {shape.padded_vocab_size:,}); {_parameters(shape)}; "
        f"{config.precision.dtype}" + _products(config.precision),
    ]


def _attention(shape: GPTShape) -> str:
    if not shape.multi_latent_attention:
        return f"{shape.num_attention_heads} heads in {shape.num_query_groups} groups of {shape.kv_channels} channels"
    queries = f"{shape.q_lora_rank} for queries, " if shape.q_lora_rank else ""
    return (
        f"{shape.num_attention_heads} heads of {shape.qk_head_dim} + {shape.qk_pos_emb_head_dim} rotary channels "
        f"(values {shape.v_head_dim}) from latents of {queries}{shape.kv_lora_rank} for keys and values"
    )


def _parts(shape: GPTShape) -> Iterator[str]:
    """What is not in every model: windows, experts, multi-token prediction."""
    if windowed := sum(shape.window_blocks):
        yield f"  sliding window of {shape.window_size[0] + 1:,} tokens in {_count(windowed, 'layer')}"
    if chunked := sum(shape.chunk_blocks):
        yield f"  chunks of {shape.attention_chunk_size:,} tokens in {_count(chunked, 'layer')}"
    if shape.num_moe_experts:
        shared = shape.moe_shared_expert_intermediate_size
        yield (
            f"  {_count(sum(shape.moe_blocks), 'layer')} with {shape.num_moe_experts} experts of "
            f"{shape.expert_ffn_hidden_size}, of which a token meets {shape.moe_router_topk}"
            + (f" and shared ones of {shared}" if shared else "")
        )
    if shape.mtp_num_layers:
        yield (
            f"  {_count(shape.mtp_num_layers, 'depth')} of multi-token prediction, on the last stage, with "
            f"{mtp_only_parameters(shape):,} of the parameters"
        )


def _parameters(shape: GPTShape) -> str:
    total = f"{num_parameters(shape):,} parameters"
    return f"{total}, {active_parameters(shape):,} active for a token" if shape.num_moe_experts else total


def table(config: RunConfig, shape: GPTShape, layout: Layout) -> list[str]:
    """One row a stage: ranks of the first replica, layers of each chunk, parameters and bytes of one rank."""
    found, case = stages(shape, config.parallel), as_case(config, layout.world_size, shape, planned_modules(config))
    held = of_stages(case, shape, range(len(found)))
    unit, scale = ("GiB", 2**30) if max(part.total for part in held) >= 2**30 else ("MiB", 2**20)
    sizes = ("weights", "gradients", "optimizer", "activations", "total")
    rows: list[tuple[str, ...]] = [("stage", "ranks of dp 0", "layers", "parameters", "on a rank", *sizes)]
    for number, (stage, part) in enumerate(zip(found, held, strict=True)):
        first = layout.rank(Coordinates(dp=0, pp=number, cp=0, tp=0))
        ranks = _span(range(first, first + layout.tp * layout.cp))
        layers = _some([_span(chunk) for chunk in stage.layers])
        parameters = f"{stage.parameters:,}", f"{stage.parameters_per_rank:,}"
        rows.append(
            (str(number), ranks, layers, *parameters, *(f"{getattr(part, name) / scale:.2f}" for name in sizes))
        )
    lines = columns(rows)
    if len(found) > MOST_ROWS:
        lines[1 + MOST_ROWS // 2 : -MOST_ROWS // 2] = [f"  ... {len(found) - MOST_ROWS} more stages ..."]
    beside = "the process and its libraries come on top"
    if case.software.cuda:
        more = f"{held[0].workspace / scale:.2f}"
        beside = f"total has {more} more, for CUDA's context, libraries, NCCL's buffers and fragmentation"
    said = f"  in {unit} on a rank: {_each(found, config, layout, bytes_per_parameter(config, case))}"
    if case.software.muon_steps:
        said += " (a matrix; 4 more where AdamW updates)"
    if ":" in config.optimizer.optimizer:
        said += f", as AdamW's: what {config.optimizer.optimizer} keeps is not known here"
    lines += [said, f"  activations at the peak of a step; {beside}"]
    if most := max(part.host for part in held):
        fullest = next(number for number, part in enumerate(held) if part.host == most)
        lines.append(
            f"  offloaded to the host: {size(most)} a rank of stage {fullest}, times the ranks of a node; torch rounds "
            "pinned tensors up to powers of two, which adds 44 % on average"
        )
    return lines


def bytes_per_parameter(config: RunConfig, case: MemoryCase) -> States:
    """What one parameter takes on its ranks together, Transformer Engine's copies included."""
    own = of_parameter(case.layout, case.software)
    casts = 0 if config.parallel.fully_sharded else product_copies(config.precision)
    return own._replace(weights=own.weights + casts)


def _products(precision: PrecisionConfig) -> str:
    name = precision.products
    return f", {name} {getattr(precision, name)}" if name else ""


def _each(found: Sequence[StageParameters], config: RunConfig, layout: Layout, each: States) -> str:
    """What the bytes of a rank are made of. each: of a parameter."""
    parallel, copies = config.parallel, config.parallel.num_distributed_optimizer_instances
    shards, expert_shards = layout.dp * layout.cp // copies, layout.edp // copies
    apart = shards != expert_shards and any(s.expert_parameters_per_rank for s in found)

    def part(size: float, zero: int) -> str:
        """zero: the stage of ZeRO from which on it is split."""
        if ZERO[parallel.sharding] < zero or shards == expert_shards == 1:
            return f"{size:g}"
        return f"{size:g} / {shards}" + (f" (/ {expert_shards} for those of experts)" if apart else "")

    more = product_copies(config.precision)
    casts = f" ({more:g} of them Transformer Engine's copies in {config.precision.products})" if more else ""
    weights, gradients, optimizer = part(each.weights, 3), part(each.gradients, 2), part(each.optimizer, 1)
    return f"for each parameter {weights}{casts} + {gradients} bytes and the optimizer's {optimizer}"


def batches(config: RunConfig, layout: Layout) -> list[str]:
    """Microbatches, the pipeline's bubble, tokens, and the schedule."""
    train, schedule = config.train, config.batches
    sizes = schedule.sizes()
    counts = [size // (train.micro_batch_size * layout.dp) for size in (sizes[0], sizes[-1])]
    samples = config.samples
    iterations = config.iterations
    ramp = f"{sizes[0]:,} rising to " if len(sizes) > 1 else ""
    microbatches = f"{counts[0]} rising to {counts[1]}" if len(sizes) > 1 else str(counts[1])
    lines = [
        f"batch: {ramp}{sizes[-1]:,} samples x {config.model.seq_length:,} tokens = "
        f"{sizes[-1] * config.model.seq_length:,} tokens an iteration; {microbatches} microbatches of "
        f"{train.micro_batch_size} on each of {_count(layout.dp, 'replica')}",
        f"  {iterations:,} iterations: {samples:,} samples, {samples * config.model.seq_length:,} tokens",
    ]
    for section, name in ((config.data, "samples_to_skip"), (train, "iterations_to_skip")):
        lines += [f"  {name}: {listed(read_ranges(getattr(section, name)))}"] if getattr(section, name) else []
    if often := passes_of(config, samples):
        lines.append(f"  {often}")
    if layout.pp > 1:
        share = bubble(layout, counts[-1])
        lines.append(
            f"  pipeline bubble (p - 1) / (v m) = {layout.pp - 1} / ({layout.vpp} x {counts[-1]}) = "
            f"{share:.1%} of the computing time, {share / (1 + share):.1%} of the whole (arXiv:2104.04473, "
            "section 2.2)"
        )
    _, said = planned(config)
    return [*lines, f"  {said.removeprefix('schedule: ')}"]


def passes_of(config: RunConfig, samples: int) -> str:
    """How often text is read, where it lies on this machine in shards and is read more than once; else empty."""
    from data import passes

    try:
        return passes.described(passes.planned(config.data, samples, config.model.seq_length))
    except UserError:
        return ""  # see missing


def compute(config: RunConfig, shape: GPTShape, world_size: int) -> list[str]:
    """FLOPs per token, and of the whole run."""
    train, seq_length = config.train, config.model.seq_length
    own = flops_per_token(shape, seq_length)
    case = as_case(config, world_size, shape, planned_modules(config))
    done = executed_flops_per_token(config, shape) + recomputed_flops(case, shape)
    whole = own * seq_length * config.samples
    again = f" ({done:.4g} with recomputation)" if done != own else ""
    lines = [f"compute: {own:.4g} model FLOPs per token{again}, {whole:.4g} in all"]
    if train.recompute_budget is not None:
        lines.append(f"  recomputed: {described_plans(recompute_plans(case, shape))}")
    return lines


def saving(config: RunConfig, shape: GPTShape) -> list[str]:
    """How many checkpoints of which size."""
    save, iterations = config.checkpoint, config.iterations
    size = checkpoint_bytes(num_parameters(shape, padded_vocab=True), config.precision)
    count = -(-iterations // (save.save_interval or iterations))
    minutes = f", and every {save.save_interval_minutes:g} minutes" if save.save_interval_minutes else ""
    return [
        f"checkpoints: {count:,}{minutes}, of about {_bytes(size)} each, of which the newest {save.keep} are kept",
    ]


def _series(ranks: Sequence[int]) -> str:
    """``0-7``, or ``0, 8, 16, ..., 120``."""
    return _span(ranks) if ranks[1] == ranks[0] + 1 else _some([str(rank) for rank in ranks])


def _some(words: list[str]) -> str:
    """The words; of more than five, the first three and the last."""
    return ", ".join(words if len(words) <= 5 else [*words[:3], "...", words[-1]])


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def _bytes(size: float) -> str:
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"
