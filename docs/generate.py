"""Write the tables of docs/ that come from elsewhere: fields of a recipe, flags of Megatron-LM, metrics, recipes.

    python -m docs.generate          write them into their pages
    python -m docs.generate --check  exit code 1 where a page is not what would be written

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``; the text around it is written by hand.
"""

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs import other_trainers
from models.config import ModelConfig
from models.shape_fields import declared
from program.flags import field_docs
from tools.from_megatron import flags_forks as forks
from tools.from_megatron import flags_translated as translated
from tools.from_megatron.flags import known
from training.config.recipe import STAGES, sections
from training.config.run_config import RunConfig
from training.metrics.console import FAMILIES, SHOWN
from training.metrics.prometheus import family, sample_name
from training.metrics.registry import METRICS, Metric
from training.metrics.values import NO_CURVES

DOCS = Path(__file__).resolve().parent


def main() -> int:
    """Write the pages, or compare them: the exit code."""
    check, stale = "--check" in sys.argv[1:], []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        new = with_tables(text)
        if new != text:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


def with_tables(text: str) -> str:
    """A page with its tables as they should be. Raises KeyError for a name that no table has."""
    pattern = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{lines(found[2])}\n\n{found[3]}", text)


def lines(name: str) -> str:
    """A table by its name."""
    return "\n".join(TABLES[name]()).strip("\n")


def row(*cells: str) -> str:
    """A line of a table; | would end a cell."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*names), "|" + "---|" * len(names)]


OF_SHAPES = {name for name, about in declared() if about.use == "shapes"}
"""Fields of the section ``model``."""


def configuration() -> Iterator[str]:
    """The fields of a recipe, section by section, but for OF_SHAPES."""
    own = {name for name in typing.get_type_hints(RunConfig) if name not in (*sections(), *STAGES)}
    yield from section_table("", "Outside of the sections, before the first of them.", RunConfig, own)
    for name, kind in sections().items():
        fields = set(typing.get_type_hints(kind)) - (OF_SHAPES if name == "model" else set())
        yield from section_table(name, (kind.__doc__ or "").split("\n\n")[0], kind, fields)


def configuration_of_shapes() -> Iterator[str]:
    """OF_SHAPES, whose default is what the named shape has."""
    texts, hints = field_docs(ModelConfig), typing.get_type_hints(ModelConfig)
    yield from head("Field", "Type", "Meaning")
    for name in hints:
        if name in OF_SHAPES:
            yield row(f"`{name}`", spelled(hints[name]), texts[name])


def section_table(name: str, about: str, kind: type, fields: set[str]) -> Iterator[str]:
    """One section: its fields in the order of the source."""
    texts, hints = field_docs(kind), typing.get_type_hints(kind)
    yield from ("", f"## {f'[{name}]' if name else 'The run'}", "", " ".join(about.split()), "")
    yield from head("Field", "Type", "Default", "Meaning")
    for field in dataclasses.fields(kind):
        if field.name in fields:
            yield row(f"`{field.name}`", spelled(hints[field.name]), default(field, name), texts.get(field.name, ""))


def default(field: "dataclasses.Field[Any]", section: str) -> str:
    """A field's default as TOML has it; in [model], what is not set is the shape's."""
    value = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is None:
        return "the shape's" if section == "model" and field.name != "vocab_size" else ""
    return f"`{toml(value)}`"


def toml(value: Any) -> str:
    """A value as a recipe spells it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}" = {toml(one)}' for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def spelled(kind: Any) -> str:
    """A type in few words: ``whole number``, ``"a"`` or ``"b"``, ``list of strings``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return spelled(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(spelled(one) for one in arguments if one is not types.NoneType)
    if origin is typing.Literal:
        return ", ".join(f"`{toml(one)}`" for one in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {spelled(arguments[0])}"
        return f"list of {len(arguments)}: {', '.join(map(spelled, arguments))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {spelled(arguments[1])}"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}.get(
        kind, getattr(kind, "__name__", "")
    )


def other_trainers_table(program: str, rows: Sequence[other_trainers.Row]) -> Iterator[str]:
    """Each key of another trainer's configuration: a field of a recipe, or none, and why."""
    yield from head(program, "Recipe", "")
    for key, fields, note in rows:
        ours = ", ".join(f"`{field}`" for field in fields)
        yield row(f"`{key}`", ours or "none", note)


def flags_to_fields() -> Iterator[str]:
    """Flags of Megatron-LM that are one field, or one of megatron-core's through a list that hands it through."""
    yield from head("Megatron-LM", "Recipe", "Megatron-LM's default")
    one = translated.FIELDS | translated.EXPERT_FIELDS | translated.LATENT_FIELDS | translated.PREDICTION_FIELDS
    for flag, (field, value) in one.items():
        yield row(f"`--{flag}`", f"`{field}`", "" if value is None else f"`{value}`")
    for flag, (field, switched) in (translated.SWITCHES | translated.EXPERT_SWITCHES).items():
        yield row(f"`--{flag}`", f"`{field} = {toml(switched)}`", f"`{toml(not switched)}`")
    for flag, fusion in translated.KERNELS_OFF.items():
        yield row(f"`--{flag}`", f'`kernels.off = ["{fusion}"]`', "")
    for flag, fusion in translated.KERNELS_ON.items():
        yield row(f"`--{flag}`", f"none: `{fusion}` runs wherever it can", "")
    for hatch, entries in translated.MEGATRON_FIELDS.items():
        for flag, field in entries.items():
            yield row(f"`--{flag.partition('=')[0]}`", f'`{hatch} = ["{field}{"" if "=" in field else "=…"}"]`', "")


