"""A run's folder as one on GPUs would leave it, written by hand: what no CPU run has; hostile names on request."""

import json
import math
from pathlib import Path
from random import Random

BEGAN_S = 1_790_000_000.0
ITERATIONS = 600
KILLED, RESUMED = 300, 250


def write_run(folder: Path, name: str = "", seed: int = 0, learning_rate: float = 3e-4) -> None:
    """name: stands in every name and text that a run's files may hold."""
    draw = Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(_config(name, learning_rate))
    events, lines, at_s = [], [], BEGAN_S
    for number, (first, last) in enumerate(((0, KILLED), (RESUMED, ITERATIONS))):
        attempt, layout = f"{number:016x}", f"TP 2 x PP 2 x DP {4 - number}"
        own = {"attempt": attempt}
        events.append(_event(at_s, "start", None, **own, world_size=16, launcher="srun", host=f"node07{name}"))
        at_s += 95
        versions = {"torch": f"2.13.0{name}", "megatron-core": "0.19.2"}
        where = {"layout": layout + name, "nodes": 2, "host": f"node07{name}", "device": f"NVIDIA H100{name}"}
        events.append(_event(at_s, "begin", first, **own, **where, versions=versions))
        for iteration in range(first + 1, last + 1):
            at_s += 2.1
            if iteration == first + 1:
                events.append(_event(at_s, "first_step", iteration, **own))
            lines.append(_line(iteration, at_s, draw, name))
            if iteration % 100 == 0:
                at_s += 11
                events.append(_event(at_s, "evaluation", iteration, **own, seconds=11.0))
                lines.append({"iteration": iteration, "time_s": at_s, "validation_loss": _loss(iteration) + 0.08,
                              f"validation_loss/wiki{name}": _loss(iteration) + 0.2})  # fmt: skip
            if iteration % 50 == 0:
                at_s += 1.5
                events.append(_event(at_s, "save", iteration, **own, seconds=1.5))
                events.append(_event(at_s, "commit", iteration, **own, bytes=45e9, seconds=31.0, stall_s=1.5))
        events += _found(at_s, number, own, name)
        at_s += 60
    (folder / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _others(folder, name, draw)


def _event(at_s: float, event: str, iteration: int | None, **fields: object) -> dict[str, object]:
    return {"time_s": at_s, "event": event, **({} if iteration is None else {"iteration": iteration}), **fields}


def _found(at_s: float, number: int, own: dict[str, str], name: str) -> list[dict[str, object]]:
    if number == 0:
        text = f"rank 5 of 16 on node07{name} was killed by SIGKILL in iteration 300, phase step"
        return [_event(at_s + 50, "death", KILLED, **own, died_s=at_s + 1, text=text)]
    held = {"weights": 11.2 * 2**30, "gradients": 22.4 * 2**30, "optimizer": 11.2 * 2**30, "activations": 19.7 * 2**30}
    return [
        _event(at_s - 900, "memory", None, **own, rank=3, stage=0, predicted={**held, "workspace": 2e9},
               measured={**held, "activations": 20.9 * 2**30, "workspace": 1e9, "reserved": -1.0}),
        _event(at_s - 800, "spike", 420, **own, text=f"iteration 420: loss 7.1 is 9.3 sigma above 3.1{name}"),
        _event(at_s - 700, "replayed", 480, **own, text=f"iteration 480: loss nan, finite when run again{name}"),
        _event(at_s - 300, "straggler", 560, **own, rank=9, text=f"rank 9 (node08{name}) computes 1.4x slower"),
        _event(at_s, "stop", ITERATIONS, **own, reason="requested"),
        _event(at_s + 1, "end", None, **own, exit_code=75),
    ]  # fmt: skip


def _loss(iteration: int) -> float:
    return 2.4 + 8.4 * math.exp(-iteration / 90)


def _line(iteration: int, at_s: float, draw: Random, name: str) -> dict[str, object]:
    tokens = iteration * 2_097_152
    heat = [draw.uniform(0.5, 1.6) for _ in range(16)]
    heat[3] *= 1 + iteration / 200
    load = [one / sum(heat) for one in heat]
    return {
        "iteration": iteration, "time_s": at_s,
        "loss": _loss(iteration) + draw.gauss(0, 0.05) + 4.1 * (iteration == 420),
        "grad_norm": math.exp(draw.gauss(0, 0.3)),
        "learning_rate": 3e-4 * min(1, iteration / 50), "consumed_samples": iteration * 512, "consumed_tokens": tokens,
        "data_wait_s": abs(draw.gauss(0.01, 0.01)), "checkpoint_stall_s": 1.5 * (iteration % 50 == 1),
        "skipped": int(iteration == 480),
        f"epoch/wiki{name}": tokens * 0.3 / 4e8, f"epoch/code{name}": tokens * 0.5 / 9e9,
        f"tokens/wiki{name}": tokens * 0.3 + 1e5 * iteration**1.3, f"tokens/code{name}": tokens * 0.5,
        f"tokens/web{name}": tokens * 0.2, "iteration_s": 2.1 + abs(draw.gauss(0, 0.05)), "tokens_per_s": 998_000.0,
        "tokens_per_s_per_gpu": 62_000 + draw.gauss(0, 600), "tflops_per_gpu": 410 + draw.gauss(0, 4),
        "mfu": 0.41 + draw.gauss(0, 0.003), "hfu": 0.47, "eta_s": (ITERATIONS - iteration) * 2.1, "restarts": 1,
        "goodput": 0.8, "memory_gib": 66.3, "memory_rank": 3, "exposed_communication": 0.07, "pipeline_bubble": 0.11,
        "gpu_utilization": 0.97 + draw.gauss(0, 0.005), "gpu_power_w": 610 + draw.gauss(0, 12),
        "gpu_temperature_c": 64 + draw.gauss(0, 1), "gpu_sm_clock_mhz": 1755 + draw.gauss(0, 8), "gpu_throttled": 0.0,
        "network_sent_gib": 12 + draw.gauss(0, 0.2), "network_received_gib": 12.0, "network_errors": 0,
        "host_memory_gib": 21 + iteration / 1000, "host_memory_available_gib": 1400.0,
        "expert_load": {"1": load, f"3{name}": load[::-1], "mtp.0": load}, "expert_load_max": max(load) * 16,
        "dead_experts": 0, "dropped_tokens": 0.0, "load_balancing_loss": 1.02, "mtp_loss": [_loss(iteration) + 0.5],
        "layer_output_rms": {str(block): 1 + block / 3 + draw.random() / 5 for block in range(8)},
        f"mine/attention_entropy{name}": 3 + draw.random(),
    }  # fmt: skip


def _config(name: str, learning_rate: float) -> str:
    return f"""device = "cuda"
[model]
shape = {json.dumps("mixtral_8x7b" + name)}
[train]
train_iters = 1000
global_batch_size = 512
[optimizer]
lr = {learning_rate}
[log]
wandb_project = {json.dumps("triplane" + name)}
"""


def _others(folder: Path, name: str, draw: Random) -> None:
    evaluations = [
        {
            "iteration": at,
            "task": task + name,
            "metrics": {"acc": 0.25 + at / 4000 + draw.random() / 50, "acc_stderr": 0.01},
        }
        for at in range(100, ITERATIONS + 1, 100)
        for task in ("hellaswag", "piqa", "arc_easy")
    ]
    samples = [
        {
            "iteration": at,
            "prompt": f"def read(self, path):\n{name}",
            "text": f"    return open(path).read()  # {at}{name}",
        }
        for at in range(100, ITERATIONS + 1, 100)
    ]
    (folder / "profile/iter_0000512").mkdir(parents=True, exist_ok=True)
    files = {"evaluations.jsonl": evaluations, "samples.jsonl": samples, "profile/timeline.jsonl": [_timeline(name)]}
    for path, records in files.items():
        (folder / path).write_text("".join(json.dumps(record) + "\n" for record in records))
    row = {"name": f"ampere_bf16_gemm{name}", "calls": 96, "total_s": 0.8, "exposed_s": None, "where": f"tp{name}"}
    ranks = [
        {"rank": rank, "compute_s": 1.6, "exposed_communication_s": 0.2, "exposed_messages_s": 0.1, "idle_s": 0.2,
         "kernels": [row], "communication": [row | {"exposed_s": 0.1}], "host_waits": [row]}
        for rank in range(4)
    ]  # fmt: skip
    (folder / "profile/iter_0000512/summary.json").write_text(json.dumps({"version": 1, "ranks": ranks}))


def _timeline(name: str) -> dict[str, object]:
    """1F1B of four stages and eight microbatches, a backward pass twice as long as a forward pass."""
    ranks = []
    for stage in range(4):
        spans: list[list[object]] = []
        at, ends = 0.1 * stage, 0
        for microbatch in range(8 + 4 - stage):
            if microbatch < 8:
                spans.append(["forward", microbatch, 0, at, at + 0.1])
                at += 0.1
            if microbatch >= 3 - stage and ends < 8:
                at = max(at, 0.1 * 4 + 0.2 * (3 - stage) + 0.3 * ends)
                spans.append(["backward", ends, 0, at, at + 0.2])
                at, ends = at + 0.2, ends + 1
        spans += [["reduce", None, None, 3.0, 3.2], ["update", None, None, 3.2, 3.3], [f"more{name}", 0, 0, 3.3, 3.35]]
        ranks.append({"rank": stage * 4, "pp": stage, "spans": spans})
    return {"iteration": 512, "ranks": ranks}
