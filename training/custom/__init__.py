"""What a recipe takes from the user's own modules, by import path (docs/callbacks.md).

    check       before ranks start: importable, and of the right kind
    callbacks   train.callbacks: what the loop calls, and what it is given
    loss        train.loss: each token's loss, and whether every layout would compute the same
    transform   data.transform: what becomes of each training sample

optimizer.optimizer is in training/optimizer_class.py, beside what builds the optimizer.
"""
