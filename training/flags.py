"""Flags over a recipe: ``--section.field value``, and ``--help``. No torch here.

tyro converts the values and prints the help; flags are checked before, so that everything wrong with them is
said at once and in the words that are used for a recipe.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from parallel.errors import SharedMistake
from training.config import RunConfig
from training.recipe import names, nearest, sections, type_name

RARE = {
    "parallel": "expert_model_parallel_size ddp_bucket_size distributed_timeout_minutes "
    "pipeline_model_parallel_layout",
    "model": "kv_channels norm_epsilon add_bias_linear add_qkv_bias qk_layernorm rotary_percent rope_scaling "
    "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings "
    "yarn_beta_fast yarn_beta_slow make_vocab_size_divisible_by init_method_std",
    "precision": "fp8_recipe loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "data": "builtin_vocab_size jsonl_key",
    "optimizer": "adam_eps start_weight_decay end_weight_decay weight_decay_incr_style lr_wsd_decay_iters "
    "lr_wsd_decay_style",
    "checkpoint": "no_load_rng",
    "log": "wandb_project wandb_name",
}
"""Fields that ``--help`` leaves to ``--help_all``: nearly every run leaves them as they are."""

HELP = frozenset({"-h", "--help", "--help_all"})


def override(default: RunConfig, arguments: Sequence[str], prog: str) -> RunConfig:
    """``default`` with the flags put over it. Asked for help, prints it and leaves with code 0.

    Raises SharedMistake with every unknown flag and every value that is not of its field's type.
    """
    asked = next((argument for argument in arguments if argument in HELP), None)
    # A flag that tyro hides cannot be given either, so that nothing is hidden but from --help.
    hidden = rare() if asked in ("-h", "--help") else frozenset()
    return tyro.cli(
        RunConfig,
        prog=prog,
        args=["--help"] if asked else _checked(arguments),
        default=default,
        description=_description(len(hidden)),
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(hidden),
    )


def rare() -> frozenset[str]:
    """The dotted names of RARE."""
    return frozenset(f"{section}.{name}" for section, fields in RARE.items() for name in fields.split())


def _description(hidden: int) -> str:
    paragraphs = [
        "Pretrain a GPT on megatron-core, with tensor, pipeline and data parallelism.",
        "Flags override the recipe, whose values are the defaults shown here.",
        "None unsets a value; a True/False flag alone means True; lists take several values.",
    ]
    if hidden:
        paragraphs.append(f"--help_all shows {hidden} more flags, which nearly every run leaves as they are.")
    return "\n\n".join(paragraphs)


def _checked(arguments: Sequence[str]) -> list[str]:
    """The arguments as tyro wants them. Raises SharedMistake with everything that it could not read."""
    known, words, problems = names(), list[str](), list[str]()
    for flag, values in _groups(arguments):
        name = flag.replace("-", "_")
        kind = known.get(name)
        if not flag:
            problems.append(
                f"unexpected argument {' '.join(values)}. The recipe is the first argument, flags follow."
            )
        elif kind is None:
            problems.append(f"unknown flag --{flag}.{nearest(name, list(known), '--')}")
        else:
            given = _spelled(values, kind)
            if not _accepts(kind, given):
                problems.append(
                    f"--{flag}: expected {type_name(kind)}, found {' '.join(values) or 'nothing'}."
                )
            words += [f"--{flag}", *given] if len(given) != 1 else [f"--{flag}={given[0]}"]
    if problems:
        raise SharedMistake("\n".join([*problems, "All flags: python pretrain_gpt.py --help_all"]))
    return words


def _groups(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``["--a", "1", "2", "--b=3"]`` -> ``[("a", ["1", "2"]), ("b", ["3"])]``; strays are of ""."""
    groups: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("-") and not _reads(float, argument):
            flag, equals, value = argument.lstrip("-").partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            groups = groups or [("", [])]
            groups[-1][1].append(argument)
    return groups


def _spelled(values: list[str], kind: Any) -> list[str]:
    """A switch alone means True, and TOML's true and false are Python's."""
    if bool not in _alternatives(kind):
        return values
    return [{"true": "True", "false": "False"}.get(value, value) for value in values] or ["True"]


def _accepts(kind: Any, values: list[str]) -> bool:
    """Whether the words after a flag make a value of its field's type."""
    for choice in _alternatives(kind):
        inner = typing.get_args(choice) if typing.get_origin(choice) is tuple else (choice,)
        if inner[-1] is Ellipsis:
            inner = (inner[0],) * len(values)
        if len(inner) == len(values) and all(map(_reads, inner, values)):
            return True
    return False


def _reads(kind: Any, text: str) -> bool:
    if kind in (int, float):
        try:
            kind(text)
        except ValueError:
            return False
        return True
    choices = {bool: ("True", "False"), types.NoneType: ("None",)}.get(kind) or typing.get_args(kind)
    return kind is str or text in choices


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """``int | None`` -> ``(int, NoneType)``."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _registry(hidden: frozenset[str]) -> ConstructorRegistry:
    """How tyro sees our dataclasses: as they are, with what is hidden from the help marked so."""
    registry = ConstructorRegistry()
    prefixes = {kind: f"{name}." for name, kind in sections().items()} | {RunConfig: ""}

    @registry.struct_rule
    def _section(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type not in prefixes:
            return None
        prefix, texts = prefixes[info.type], field_docs(info.type)
        fields = tuple(
            StructFieldSpec(
                name=name,
                type=_marked(kind, f"{prefix}{name}", f"{prefix}{name}" in hidden),
                default=getattr(info.default, name),
                helptext=texts.get(name),
            )
            for name, kind in typing.get_type_hints(info.type).items()
        )
        return StructConstructorSpec(instantiate=info.type, fields=fields)

    return registry


def _marked(kind: Any, name: str, hidden: bool) -> Any:
    """A field's type for tyro: hidden or not, and with an empty default said in words."""
    if dataclasses.is_dataclass(kind):
        return kind
    from_shape = name.startswith("model.") and name != "model.vocab_size"
    unset = "(default: the shape's)" if from_shape else ""
    hint = tyro.conf.arg(
        help_behavior_hint=lambda text: {"None": unset, "": ""}.get(text, f"(default: {text})")
    )
    return Annotated[kind, hint, tyro.conf.Suppress] if hidden else Annotated[kind, hint]


def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
