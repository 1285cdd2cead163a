"""What a start says of where it continues from, what is different now, and whether the numbers will be the same."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.config import ModelConfig
from models.resolve import resolve
from parallel.layout import Layout
from program.errors import UserError, cut_short
from program.schema import structured
from program.untrusted import InputError, parse_toml, read_text, toml_table
from training.checkpoint.restoring import Restored
from training.checkpoint.schedule_entry import ENTRY as SCHEDULE
from training.checkpoint.schedule_entry import kept_schedule
from training.checkpoint.state import JSON
from training.config.deprecated import in_current_names
from training.config.recipe import dump, flattened, sections, whole
from training.config.run_config import RunConfig
from training.run_dir.data_changes import changed_entries

RECIPE = "config.toml"
UNSET = "unset"
ROW_CHARACTERS = 105
"""Of a list in a row, so that the line fits a terminal."""
VALUE_CHARACTERS = 24
"""Of a changed value."""
MOST_CHARACTERS = 2000
"""Of a row, which quotes the checkpoint's files: they may hold anything."""

_NEUTRAL_SECTIONS = ("checkpoint.", "eval.", "log.", "profile.")
_OF_SCHEDULE = (
    "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
)  # fmt: skip
"""What fields begin with that make the schedule and nothing else."""
_NEUTRAL = frozenset({
    "device", "data.cache_dir", "model.hf_model_type", "model.name", "parallel.distributed_timeout_minutes",
    "train.callbacks", "train.eval_interval", "train.eval_iters", "train.exit_interval", "train.generate_tokens",
    "train.sample_interval", "train.sample_prompts", "train.train_iters",
})  # fmt: skip
"""Fields without which every update is the same; what train_iters does to the schedule is looked at by itself."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Now:
    """This start, as far as the card compares it with what wrote the checkpoint."""

    layout: Layout
    device: str
    fp8: bool
    recipe: str
    """TOML, as it goes into this run's checkpoints."""
    recipe_before: str
    """The one that lies in the checkpoint; empty where that is unreadable."""
    unreadable: str = ""
    """Why it cannot be read."""
    entries: Mapping[str, JSON]
    """As they go into this run's checkpoints: schedule, data, versions."""
    tokens: int
    """Of the run until here."""


def card(restored: Restored, now: Now, seconds: float) -> str:
    """The card, a line each; ``seconds`` is what reading took."""
    progress = restored.progress
    parts = {"weights": True, "optimizer": restored.optimizer_restored, "RNG": restored.rng_restored}
    taken = " + ".join(name for name, there in parts.items() if there)
    left = ", ".join(name for name, there in parts.items() if not there)
    reasons = list(differences(restored, now))
    rows = {
        "from": str(restored.path),
        "at": f"iteration {progress.iteration}, {progress.consumed_samples:,} samples, {now.tokens:,} tokens",
        "layout": f"{restored.layout_before} -> {now.layout}"
        if restored.layout_before != now.layout
        else f"{now.layout}, as before",
        "restored": f"{taken}{f' (fresh: {left})' if left else ''}; {seconds:.1f} s",
        "changed": f"not known: {now.unreadable}"
        if now.unreadable
        else fitted(list(changes(now.recipe_before, now.recipe))) or "nothing",
        "bit for bit": "the same numbers as without the interruption"
        if not reasons
        else f"not expected: {'; '.join(reasons)}",
    }
    return "\n".join(["resumed", *(f"  {name:<13}{cut_short(text, MOST_CHARACTERS)}" for name, text in rows.items())])


def differences(restored: Restored, now: Now) -> Iterator[str]:
    """Why the coming updates may differ from those that the writer of the checkpoint would have made."""
    before = restored.entries
    if restored.layout_before != now.layout:
        yield "another layout adds up in another order"
    if restored.device != now.device:
        yield f"{restored.device} before, {now.device} now"
    if not restored.optimizer_restored:
        yield "the optimizer starts fresh"
    elif not restored.rng_restored:
        yield "the random numbers start fresh"
    if not restored.fp8_restored and now.fp8:
        yield "fp8's scales start fresh (recipe delayed; see docs/checkpoints.md)"
    if isinstance(before.get("versions"), dict):  # an imported checkpoint has none, and no schedule
        for name, (old, new) in _pairs(before.get("versions"), now.entries.get("versions")).items():
            yield f"{name} {old} before, {new} now"
    data = now.entries.get("data")
    if isinstance(data, dict) and (changed := changed_entries(before.get("data"), data)):
        yield f"other data ({', '.join(changed)})"
    if _other_schedule(before, now.entries):
        yield "another schedule"
    if now.unreadable:
        yield "what else has changed is not known"
    elif fields := [name for name in _changed(now.recipe_before, now.recipe) if decides(name)]:
        yield f"changed: {fitted(fields, ', ')}"
    if now.device == "cuda":
        yield "kernels on GPUs may add up in another order each time"


