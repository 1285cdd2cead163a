"""The table of old names: what recipe fields were before 0.2.0, and what to write now. Delete with 0.3.0.

``deprecated`` reads recipes and flags by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, get_args

from models.kernels import FusionName
from parallel.config import SHADOW_BOUND, PrecisionConfig, Shadow, StreamGroup
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


def _both(old: Values, given: Values) -> str | None:
    first = next(iter(old))
    return f"{first} and {next(iter(given))} are both there: {first} is the old name of it. Remove {first}."


@dataclass(kw_only=True, slots=True, frozen=True)
class Moved:
    """Old fields that are read together."""

    old: Mapping[str, OldField]
    """By dotted names."""
    new: tuple[str, ...] = ()
    """Dotted names of what is there now. None: a constant."""
    becomes: Callable[[Values, Values], Values]
    """(old values as given, what the new fields are) -> new values; none where the old ones say nothing by themselves.
    Raises Contradiction where these disagree."""
    beside: Callable[[Values, Values], str | None] = _both
    """(old values as given, new ones that stand beside them) -> why not; None where these were fields then, too, and go
    together."""
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
        given = {name.rpartition(".")[2]: value for name, value in was.items()}
        kept = [str(each) for each in now[hatch] if _name(str(each)) not in given]
        return {hatch: kept + [f"{name}={_literal(value)}" for name, value in given.items()]}

    def beside(old: Values, given: Values) -> str | None:
        entries = {_name(str(each)) for each in given[hatch]}
        for name in old:
            if (own := name.rpartition(".")[2]) in entries:
                return f"{name} and {hatch} both set {own}: {name} is the old name of it. Remove {name}."
        return None

    return Moved(old=_fields(section, **fields), new=(hatch,), becomes=becomes, beside=beside)


def _name(entry: str) -> str:
    return entry.partition("=")[0].strip()


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _reset(was: Values, _: Values) -> Values:
    apart = was["data.reset"] == "attention"
    return {"data.reset_attention_mask": apart, "data.reset_position_ids": apart}


def _watch(was: Values, now: Values) -> Values:
    """One interval of two: the shorter one that is not 0. What is not said is as it is now."""
    both = [was.get(name, now["fault.watch_interval"]) for name in WATCHES]
    return {"fault.watch_interval": min((each for each in both if each), default=0)}


WATCHES = _fields("fault", straggler_interval=(int, 50), memory_interval=(int, 50))


def _shadow(was: Values, now: Values) -> Values:
    """ACTION:ITERATIONS:BOUND, of three fields."""
    text = now["precision.fp8_shadow"]
    before = PrecisionConfig(fp8_shadow=text).shadow if text else Shadow(interval=0, bound=SHADOW_BOUND, stop=False)
    if before is None:  # no form of it, which the section's own check says
        return {}
    after = replace(before, **{name.removeprefix("precision.fp8_shadow_"): value for name, value in was.items()})
    if not after.interval:
        return {"precision.fp8_shadow": None} if text else {}
    action = "stop" if after.stop else "warn"
    bound = f":{Decimal(repr(after.bound)).normalize():f}" if after.bound != SHADOW_BOUND else ""
    return {"precision.fp8_shadow": f"{action}:{after.interval}{bound}"}


def _recompute(was: Values, now: Values) -> Values:
    """Megatron's four fields as one, over what is there: flags change one of them."""
    before = read_recompute(now["train.recompute"]) or Recomputation()
    if before.budget is not None:
        if set(was) <= {MODULES}:  # which a budget has never read
            return {}
        raise Contradiction(_by_memory(now["train.recompute"], was))
    given = {name.removeprefix("train.recompute_"): value for name, value in was.items()}
    after = replace(before, **given)
    if after.granularity != "full":  # what a recipe says beside "full", and flags of another granularity take back
        after = replace(after, method=given.get("method"), num_layers=given.get("num_layers"))
    if {after.method is not None, after.num_layers is not None} != {after.granularity == "full"}:
        raise Contradiction(
            'train.recompute_granularity = "full", recompute_method and recompute_num_layers go together: write '
            'train.recompute = "full:uniform:1".'
        )
    nothing = after.granularity is None and before.granularity is None and MODULES in was
    return {} if nothing else {"train.recompute": after.spelled()}


MODULES = "train.recompute_modules"


def _by_memory(text: str, old: Values) -> str:
    name = next(name for name in old if name != MODULES)
    return f'train.recompute = "{text}" chooses by predicted memory, which {name} changes: set one of them.'


def _recompute_beside(old: Values, given: Values) -> str | None:
    """A budget stood beside modules, which it did not read; and every saved config.toml has the default ones."""
    text = given["train.recompute"]
    budget = (read_recompute(text) or Recomputation()).budget is not None
    dormant = {MODULES} if budget or old.get(MODULES) == Recomputation().modules else set()
    said = {name: value for name, value in old.items() if name not in dormant}
    if not said:
        return None
    return _by_memory(text, said) if budget else _both(said, given)


def _modules(was: Values, now: Values) -> Values:
    modules = now["train.offload_modules"]
    if was["train.fine_grained_activation_offloading"] and not modules:
        raise Contradiction("train.fine_grained_activation_offloading is what train.offload_modules says, found none.")
    return {} if was["train.fine_grained_activation_offloading"] else {"train.offload_modules": ()}


def _modules_beside(old: Values, given: Values) -> str | None:
    if old["train.fine_grained_activation_offloading"] or not given["train.offload_modules"]:
        return None
    return (
        "train.fine_grained_activation_offloading = false and train.offload_modules disagree: leave both out, or the "
        "first."
    )


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
        old=WATCHES,
        new=("fault.watch_interval",),
        becomes=_watch,
    ),
    Moved(
        old=_fields(
            "precision",
            fp8_shadow_interval=(int | None, None),
            fp8_shadow_bound=(float, SHADOW_BOUND),
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
        beside=_recompute_beside,
    ),
    Moved(
        old=_fields("train", fine_grained_activation_offloading=(bool, False)),
        new=("train.offload_modules",),
        becomes=_modules,
        beside=_modules_beside,
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
