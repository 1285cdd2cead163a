"""Which layout, how fast, how much memory, how sure: answers on a login node, without torch.

cost        seconds of a step from its parts, for arrays with one element per candidate; hardware, constants
search      which layouts are legal, priced, ranked and selected; what else was asked (sizes, reasons)
report      the table, JSON and the page
calibrate   constants of a cluster of one's own, measured there
trace       memory of a layout, traced on meta tensors
goodput     share of a run's time that trains
flags, run  one flag class and one function for each subcommand
"""
