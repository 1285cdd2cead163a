"""A Megatron checkpoint by our keys: what of it is what, and whether its optimizer's state is to be trusted.

Without torch and process groups: megatron-core's own loader is not used.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.costs.parameters import parameters
from models.names import canonical, checkpoint_key
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.layout import Layout
from program.errors import UserError
from program.printing import some
from tools.reshard.checkpoint_source import MASTER, STATE, STATES, CheckpointSource, real_vocab_size
from tools.reshard.megatron import dp_reshardable
from tools.reshard.megatron import known as megatron_known
from tools.reshard.megatron.args import ARGS, SCHEDULER, with_schedule
from tools.reshard.megatron.dp_reshardable import FlatStates, by_weight, has_buckets, optimizer_numbers
from tools.reshard.megatron.files import Namespace, TorchDist
from tools.reshard.megatron.hybrid_files import HybridFiles, is_cut
from tools.reshard.megatron.keys import moe_blocks, ours, style_of
from tools.reshard.model_recipe import carried_files
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import is_of_vocabulary
from tools.reshard.tensors import BLOCK_BYTES, Origin, SourceRows, Tensors, rectangles
from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.state import State
from training.config.recipe import load
from training.progress import Progress

RECIPE_WANTED = (
    "Megatron's checkpoint does not say enough of its model. Give the model as a recipe, --recipe RECIPE.toml; python "
    "-m tools.from_megatron makes one of Megatron-LM's command line."
)

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)$")
_MASTERS = {"fp32_param": "param"}
"""How megatron-core's optimizers that are not distributed name the fp32 weights."""
_BUCKET = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_NO_WEIGHTS = re.compile(r"(^|/|\.)(_extra_state|rng_state|rerun_state_machine_state|common_state)(/|$|\.)")


def open_source(folder: Path, options: ReshardOptions) -> CheckpointSource:
    """Raises UserError for whatever of it is not covered, by name."""
    if options.recipe is None:
        raise UserError(f"{folder}: {RECIPE_WANTED}")
    config = load(options.recipe)
    files = TorchDist(folder)
    if is_cut(files.tensors):
        files.close()
        files = HybridFiles(folder)
    vocab_size = real_vocab_size(config, options.recipe.parent)
    shape = resolve(config.model, vocab_size)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    common = files.common()
    tensors: Tensors = files
    if has_buckets(files):
        common = common | {"optimizer": optimizer_numbers(files)}
        if not options.drop_optimizer:
            weights = _weights(files)
            tensors = _by_weight(files, weights, shape, _plain(common.get("args")))
    carried = carried_files(config, folder)
    return CheckpointSource(
        folder=folder,
        files=tensors,
        origins=_origins(tensors, shape, folder, options.drop_optimizer),
        state=with_schedule(plain_state(common), config),
        config=config,
        about={"source": "megatron", "iteration": _iteration(common), "layout": str(Layout())},
        carried=carried.copies,
        texts=carried.texts,
        tokenizer=carried.name,
        pads_as_configured=False,
        fingerprint=files.fingerprint(),
    )


def _by_weight(files: TorchDist, weights: Sequence[str], shape: GPTShape, args: Any) -> FlatStates:
    """The optimizer's state by weight: as it is known to lie, or as it is found."""
    style = style_of(weights)
    moe = moe_blocks(weights, style)
    if (job := megatron_known.job_of(args)) is not None:
        return megatron_known.by_weight(files, weights, shape, style, moe, job)
    return by_weight(files, weights, shape, style, moe)


def _weights(files: Tensors) -> list[str]:
    """Keys of the model's tensors."""
    keys = [key for key in files.tensors if not _NO_WEIGHTS.search(key)]
    return [key for key in keys if not _STATE.match(key) and not _BUCKET.match(key)]


