"""Checkpoints of Megatron-LM and megatron-core, read (torch_dist, mp_rank) and written (torch_dist) without importing
either.

Read:
    files.py             .metadata and .distcp files: tensors by rectangle, the common state
    hybrid_files.py      ... of hybrids, whose mixers' matrices are cut into several tensors
    keys.py              Megatron's keys <-> Triplane's: stacked, by block, by sublayer
    source.py            what of a Megatron checkpoint is what, and whether its optimizer's state can be trusted
    params.py            the parameters that ranks held, and the order of a model's modules
    dp_reshardable.py    dp_reshardable optimizers: ranks' flat memory, in which each tensor is found;
                         what several ranks hold alike, compared whole
    known.py             ... written by Triplane: its layout is recorded
    mp_rank.py           mp_rank_XX folders: all ranks' files as one model
    mp_rank_names.py     ... their names of weights, old and new

Written (``--format megatron``):
    job.py               the job that is to load it
    megatron_tensors.py  which tensors, by Megatron's keys
    target.py            .metadata, metadata.json
    blobs.py             .distcp files
    buckets.py           dp_reshardable optimizers: each rank's flat memory
    state.py             the common state, and ranks' own
    args.py              what Megatron-LM restores besides: its arguments, samples, schedule
"""
