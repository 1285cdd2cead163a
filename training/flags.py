"""Flags over a recipe: ``--section.field value``, and ``--help``. No torch here.

tyro reads the values and prints the help; what a flag may be called and how many values it takes is checked before,
so that every wrong flag is named at once, with the nearest right one.
"""

import ast
import dataclasses
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from parallel.errors import UserError
from training.config import RunConfig
from training.recipe import names, nearest, sections

RARE = frozenset(
    """
    parallel.expert_model_parallel_size parallel.ddp_bucket_size parallel.distributed_timeout_minutes
    parallel.pipeline_model_parallel_layout
    model.kv_channels model.norm_epsilon model.add_bias_linear model.add_qkv_bias model.qk_layernorm
    model.rotary_percent model.rope_scaling model.rope_scaling_factor model.rope_low_freq_factor
    model.rope_high_freq_factor model.rope_original_max_position_embeddings model.yarn_beta_fast
    model.yarn_beta_slow model.make_vocab_size_divisible_by model.init_method_std
    precision.fp8_recipe precision.loss_scale precision.initial_loss_scale precision.min_loss_scale
    precision.loss_scale_window precision.hysteresis
    data.builtin_vocab_size data.jsonl_key
    optimizer.adam_eps optimizer.start_weight_decay optimizer.end_weight_decay
    optimizer.weight_decay_incr_style optimizer.lr_wsd_decay_iters optimizer.lr_wsd_decay_style
    checkpoint.no_load_rng log.wandb_project log.wandb_name
    """.split()
)
"""Fields that ``--help`` leaves to ``--help_all``: right for nearly every run as they are."""

HELP = frozenset({"-h", "--help", "--help_all"})


def override(default: RunConfig, arguments: Sequence[str], prog: str, quiet: bool = False) -> RunConfig:
    """``default`` with the flags put over it. Help, and a value that is not of its field's type, end the process.

    quiet: leave with code 2 and say nothing, since another rank does. Raises UserError for unknown flags.
    """
    asked = next((argument for argument in arguments if argument in HELP), None)
    words = ["--help"] if asked else _complete(arguments)
    hidden = frozenset() if asked == "--help_all" else RARE
    return tyro.cli(
        RunConfig,
        prog=prog,
        args=words,
        default=default,
        description=_description(len(hidden)),
        use_underscores=True,
        console_outputs=not quiet,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(hidden),
    )


def _description(hidden: int) -> str:
    rest = f"\n--help_all shows {hidden} more flags, which nearly every run leaves as they are." if hidden else ""
    return (
        "Pretrain a GPT on megatron-core, with tensor, pipeline and data parallelism.\n\n"
        "A flag overrides the recipe, whose values are the defaults shown here. None unsets\n"
        f"a value; a True/False flag alone means True; lists take several values.{rest}"
    )


def _complete(arguments: Sequence[str]) -> list[str]:
    """The arguments with the True that a bare switch stands for. Raises UserError with every wrong one."""
    known, words, problems = names(), list[str](), list[str]()
    flag, values = "", 0
    for argument in [*arguments, "--"]:
        if argument.startswith("--"):
            if not values and _is_switch(known.get(flag)):
                words.append("True")
            name, equals, _ = argument[2:].partition("=")
            flag, values = name.replace("-", "_"), len(equals)
            if flag and flag not in known:
                problems.append(f"unknown flag --{name}.{nearest(flag, list(known), '--')}")
        elif flag not in known and flag or values < _most_values(known.get(flag)):
            values += 1
        else:
            problems.append(f"unexpected argument {argument}.{_out_of_place(argument)}")
        words.append(argument)
    if problems:
        raise UserError("\n".join([*problems, "All flags: python pretrain_gpt.py --help_all"]))
    return words[:-1]


def _most_values(kind: Any) -> float:
    """Values that a flag of this type takes; no flag takes none."""
    if any(typing.get_origin(part) is tuple for part in _parts(kind)):
        return math.inf
    return 0 if kind is None else 1


def _is_switch(kind: Any) -> bool:
    return bool in _parts(kind)


def _parts(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type: ``int | None`` -> ``(int, NoneType)``."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _out_of_place(argument: str) -> str:
    return " The recipe is the first argument, and there is one only." if argument.endswith(".toml") else ""


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
    hint = tyro.conf.arg(help_behavior_hint=lambda text: {"None": unset, "": ""}.get(text, f"(default: {text})"))
    return Annotated[kind, hint, tyro.conf.Suppress] if hidden else Annotated[kind, hint]


def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip
