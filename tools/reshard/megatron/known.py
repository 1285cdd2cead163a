"""Megatron's dp_reshardable optimizer state that we have written ourselves: what lies where is known.

``args.triplane_job`` says for which job it was laid out; a checkpoint that Megatron-LM has saved since has no such
entry. As of every Megatron checkpoint, each element is compared with its weight (``source.check_optimizer``).
"""

from collections.abc import Collection
from typing import Any

from models.shapes import GPTShape
from program.errors import UserError
from tools.reshard.megatron.buckets import memories
from tools.reshard.megatron.dp_reshardable import FIX, BucketRows, FlatStates, buffers_of
from tools.reshard.megatron.files import TorchDist
from tools.reshard.megatron.job import MegatronJob
from tools.reshard.megatron.keys import Style, ours
from tools.reshard.tensors import Rectangle

JOB = "triplane_job"


def job_of(args: Any) -> MegatronJob | None:
    """For which a checkpoint was laid out; None where we have not written it."""
    said = args.get(JOB) if isinstance(args, dict) else None
    if said is None:
        return None
    try:
        return MegatronJob(**said)
    except TypeError as error:
        raise UserError(f"args.{JOB}: not what this version of Triplane writes ({error}).") from None


def by_weight(
    files: TorchDist,
    weights: Collection[str],
    shape: GPTShape,
    style: Style,
    moe: Collection[int | None],
    job: MegatronJob,
) -> FlatStates:
    """The optimizer's state by weight. Raises UserError where the buckets are not those of the job."""
    theirs: dict[str, tuple[str, int | None]] = {}
    for key in weights:
        size = files.tensors[key].shape[:1]
        theirs |= {our: (key, index) for our, index in ours(key, style, size[0] if size else 0, moe)}
    shapes = {our: files.tensors[key].shape[0 if index is None else 1 :] for our, (key, index) in theirs.items()}
    found: dict[str, dict[Rectangle, BucketRows]] = {}
    written = buffers_of(files)
    for memory in memories(job, shape, shapes):
        for number, buffer in enumerate(memory.buffers):
            names = written.pop((memory.chained, memory.number, number), [])
            sizes = [files.tensors[f"{name}.param"].shape for name in names]
            if sizes != [(bucket.unpadded,) for bucket in buffer]:
                raise UserError(
                    f"{files.folder}: buffer {number} of {memory.prefix} has buckets of {sizes}; args.{JOB} says "
                    f"{[bucket.unpadded for bucket in buffer]}. {FIX}"
                )
            for name, bucket in zip(names, buffer, strict=True):
                for start, box, our in bucket.boxes:
                    key, index = theirs[our]
                    whole = box if index is None else ((index, *box[0]), (1, *box[1]))
                    found.setdefault(key, {}).setdefault(whole, BucketRows(whole, name, start))
    if written:
        raise UserError(f"{files.folder}: {next(iter(written.values()))[0]} is not of args.{JOB}. {FIX}")
    return FlatStates(files, {key: tuple(pieces.values()) for key, pieces in found.items()})