def _origins(files: Tensors, shape: GPTShape, folder: Path, weights_alone: bool) -> dict[str, Origin]:
    """Every tensor of the model by our key. Raises UserError for what is missing, left over or of another shape."""
    keys = [key for key in files.tensors if not _NO_WEIGHTS.search(key)]
    plain = _weights(files)
    style = style_of(plain)
    moe = moe_blocks(plain, style)
    found: dict[str, Origin] = {}
    extra: list[str] = []
    for key in keys:
        match = _STATE.match(key)
        if weights_alone and (match or _BUCKET.match(key)):
            continue
        if _BUCKET.match(key):
            raise UserError(
                f"{folder}: {key}: a form of the optimizer's state that is not read here. Take the weights alone: "
                "--drop_optimizer."
            )
        state = _MASTERS.get(match[1], match[1]) if match else ""
        name, prefix = (match[2], f"{STATE}{state}.") if match else (key, "")
        info = files.tensors[key]
        try:
            for our_key, index in ours(name, style, info.shape[0] if info.shape else 0, moe):
                own = info.shape if index is None else info.shape[1:]
                if prefix + our_key in found:
                    raise UserError(f"{folder}: {found[prefix + our_key].key} and {key} are the same tensor's names.")
                found[prefix + our_key] = Origin(key, info.dtype, own, index)
        except (KeyError, ValueError):
            extra.append(key)
        if match and state not in STATES:
            extra.append(key)
    if not weights_alone:
        found |= _weights_as_masters(found)
    check_model(found, extra, shape, folder)
    return found


def _weights_as_masters(found: Mapping[str, Origin]) -> dict[str, Origin]:
    """megatron-core's FP32Optimizer has no other fp32 weights than the model's own."""
    names = {key.removeprefix(f"{STATE}exp_avg.") for key in found if key.startswith(f"{STATE}exp_avg.")}
    if any(MASTER + name in found for name in names):
        return {}
    return {MASTER + name: found[name] for name in names if name in found and found[name].dtype == "float32"}