def flags_respelled() -> Iterator[str]:
    """Flags of forks that Megatron-LM spells otherwise."""
    yield from head("Fork", "Megatron-LM, or the recipe")
    for name, own in forks.RENAMED.items():
        yield row(f"`--{name}`", f"`--{own}`")
    for name, meaning in forks.RESPELLED.items():
        yield row(f"`--{name.partition('=')[0]}`", meaning)
    for name, (field, _) in forks.FIELDS_OF_FORKS.items():
        yield row(f"`--{name}`", f"none: `{field}`")
    yield row("`--xielu`", 'none: `model.activation = "xielu"`')
    yield row("`--lr-wsd-decay-style 1-sqrt`", "`--lr-wsd-decay-style minus_sqrt`")


def flags_by_rules() -> Iterator[str]:
    """Flags that several together, or a default of Megatron-LM's, make a field of."""
    yield ", ".join(f"`--{entry.partition('=')[0]}`" for entry in translated.RULES.split())


def flags_by_reason(fate: str) -> Iterator[str]:
    """Flags that are not translated, by the reason that a recipe's head gives."""
    reasons: dict[str, list[str]] = {}
    for flag in known().values():
        if ("another model" if flag.other_model else flag.fate) == fate:
            harmless = f" (but for `{flag.harmless}`)" if fate != "irrelevant" and flag.harmless else ""
            reasons.setdefault(flag.reason, []).append(f"`--{flag.name}`{harmless}")
    yield from head("Why", "Flags")
    for reason, flags in reasons.items():
        yield row(reason, " ".join(flags))


def metrics() -> Iterator[str]:
    """Every key of metrics.jsonl."""
    yield from head("Key", "Unit", "Of ranks and iterations", "Meaning", "Prometheus", "Megatron-LM", "Console")
    for key, one in METRICS.items():
        megatron = f"`{one.megatron}`" if one.megatron else ""
        shown = "yes" if key in SHOWN or key.partition("/")[0] in FAMILIES else ""
        yield row(f"`{key}`", one.unit, one.reduce, one.meaning, in_prometheus(one), megatron, shown)


def in_prometheus(metric: Metric) -> str:
    """Name and labels of its samples, but for the label ``run``."""
    if metric.name in NO_CURVES:
        return ""
    known = family(metric)
    labels = [f'{name}="{value}"' for name, value in known.labels.items()] + ["name"] * ("*" in metric.name)
    return f"`{sample_name(metric)}{'{' + ', '.join(labels) + '}' if labels else ''}`"


def monitoring() -> Iterator[str]:
    """What ``make monitoring`` asked, and when."""
    found = json.loads((DOCS / "benchmarks/monitoring.json").read_text())
    versions, asked = found["versions"], found["asked"]
    servers = (
        "hangs, one that answers and one that is killed" if any("real MLflow" in one for one in asked) else "hangs"
    )
    yield (
        "`make monitoring` asks every query of the dashboard and every alert of a real Prometheus "
        f"({versions['prometheus']}) that scrapes a run of two CPU ranks, at its endpoint and through node_exporter "
        f"({versions['prometheus-node-exporter']}), and trains beside an MLflow server that {servers}: "
        f"{len(asked)} questions, {len(found['wrong'])} wrong; {found['date'][:10]}, commit {found['commit']}, "
        f"{found['cores']} cores ([monitoring.json](benchmarks/monitoring.json)). Not run: Grafana itself, and a run "
        "with GPUs, whose panels were asked and had no data."
    )


def recipes() -> Iterator[str]:
    """What the heads of the planned recipes say."""
    yield from head("Recipe", "GPUs", "Layout", "Step (4 of 5 runs)", "Fullest rank")
    line = re.compile(
        r"# \w+ on ([\d,]+ x .*?) \(\w+\): (.*)\. Planned, not run\.\n"
        r"# Expected: (.*) a step \((.*)\), (\d+ GiB) on the fullest rank"
    )
    for path in sorted((DOCS.parent / "slurm/recipes").glob("*.toml")):
        if found := line.match(path.read_text()):
            gpus, layout, step, spread, memory = found.groups()
            yield row(
                f"[{path.stem}](../slurm/recipes/{path.name})", gpus, f"`{layout}`", f"{step} ({spread} s)", memory
            )


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "configuration": configuration,
    "deepspeed-keys": lambda: other_trainers_table("DeepSpeed", other_trainers.DEEPSPEED),
    "torchtitan-keys": lambda: other_trainers_table("torchtitan", other_trainers.TORCHTITAN),
    "accelerate-keys": lambda: other_trainers_table("Accelerate", other_trainers.ACCELERATE),
    "flags-to-fields": flags_to_fields,
    "flags-by-rules": flags_by_rules,
    "configuration-of-shapes": configuration_of_shapes,
    "flags-respelled": flags_respelled,
    "flags-irrelevant": lambda: flags_by_reason("irrelevant"),
    "recipes": recipes,
    "flags-of-another-model": lambda: flags_by_reason("another model"),
    "flags-unsupported": lambda: flags_by_reason("unsupported"),
    "metrics": metrics,
    "monitoring": monitoring,
}

if __name__ == "__main__":
    sys.exit(main())
