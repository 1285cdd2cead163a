"""One rank of the doctor's measurements, a process of its own: a hang or a crash of it is a finding, not the end.

    python -m tools.doctor.worker '{"device": "cuda", "local_rank": 3, "gemm": true}'

It speaks JSON lines with its parent: first what the GEMM gave; then, for each question (tools/doctor/workers.py), an
answer; it ends when its input does.
"""

import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from program.untrusted import parse_json
from tools.shared.processor import cpu_model

SEED = 20260101
GEMM_SIZE = {"cpu": 768, "cuda": 8192}
EXACT_SIZE = {"cpu": 768, "cuda": 4096}
GEMM_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
GEMM_S = {"cpu": 0.1, "cuda": 1.0}
"""How long products are timed: on a GPU long enough for clocks to fall to what power and cooling allow."""
BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
ROUNDS = {"cpu": 3, "cuda": 10}
TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Serve the parent until it closes our input."""
    reported = parse_json(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not to mix with the answers
    device = torch.device(f"cuda:{reported['local_rank']}" if reported["device"] == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    say(answers, {"gemm": gemm(device) if reported["gemm"] else None})
    store: dist.Store | None = None
    for line in sys.stdin:
        question = parse_json(line)
        if question["do"] == "listen":
            store = dist.TCPStore(question["address"], 0, None, True, TIMEOUT, wait_for_workers=False)
            say(answers, {"port": store.port})
            continue
        store = store or dist.TCPStore(question["address"], question["port"], None, False, TIMEOUT)
        say(answers, measure(question, device, store))
    answers.close()
    os._exit(0)  # gloo's and NCCL's threads need not be waited for


def say(stream: TextIO, answer: dict[str, Any]) -> None:
    """One line."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def gemm(device: torch.device) -> dict[str, Any]:
    """TFLOP/s, a digest of one product's bits, and whether a product of integers is exact."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    kind = device.type
    left, right = (random(GEMM_SIZE[kind], seed, GEMM_DTYPE[kind]).to(device) for seed in (SEED, SEED + 1))
    product = (left @ right).cpu()
    bits = product.view(torch.int16 if product.element_size() == 2 else torch.int32).numpy().tobytes()
    return {
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else None,
        "tflops": speed(left, right, GEMM_S[kind]) / 1e12,
        "digest": hashlib.blake2b(bits, digest_size=8).hexdigest(),
        "exact": is_exact(EXACT_SIZE[kind], GEMM_DTYPE[kind], device),
    }


def random(size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[size, size], normal; drawn on the CPU, so that every card multiplies the same numbers."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def speed(left: Tensor, right: Tensor, seconds: float) -> float:
    """FLOP/s of square products: the best of several slices of time, since others may run on a CPU."""
    product = torch.empty_like(left)
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds or best == float("inf"):
        turns = 20 if left.is_cuda else 1
        synchronize(left)
        start = time.perf_counter()
        for _ in range(turns):
            torch.matmul(left, right, out=product)
        synchronize(left)
        best = min(best, (time.perf_counter() - start) / turns)
    return 2.0 * left.shape[0] ** 3 / best


def is_exact(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of matrices of -1, 0 and 1 is right in every element.

    Three of four entries are 0, so that sums stay below 256 and are exact in bf16 whatever the order of additions:
    the reference needs no card. It is Freivalds' check (1977), A (B x) = (A B) x, in fp64 with integers x, on the CPU.
    """
    pieces = []
    for seed in (SEED + 2, SEED + 3):
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (size, size), generator=generator) * 2 - 1
        pieces.append(signs * (torch.randint(0, 4, (size, size), generator=generator) == 0))
    left, right = (piece.to(dtype) for piece in pieces)
    product = (left.to(device) @ right.to(device)).cpu().double()
    probe = torch.randint(1, 1 << 16, (size, 2), generator=torch.Generator().manual_seed(SEED + 4)).double()
    return bool(torch.equal(left.double() @ (right.double() @ probe), product @ probe))


