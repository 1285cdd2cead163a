"""Recomputation, offloading and the rest of the train section."""

import typing

from models.sublayers import OffloadModule
from tools.from_megatron.draft import DEFAULT, Draft


def training(draft: Draft) -> None:
    """What is more than one flag's value of how a step is run."""
    _recompute(draft)
    _offload(draft)
    for flag, what in (("eval-interval", "evaluates"), ("exit-interval", "stops early")):
        if draft.values.get(name := f"train.{flag.replace('-', '_')}") == 0:
            del draft.values[name]
            draft.irrelevant.append(f"--{flag} 0: it never {what}, which is Triplane's default")
    interval = draft.arguments.whole("manual-gc-interval")
    if draft.arguments.switch("manual-gc"):
        draft.put("train.manual_gc_interval", interval or 100, "--manual-gc-interval" if interval else "--manual-gc")
    elif interval is not None:
        draft.irrelevant.append("--manual-gc-interval: has no effect without --manual-gc")


def _recompute(draft: Draft) -> None:
    granularity = draft.arguments.text("recompute-granularity")
    short, modules = draft.arguments.switch("recompute-activations"), draft.arguments.texts("recompute-modules")
    if granularity is None and short:
        granularity = "selective"
    if granularity is not None:
        source = "--recompute-activations" if short else "--recompute-granularity"
        draft.put("train.recompute_granularity", granularity, source)
    if granularity == "selective":
        source = "--recompute-modules" if modules else DEFAULT
        draft.put("train.recompute_modules", modules or ["core_attn"], source)
    elif modules:
        draft.irrelevant.append('--recompute-modules: has no effect without --recompute-granularity "selective"')


def _offload(draft: Draft) -> None:
    modules, known = draft.arguments.texts("offload-modules"), typing.get_args(OffloadModule)
    asked = draft.arguments.switch("fine-grained-activation-offloading")
    if not modules:
        if asked:
            draft.irrelevant.append("--fine-grained-activation-offloading: offloads nothing without --offload-modules")
        return
    if not asked:
        draft.irrelevant.append("--offload-modules: has no effect without --fine-grained-activation-offloading")
        return
    for module in modules:
        if module not in known:
            draft.unsupported.append(f"--offload-modules {module}: Triplane offloads {', '.join(known)}.")
    draft.put("train.offload_modules", [module for module in modules if module in known], "--offload-modules")
