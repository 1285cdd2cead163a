"""The section ``train`` of the configuration."""

from dataclasses import dataclass, replace

from models.sublayers import OffloadModule
from program import number_ranges
from program.limits import too_small
from training.config.batch_schedule import read_steps
from training.config.import_path import form_problems
from training.config.recompute import (
    Granularity,
    Method,
    Recomputation,
    RecomputeModule,
    read_recompute,
    recompute_form_problems,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """How long, in which batches, and what is recomputed."""

    train_iters: int = 1000
    """Optimizer updates until the run is done."""

    exit_interval: int | None = None
    """Save and stop (exit code 0) when the iteration is a multiple of this; schedules stay those of
    train_iters. None: run to train_iters."""

    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, in fp32, of which each update leaves this share: 0.999 looks
    back about 1000. `--weights ema` of the tools takes it. None: keep none."""

    average_last: int | None = None
    """Keep the plain mean of the weights of the last so many iterations of train_iters: `--weights average_last`. None:
    keep none."""

    averages_on_host: bool = False
    """Keep averages in the host's memory: 4 bytes less of each parameter that a GPU updates, and as many to copy in
    each iteration."""

    decay_from: str | None = None
    """Branch off another run, here or in a bucket: continue its newest checkpoint, or the one named, in a run_dir of
    its own, with a learning rate that falls from its value there to optimizer.min_lr. In place of checkpoint.load.
    None: do not."""

    decay_iters: int | None = None
    """Iterations of that fall (optimizer.lr_wsd_decay_style), and of the branch: train_iters is counted from it."""

    global_batch_size: int = 8
    """Samples (windows of seq_length tokens) per optimizer update, over all ranks."""

    micro_batch_size: int = 1
    """Samples per forward pass of one data-parallel replica."""

    rampup_batch_size: tuple[int, int, int] | None = None
    """Grow the global batch: (first size, increment, samples until the full size).
    None: always global_batch_size."""

    step_batch_size_schedule: str | None = None
    """In place of a ramp, where each size of the global batch begins, in tokens: "0:16 2.4B:320". The last one is
    global_batch_size. None: always global_batch_size."""

    iterations_to_skip: tuple[int | str, ...] = ()
    """Iterations without an update, by their numbers in the log, as 7 or "100-120" (both included): their batches are
    computed and counted, and the schedules of learning rate and weight decay wait, as with Megatron's
    --iterations-to-skip, which does not compute them."""

    seed: int = 1234
    """Of initial weights, data order and dropout."""

    eval_interval: int | None = None
    """Iterations between evaluations on the validation split and eval.validation_sets. None: never."""

    eval_iters: int = 10
    """Global batches per evaluation, of each of them. 0: no evaluation."""

    recompute: str | None = None
    """Activations that the backward pass computes again. "selective:core_attn,mlp": modules, by Megatron's names (moe:
    whole layers of experts; moe_act: their activation function alone; mla_up_proj: latent attention from its latents
    on; also shared_experts, layernorm; moe_act, layernorm, mla_up_proj need Transformer Engine). "full:uniform:1":
    every group of so many layers; "full:block:2": the first so many of each chunk. "auto:70GiB": the attention, MLPs,
    experts and mixers that cost least, so that no rank is predicted to hold more (GiB, MiB, GB, MB). None: keep all."""

    manual_gc_interval: int = 100
    """Iterations between Python's garbage collections, on all ranks together (Megatron's --manual-gc). 0: whenever
    Python collects by itself, on each rank at another moment."""

    deterministic_mode: bool = False
    """Equal runs are equal bit by bit (Megatron's --deterministic-mode): deterministic algorithms of torch,
    cuBLAS and Transformer Engine, cross entropy not fused. Slower; an operation that has none raises. Not yet run on a
    GPU."""

    detect_anomaly: bool = False
    """Errors of the backward pass show where the forward pass made what fails (torch's anomaly detection). Steps take
    longer."""

    generate_tokens: int = 0
    """Length in tokens of each sample: what the model makes of sample_prompts, at the end of training. It is shown on
    the console and written to RUN_DIR/samples.jsonl. 0: none."""

    sample_prompts: tuple[str, ...] = ("def read(self, path):\n",)
    """Texts that samples continue, each shorter than seq_length."""

    sample_interval: int | None = None
    """Iterations between samples during training; needs generate_tokens. None: only at the end."""

    callbacks: tuple[str, ...] = ()
    """Your own callbacks, by import path: "module:class". Called in this order."""

    loss: str | None = None
    """Your own loss, by import path: "module:function", which makes each token's loss of its cross entropy. None: the
    cross entropy."""

    cross_entropy_chunk_tokens: int | None = None
    """Tokens of a microbatch whose logits are there at once: output layer and loss run over pieces of so many, again in
    the backward pass. For large vocabularies: it saves their logits, and costs the output layer a third product. None:
    all."""

    cpu_offloading_num_layers: int = 0
    """Blocks of each pipeline chunk, the first ones, whose activations wait in host memory for their backward pass
    (Megatron's name). 0: none. Not yet run on a GPU."""

    offload_modules: tuple[OffloadModule, ...] = ()
    """Modules whose inputs wait in host memory for their backward pass (Megatron's fine-grained activation offloading),
    on GPUs with Transformer Engine; in place of cpu_offloading_num_layers. attn_norm is latent attention's, mlp_norm
    that of experts: other norms are parts of the linear layers behind them. attn_proj needs core_attn. Not yet run on a
    GPU."""

    compile: bool = False
    """Compile each block with torch.compile as it first runs: fewer, fused kernels, for a first step that takes a
    minute or more. Experts run as they are written, and so do evaluation and generation. Not yet run on a GPU."""

    @property
    def changes_batch(self) -> str | None:
        """The field that makes iterations of different numbers of samples."""
        names = ("rampup_batch_size", "step_batch_size_schedule")
        return next((f"train.{name}" for name in names if getattr(self, name) is not None), None)

    @property
    def evaluates(self) -> bool:
        """Whether there are validation losses."""
        return self.eval_interval is not None and self.eval_iters > 0

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes anything again, logits aside."""
        return self.recompute is not None

    @property
    def _recompute(self) -> Recomputation:
        return read_recompute(self.recompute) or Recomputation()

    @property
    def recompute_granularity(self) -> Granularity | None:
        """Megatron's: full: whole layers; selective: ``recompute_modules``."""
        return self._recompute.granularity

    @property
    def recompute_method(self) -> Method | None:
        """Megatron's: uniform: every group of ``recompute_num_layers`` layers; block: the first ones of each chunk."""
        return self._recompute.method

    @property
    def recompute_num_layers(self) -> int | None:
        """Transformer layers per group (uniform) or recomputed per chunk (block)."""
        return self._recompute.num_layers

    @property
    def recompute_modules(self) -> tuple[RecomputeModule, ...]:
        """Of "selective"."""
        return self._recompute.modules

    @property
    def recompute_budget(self) -> float | None:
        """Bytes of "auto:70GiB"."""
        return self._recompute.budget

    def without_modules_offloaded(self) -> "TrainConfig":
        """As a CPU can train it, too."""
        return replace(self, offload_modules=())

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = [problem for path in self.callbacks for problem in form_problems("train.callbacks", path)]
        found += form_problems("train.loss", self.loss) if self.loss is not None else []
        found += too_small(
            self, "train.", 1, "train_iters", "exit_interval", "global_batch_size", "micro_batch_size", "eval_interval",
            "sample_interval", "cross_entropy_chunk_tokens", "decay_iters", "average_last",
        )  # fmt: skip
        for name in ("eval_iters", "generate_tokens", "manual_gc_interval", "cpu_offloading_num_layers"):
            if getattr(self, name) < 0:
                found.append(f"train.{name} must not be negative, found {getattr(self, name)}.")
        if not 0 <= self.seed < 2**31:
            found.append(f"train.seed must be in [0, 2^31), found {self.seed}.")
        if self.sample_interval is not None and not self.generate_tokens:
            found.append("train.sample_interval needs train.generate_tokens, tokens of a sample, found 0.")
        if self.generate_tokens and not self.sample_prompts:
            found.append("train.generate_tokens needs train.sample_prompts, found none. Give a text, or 0 tokens.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            found.append(f"train.ema_decay must be between 0 and 1, found {self.ema_decay}.")
        if self.averages_on_host and self.ema_decay is None and self.average_last is None:
            found.append("train.averages_on_host says where averages are kept, and there are none.")
        if (self.decay_from is None) != (self.decay_iters is None):
            found.append("train.decay_from and train.decay_iters go together: give both, or neither.")
        found += number_ranges.problems("train.iterations_to_skip", self.iterations_to_skip, 1)
        found += self._steps_problems()
        found += self._offload_problems()
        found += recompute_form_problems(self.recompute)
        if self.recompute_budget is not None:
            found += self._budget_problems()
        return found

    def _steps_problems(self) -> list[str]:
        if self.step_batch_size_schedule is not None:
            try:
                read_steps(self.step_batch_size_schedule)
            except ValueError as error:
                return [f"train.step_batch_size_schedule: {error}."]
        return []

    def _offload_problems(self) -> list[str]:
        if "attn_proj" not in self.offload_modules or "core_attn" in self.offload_modules:
            return []
        return [
            'train.offload_modules "attn_proj" needs "core_attn" beside it, found none: its input is the output '
            "that core_attn's backward pass needs. Add it."
        ]

    def _budget_problems(self) -> list[str]:
        also = {"cpu_offloading_num_layers": self.cpu_offloading_num_layers > 0, "compile": self.compile}
        return [
            f'train.recompute "auto" chooses by predicted memory, which train.{name} changes: set one of them.'
            for name, there in also.items()
            if there
        ]


LOSS_CHUNK_TOKENS = 1024
"""Of train.cross_entropy_chunk_tokens: enough for the output layer's products to fill a GPU."""