def expected(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """Every weight of a model and its shape, by our key; buffers that are saved, too."""
    found = {checkpoint_key(each.name): each.shape for each in parameters(shape)}
    if shape.moe_router_enable_expert_bias:
        routers = [key for key in found if key.endswith("mlp.router.weight")]
        found |= {key.replace("router.weight", "router.expert_bias"): found[key][:1] for key in routers}
    return found


def check_model(found: Mapping[str, Origin], extra: Sequence[str], shape: GPTShape, folder: Path) -> None:
    """Raises UserError for what is missing, left over or of another shape."""
    wanted = expected(shape)
    weights = {key: origin for key, origin in found.items() if not key.startswith(STATE)}
    missing = sorted(wanted.keys() - weights.keys())
    left = sorted({*extra, *(weights[key].key for key in weights.keys() - wanted.keys())})
    reshaped = [
        f"{found[key].key} {list(found[key].shape)}, expected {list(size)}"
        for key, size in wanted.items()
        if key in weights and not _fits(key, found[key].shape, size)
    ]
    for what, names in (
        ("lacks", [_name(key) for key in missing]),
        ("has no place for", left),
        ("differs in", reshaped),
    ):
        if names:
            raise UserError(
                f"{folder}: the model of --recipe {what} {some(names)}. Mend the recipe."
                if what != "lacks"
                else f"{folder}: lacks {some(names)}, which the model of --recipe has. Mend the recipe."
            )
    _check_states(found, weights, folder)


def _check_states(found: Mapping[str, Origin], weights: Mapping[str, Origin], folder: Path) -> None:
    """Each state of the optimizer has its weight's shape, and no state is there in part."""
    states = [key for key in found if key.startswith(STATE)]
    for key in states:
        name = key.removeprefix(STATE).partition(".")[2]
        if name not in weights or found[key].shape != weights[name].shape:
            raise UserError(f"{folder}: {found[key].key} {list(found[key].shape)} has no weight of its shape.")
        lacking = [part for part in STATES if f"{STATE}{part}.{name}" not in found]
        if lacking:
            raise UserError(
                f"{folder}: lacks optimizer.state.{lacking[0]}.{name}. Take the weights alone: --drop_optimizer."
            )
    trained = [name for name in weights if not name.endswith("router.expert_bias")]
    if states and (bare := [name for name in trained if MASTER + name not in found]):
        raise UserError(
            f"{folder}: lacks the optimizer's state of {bare[0]}. Take the weights alone: --drop_optimizer."
        )


def _fits(key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """The vocabulary may be padded otherwise."""
    if is_of_vocabulary(key):
        return found[1:] == wanted[1:]
    return found == wanted


def _name(key: str) -> str:
    try:
        return canonical(key)
    except KeyError:
        return key


def check_bytes(source: CheckpointSource) -> None:
    """Raises UserError for a chunk that does not have the checksum that torch.save has written for it. Of flat memory
    each element is compared with its weight instead."""
    if isinstance(source.files, TorchDist):
        source.files.check({origin.key for origin in source.origins.values() if isinstance(origin, Origin)})


def check_optimizer(source: CheckpointSource) -> None:
    """The optimizer's fp32 weights, rounded, are the model's, bit by bit. Raises UserError with those that are not.

    megatron-core 0.19.2 gathers a padded bucket's state wrongly (distrib_optimizer.py:1398 counts unpadded elements,
    :1791 padded ones), and says so in a warning at most. The moments of such a tensor are wrong as its weights are.
    """
    weights = source.weights()
    wrong = [
        key for key, weight in weights.items()
        if MASTER + key in source.origins and not _rounds_to(source, source.origins[MASTER + key], weight)
    ]  # fmt: skip
    if wrong:
        why = "" if isinstance(source.files, FlatStates) else (
            "megatron-core's fully_reshardable form loses a padded bucket's place; its moments are wrong as well. "
        )  # fmt: skip
        raise UserError(
            f"{source.folder}: the optimizer's state does not belong to the weights: optimizer.state.param of "
            f"{some(wrong)} does not round to the saved weight. {why}"
            "The weights are right: --drop_optimizer."
        )
    if isinstance(source.files, FlatStates) and (names := dp_reshardable.differing(source.files)):
        print(
            f"{source.folder}: the optimizer's state of {some(names)} differs between the ranks that hold it alike; "
            "the first rank's is taken, as megatron-core itself does. All round to the same weights."
        )


def _rounds_to(source: CheckpointSource, master: SourceRows, weight: SourceRows) -> bool:
    for rectangle in rectangles(weight.shape, ITEM_BYTES[master.dtype], BLOCK_BYTES):
        rounded = cast(master.rows_read(source.files, rectangle), master.dtype, weight.dtype)
        if not np.array_equal(rounded, weight.rows_read(source.files, rectangle)):
            return False
    return True


def plain_state(common: Mapping[str, Any]) -> State:
    """Progress and the optimizer's numbers, of what a checkpoint keeps beside tensors."""
    groups = _param_groups(common.get("optimizer"))
    steps = {int(group["step"]) for group in groups if group.get("step") is not None}
    steps |= set(_common_steps(common.get("optimizer")))
    if len(steps) > 1:
        raise UserError(f"Megatron's parameter groups have taken different numbers of steps: {sorted(steps)}.")
    args, schedule = _plain(common.get("args")), _plain(common.get("opt_param_scheduler"))
    samples = args.get("consumed_train_samples", 0) if isinstance(args, dict) else 0
    return State(
        progress=Progress(iteration=_iteration(common), consumed_samples=int(samples or 0)),
        layout=Layout(),
        device="cpu",
        optimizer={
            "step": steps.pop() if steps else _iteration(common),
            "param_groups": [
                _plain({key: value for key, value in group.items() if key != "params"}) for group in groups
            ],
            "grad_scaler": _grad_scaler(common.get("optimizer")),
        },
        entries={key: value for key, value in ((ARGS, args), (SCHEDULER, schedule)) if isinstance(value, dict)},
    )


def _iteration(common: Mapping[str, Any]) -> int:
    return int(common.get("iteration") or 0)


def _param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Of one optimizer, or of several chained ones."""
    if not isinstance(optimizer, dict):
        return []
    if isinstance(inner := optimizer.get("optimizer"), dict):
        optimizer = inner
    if isinstance(groups := optimizer.get("param_groups"), list):
        return [group for group in groups if isinstance(group, dict)]
    return [group for part in optimizer.values() for group in _param_groups(part)]


def _common_steps(optimizer: Any) -> Iterator[int]:
    """Of optimizers that are not distributed: the steps that all parameters have taken."""
    if not isinstance(optimizer, dict):
        return
    for key, value in optimizer.items():
        if key == "common_step":
            yield int(value[0] if isinstance(value, list) else value)
        elif isinstance(value, dict):
            yield from _common_steps(value)


def _grad_scaler(optimizer: Any) -> dict[str, Any] | None:
    """Of fp16: its scale is a tensor of one element in Megatron's."""
    if not isinstance(optimizer, dict):
        return None
    if isinstance(saved := optimizer.get("grad_scaler"), dict):
        return {key: value[0] if isinstance(value, list) else value for key, value in saved.items()}
    return next(filter(None, map(_grad_scaler, optimizer.values())), None)


def _plain(value: Any) -> Any:
    """What JSON can say of a value; the rest is left out."""
    if isinstance(value, Namespace):
        value = value.state
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if _is_plain(each)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value if _is_plain(each)]
    return value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | dict | list | tuple)
