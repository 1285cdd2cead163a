"""megatron-core's letters of sublayers: of model.hybrid_layer_pattern, and of what blocks are made of."""

SYMBOLS = {
    "M": "a Mamba-2 mixer",
    "G": "a gated delta net",
    "*": "attention",
    "+": "latent attention",
    "-": "an MLP",
    "E": "a mixture of experts",
}
"""Those of megatron-core's that Triplane builds."""

ATTENTIONS, MIXERS, MLPS = "*+", "MG", "-E"
