"""Numbers of ranks, nodes, weights and activations, against what a test computes by itself."""

import ctypes
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
from data.prepared import Prepared
from models.names import canonical
from parallel import groups
from parallel.ddp import held, unwrap
from parallel.launch import Identity
from ranks import run_ranks
from training import train
from training.batches import BatchStream
from training.config.schedules import batch_schedule
from training.metrics import node
from training.metrics.parameter_stats import BlockOutputs, Due, ParameterStats
from training.metrics.recorder import reduced
from training.metrics.registry import METRICS, find, unknown
from training.parts.data import open_source
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

SOURCE = Path(__file__).parent / "nvml.c"


def _measured(identity: Identity, config: Any, prepared: Prepared) -> None:
    """A step with a clip that bites, so that clipped gradients would be other numbers."""
    shape = train.resolve(config.model, prepared.tokenizer.vocab_size)
    with groups.start(config.layout(1), identity, device="cpu", seed=1) as ranks:
        parts = build_parts(config, shape, ranks)
        chunks, optim = parts.chunks, parts.optimizer
        stats = ParameterStats(
            shape, chunks, optim, ranks, lambda _: Due(total=True, blocks=True), params_norm=True, num_zeros=True
        )
        outputs = BlockOutputs(shape, chunks, ranks, lambda iteration: iteration == 1)
        seen: list[torch.Tensor] = []
        unwrap(chunks[0]).decoder.layers[1].register_forward_hook(  # type: ignore[union-attr, index]
            lambda _module, _inputs, output: seen.append((output[0] if isinstance(output, tuple) else output).detach())
        )
        expected: dict[str, Any] = {"layer_param_norm": {}, "layer_grad_norm": {}, "zeros": 0}

        def before_update() -> None:
            for one in held(chunks[0]):
                row = _row(canonical(one.regions[0].key))
                grad = one.tensor.main_grad  # type: ignore[attr-defined]
                for name, tensor in (("layer_param_norm", one.tensor), ("layer_grad_norm", grad)):
                    square = expected[name].get(row, 0.0) + float((tensor.double() ** 2).sum())
                    expected[name][row] = square
                expected["zeros"] += int((grad == 0).sum())
            stats.before_update()

        stream = BatchStream(
            lambda: open_source(prepared, config, "train"),
            ranks,
            batch_schedule(config.train, config.model.seq_length),
            2,
            0,
        )
        for callback in (stats, outputs):
            callback.before_step(Progress())
        train.one_step(parts, stream, Progress(), StepRequests(), before_update=before_update)
        found = stats.report() | outputs.report()
        stream.close()
    for name in ("layer_param_norm", "layer_grad_norm"):
        roots = {row: square**0.5 for row, square in expected[name].items()}
        assert found[name] == pytest.approx(roots, rel=1e-6)
    assert found["param_norm"] == pytest.approx(math.hypot(*found["layer_param_norm"].values()))  # type: ignore[union-attr]
    assert found["zeros_in_grad"] == expected["zeros"] > 0
    everything = torch.cat([one.flatten().double() for one in seen])
    assert found["layer_output_rms"]["0"] == pytest.approx(float((everything**2).mean().sqrt()))  # type: ignore[index, call-overload]
    assert found["layer_output_max"]["0"] == pytest.approx(float(everything.abs().max()))  # type: ignore[index, call-overload]
    outputs.before_step(Progress(iteration=1))
    assert outputs.report() == {}


def _row(name: str) -> str:
    if name.startswith("layers."):
        return name.split(".")[1]
    return "embedding" if "embeddings" in name else "output"


def test_weights_gradients_and_outputs_are_measured_before_clipping(prepared: Prepared, tmp_path: Path) -> None:
    config = runs.configuration(tmp_path, "--train.global_batch_size", "4", "--optimizer.clip_grad", "1e-3")
    run_ranks(1, _measured, config, prepared)


