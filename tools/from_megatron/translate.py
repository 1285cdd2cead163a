"""A command's words become a draft of a recipe: every flag ends in it, under irrelevant, or under unsupported."""

from collections.abc import Sequence

from tools.from_megatron import flags_translated as table
from tools.from_megatron import (
    rules_data,
    rules_model,
    rules_optimizer,
    rules_parallel,
    rules_profile,
    rules_schedule,
    rules_training,
    rules_vocabulary,
)
from tools.from_megatron.arguments import Arguments, parse
from tools.from_megatron.draft import Draft, said
from tools.from_megatron.flags import Flag, known
from tools.from_megatron.flags_forks import FIELDS_OF_FORKS
from tools.from_megatron.missing import refuse_missing
from tools.from_megatron.unknown import ScriptWord, joined


def translate(words: Sequence[ScriptWord], world: int | None = None) -> Draft:
    """The recipe of a Megatron-LM command, whose flags are ``words``.

    world: ranks that the script starts, where it says so.
    Raises UserError for a value that is missing, not a number, or not known though the model depends on it.
    """
    arguments = parse(words)
    refuse_missing(arguments, ["SCRIPT"])
    return translated(arguments, world)


def translated(arguments: Arguments, world: int | None, overrides: bool = False) -> Draft:
    """As ``translate``, of arguments whose values are known as far as they must be. overrides: as ``Draft`` has it."""
    draft = Draft(arguments, world, overrides=overrides)
    draft.notes += arguments.notes
    draft.irrelevant += arguments.irrelevant
    draft.other_model += arguments.other_model
    draft.not_understood += arguments.not_understood
    if arguments.unknown_flags:
        draft.open.append(f"further flags: {said(arguments.unknown_flags)} and was taken to be empty.")
        draft.wanted += arguments.unknown_flags
    draft.fields({name: entry for name, entry in table.FIELDS.items() if name not in ("lr", "micro-batch-size")})
    for name in ("lr", "micro-batch-size"):  # Megatron-LM has no defaults for them
        if draft.arguments.text(name) is None:
            lines = draft.not_understood if name == "lr" else draft.unsupported
            lines.append(f"no --{name}: Megatron-LM does not start without it. Without it, the recipe has our default.")
            draft.arguments.given[name] = ["3e-4" if name == "lr" else "1"]
        draft.fields({name: table.FIELDS[name]})
    draft.fields(dict(FIELDS_OF_FORKS))
    draft.switches(table.SWITCHES)
    for rule in (
        rules_parallel.parallel,
        rules_parallel.precision,
        rules_model.model,
        rules_schedule.schedules,
        rules_optimizer.optimizer,
        rules_training.training,
        rules_data.data,
        rules_vocabulary.vocabulary,
        rules_data.saving,
        rules_data.logging,
        rules_profile.profile,
    ):
        rule(draft)
    _kernels(draft)
    _megatron_fields(draft)
    _others(draft)
    return draft


def _kernels(draft: Draft) -> None:
    for flag, fusion in table.KERNELS_OFF.items():
        if draft.arguments.switch(flag):
            draft.add("kernels.off", fusion, f"--{flag}")
    for flag, fusion in table.KERNELS_ON.items():
        if draft.arguments.switch(flag):
            draft.irrelevant.append(f"--{flag}: {fusion} runs wherever it can, unless kernels.off names it")
    backend = draft.arguments.text("attention-backend")
    if backend == "local":
        draft.irrelevant.append("--attention-backend local: Triplane's own attention runs without Transformer Engine")
    elif backend:
        draft.put("kernels.attention_backend", backend, "--attention-backend")
    if draft.arguments.switch("enable-cuda-graph"):
        draft.put("kernels.cuda_graph_impl", "local", "--enable-cuda-graph")
    graphs = draft.arguments.text("cuda-graph-impl")
    if graphs in ("none", "local"):
        draft.put("kernels.cuda_graph_impl", graphs, "--cuda-graph-impl")
    elif graphs:
        draft.unsupported.append(f'--cuda-graph-impl {graphs}: Triplane has "local", Megatron\'s own graphs of layers.')


def _megatron_fields(draft: Draft) -> None:
    """Fields of megatron-core's own that the recipe hands through."""
    for field, entries in table.MEGATRON_FIELDS.items():
        for flag, entry in entries.items():
            name = flag.partition("=")[0]
            if draft.arguments.switch(name):
                text = draft.arguments.text(name)
                draft.add(field, entry if text is None else f"{entry}={text}", f"--{name}")


def _others(draft: Draft) -> None:
    flags = known()
    for name, values in draft.arguments.given.items():
        flag, written = flags[name], joined([f"--{name}", *values])
        if flag.fate == "irrelevant" and flag.harmless is None:
            draft.irrelevant.append(f"{written}: {flag.reason}")
        elif flag.fate != "translated" and _harmless(flag, values):
            draft.irrelevant.append(f"{written}: is what Triplane does anyway")
        elif flag.fate != "translated" and not flag.other_model:
            draft.unsupported.append(f"{written}: {flag.reason}.")
    draft.other_model += other_models(draft.arguments)


def other_models(arguments: Arguments) -> list[str]:
    """Flags without which it is another model, each with why."""
    flags = known()
    return [
        f"{joined([f'--{name}', *values])}: {flags[name].reason}."
        for name, values in arguments.given.items()
        if flags[name].other_model and not _harmless(flags[name], values)
    ]


def _harmless(flag: Flag, values: Sequence[ScriptWord]) -> bool:
    """Whether a flag has the one value with which it changes nothing; 0.0 is 0."""
    if flag.name == "spec" and values and values[-1] in ("mamba_stack_spec", "hybrid_stack_spec"):
        return True  # HybridModel's own layers, which every model here is made of
    if flag.harmless is None or len(values) != 1 or not isinstance(values[0], str):
        return False
    try:
        return float(values[0]) == float(flag.harmless)
    except ValueError:
        return values[0] == flag.harmless
