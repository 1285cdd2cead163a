"""A CSV of published runs as cases with measured seconds."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from models.costs.candidate import Candidate, Recompute
from models.costs.sizes import ModelSizes
from models.shapes import GPTShape
from program.errors import UserError
from program.untrusted import read_text
from tests.planner.columns import canonical, cells
from tests.planner.machines import cluster_of
from tests.planner.models import model_name, shape_of, sizes_of
from tests.planner.programs import PublishedProgram, on_card, program, when
from tools.clusters import Cluster
from tools.plan.cost.cases import PricedCase
from tools.plan.cost.hardware import Hardware, card_age, generation, machine

PUBLISHED = Path(__file__).with_name("published.csv")
MOST_CHARACTERS = 1 << 17
"""Of a cell."""
GIB = 2**30
"""Of mem_gb: nvidia-smi and PyTorch's allocator, which people copy their peaks from, count in powers of two."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishedRun:
    """One published run. measured_s: seconds of a step, None where none is given."""

    id: str
    source: str
    text: Mapping[str, str]
    case: PricedCase
    shape: GPTShape
    cluster: Cluster
    measured_s: float | None
    memory_bytes: float | None
    out_of_memory: bool

    @property
    def experts(self) -> bool:
        return self.case.model.experts > 0

    @property
    def problem(self) -> tuple[object, ...]:
        """Rows with the same one are layouts of one model, cluster and batch: they can be ranked."""
        shape = self.case.model
        kind = (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.experts, shape.seq_length)
        text = self.text
        return (*kind, text.get("gpu"), text.get("precision"), text["n_gpus"], text["gbs"], text.get("framework"))

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Repeats of one layout (other days, containers, GPU counts of a weak-scaling series) share it."""
        layout, text = self.case.layout, self.text
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.mbs, layout.recompute)
        return (text.get("model"), text.get("gpu"), text.get("precision"), text.get("seq_len"), *sizes)


def read(path: Path) -> list[PublishedRun]:
    """Raises UserError where the file is no such table, with what is missing."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    csv.field_size_limit(MOST_CHARACTERS)  # a setting of the process
    lines = csv.reader(io.StringIO(text))
    try:
        header = next(lines, [])
        table = [(lines.line_num, values) for values in lines if any(values)]
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: cannot be read as CSV: {error}") from None
    names = canonical(path, header)
    return [_row(path, line, cells(path, line, names, values)) for line, values in table]


def _row(path: Path, line: int, row: Mapping[str, str]) -> PublishedRun:
    try:
        shape, cluster = shape_of(row), cluster_of(row)
        model = sizes_of(row, shape)
        layout = _layout(row, model)
        software = _program(row, model, shape.multi_latent_attention, cluster.gpu.name)
        case = PricedCase(
            model=model,
            layout=layout,
            machine=_machine(cluster, layout.precision),
            software=software,
            published=software,
        )
        measured = _measured(row, case)
    except ValueError as error:
        raise UserError(
            f"{path}, line {line} ({row.get('id', 'no id')}): not a number where one belongs: {error}"
        ) from None
    notes = row.get("notes", "")
    return PublishedRun(
        id=row["id"], source=row.get("source", ""), text=row, case=case, shape=shape, cluster=cluster,
        measured_s=measured, memory_bytes=_number(row, "mem_gb", 0) * GIB or None,
        out_of_memory="OOM" in notes and "close to OOM" not in notes,
    )  # fmt: skip


def _program(row: Mapping[str, str], model: ModelSizes, latent: bool, gpu: str) -> PublishedProgram:
    base, year = program(row, model.gated), when(row)
    return replace(on_card(base, model.head_dim, latent, generation(gpu), year), card_age=card_age(gpu, year))


def _machine(cluster: Cluster, precision: str) -> Hardware:
    key = (cluster.name, precision)
    if key not in _MACHINES:
        try:
            _MACHINES[key] = machine(cluster, precision)
        except KeyError:
            _MACHINES[key] = machine(cluster, "bf16" if "bf16" in cluster.gpu.peak_tflops else "fp16")
    return _MACHINES[key]


_MACHINES: dict[tuple[str, str], Hardware] = {}


def _number(row: Mapping[str, str], name: str, otherwise: float) -> float:
    return float(row.get(name, "") or otherwise)