def _other_schedule(before: Mapping[str, JSON], now: Mapping[str, JSON]) -> bool:
    """Whether learning rates or weight decays will be others than the checkpoint's schedule has."""
    was, own = kept_schedule(before), kept_schedule(now)
    if was is not None and own is not None:
        return not was.is_same_as(own)
    said = own.describe() if own is not None else now.get(SCHEDULE)  # older versions keep a sentence
    return SCHEDULE in before and before[SCHEDULE] != said


def decides(field: str) -> bool:
    """Whether an update's numbers depend on a field of the configuration; on those that make the schedule only by way
    of that, which is compared itself."""
    return field not in _NEUTRAL and not field.startswith((*_NEUTRAL_SECTIONS, *_OF_SCHEDULE))


def recipe_of(path: Path) -> tuple[str, str]:
    """A checkpoint's configuration, to compare with, and why it cannot be; the other is empty."""
    try:
        text = read_text(path)
        table = parse_toml(text, where=path)
    except (OSError, InputError) as error:
        problem = error.problem if isinstance(error, InputError) else error.strerror or str(error)
        return "", f"{path} is unreadable ({problem.rstrip('.')})"
    known = sections()
    wrong = [name for name in known if not isinstance(table.get(name, {}), dict)]
    if wrong or not known.keys() & table:
        found = f"{wrong[0]} is no section" if wrong else "it has no section of a configuration"
        return "", f"{path} is unreadable ({found})"
    return text, ""


def changes(before: str, now: str) -> Iterator[str]:
    """``section.field old -> new`` for each field that differs between two recipes, those first that decide about
    numbers."""
    changed = _changed(before, now)
    for name in sorted(changed, key=decides, reverse=True):
        if name != "data.cache_dir":  # a place, and another machine's as a rule
            yield f"{name} {' -> '.join(cut_short(str(whole(one)), VALUE_CHARACTERS) for one in changed[name])}"


def fitted(items: Sequence[str], between: str = "; ") -> str:
    """As many of the items as a row takes, and how many more there are."""
    for count in range(len(items), 0, -1):
        more = f"{between}and {len(items) - count} more" if count < len(items) else ""
        text = between.join(items[:count]) + more
        if len(text) <= ROW_CHARACTERS or count == 1:
            return text
    return ""


def _changed(before: str, now: str) -> dict[str, tuple[JSON, JSON]]:
    """A field that one recipe leaves out, as an import's does, and that is at its default in the other, is the same;
    so is a model that one names and the other spells out."""
    default = dict(flattened(toml_table(dump(RunConfig()), RECIPE)))
    pairs = _pairs(*map(_meant, (before, now)))
    return {
        name: (old, new)
        for name, (old, new) in pairs.items()
        if UNSET not in (old, new) or (new if old == UNSET else old) != default.get(name, UNSET)
    }


def _meant(recipe: str) -> dict[str, JSON]:
    """A recipe's fields by name, with every number of its model where it can be resolved."""
    table = in_current_names(toml_table(recipe, RECIPE))
    flat = dict(flattened(table))
    config, problems = structured(table.get("model", {}), ModelConfig)
    if problems:  # of a later version, say
        return flat
    try:
        shape = dataclasses.asdict(resolve(config, None))
    except UserError:
        return flat
    named = {f"model.{name}": list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
    if config.vocab_size is None:  # the tokenizer's
        del named["model.vocab_size"]
    flat.pop("model.shape", None)
    return flat | named


def _pairs(before: JSON, now: JSON) -> dict[str, tuple[JSON, JSON]]:
    """Name -> (old, new) of the entries in which two tables differ; "unset" where one lacks it."""
    old, new = (table if isinstance(table, dict) else {} for table in (before, now))
    names = dict.fromkeys([*old, *new])
    return {n: (old.get(n, UNSET), new.get(n, UNSET)) for n in names if old.get(n, UNSET) != new.get(n, UNSET)}
