"""The section ``checkpoint`` of the configuration."""

from dataclasses import dataclass
from typing import Literal

from program.buckets import names
from program.limits import too_small


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """When checkpoints are written, which are kept, and what a new run starts from."""

    save_interval: int | None = None
    """Iterations between checkpoints. None: only at the end."""

    save_interval_minutes: float | None = None
    """Minutes between checkpoints, whichever of the two comes first."""

    keep: int = 3
    """Newest checkpoints to keep; older ones are deleted after a newer one is committed."""

    save_retain_interval: int | None = None
    """Checkpoints of iterations that this divides are kept for good, beside the newest ones. None: none."""

    verify: Literal["hashes", "sizes"] = "hashes"
    """What is verified before a checkpoint is loaded: every byte, by all ranks together, or the sizes of its files."""

    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory as large as a rank's share (Megatron's
    --async-save). Off: training waits for the disk."""

    load: str | None = None
    """Checkpoint (or folder of checkpoints) to start from where run_dir has none of its own yet; or the URL of one in a
    bucket, which is fetched into RUN_DIR/fetched."""

    bucket: str | None = None
    """s3://BUCKET/PREFIX, this run's alone, into which every committed checkpoint is copied, while training goes on
    (without async_save training waits for it). A start fetches from there what is newer than run_dir's: on another
    cluster, after a lost disk. Credentials come from the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID, ...)."""

    bucket_keep: int | None = None
    """Newest checkpoints to keep in the bucket. None: as `keep`."""

    convert: bool = False
    """Convert a `load` that is another program's (Megatron's, a Hugging Face, PyTorch DCP or DeepSpeed folder) into
    RUN_DIR/converted, once. Off: such a folder is refused with the command that converts it."""

    finetune: bool = False
    """Of `load` take the weights only: iteration, data position, optimizer and RNG start fresh (Megatron's
    --finetune)."""

    no_load_optim: bool = False
    """Do not load the optimizer's state."""

    no_load_rng: bool = False
    """Do not load the random-number generators' states."""

    override_opt_param_scheduler: bool = False
    """On resume, take this configuration's schedules of learning rate and weight decay. Off: those that the run began
    with, in samples, as its checkpoints keep them, whatever batch and iterations are now."""

    use_checkpoint_opt_param_scheduler: bool = False
    """Take the checkpoint's schedules without a word on those that this configuration would make."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        counts = "save_interval", "keep", "save_retain_interval", "bucket_keep"
        found = too_small(self, "checkpoint.", 1, *counts) + self.bucket_problems()
        found += too_small(self, "checkpoint.", None, "save_interval_minutes")
        if self.load is None and self.convert:
            found.append("checkpoint.convert says how to read checkpoint.load, which is not set.")
        if self.load is None and (self.finetune or self.no_load_optim):
            found.append("checkpoint.finetune and no_load_optim say how to read checkpoint.load, which is not set.")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            found.append(
                "checkpoint.override_opt_param_scheduler takes this configuration's schedule, "
                "checkpoint.use_checkpoint_opt_param_scheduler the checkpoint's. Set one of them."
            )
        return found

    def bucket_problems(self) -> list[str]:
        """What is wrong with its URLs, and what goes with them."""
        found = []
        if self.bucket is not None and (names.scheme(self.bucket) == "hf" or not names.is_url(self.bucket)):
            found.append(f"checkpoint.bucket must be s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, found {self.bucket!r}.")
        elif self.bucket is not None and (text := names.problem(self.bucket)):
            found.append(f"checkpoint.bucket: {text}")
        if self.bucket_keep is not None and self.bucket is None:
            found.append("checkpoint.bucket_keep says what to keep in checkpoint.bucket, which is not set.")
        if self.load is not None and names.is_url(self.load) and (text := names.problem(self.load)):
            found.append(f"checkpoint.load: {text}")
        return found
