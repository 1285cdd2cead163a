"""Our checkpoint, from the parts that are written."""

from pathlib import Path

from program.durable import replace_file
from program.untrusted import read_text
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.model_recipe import with_tokenizer
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.rewriting import job_of, rewrite
from tools.reshard.sources import CONFIG
from tools.shared import resumable
from tools.shared.part_files import is_committed
from training.checkpoint import folders
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.state import encoded
from training.config.recipe import dump


def write(source: CheckpointSource, plan: ReshardPlan, target: Path, options: ReshardOptions, workers: int) -> None:
    """Write ``target``, a checkpoint. Killed and started again, it goes on and writes the same bytes."""
    with resumable.unfinished(target, job_of(source, options)) as folder:
        names = rewrite(source, plan, folder, options, workers)
        if not is_committed(folder):
            commit(source, plan, folder, names)
        remove_tables(folder, names)


def commit(source: CheckpointSource, plan: ReshardPlan, folder: Path, names: list[str]) -> None:
    """Index, state, configuration and carried files; the manifest last."""
    facts = merge(folder, names)
    for name, path in source.carried.items():
        folders.copy(path, folder / name)
    for name, written in source.texts.items():
        replace_file(folder / name, written.encode())
    unchanged = plan.config == source.config and (source.folder / CONFIG).is_file()
    text = read_text(source.folder / CONFIG) if unchanged else dump(with_tokenizer(plan.config, source.tokenizer))
    replace_file(folder / CONFIG, text.encode())
    replace_file(folder / folders.STATE, encoded(plan.state).encode())
    write_manifest(folder, facts, {**source.about, "resharded": source.folder.name})
