"""Start a run again after it ended, as often as it gets further: for batch scripts, and without any scheduler.

decide    whether to start again after an attempt, for slurm/pretrain.sbatch and loop.sh
rule      that decision, a pure function
attempts  RUN_DIR/attempts.jsonl, what is remembered from one attempt to the next
evidence  what an attempt left in the run's folder
loop.sh   attempts one after the other, where there is no SLURM
"""
