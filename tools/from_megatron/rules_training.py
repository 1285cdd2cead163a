"""Recomputation, offloading and the rest of the train section."""

import typing

from models.sublayers import OffloadModule
from tools.from_megatron.arguments import number
from tools.from_megatron.draft import Draft
from training.config.recompute import Method


def training(draft: Draft) -> None:
    """What is more than one flag's value of how a step is run."""
    _recompute(draft)
    _offload(draft)
    for flag, what in (("eval-interval", "evaluates"), ("exit-interval", "stops early")):
        if draft.values.get(name := f"train.{flag.replace('-', '_')}") == 0:
            del draft.values[name]
            draft.irrelevant.append(f"--{flag} 0: it never {what}, which is Triplane's default")
    if skipped := draft.arguments.texts(flag := "iterations-to-skip"):
        draft.put("train.iterations_to_skip", [number(flag, one, int) for one in skipped], f"--{flag}")
        draft.notes.append(f"--{flag}: the log's numbers; older Megatron-LM skips the iteration behind each.")
    interval = draft.arguments.whole("manual-gc-interval")
    if draft.arguments.switch("manual-gc"):
        draft.put("train.manual_gc_interval", interval or 100, "--manual-gc-interval" if interval else "--manual-gc")
    elif interval is not None:
        draft.irrelevant.append("--manual-gc-interval: has no effect without --manual-gc")


def _recompute(draft: Draft) -> None:
    """train.recompute, of five flags."""
    arguments = draft.arguments
    granularity, method = arguments.text("recompute-granularity"), arguments.text("recompute-method")
    short, modules = arguments.switch("recompute-activations"), arguments.texts("recompute-modules")
    layers = arguments.whole("recompute-num-layers", least=1)
    if granularity is None and short:
        granularity = "selective"
    if granularity == "selective":
        source = ["--recompute-activations" if short else "--recompute-granularity"]
        source += ["--recompute-modules"] if modules else []
        draft.put("train.recompute", f"selective:{','.join(modules or ['core_attn'])}", " ".join(source))
    elif modules:
        draft.irrelevant.append('--recompute-modules: has no effect without --recompute-granularity "selective"')
    if granularity == "full" and method in typing.get_args(Method) and layers is not None:
        source = [f"--recompute-{flag}" for flag in ("granularity", "method", "num-layers")]
        draft.put("train.recompute", f"full:{method}:{layers}", " ".join(source))
    elif granularity == "full":
        draft.unsupported.append(
            "--recompute-granularity full: needs --recompute-method uniform or block, and --recompute-num-layers: "
            f'train.recompute = "full:uniform:1"; found {method} and {layers}.'
        )
    elif granularity not in ("selective", None):
        draft.unsupported.append(f'--recompute-granularity {granularity}: Triplane knows "full" and "selective".')
    if granularity != "full":
        draft.only_with('recompute-granularity "full"', ["recompute-method", "recompute-num-layers"])


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
