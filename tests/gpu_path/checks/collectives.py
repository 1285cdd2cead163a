"""Every collective that torch and Megatron use, on three ranks, in all dtypes."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["RANK"]))
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()


def filled(length: int, value: float) -> torch.Tensor:
    return torch.full((length,), float(value), device="cuda")


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int8)
for dtype in FLOATS + INTEGERS:
    given = torch.stack([torch.arange(5).double() + k + 1 for k in range(size)])
    expected = {
        "SUM": given.sum(0), "MAX": given.max(0).values, "MIN": given.min(0).values, "PRODUCT": given.prod(0),
        "AVG": given.mean(0),
    }  # fmt: skip
    for name, result in expected.items():
        if name == "AVG" and not dtype.is_floating_point:
            continue
        x = torch.arange(5, device="cuda").to(dtype) + rank + 1
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        assert torch.equal(x.cpu().double(), result.to(dtype).double()), (dtype, name, x)

x = filled(4, rank + 1)
dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
assert x[0].item() == 0.5 * size * (size + 1) / 2

out = torch.zeros(2 * size, device="cuda")
dist.all_gather_into_tensor(out, filled(2, rank))
assert out.tolist() == [k for k in range(size) for _ in range(2)]

out = torch.zeros(2, device="cuda")
dist.reduce_scatter_tensor(out, torch.arange(2.0 * size, device="cuda"))
assert out.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]

out = torch.zeros(size, device="cuda")
dist.all_to_all_single(out, filled(size, rank))
assert out.tolist() == list(range(size))

lengths = [k + 1 for k in range(size)]
out = torch.zeros(size * (rank + 1), device="cuda")
dist.all_to_all_single(out, filled(sum(lengths), rank), [rank + 1] * size, lengths)
assert out.tolist() == [k for k in range(size) for _ in range(rank + 1)]

x = filled(3, rank)
dist.broadcast(x, 1)
assert x.tolist() == [1, 1, 1]

x = filled(3, rank)
dist.reduce(x, 0)
assert rank or x.tolist() == [size * (size - 1) / 2] * 3

received = torch.zeros(4, device="cuda")
messages = [
    dist.P2POp(dist.irecv, received, (rank - 1) % size),
    dist.P2POp(dist.isend, filled(4, rank), (rank + 1) % size),
]
for work in dist.batch_isend_irecv(messages):
    work.wait()
assert received.tolist() == [(rank - 1) % size] * 4

objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": k} for k in range(size)]

pair = dist.new_group([0, 1])
x = torch.ones(1, device="cuda")
if rank < 2:
    dist.all_reduce(x, group=pair)
    assert x.item() == 2

dist.barrier()
dist.destroy_process_group()
