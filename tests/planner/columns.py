"""Columns of a table of runs: their other names, their units, and what no run can have."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from program.errors import UserError

NEEDED = ("id", "model", "seq_len", "gpu", "n_gpus", "gbs")
TIMES = ("step_s", "tokens_s_gpu", "tflops_gpu")
READ = (
    *NEEDED, *TIMES, "source", "year", "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab",
    "experts", "topk", "moe_ffn", "precision", "tp", "pp", "vpp", "dp", "cp", "ep", "mbs", "recompute", "seq_parallel",
    "zero", "mem_gb", "framework", "notes",
)  # fmt: skip
FOR_PEOPLE = ("url", "mfu_pct", "group")
"""In the shipped table, too, for its readers."""
OTHER_NAMES = {
    # Megatron's own, and those of its users' tables.
    "tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
    "pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel pp_size",
    "vpp": "virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size vp vp_size",
    "cp": "context_parallel_size context_parallel cp_size",
    "ep": "expert_model_parallel_size expert_parallel_size expert_parallel ep_size",
    "dp": "data_parallel_size data_parallel dp_size",
    "mbs": "micro_batch_size microbatch_size",
    "gbs": "global_batch_size",
    "seq_len": "seq_length sequence_length",
    "n_gpus": "num_gpus gpus world_size",
    "gpu": "gpu_type gpu_name",
    "layers": "num_layers n_layers",
    "hidden": "hidden_size d_model",
    "ffn_hidden": "ffn_hidden_size",
    "heads": "num_attention_heads n_heads",
    "kv_heads": "num_query_groups num_key_value_heads",
    "vocab": "vocab_size padded_vocab_size",
    "experts": "num_experts num_moe_experts",
    "topk": "moe_router_topk",
    "moe_ffn": "moe_ffn_hidden_size",
    "precision": "dtype",
    "recompute": "recompute_granularity",
    "seq_parallel": "sequence_parallel",
    "zero": "zero_stage",
    "step_s": "step_time_s iteration_time_s elapsed_time_per_iteration_s",
    "tokens_s_gpu": "tokens_per_s_per_gpu tokens_per_second_per_gpu tokens_per_sec_per_gpu",
    "tflops_gpu": "tflops_per_gpu",
    "mem_gb": "mem_gib",
}
NUMBERS = {
    # With the unit, and whether zero is one. Times and peaks of zero were not measured.
    "seq_len": ("tokens", False), "n_gpus": ("GPUs", False), "gbs": ("sequences", False), "mbs": ("sequences", False),
    "layers": ("layers", False), "hidden": ("channels", False), "ffn_hidden": ("channels", False),
    "heads": ("heads", False), "kv_heads": ("heads", False), "vocab": ("tokens", False), "experts": ("experts", True),
    "topk": ("experts", True), "moe_ffn": ("channels", True), "params_b": ("billions", True), "tp": ("ranks", True),
    "pp": ("stages", True), "vpp": ("chunks a stage", True), "dp": ("ranks", True), "cp": ("ranks", True),
    "ep": ("ranks", True), "step_s": ("seconds", True), "tokens_s_gpu": ("tokens per second and GPU", True),
    "tflops_gpu": ("TFLOPS per GPU", True), "mem_gb": ("GiB", True),
}  # fmt: skip
LARGEST_GIB = 320
"""More than any card has: 288 GB on the largest that is published today."""
_WORDS = {
    "seq_parallel": {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"},
    "precision": {word: word for word in ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4")}
    | {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "fp8-mx": "mxfp8", "fp8_mx": "mxfp8"}
    | {"fp8-cs": "fp8", "fp8_cs": "fp8", "fp8-hybrid": "fp8", "hybrid": "fp8"},
}
"""Cells as the rest reads them."""
_CANONICAL = {other: name for name, others in OTHER_NAMES.items() for other in others.split()}


def canonical(path: Path, header: Sequence[str]) -> list[str]:
    """The columns by the names that are read. Raises UserError where one is missing, with what may be it."""
    names = [_canonical(name) for name in header]
    missing = [name for name in NEEDED if name not in names]
    if missing or not set(TIMES) & set(names):
        absent = ", ".join(missing) if missing else f"any of {', '.join(TIMES)}"
        near = "" if set(TIMES) & set(names) else _other_units(header)
        found = ", ".join(name.strip() for name in header[:12])
        raise UserError(
            f"{path}: column {absent} is missing{near}. Expected a header with {', '.join(NEEDED)}, and one of "
            f"{', '.join(TIMES)} (seconds, tokens per second and GPU, TFLOPS per GPU); found {found}."
        )
    return names


def unread(header: Sequence[str]) -> list[str]:
    """Columns that nothing is taken from, as they are spelled."""
    return [name.strip() for name in header if _canonical(name) not in (*READ, *FOR_PEOPLE, "")]


def cells(path: Path, line: int, names: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """A line by its columns' names. Raises UserError for what no run can have."""
    found = dict.fromkeys(names, "")
    for name, value in zip(names, values, strict=False):
        text = _WORDS.get(name, {}).get(value.strip().lower(), value.strip())
        if name in READ and text and found[name] not in ("", text):
            raise UserError(
                f"{path}, line {line}: two columns tell {name}: {found[name]} and {text}. Leave one of them out: "
                f"{name} is also called {', '.join(OTHER_NAMES.get(name, '').split())}."
            )
        found[name] = found[name] or text
    where = f"{path}, line {line} ({found.get('id') or 'no id'})"
    for name, (unit, zero) in NUMBERS.items():
        if problem := _problem(found.get(name, ""), unit, zero):
            raise UserError(f"{where}: {name} is {found[name]}: {problem}")
    peak = float(found.get("mem_gb", "") or 0)
    if peak > LARGEST_GIB:
        raise UserError(
            f"{where}: mem_gb is {found['mem_gb']}: expected GiB on the fullest GPU, and no card has {LARGEST_GIB}. "
            f"If it is in MiB, write {peak / 1024:.1f}."
        )
    return found


def _problem(text: str, unit: str, zero: bool) -> str:
    """What is wrong with a cell; empty where it is a number that can be, or where the cell is empty."""
    if not text:
        return ""
    try:
        number = float(text)
    except ValueError:
        return f"not a number where one belongs. Expected {unit}, or an empty cell where it is not known."
    if math.isfinite(number) and (number > 0 or (zero and number == 0)):
        return ""
    return f"expected {unit}, a number above 0, or an empty cell where it is not known."


def _canonical(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return _CANONICAL.get(plain, plain)


def _other_units(header: Sequence[str]) -> str:
    """A hint for a time in other units, which would be taken for none."""
    hints = [f"{name.strip()}{hint}" for name in header if (hint := _unit(_canonical(name)))]
    return f" (found {'; '.join(hints)})" if hints else ""


def _unit(name: str) -> str:
    words = set(name.split("_"))
    if not words & {"step", "iter", "iteration", "time", "elapsed", "duration", "tokens", "throughput", "ms", "tflops"}:
        return ""
    if words & {"ms", "msec", "millis", "milliseconds"}:
        return ": convert it from milliseconds, and call it step_s"
    if words & {"min", "minutes"}:
        return ": convert it from minutes, and call it step_s"
    if words & {"tokens", "throughput"}:
        return ": convert it to tokens per second and GPU, and call it tokens_s_gpu"
    return f": convert it to seconds, and call it step_s, or to one of {', '.join(TIMES[1:])}"
