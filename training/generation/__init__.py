"""Text from a model, in whatever layout it is: for tools.generate, and for samples while it trains.

settings.py   what is asked for: sampling, and when texts end
forward.py    logits after each text's last token, with or without a KV cache, on any layout
sampling.py   the next token: greedy, or drawn by temperature, top_k and top_p
generate.py   token by token, until a text ends
texts.py      prompts to texts
samples.py    samples during training
"""
