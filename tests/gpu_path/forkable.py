"""A hook for a process that forks ranks of the emulated device: torch refuses CUDA to whatever is forked after it has
counted devices, and Megatron's imports ask for the count. Forked ranks ask the device again."""

import os

import torch

DEVICES = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

count_devices = torch._C._cuda_getDeviceCount


def restore() -> None:
    """In the fork."""
    torch._C._cuda_getDeviceCount = count_devices


torch._C._cuda_getDeviceCount = lambda: DEVICES
os.register_at_fork(after_in_child=restore)
