"""How fast checkpoints are written, read and converted, against the disk itself and megatron-core's own: measured.

    command.py       the command line, the table, docs/benchmarks/checkpoint.json
    disk.py          the yardsticks: dd with fsync, and a cold sequential read
    memory.py        how much a process grew meanwhile
    trainer.py       a real model and optimizer on forked ranks, to save and load
    ours.py          Triplane's save, background save and load
    megatron.py      megatron-core's
    rounds.py        all of them in turns, in one run
    conversion.py    tools.convert against dd; a 70B model's shapes through one worker
    scale.py         the tables of checkpoints of thousands of ranks, as large as they get

Every ratio is of two sides of one run, taken in turns, so that what slows the machine down slows both.
"""
