"""What one rank's run is made of, built from its configuration before the loop begins.

run.py            what is built from: what a start has prepared, and this rank's place in it
model.py          model chunks and optimizer
data.py           the training data, from where this start begins
checkpoints.py    what saves
evaluation.py     validation losses, samples, tasks
measuring.py      what is measured of steps, weights and activations, and who writes it
companions.py     all that accompanies the loop, in the order in which it is called
announcement.py   what a run says of itself: before it begins, after its first step, and at its end
"""
