"""Start a run again after it ended, as often as it gets further: for batch scripts, and without any scheduler.

decide    whether to start again after an attempt, for slurm/pretrain.sbatch
rule      that decision, a pure function
attempts  RUN_DIR/attempts.jsonl, what is remembered from one attempt to the next
evidence  what an attempt left in the run's folder
loop      attempts one after the other, with back-off
child     the one process of an attempt: signals go in, an exit code comes out, nothing is left running
notice    asks every few seconds whether this machine is about to be taken away
requests  the signals that supervise was sent, for its child
"""
