"""The table of old names: what recipe fields were before 0.2.0, and what to write now. Delete with 0.3.0.

``deprecated`` reads recipes and flags by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from models.kernels import FusionName
from parallel.config import StreamGroup
from training.config.recompute import Granularity, Method, Recomputation, RecomputeModule, read_recompute

Values = Mapping[str, Any]
"""By dotted names."""


class Contradiction(ValueError):
    """An old name and its new one say different things."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OldField:
    """One that recipes had."""

    kind: Any
    """Its type."""
    default: Any = None
    """What it was where a recipe left it out: a saved config.toml has every field, and says nothing by most."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Moved:
    """Old fields that are read together."""

    old: Mapping[str, OldField]
    """By dotted names."""
    new: tuple[str, ...] = ()
    """Dotted names of what is there now. None: a constant."""
    becomes: Callable[[Values, Values], Values]
    """(old values as given, what the new fields are) -> new values. Raises Contradiction where these disagree."""
    beside: Literal["refused", "merged"] = "refused"
    """What is done with new fields beside old ones: merged, where these were fields then, too."""
    now: str = ""
    """What the warning says in place of the new values."""


def _fields(section: str, **fields: tuple[Any, Any]) -> dict[str, OldField]:
    """type and default by name."""
    return {f"{section}.{name}": OldField(kind=kind, default=default) for name, (kind, default) in fields.items()}


def _renamed(old: str, *new: str) -> Moved:
    """A switch that has another name."""
    return Moved(
        old={old: OldField(kind=bool, default=False)},
        new=new,
        becomes=lambda was, _: {name: value for value in was.values() for name in new},
    )


def _constant(old: str, kind: Any, value: Any) -> Moved:
    return Moved(old={old: OldField(kind=kind, default=value)}, becomes=lambda *_: {}, now=f"{value:g} in every run")


def _in_megatron(section: str, of: str, **fields: tuple[Any, Any]) -> Moved:
    """Fields of ``section`` that ``of``.megatron sets by megatron-core's own names."""
    hatch = f"{of}.megatron"

    def becomes(was: Values, now: Values) -> Values:
        entries = [str(each) for each in now[hatch]]
        given = {name.rpartition(".")[2]: value for name, value in was.items()}
        set_twice = [name for name in given if name in map(_name, entries)]
        if set_twice:
            name = f"{section}.{set_twice[0]}"
            raise Contradiction(
                f"{name} and {hatch} both set {set_twice[0]}: {name} is the old name of it. Remove {name}."
            )
        return {hatch: entries + [f"{name}={_literal(value)}" for name, value in given.items()]}

    return Moved(old=_fields(section, **fields), new=(hatch,), becomes=becomes, beside="merged")


def _name(entry: str) -> str:
    return entry.partition("=")[0].strip()


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _reset(was: Values, _: Values) -> Values:
    apart = was["data.reset"] == "attention"
    return {"data.reset_attention_mask": apart, "data.reset_position_ids": apart}


def _watch(was: Values, _: Values) -> Values:
    """One interval of two: the shorter one that is not 0."""
    return {"fault.watch_interval": min((value for value in was.values() if value), default=0)}


def _shadow(was: Values, now: Values) -> Values:
    """ACTION:ITERATIONS:BOUND, of three fields."""
    given = {name.removeprefix("precision.fp8_shadow_"): value for name, value in was.items()}
    action, interval, bound = [*(now["precision.fp8_shadow"] or "warn:").split(":"), "0.25"][:3]
    interval = given.get("interval", interval)
    action = ("warn", "stop")[given["stop"]] if "stop" in given else action
    bound = f"{given.get('bound', float(bound)):g}"
    if not interval:
        return {"precision.fp8_shadow": None}
    return {"precision.fp8_shadow": f"{action}:{interval}" + (f":{bound}" if bound != "0.25" else "")}