def _layout(row: Mapping[str, str], model: ModelSizes) -> Candidate:
    """What a table leaves out: one, or what the rest of the row implies."""
    world = max(1, int(_number(row, "n_gpus", 8)))
    tp, pp, cp, ep = (max(1, int(_number(row, name, 1))) for name in ("tp", "pp", "cp", "ep"))
    dp = max(1, int(_number(row, "dp", world // (tp * pp * cp) or 1)))
    mbs = _micro_batch(row, dp, pp)
    batch = _number(row, "gbs", dp * mbs)
    zero = row.get("zero", "").lower()
    framework = row.get("framework", "").lower()
    noted = "fsdp on" in row.get("notes", "").lower()
    sharded = 3 if noted or zero in ("3", "fsdp") or "fsdp" in framework or "titan" in framework else 1
    if zero in ("0", "2"):
        sharded = 2 if zero == "2" and "fsdp" not in framework else sharded
    old = framework in ("megatron-lm", "megatron-deepspeed")
    words = row.get("seq_parallel", "")
    precision = _precision(row)
    vpp = _virtual(row, model, pp)
    chunks = () if old or sharded == 3 else _chunks(model.layers, pp, vpp)
    return Candidate(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=1, dp=dp, mbs=mbs, vpp=vpp,
        chunk_layers=chunks, first_layers=sum(chunks[::pp]), last_layers=sum(chunks[pp - 1 :: pp]),
        microbatches=max(1, round(batch / (mbs * dp))),
        recompute=_recompute(row.get("recompute", "")),
        zero=cast("Literal[0, 1, 2, 3]", sharded if not (old and zero == "") else 0),
        overlap=not old, sequence_parallel=words == "1" or (words == "" and not old), precision=precision,
    )  # fmt: skip


def _precision(row: Mapping[str, str]) -> str:
    """Number format of matrix products.

    Nemotron 3's recipe for nvfp4 keeps attention, latent projections and multi-token depths in bf16, and state-space
    layers' outputs in mxfp8 (Megatron-Bridge, te_quant.cfg): as mxfp8 throughout.
    """
    stated = row.get("precision", "").strip("?") or "bf16"
    return "mxfp8" if stated == "nvfp4" and model_name(row).startswith("nemotron_3_") else stated


def _chunks(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each chunk, first to last, where chunks cannot hold as many each; empty where they can.

    As Megatron-Bridge's recipes deal them: embedding and head count as a layer each where that makes chunks equal; else
    all are filled but the last, which has the head and the depths of multi-token prediction, and then the first
    (pp_layout "Et*4|(t*4|)*14tmL", "Et|(tt|)*30mL").
    """
    count = pp * vpp
    if pp == 1 or layers % count == 0:
        return ()
    if (layers + 2) % count == 0:
        each = (layers + 2) // count
        return (each - 1, *[each] * (count - 2), each - 1)
    each = -(-layers // count)
    missing = each * count - layers
    return (each - max(0, missing - each), *[each] * (count - 2), each - min(each, missing))


def _virtual(row: Mapping[str, str], model: ModelSizes, pp: int) -> int:
    """Interleaving that a table leaves out: what its notes say, else Megatron's usual chunks of two layers or fewer.

    DeepSpeed has no interleaved schedule, and torchtitan's tables name theirs.
    """
    stated, framework = row.get("vpp", ""), row.get("framework", "").lower()
    if noted := re.search(r"VP NA.*\((\d+) in", row.get("notes", "")):
        stated = noted[1]
    plain = any(word in framework for word in ("deepspeed", "titan", "fsdp", "bridge", "nemo"))
    if stated or pp == 1 or plain:
        return max(1, int(float(stated or 1)))
    return max(1, round(model.layers / pp / 2))


def _micro_batch(row: Mapping[str, str], dp: int, pp: int) -> int:
    """Left out: 1, but for torchtitan, whose pipelines cut the local batch into as many microbatches as stages."""
    if stated := _number(row, "mbs", 0):
        return max(1, int(stated))
    if "titan" in row.get("framework", "").lower() and pp > 1:
        return max(1, int(_number(row, "gbs", 1)) // (dp * pp))
    return 1


def _recompute(word: str) -> Recompute:
    """selective: the core of attention (arXiv:2205.05198); -op: torchtitan's; moe: layers of experts."""
    if word == "full":
        return "full"
    if "moe" in word or "layernorm" in word:
        return "moe"
    if "op" in word:
        return "operators"
    return "core_attn" if word.startswith("selective") else "mlp" if "mlp" in word or "act" in word else "none"


def _measured(row: Mapping[str, str], case: PricedCase) -> float | None:
    """Seconds of a step; tokens per second and GPU, or TFLOPS by the publisher's own formula, converted."""
    world = max(1, int(_number(row, "n_gpus", 8)))
    batch, model = _number(row, "gbs", 0), case.model
    if seconds := _number(row, "step_s", 0):
        return seconds
    if rate := _number(row, "tokens_s_gpu", 0):
        return batch * model.seq_length / (rate * world)
    tflops, flops = _number(row, "tflops_gpu", 0), _published_flops(row, case)
    return flops * batch * model.seq_length / (tflops * 1e12 * world) if tflops and batch and flops else None


def _published_flops(row: Mapping[str, str], case: PricedCase) -> float | None:
    """FLOPs per token as the source counts them; None where that is unknown.

    Megatron-LM: arXiv:2104.04473, equation 3, until 2022 with recomputation. Meta: arXiv:2407.21783, 6 N and causal
    attention. Elsewhere conventions changed from release to release.
    """
    model, framework = case.model, row.get("framework", "")
    layers, hidden, length = model.layers, model.hidden, model.seq_length
    if framework in ("Megatron-LM", "Megatron-Core r0.8"):
        passes, logits = (96, 16) if framework == "Megatron-LM" else (72, 12)
        return passes * layers * hidden**2 * (1 + length / (6 * hidden) + model.vocab / (logits * layers * hidden))
    return 6.0 * model.parameters + 6 * layers * length * hidden if framework == "Meta" else None
