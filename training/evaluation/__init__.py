"""What a model is judged by: losses on held-out text, and tasks of lm-evaluation-harness.

validation       losses every train.eval_interval iterations
validation_sets  the validation split and eval.validation_sets, opened before ranks start
set_batches      their batches on this rank, the last one filled up

tasks            tasks with all their requests, built before ranks start
task_callback    tasks while a model trains
harness          the harness over a model, on rank 0
shared_model     the model on all ranks, asked from rank 0
batching         requests as rows, rows as rounds that all replicas run alike
scoring          log-likelihoods of rows
generating       greedy texts
harness_tokens   texts as ids, as the harness has them
scores           results as metrics and lines of evaluations.jsonl
"""
