"""Checkpoints rewritten offline, on a CPU, without ranks and without building a model: ``python -m tools.reshard``.

    __main__.py           the command line
    options.py            what is asked for
    sources.py            opens a checkpoint, Triplane's or Megatron's
    inert_pickle.py       pickles read as data: what they name is never imported, what they call is never called
    torch_file.py         files of torch.save, read as data: their tensors by rectangle
    assembled.py          tensors that lie in pieces in many such files
    checkpoint_source.py  what it holds, under Triplane's keys
    tensors.py            tensors to write, and where each of their elements comes from
    plan.py               which tensors those are: optimizer dropped, dtypes, the vocabulary's rows and padding
    model_recipe.py       the model of another program's checkpoint, a recipe or a config.json, and its tokenizer
    named_weights.py      a model's weights by other names: where each one's rows lie
    naming.py             which names a model may have: transformers' files' and modules', torchtitan's
    named_source.py       which of a checkpoint's names is which weight, and which state of its optimizer
    rewriting.py          the work: parts of bounded size, by workers, resumable; the target against the source
    triplane_format.py    Triplane's checkpoint, from the parts
    megatron/             Megatron's formats, read and written
    deepspeed/            DeepSpeed's ZeRO folders, read
    dcp/                  PyTorch's distributed checkpoints (FSDP, torchtitan, Accelerate), read and written

Bytes go from file to file in blocks of at most BLOCK_BYTES, so memory does not grow with the model. A Triplane
checkpoint fits every layout as it is; what is rewritten here is what it holds.
"""
