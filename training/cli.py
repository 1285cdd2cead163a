"""From a command line to a checked ``RunConfig``. No torch here.

A TOML recipe is structured strictly into the dataclasses (unknown keys forbidden, every error at once); the result
is tyro's default, so that flags override the recipe and ``--help`` shows the recipe's values.
"""

import dataclasses
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cattrs
import tomli_w
import tyro
from cattrs.gen import make_dict_structure_fn

from parallel.errors import UserError
from training.config import RunConfig

USAGE = "usage: python pretrain_gpt.py [RECIPE.toml] [--section.field value ...]"


def parse(argv: Sequence[str]) -> RunConfig:
    """The configuration that ``[RECIPE.toml] [flags]`` asks for.

    Raises UserError for a bad recipe; a bad flag ends the process with code 2 and tyro's message.
    """
    arguments = list(argv)
    recipe = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    default = load(recipe) if recipe else RunConfig()
    config = tyro.cli(
        RunConfig,
        args=arguments,
        default=default,
        use_underscores=True,
        prog=f"pretrain_gpt.py {recipe or '[RECIPE.toml]'}",
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands) if "--help" not in arguments else (tyro.conf.AvoidSubcommands,),
    )
    return dataclasses.replace(config, run_dir=config.run_dir or str(default_run_dir(recipe)))


def default_run_dir(recipe: Path | None) -> Path:
    """``runs/NAME`` after the recipe; a run's own ``config.toml`` continues that run.

    A checkpoint's ``config.toml`` starts a new run named after the checkpoint, since a run never writes into one.
    """
    if recipe is None:
        return Path("runs/run")
    if recipe.name != "config.toml":
        return Path("runs") / recipe.stem
    folder = recipe.resolve().parent
    if (folder / "state.json").exists():
        return Path("runs") / f"from_{folder.name}"
    return folder


def load(recipe: Path) -> RunConfig:
    """A recipe as configuration. Raises UserError naming the file, each wrong key or type, and the nearest name."""
    try:
        table = tomllib.loads(recipe.read_text())
    except FileNotFoundError:
        raise UserError(f"{recipe}: no such recipe.{_nearest_recipe(recipe)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{recipe}: not valid TOML: {error}") from None
    problems = list(_unknown_keys(table, RunConfig)) + list(_wrong_types(table, RunConfig))
    if problems:
        raise UserError("\n".join(f"{recipe}: {problem}" for problem in problems))
    return _beside(_converter().structure(table, RunConfig), recipe)


def dump(config: RunConfig) -> str:
    """The configuration as TOML that ``load`` reads back to an equal one. None is left out: it is every None's default."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def fail(error: UserError) -> NoReturn:
    """Show a user's mistake, without a traceback, and leave with exit code 2."""
    print(f"pretrain_gpt.py: {error}", file=sys.stderr)
    raise SystemExit(2)


def check(config: RunConfig, world_size: int) -> None:
    """Raises UserError with every problem of this configuration on ``world_size`` ranks, all at once."""
    problems = config.problems(world_size)
    if problems:
        raise UserError("\n  ".join([f"{len(problems)} problem(s) with this configuration:", *problems]))


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass,
        lambda cls: make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True),
    )
    return converter


def _unknown_keys(table: dict[str, Any], target: type, prefix: str = "") -> Iterator[str]:
    known = {field.name: field for field in dataclasses.fields(target)}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or _elsewhere(key)
            hint = f' Did you mean "{near[0]}"?' if near else f" Known: {', '.join(known)}."
            yield f'unknown key "{prefix}{key}".{hint}'
        elif dataclasses.is_dataclass(known[key].type) and isinstance(value, dict):
            yield from _unknown_keys(value, typing.cast(type, known[key].type), f"{prefix}{key}.")


def _elsewhere(key: str) -> list[str]:
    """Where a misplaced key belongs: ``train_iters`` at top level is ``train.train_iters``."""
    return [
        f"{section.name}.{key}"
        for section in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(section.type) and key in {field.name for field in dataclasses.fields(section.type)}
    ]


def _wrong_types(table: dict[str, Any], target: type, prefix: str = "") -> Iterator[str]:
    known = typing.get_type_hints(target)
    for key, value in table.items():
        expected = known.get(key)
        if expected is None:
            continue
        if dataclasses.is_dataclass(expected):
            if isinstance(value, dict):
                yield from _wrong_types(value, typing.cast(type, expected), f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}: expected a table [{key}], found {value!r}."
        elif not fits(value, expected):
            yield f"{prefix}{key}: expected {type_name(expected)}, found {value!r}."


def fits(value: object, expected: Any) -> bool:
    """Whether a TOML value may stand where a field of type ``expected`` is. An integer may stand for a float."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, choice) for choice in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, list):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if expected is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected)


def type_name(expected: Any) -> str:
    """A field's type in words a recipe's writer knows."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(choice) for choice in arguments if choice is not types.NoneType)
    if origin is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return f"a list of {type_name(arguments[0])}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(expected, str(expected))


def _nearest_recipe(recipe: Path) -> str:
    if not recipe.parent.is_dir():
        return ""
    names = [path.name for path in recipe.parent.glob("*.toml")]
    near = difflib.get_close_matches(recipe.name, names, n=3, cutoff=0.3) or names[:5]
    return f" That folder has: {', '.join(near)}." if near else ""


def _beside(config: RunConfig, recipe: Path) -> RunConfig:
    """A tokenizer named by a bare file name is looked for beside the recipe: a checkpoint carries its own."""
    beside = recipe.parent / config.data.tokenizer
    if config.data.tokenizer.endswith(".model") and beside.is_file():
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(beside)))
    return config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value