def cpu_name() -> str:
    """The processor's name and what of it torch uses."""
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"


def synchronize(tensor: Tensor) -> None:
    """Wait for the device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def measure(question: dict[str, Any], device: torch.device, store: dist.Store) -> dict[str, Any]:
    """GB/s of each collective over all ranks and within the node, and with neighbouring nodes. See ``bandwidths``."""
    rank, world, local = question["rank"], question["world_size"], question["local_world_size"]
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        answer: dict[str, Any] = {"rank": rank, "all": dict(bandwidths(device, None))}
        if 1 < local < world:
            groups = [dist.new_group(list(range(first, first + local))) for first in range(0, world, local)]
            answer["local"] = dict(bandwidths(device, groups[rank // local]))
        if local < world:
            answer["pairs"] = pairs(device, rank, world, local)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        return {"rank": rank, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    return answer


def bandwidths(device: torch.device, group: dist.ProcessGroup | None) -> Iterator[tuple[str, float]]:
    """(collective, bus bandwidth in GB/s of 1e9 bytes), with the correction factors of nccl-tests (PERFORMANCE.md)."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    elements = BYTES[device.type] // 4 // ranks * ranks
    whole, part = torch.ones(elements, device=device), torch.ones(elements // ranks, device=device)
    other = torch.empty_like(whole)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    following, previous = members[(rank + 1) % ranks], members[(rank - 1) % ranks]

    def around() -> None:
        exchange([(whole, following)], [(other, previous)], group)

    share = (ranks - 1) / ranks
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (2 * share, lambda: dist.all_reduce(whole, group=group)),
        "all_gather": (share, lambda: dist.all_gather_into_tensor(other, part, group=group)),
        "reduce_scatter": (share, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
        "all_to_all": (share, lambda: dist.all_to_all_single(other, whole, group=group)),
        "send and receive": (1.0, around),
    }
    for name, (factor, call) in calls.items():
        whole.fill_(1.0)
        yield name, factor * elements * 4 / best_s(call, whole, group) / 1e9


def best_s(call: Callable[[], object], tensor: Tensor, group: dist.ProcessGroup | None) -> float:
    """Seconds of one call: the best of some rounds, after one that sets up connections."""
    times = []
    for _ in range(1 + ROUNDS[tensor.device.type]):
        dist.barrier(group)
        synchronize(tensor)
        began = time.perf_counter()
        call()
        synchronize(tensor)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def exchange(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: dist.ProcessGroup | None = None
) -> None:
    """Send and receive at once."""
    operations = [dist.P2POp(dist.isend, tensor, rank, group) for tensor, rank in sends]
    operations += [dist.P2POp(dist.irecv, tensor, rank, group) for tensor, rank in receives]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def pairs(device: torch.device, rank: int, world: int, local: int) -> dict[str, float]:
    """Partner node -> GB/s in each direction between this rank and its counterpart there, one pair of nodes at a time
    per node. All nodes call this, and each has two partners (one, of two nodes): see ``pairings``."""
    node, nodes = rank // local, world // local
    found: dict[str, float] = {}
    whole = torch.ones(BYTES[device.type] // 4, device=device)
    other = torch.empty_like(whole)
    for pairing in pairings(nodes):
        partner = pairing.get(node)
        there = rank if partner is None else partner * local + rank % local

        def meet(there: int = there) -> None:
            if there != rank:
                exchange([(whole, there)], [(other, there)])

        seconds = best_s(meet, whole, None)
        if partner is not None:
            found[str(partner)] = whole.numel() * 4 / seconds / 1e9
    return found


def pairings(nodes: int) -> list[dict[int, int]]:
    """Rounds of disjoint pairs, so that each node meets the next and the previous one of the ring."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 2 else [(0, 1)]
    rounds = [ring[0 : len(ring) - len(ring) % 2 : 2], ring[1::2], ring[len(ring) - len(ring) % 2 :]]
    return [{a: b for one, other in pairs for a, b in ((one, other), (other, one))} for pairs in rounds if pairs]


if __name__ == "__main__":
    main()
