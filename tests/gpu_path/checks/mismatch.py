"""Ranks that reduce tensors of different lengths."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(4 + rank, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
