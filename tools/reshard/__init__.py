"""Checkpoints rewritten offline, on a CPU, without ranks and without building a model: ``python -m tools.reshard``.

    __main__.py        the command line
    options.py         what is asked for
    checkpoint_source.py  what a checkpoint holds, by our keys
    sources.py         opens one, ours or Megatron's
    tensors.py         tensors to write, and where each of their elements comes from
    plan.py            which tensors those are: optimizer dropped, dtypes, the vocabulary's padding
    vocabulary.py      how many rows the vocabulary gets
    rewriting.py       the work: parts of bounded size, by workers, resumable
    triplane_format.py    our checkpoint, from the parts
    verify.py          the target against the source, element by element

    megatron_pickle.py    pickles read as data: what they name is never imported, what they call is never called
    megatron_files.py     .metadata and .distcp files: tensors by rectangle, the common state
    megatron_keys.py      Megatron's keys <-> ours: stacked, by block, by sublayer
    megatron_source.py    what of a Megatron checkpoint is what, and whether its optimizer's state is to be trusted
    megatron_params.py    the parameters that ranks held, and the order of a model's modules
    megatron_dp_reshardable.py  dp_reshardable optimizers: ranks' flat memory, in which each tensor is to be found
    megatron_copies.py    ... what several ranks hold alike, compared whole
    megatron_known.py     ... where we have written it, and know
    megatron_blobs.py     writes .distcp files
    megatron_plan.py      ``--format megatron``: which tensors, by Megatron's keys
    megatron_target.py    ``--format megatron``: .metadata, metadata.json
    megatron_job.py       the job that is to load it
    megatron_buckets.py   dp_reshardable optimizers to be written: each rank's flat memory
    megatron_state.py     the common state, and ranks' own
    megatron_args.py      what Megatron-LM restores besides: its arguments, samples, schedule

Bytes go from file to file in blocks of at most BLOCK_BYTES, so memory does not grow with the model. A Triplane
checkpoint fits every TP, PP, DP and EP size as it is; what is rewritten here is what it holds.
"""