def test_ranks_numbers_become_one() -> None:
    found = reduced({
        "memory_gib": [1.0, 4.0, 2.0],
        "gpu_sm_clock_mhz": [1980.0, math.nan, 1200.0],
        "gpu_power_w": [600.0, 700.0, math.nan],
        "network_sent_gib": [2.0, math.nan, 3.0],
        "network_errors": [math.nan] * 3,
    })  # fmt: skip
    assert found == {
        "memory_gib": 4.0, "memory_rank": 1, "gpu_sm_clock_mhz": 1200.0, "gpu_power_w": 650.0, "network_sent_gib": 5.0,
    }  # fmt: skip


def test_every_line_has_the_host_and_the_network(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--train.global_batch_size", "4", "--train.train_iters", "1", "--parallel.tensor_model_parallel_size", "2")
    (line,) = runs.train(prepared, runs.configuration(tmp_path, *flags), 2)
    assert 0.01 < line["host_memory_gib"] < 64 and line["host_memory_available_gib"] > 0.01
    if any(path.parent.name != "lo" for path in node.INTERFACES.glob("*/statistics")):
        assert line["network_sent_gib"] >= 0
    assert line["batch_size"] == 4 and line["time_s"] > 1.7e9
    assert not unknown(line)


def test_the_network_is_counted_from_reading_to_reading(tmp_path: Path) -> None:
    ports, interfaces = tmp_path / "infiniband", tmp_path / "net"

    def write(folder: Path, **counts: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, count in counts.items():
            (folder / name).write_text(f"{count}\n")

    assert all(math.isnan(value) for value in node.Network(ports, interfaces).read().values())
    write(interfaces / "lo/statistics", tx_bytes=2**40, rx_bytes=2**40)
    write(interfaces / "eth0/statistics", tx_bytes=2**30, rx_bytes=5, tx_errors=1, rx_errors=1)
    ethernet = node.Network(ports, interfaces)
    write(interfaces / "eth0/statistics", tx_bytes=3 * 2**30, rx_bytes=2, tx_errors=1, rx_errors=4)
    grown = ethernet.read()  # rx_bytes was reset
    assert grown == {"network_sent_gib": 2.0, "network_received_gib": 0.0, "network_errors": 3.0}
    card = ports / "mlx5_0/ports/1/counters"
    write(card, port_xmit_data=0, port_rcv_data=2**28, symbol_error=0)
    infiniband = node.Network(ports, interfaces)
    write(card, port_xmit_data=2**28, port_rcv_data=2**29, symbol_error=2, link_downed=1)
    assert infiniband.read() == {"network_sent_gib": 1.0, "network_received_gib": 1.0, "network_errors": 3.0}


NVML_PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1])  # of this soname: the one that pynvml then opens
from training.metrics.nvml import GpuSensor
sensor = GpuSensor("1234-5678")
print(json.dumps([sensor.read(), sensor.read()]))
"""


def test_nvml_is_read_by_uuid_and_since_the_last_reading(tmp_path: Path) -> None:
    """Against a library with NVML's functions and one GPU, as there is no GPU here."""
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(SOURCE)], check=True
    )
    first, second = runs_python(NVML_PROGRAM, str(library))
    assert first == {
        "gpu_utilization": 0.5, "gpu_sm_clock_mhz": 1410.0, "gpu_throttled": 1.0, "gpu_power_capped": 0.0,
        "gpu_power_w": 350.5, "gpu_energy_j": 2.0, "gpu_temperature_c": 71.0,
    }  # fmt: skip
    assert math.isnan(second["gpu_utilization"])  # no new samples
    assert second["gpu_energy_j"] == 2.0


def test_without_the_library_there_are_no_numbers() -> None:
    with pytest.raises(OSError, match="libnvidia-ml"):
        ctypes.CDLL("libnvidia-ml.so.1")
    from training.metrics.nvml import GpuSensor

    assert all(math.isnan(value) for value in GpuSensor("GPU-1").read().values())


def runs_python(program: str, *args: str) -> Any:
    import json
    import sys

    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_registry_finds_what_has_a_part_of_its_own() -> None:
    found = find("epoch/wiki")
    assert found is METRICS["epoch/*"] and find("epoch") is METRICS["epoch"] and find("toy/mean") is None
