"""From a source's text to a recipe's text that was read back and checked."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallel.layout import smallest_world
from program.errors import UserError
from tools.from_megatron import recipe_text, summary
from tools.from_megatron.arguments import Arguments, parse
from tools.from_megatron.draft import Draft
from tools.from_megatron.missing import choices, refuse_missing
from tools.from_megatron.overrides import keep_changes
from tools.from_megatron.ranks import rank_unknowns, ranks
from tools.from_megatron.rules_vocabulary import refuse_unknown
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.sources import Source, SourceReading, read_source
from tools.from_megatron.translate import other_models, translated
from training.config.recipe import load
from training.config.run_config import RunConfig

_OTHER_PROGRAMS = {
    "bert": "a BERT", "t5": "a T5", "retro": "a retrieval model", "ict": "a retrieval model",
    "vision": "a vision model", "vlm": "a vision-language model", "mimo": "a multimodal model",
    "multimodal": "a multimodal model", "mamba": "a hybrid, whose --hybrid-layer-pattern is missing",
    "hybrid": "a hybrid, whose --hybrid-layer-pattern is missing", "realm": "a retrieval model",
    "dino": "a vision model", "llava": "a vision-language model", "vl": "a vision-language model", "rwkv": "an RWKV",
    "inpaint": "a vision model", "classification": "a vision model", "train_rl.py": "by reinforcement learning",
    "finetune": "on instructions", "sft": "on instructions",
}  # fmt: skip
"""Parts of a program's name, and what it trains."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a user should know beside the recipe."""

    blocks: list[list[str]]
    """Headings with their lines."""
    complete: bool
    """Whether everything was translated or changes nothing here, and a run would start."""
    other_model: list[str] = field(default_factory=list)
    """Why the recipe makes another model, or trains it otherwise."""
    not_understood: list[str] = field(default_factory=list)
    """Why it may do so."""


def convert(text: str, origin: str, given: Mapping[str, str]) -> tuple[str, Summary]:
    """The recipe (TOML) that a command line or script means, and what to say about it.

    given: variables that the script takes from outside. Raises UserError for what cannot be read.
    """
    return convert_source(Source(text, origin), given)


def convert_source(source: Source, given: Mapping[str, str]) -> tuple[str, Summary]:
    """As ``convert``."""
    reading = read_source(source, given)
    launch = reading.launch
    arguments, world = parse(launch.flags), ranks(launch)
    by_ranks = world is None and not {"global-batch-size", "step-batch-size-schedule"} & set(arguments.given)
    further = choices(arguments, reading.script.other_starts)
    further |= {unknown: ["global-batch-size"] for unknown in (rank_unknowns(launch) if by_ranks else ())}
    refuse_missing(arguments, source.typed, further)
    draft = _translated(arguments, world, source.typed, overrides=bool(reading.shape))
    if reading.shape:
        keep_changes(draft, reading)
    for name, value in reading.fields.items():
        draft.put(name, value, "as the file has it")
    _note_reading(draft, reading)
    origin = source.origin
    if draft.world is not None:
        origin += f" Launched on {draft.world:,} ranks: plan with --dry_run --world_size {draft.world}."
    problems = check(draft)
    blocks = summary.blocks(draft, problems, source.typed)
    incomplete = problems or arguments.strays or draft.unsupported or draft.open
    complete = not (incomplete or draft.other_model or draft.not_understood)
    return recipe_text.toml(draft, origin, blocks), Summary(blocks, complete, draft.other_model, draft.not_understood)


def _translated(arguments: Arguments, world: int | None, typed: Sequence[str], overrides: bool) -> Draft:
    """A draft. What another model lacks of this one's flags is not worth a message: that it is another one is.

    overrides: as ``Draft`` has it.
    """
    try:
        draft = translated(arguments, world, overrides)
        if not overrides:
            refuse_unknown(draft, typed)
        return draft
    except UserError as error:
        others = [*arguments.other_model, *other_models(arguments)]
        if others:
            said = ["it trains another model, or otherwise than Triplane does:", *others]
        elif arguments.not_understood:
            said = [f"{error}\n{summary.NOT_UNDERSTOOD}:", *arguments.not_understood]
        else:
            raise
        raise UserError("\n  - ".join(said)) from error


def _note_reading(draft: Draft, reading: SourceReading) -> None:
    launch, script = reading.launch, reading.script
    draft.arguments.strays += reading.strays
    draft.other_model += reading.other_model
    draft.not_understood += reading.not_understood
    draft.open += reading.open
    draft.notes += reading.notes
    draft.open += _not_followed(reading)
    summary.note_answers(draft, script.answers, launch)
    summary.note_overwritten(draft, script.overwritten)
    summary.note_not_read(draft, script)
    parts = set(re.split(r"[/_.\-]", str(launch.program).removesuffix(".py"))) | {
        str(launch.program).rpartition("/")[2]
    }
    known = {"mamba", "hybrid"} if "model.hybrid_layer_pattern" in draft.values else set()
    if trains := next((what for part, what in _OTHER_PROGRAMS.items() if part in parts - known), ""):
        draft.other_model.append(
            f"{launch.program}: it trains {trains}. Triplane's pretrain_gpt.py trains a GPT on text."
        )


def _not_followed(reading: SourceReading) -> list[str]:
    others = [f"{line} It was not followed." for line in reading.script.not_followed]
    return others + [
        f"line {launch.line}: a further command that starts Megatron-LM." for launch in reading.script.launches[1:]
    ]


def find(text: str, given: Mapping[str, str]) -> tuple[Launch, list[str]]:
    """The command that starts Megatron-LM, and what else of the script was not followed."""
    reading = read_source(Source(text), given)
    return reading.launch, _not_followed(reading)


def check(draft: Draft) -> list[str]:
    """What a run would refuse, on the ranks that the script starts, or the fewest that fit."""
    try:
        config = read_back(recipe_text.toml(draft, "", []))
    except UserError as error:
        return str(error).splitlines()
    world = draft.world
    if world is None or world % smallest_world(config.parallel):
        fewest = smallest_world(config.parallel)
        if world is not None:
            draft.notes.append(f"the script starts {world} ranks; this layout needs a multiple of {fewest}.")
        world = fewest
    try:
        return config.problems(world)
    except UserError as error:
        return [str(error)]


def read_back(recipe: str) -> RunConfig:
    """The recipe as a run would read it. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(recipe)
        try:
            return load(path)
        except UserError as error:
            raise UserError(str(error).replace(f"{path}: ", "")) from None
