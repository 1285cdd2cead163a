"""The table of old names: what recipe fields were before 0.2.0, and what to write now. Delete with 0.3.0.

``deprecated`` reads recipes and flags by it.
"""

from dataclasses import replace
from decimal import Decimal
from typing import Literal, get_args

from models.kernels import FusionName
from parallel.config import SHADOW_BOUND, PrecisionConfig, Shadow, StreamGroup
from training.config.log_config import read_endpoint
from training.config.moved import (
    Contradiction,
    Moved,
    OldField,
    Values,
    both_there,
    constant,
    in_megatron,
    of_section,
    renamed,
)
from training.config.recompute import Granularity, Method, Recomputation, RecomputeModule, read_recompute


def _reset(was: Values, _: Values) -> Values:
    apart = was["data.reset"] == "attention"
    return {"data.reset_attention_mask": apart, "data.reset_position_ids": apart}


def _watch(was: Values, now: Values) -> Values:
    """One interval of two: the shorter one that is not 0. What is not said is as it is now."""
    both = [was.get(name, now["fault.watch_interval"]) for name in WATCHES]
    return {"fault.watch_interval": min((each for each in both if each), default=0)}


WATCHES = of_section("fault", straggler_interval=(int, 50), memory_interval=(int, 50))


def _endpoint(was: Values, now: Values) -> Values:
    """ADDRESS:PORT, where there is an endpoint."""
    before = read_endpoint(now["log.prometheus"])
    if before is None:
        return {}
    return {"log.prometheus": str(before._replace(**{name.removeprefix("log.prometheus_"): was[name] for name in was}))}


def _endpoint_beside(old: Values, given: Values) -> str | None:
    """Where it is was said beside whether it is."""
    return None if given["log.prometheus"] in ("off", "textfile", "endpoint") else both_there(old, given)


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
    return _by_memory(text, said) if budget else both_there(said, given)


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
    renamed("data.accept_change", "data.allow_data_change"),
    renamed("parallel.fit", "parallel.elastic"),
    Moved(
        old={"data.reset": OldField(kind=Literal["none", "attention"], default="none")},
        new=("data.reset_attention_mask", "data.reset_position_ids"),
        becomes=_reset,
    ),
    constant("fault.spike_sigma", float, 6.0),
    constant("fault.spike_window", int, 128),
    constant("fault.straggler_ratio", float, 1.3),
    constant("fault.memory_growth_mib", float, 256.0),
    constant("profile.trace_limit_mib", int, 1024),
    Moved(
        old=of_section("log", prometheus_address=(str, "127.0.0.1"), prometheus_port=(int, 9464)),
        new=("log.prometheus",),
        becomes=_endpoint,
        beside=_endpoint_beside,
    ),
    Moved(
        old=WATCHES,
        new=("fault.watch_interval",),
        becomes=_watch,
    ),
    Moved(
        old=of_section(
            "precision",
            fp8_shadow_interval=(int | None, None),
            fp8_shadow_bound=(float, SHADOW_BOUND),
            fp8_shadow_stop=(bool, False),
        ),
        new=("precision.fp8_shadow",),
        becomes=_shadow,
    ),
    Moved(
        old=of_section("kernels", **dict.fromkeys(get_args(FusionName), (Literal["auto", "on", "off"], "auto"))),
        new=("kernels.off",),
        becomes=_off,
    ),
    in_megatron(
        "parallel",
        "parallel",
        high_priority_stream_groups=(tuple[StreamGroup, ...], ()),
        use_sharp=(bool, False),
        nccl_ub=(bool, False),
    ),
    in_megatron("optimizer", "optimizer", overlap_cpu_optimizer_d2h_h2d=(bool, False)),
    Moved(
        old=of_section(
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
        old=of_section("train", fine_grained_activation_offloading=(bool, False)),
        new=("train.offload_modules",),
        becomes=_modules,
        beside=_modules_beside,
        now="what train.offload_modules says",
    ),
    in_megatron(
        "train",
        "model",
        min_offloaded_tensor_size=(int, 1024 * 1024),
        activation_offload_fraction=(float, 1.0),
        delta_offload_bytes_across_pp_ranks=(int, 0),
    ),
)
