"""Which layout, how fast, how much memory, how sure: answers on a login node, without torch.

``enumeration`` lists what is legal, ``cost`` and ``memory`` price all of it at once (arrays with one element per
candidate), ``ranking`` orders it, ``selection`` takes the best that runs, ``report`` shows it; ``backtest`` holds
the same code against published runs.
"""