def _recompute(was: Values, now: Values) -> Values:
    """Megatron's four fields as one, over what is there: flags change one of them."""
    before = read_recompute(now["train.recompute"]) or Recomputation()
    if before.budget is not None:
        raise Contradiction(
            f'train.recompute = "{now["train.recompute"]}" chooses by predicted memory, which {next(iter(was))} '
            "changes: set one of them."
        )
    given = {name.removeprefix("train.recompute_"): value for name, value in was.items()}
    after = replace(before, **given)
    if after.granularity != "full":  # what a recipe says beside "full", and flags of another granularity take back
        after = replace(after, method=given.get("method"), num_layers=given.get("num_layers"))
    if {after.method is not None, after.num_layers is not None} != {after.granularity == "full"}:
        raise Contradiction(
            'train.recompute_granularity = "full", recompute_method and recompute_num_layers go together: write '
            'train.recompute = "full:uniform:1".'
        )
    return {"train.recompute": after.spelled()}


def _modules(was: Values, now: Values) -> Values:
    modules = now["train.offload_modules"]
    if was["train.fine_grained_activation_offloading"] and not modules:
        raise Contradiction("train.fine_grained_activation_offloading is what train.offload_modules says, found none.")
    return {} if was["train.fine_grained_activation_offloading"] else {"train.offload_modules": ()}


def _off(was: Values, now: Values) -> Values:
    """ "on" is as good as "auto": what can run does."""
    given = {name.partition(".")[2]: value for name, value in was.items()}
    kept = [name for name in now["kernels.off"] if name not in given]
    return {"kernels.off": kept + [name for name, value in given.items() if value == "off"]}


MOVED: tuple[Moved, ...] = (
    _renamed("data.accept_change", "data.allow_data_change"),
    _renamed("parallel.fit", "parallel.elastic"),
    Moved(
        old={"data.reset": OldField(kind=Literal["none", "attention"], default="none")},
        new=("data.reset_attention_mask", "data.reset_position_ids"),
        becomes=_reset,
    ),
    _constant("fault.spike_sigma", float, 6.0),
    _constant("fault.spike_window", int, 128),
    _constant("fault.straggler_ratio", float, 1.3),
    _constant("fault.memory_growth_mib", float, 256.0),
    Moved(
        old=_fields("fault", straggler_interval=(int, 50), memory_interval=(int, 50)),
        new=("fault.watch_interval",),
        becomes=_watch,
    ),
    Moved(
        old=_fields(
            "precision",
            fp8_shadow_interval=(int | None, None),
            fp8_shadow_bound=(float, 0.25),
            fp8_shadow_stop=(bool, False),
        ),
        new=("precision.fp8_shadow",),
        becomes=_shadow,
    ),
    Moved(
        old=_fields("kernels", **dict.fromkeys(get_args(FusionName), (Literal["auto", "on", "off"], "auto"))),
        new=("kernels.off",),
        becomes=_off,
    ),
    _in_megatron(
        "parallel",
        "parallel",
        high_priority_stream_groups=(tuple[StreamGroup, ...], ()),
        use_sharp=(bool, False),
        nccl_ub=(bool, False),
    ),
    _in_megatron("optimizer", "optimizer", overlap_cpu_optimizer_d2h_h2d=(bool, False)),
    Moved(
        old=_fields(
            "train",
            recompute_granularity=(Granularity | None, None),
            recompute_method=(Method | None, None),
            recompute_num_layers=(int | None, None),
            recompute_modules=(tuple[RecomputeModule, ...], ("core_attn",)),
        ),
        new=("train.recompute",),
        becomes=_recompute,
        beside="merged",
    ),
    Moved(
        old=_fields("train", fine_grained_activation_offloading=(bool, False)),
        new=("train.offload_modules",),
        becomes=_modules,
        beside="merged",
        now="what train.offload_modules says",
    ),
    _in_megatron(
        "train",
        "model",
        min_offloaded_tensor_size=(int, 1024 * 1024),
        activation_offload_fraction=(float, 1.0),
        delta_offload_bytes_across_pp_ranks=(int, 0),
    ),
)
