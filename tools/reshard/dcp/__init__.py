"""PyTorch's distributed checkpoints (``.metadata`` and ``__R_N.distcp``), as torchtitan and users of FSDP have them.

source.py       read: weights and AdamW states by parameter names, through the closed reader of .metadata
dcp_tensors.py  written (--format dcp): which tensors, by whose names
target.py       .metadata; what torch.distributed.checkpoint.load reads
"""
