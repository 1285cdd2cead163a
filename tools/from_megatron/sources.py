"""What is to be translated, by its kind: a launch script or command, a functional test, a configuration of
Megatron-Bridge's; or a file of another program, which is refused by name."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.families import SHAPES, named
from program.errors import UserError
from tools.from_megatron.bridge import flags_of, is_bridge, of_shape
from tools.from_megatron.flags import known
from tools.from_megatron.flagscale import is_flagscale, read_flagscale
from tools.from_megatron.foreign import refusal
from tools.from_megatron.functional_test import is_functional_test, script_of
from tools.from_megatron.script import ScriptReading, read_script
from tools.from_megatron.shell.programs import Launch, launch_at, trains_nothing
from tools.from_megatron.unknown import ScriptWord
from tools.from_megatron.yaml_text import YamlValue, plain, read_yaml

_YAML_START = re.compile(r"(?:\s*(?:#[^\n]*)?\n)*(?:---[ \t]*\n)?(?:\s*(?:#[^\n]*)?\n)*[\w.'\"-]+:(?:[ \t]|\n|$)")


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be translated."""

    text: str
    origin: str = ""
    """A sentence on where it comes from."""
    path: Path | None = None
    """Of its file: others are looked for beside it."""
    typed: Sequence[str] = ("SCRIPT",)
    """The words of the command, for the one to type next."""
    shape: str = ""
    """The named shape that it changes, where it does not say the model itself."""
    words: Sequence[str] = ()
    """Of a command that is given as it is; then there is no text."""


@dataclass(slots=True)
class SourceReading:
    """The command that a source means, and what else it says."""

    launch: Launch
    script: ScriptReading = field(default_factory=ScriptReading)
    strays: list[str] = field(default_factory=list)
    other_model: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe that no flag means."""
    shape: str = ""
    """The named shape that it changes; empty: its flags say the whole model."""
    filled_in: frozenset[str] = frozenset()
    """Flags that are the shape's, not the source's."""
    off: frozenset[str] = frozenset()
    """Flags, without dashes, that the source says are not to be given."""


def read_source(source: Source, given: Mapping[str, str]) -> SourceReading:
    """The command that starts the training. given: what --set says. Raises UserError where there is none."""
    if source.words:
        return SourceReading(_command(source.words), ScriptReading(not_read=list(given)))
    again: list[str] = []
    yaml = _yaml(source, again)
    if yaml is not None and is_functional_test(yaml):
        reading = _script(dataclasses.replace(source, text=script_of(yaml, source.path)), given)
        others = [name for name in plain(yaml) if re.fullmatch(r"MODEL_ARGS_\d+", name)]
        reading.notes += [f"{', '.join(others)}: of the test's later runs, which are not translated."] if others else []
    elif yaml is not None and is_bridge(yaml, source.shape):
        reading = _bridge(source, yaml, given)
    elif yaml is not None and is_flagscale(yaml):
        launch, left = read_flagscale(yaml, source.path, given)
        reading = SourceReading(launch, open=left)
    else:
        why = refusal(source.text, source.path, None if yaml is None else plain(yaml))
        if why is not None:
            raise UserError(why)
        reading = _script(source, given)
    reading.notes += again
    if source.shape and not reading.shape:
        raise UserError(f"--shape {source.shape}: it says its model itself; leave --shape out.")
    return reading


def _yaml(source: Source, again: list[str]) -> YamlValue | None:
    suffix = source.path.suffix if source.path else ""
    if suffix in (".yaml", ".yml") or (suffix not in (".sh", ".slurm", ".sbatch") and _YAML_START.match(source.text)):
        return read_yaml(source.text, str(source.path or "the text"), again)
    return None


def _script(source: Source, given: Mapping[str, str]) -> SourceReading:
    text = source.text
    if text.lstrip().startswith("--"):
        text = "pretrain_gpt.py " + text.lstrip().replace("\\\n", " ").replace("\n", " ")
    if (plain := _plain_command(text)) is not None:
        return SourceReading(plain, ScriptReading(not_read=list(given)))
    script = read_script(text, starts_megatron, given, source.path)
    if script.launches:
        return SourceReading(script.launches[0], script)
    said = "no command was found that starts a .py file with flags of Megatron-LM's."
    if script.holding_flags:
        names = ", ".join(f"${name}" for name in script.holding_flags[:5])
        hold = "holds" if len(script.holding_flags) == 1 else "hold"
        said += f" {names} {hold} such flags: give the script that uses them, or add a line that does."
    lines = text.splitlines()
    if script.ends_at is not None and any(map(str.strip, lines[script.ends_at :])):
        said += f" With these values it ends at line {script.ends_at}: {lines[script.ends_at - 1].strip()[:80]}"
    raise UserError(" ".join([said, *script.other_tasks[:3], *script.not_followed[:3], *script.within_words[:3]]))


def _plain_command(text: str) -> Launch | None:
    """One command of words and quotes, which means the same without a shell; None for any other text."""
    line = text.replace("\\\n", " ").strip()
    if re.search(r"[^\w\s./:,+%@='\"-]", line) or "\n" in line or line.count("'") % 2 or line.count('"') % 2:
        return None
    try:
        words = shlex.split(line)
    except ValueError:  # quotes within the others
        return None
    at = launch_at(words, starts_megatron)
    if at is None or "=" in words[0] or trains_nothing(words[at]):
        return None
    return Launch(list(words[:at]), words[at], list(words[at + 1 :]), 1, {})


def _command(words: Sequence[str]) -> Launch:
    """A command's words. Raises UserError where it starts no Megatron-LM."""
    words = ["pretrain_gpt.py", *words] if words[0].startswith("--") else words
    if (at := launch_at(words, starts_megatron)) is None:
        raise UserError("expected flags of Megatron-LM's, or a command that starts a .py file with them.")
    return Launch(list(words[:at]), words[at], list(words[at + 1 :]), 0, {})


def starts_megatron(words: Sequence[ScriptWord]) -> bool:
    """Whether words behind a program are flags of Megatron-LM's."""
    flags = known()
    found = [flags.get(str(word)[2:].partition("=")[0]) for word in words if str(word).startswith("--")]
    return sum(flag is not None for flag in found) > 1 or flags["yaml-cfg"] in found


def _bridge(source: Source, yaml: YamlValue, given: Mapping[str, str]) -> SourceReading:
    base = named(source.shape) if source.shape else None
    flags = flags_of(yaml, given, base)
    words, filled_in = list(flags.words), frozenset[str]()
    if flags.has_model:
        base = None
    elif base is None:
        raise UserError(_without_model(source.path))
    else:
        beside = of_shape(base, flags)
        words += [word for flag, values in beside.items() for word in (flag, *values)]
        filled_in = frozenset(beside)
    return SourceReading(
        Launch([], "pretrain_gpt.py", words, 0, {}), strays=flags.strays, other_model=flags.other_model,
        not_understood=flags.not_understood, shape="" if base is None else source.shape, filled_in=filled_in,
        off=frozenset(flags.off),
        fields=flags.fields,
    )  # fmt: skip


def _without_model(path: Path | None) -> str:
    stem = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()) if path else ""
    near = [name for name in SHAPES if stem.startswith(name)] or difflib.get_close_matches(
        stem, SHAPES, n=2, cutoff=0.5
    )
    example = max(near, key=len) if near else "llama3_8b"
    return (
        "it changes a recipe of Megatron-Bridge's, which is a Python function, and does not say the model (no "
        f"model.num_layers). Name the model, as in --shape {example}; or give the whole configuration, "
        "run_config.yaml, which is in each checkpoint of Megatron-Bridge's."
    )
