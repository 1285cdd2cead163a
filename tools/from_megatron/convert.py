"""From a script's text to a recipe's text that was read back and checked."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.layout import smallest_world
from tools.from_megatron import draft as writing
from tools.from_megatron.draft import Draft
from tools.from_megatron.flags import known
from tools.from_megatron.script import Launch, read_script
from tools.from_megatron.translate import translate
from tools.from_megatron.words import Variables, words
from training.config.recipe import load
from training.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Summary:
    """What a user should know beside the recipe."""

    blocks: list[list[str]]
    """Headings with their lines."""
    complete: bool
    """Whether everything was translated or changes nothing here, and a run would start."""


def convert(text: str, origin: str, given: Mapping[str, str]) -> tuple[str, Summary]:
    """The recipe (TOML) that a command line or script means, and what to say about it.

    given: variables that the script takes from outside. Raises UserError for what cannot be read.
    """
    launch, others = find(text, given)
    draft = translate(launch.flags, ranks(launch))
    draft.unsupported += others
    if draft.world is not None:
        origin += f" Launched on {draft.world:,} ranks: plan with --dry_run --world_size {draft.world}."
    problems = check(draft)
    recipe = writing.toml(draft, origin, problems)
    incomplete = problems or draft.arguments.strays or draft.unsupported or draft.open
    return recipe, Summary(writing.summary(draft, problems), not incomplete)


def find(text: str, given: Mapping[str, str]) -> tuple[Launch, list[str]]:
    """The command that starts Megatron-LM, and what else of the script was not followed."""
    if text.lstrip().startswith("--"):
        found = words(text.replace("\\\n", " "), Variables(dict(given)))
        return Launch(launcher=[], flags=found, line=1, slurm={}), []
    flags = known()
    reading = read_script(text, lambda found: sum(word[2:].partition("=")[0] in flags for word in found) > 1, given)
    others = [f"{line} It was not followed." for line in reading.not_followed]
    if not reading.launches:
        said = " ".join(others)
        raise UserError(f"no command was found that starts a .py file with flags of Megatron-LM's. {said}".rstrip())
    others += [f"line {launch.line}: a further command that starts Megatron-LM." for launch in reading.launches[1:]]
    return reading.launches[0], others


def check(draft: Draft) -> list[str]:
    """What a run would refuse, on the ranks that the script starts, or the fewest that fit."""
    try:
        config = read_back(writing.toml(draft, "", []))
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


_PER_NODE = ("nproc-per-node", "nproc_per_node")
_NODES = ("nnodes",)


def ranks(launch: Launch) -> int | None:
    """Of torchrun its nodes x processes, of srun its tasks; None where that is not known."""
    per_node, nodes = _option(launch.launcher, _PER_NODE), _option(launch.launcher, _NODES)
    if per_node is not None:
        return _product("1" if nodes is None else nodes.rpartition(":")[2], per_node)
    if not any(word.endswith(("srun", "mpirun")) for word in launch.launcher):
        return None
    if (tasks := _option(launch.launcher, ("ntasks", "n", "np"))) is not None:
        return _whole(tasks)
    count = _option(launch.launcher, ("nodes", "N")) or launch.slurm.get("SLURM_NNODES")
    each = _option(launch.launcher, ("ntasks-per-node",)) or launch.slurm.get("SLURM_NTASKS_PER_NODE")
    if "SLURM_NTASKS" in launch.slurm:
        return _whole(launch.slurm["SLURM_NTASKS"])
    return _product(count, each)


def _option(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of ``--name value`` or ``--name=value``."""
    for number, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names:
            return value if equals else next(iter(words[number + 1 :]), None)
    return None


def _product(nodes: str | None, per_node: str | None) -> int | None:
    counts = _whole(nodes or ""), _whole(per_node or "")
    return None if counts[0] is None or counts[1] is None else counts[0] * counts[1]


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
