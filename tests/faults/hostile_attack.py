"""Which file or flag of a target is changed, and how: drawn, and named."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.faults import hostile_values
from tests.faults.hostile_files import replace
from tests.faults.hostile_mutations import Mutation, at, mutate, places, put
from tests.faults.hostile_targets import Target
from training.checkpoint.format.manifest import MANIFEST, read_manifest, write_manifest


def attack(target: Target, words: Sequence[str], copy: Path, draw: Random) -> tuple[Path, Mutation]:
    """Change one of the target's files, most often one that the command's words name."""
    found = sorted({path for pattern in target.victims for path in copy.glob(pattern)})
    if named := [path for path in found if str(path.relative_to(copy)) in words or path.name in words]:
        found = named
    while True:
        victim = draw.choice(found)
        if victim.is_dir() or (not target.signed and draw.random() < 0.2):
            if not target.signed:
                return victim, replace(victim, draw)
            continue
        if target.signed:
            return victim, signed(victim, draw)
        return victim, mutate(victim, draw)


def signed(victim: Path, draw: Random) -> Mutation:
    """Change a file of a checkpoint, or what its manifest says, and write the manifest that fits."""
    folder = victim.parent
    manifest = read_manifest(folder)
    tensors = {name: facts for name, facts in manifest.files.items() if name.endswith(".bin")}
    about = dict(manifest.about)
    if victim.name == MANIFEST:
        place = draw.choice([one for one in places(about) if one])
        value = hostile_values.plain(draw)
        names = tuple(key for key in place if isinstance(key, str))
        mutation = Mutation(kind="JSON: other value", file=MANIFEST, text=f"{names}: {str(value)[:60]!r}", names=names)
        if at(about, place) != value:
            about = put(about, place, value)
    else:
        mutation = mutate(victim, draw)
    write_manifest(folder, tensors, about)
    return mutation


def hostile_words(words: Sequence[str], draw: Random) -> tuple[list[str], Mutation]:
    """One value of a command's flags is another; a run gets a flag of its recipe's besides."""
    own = list(words)
    numbers = [n for n, word in enumerate(own) if word.startswith("--") and n + 1 < len(own)]
    values = [n + 1 for n in numbers if not own[n + 1].startswith("--")]
    value = hostile_values.word(draw)
    if values:
        at_ = draw.choice(values)
        flag, own[at_] = own[at_ - 1], value
    else:
        flag = f"--{draw.choice(RUN_FLAGS)}"
        own += draw.choice([[flag, value], [f"{flag}={value}"]])
    return own, Mutation(
        kind="flag",
        file=flag,
        text=f"{flag} {value!r}"[:200],
        names=(flag.lstrip("-"), flag.rpartition(".")[2], flag.lstrip("-").upper()),
    )


RUN_FLAGS = (
    "run_dir", "nproc", "device", "world_size", "parallel.tensor_model_parallel_size", "parallel.elastic",
    "parallel.pipeline_model_parallel_size", "parallel.context_parallel_size", "parallel.distributed_timeout_minutes",
    "parallel.megatron", "model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.shape",
    "model.seq_length", "model.vocab_size", "model.init_method_std", "model.rotary_base", "model.hidden_dropout",
    "precision.dtype", "precision.initial_loss_scale", "data.paths", "data.split", "data.tokenizer", "data.blend_file",
    "data.stream_count", "data.cache_dir", "data.max_document_mb", "optimizer.lr", "optimizer.adam_eps",
    "optimizer.clip_grad", "optimizer.lr_warmup_iters", "optimizer.adam_beta2", "train.train_iters", "train.seed",
    "train.global_batch_size", "train.micro_batch_size", "train.eval_iters", "train.rampup_batch_size",
    "train.recompute", "checkpoint.save_interval", "checkpoint.keep", "checkpoint.load", "checkpoint.verify",
    "log.log_interval", "log.wandb_project", "fault.step_timeout_s", "fault.replica_check_interval",
    "fault.watch_interval", "fault.failures_per_gpu_hour", "nothing.like_it", "",
)  # fmt: skip
