"""Megatron-LM's own pretrain_gpt.py: MEGATRON_LM=its checkout.

python -m tests.gpu.sides.megatron_lm CHECKOUT [flag ...]: that program. Nothing of the checkout is changed; its index
builder in C++ is the installed megatron-core's, so it compiles nothing.
"""

import importlib.util
import re
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the program's own megatron.core must come first
    from tests.gpu.sides.program import Request

VARIABLE = "MEGATRON_LM"
HELPERS = "megatron.core.datasets.helpers_cpp"
TIME = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
LOSS = re.compile(r"lm loss: ([-+.\dE]+)")
PEAK = re.compile(r"max allocated: ([\d.]+)")


def measured(request: "Request") -> dict[str, Any]:
    """Its own log's times, losses, and the allocator's peak of rank 0, which it tells in MiB. Raises UnrunError."""
    from tests.gpu import processes
    from tests.gpu.sides.program import checkout

    folder = checkout(VARIABLE, "pretrain_gpt.py", "Megatron-LM")
    command = [sys.executable, *request.launcher, "-m", "tests.gpu.sides.megatron_lm", str(folder), *flags(request)]
    printed = processes.run(command, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, request.limit_s)
    losses, times = map(float, LOSS.findall(printed)), map(float, TIME.findall(printed))
    peak = max(map(float, PEAK.findall(printed)), default=0.0)
    return request.row(list(losses), [one / 1e3 for one in times], peak * 2**20)


def flags(request: "Request") -> list[str]:
    """With the kernels that it has without APEX, on its own random tokens."""
    shape, config, rates = request.shape, request.config, request.config.optimizer
    given = {
        "num-layers": shape.num_layers, "hidden-size": shape.hidden_size, "ffn-hidden-size": shape.ffn_hidden_size,
        "num-attention-heads": shape.num_attention_heads, "num-query-groups": shape.num_query_groups,
        "kv-channels": shape.kv_channels, "seq-length": config.model.seq_length,
        "max-position-embeddings": config.model.seq_length, "position-embedding-type": "rope",
        "rotary-base": int(shape.rotary_base), "normalization": "RMSNorm", "norm-epsilon": shape.norm_epsilon,
        "attention-dropout": 0, "hidden-dropout": 0, "micro-batch-size": config.train.micro_batch_size,
        "global-batch-size": config.train.global_batch_size, "train-iters": request.iterations, "lr": rates.lr,
        "lr-decay-style": "constant", "weight-decay": rates.weight_decay, "clip-grad": rates.clip_grad,
        "adam-beta1": rates.adam_beta1, "adam-beta2": rates.adam_beta2, "adam-eps": rates.adam_eps,
        "tokenizer-type": "NullTokenizer", "vocab-size": shape.padded_vocab_size - 1, "log-interval": 1,
        "eval-iters": 0, "eval-interval": 1000, "split": "100,0,0", "cross-entropy-fusion-impl": "native",
        "transformer-impl": "transformer_engine" if request.te else "local",
    }  # fmt: skip
    switches = "bf16 use-distributed-optimizer group-query-attention swiglu disable-bias-linear mock-data "
    switches += "untie-embeddings-and-output-weights cross-entropy-loss-fusion no-gradient-accumulation-fusion "
    switches += "no-persist-layer-norm " * (not request.te)
    switches += "overlap-grad-reduce overlap-param-gather " * (len(request.gpus) > 1)
    named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*named, *(f"--{name}" for name in switches.split())]


def use_installed_helpers() -> None:
    """Without an import of the installed megatron-core."""
    (path,) = Path(sysconfig.get_paths()["purelib"], "megatron/core/datasets").glob("helpers_cpp*.so")
    spec = importlib.util.spec_from_file_location(HELPERS, path)
    assert spec and spec.loader
    sys.modules[HELPERS] = helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)


def main(folder: Path, given: list[str]) -> None:
    """Its program, in this process."""
    use_installed_helpers()
    sys.path.insert(0, str(folder))
    sys.argv = [str(folder / "pretrain_gpt.py"), *given]
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
