"""What both programs train, as flags of Megatron-LM's; tools.from_megatron makes the recipe of them."""

from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = 512
"""No padding at TP 1 and 2: Megatron-LM's loss counts rows of padding, ours masks them."""

COMMON = """
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4 --kv-channels 16 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.02 --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 3e-3 --min-lr 0 --lr-decay-style cosine
    --lr-warmup-iters 0 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
    --use-distributed-optimizer --seed 1 --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion
    """
GROUPED = "--group-query-attention --num-query-groups 2"
MIXTURE = f"""{GROUPED} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32"""
LATENT = """--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --rope-type rope"""
LOCAL = "--transformer-impl local --attention-backend unfused"
TE = "--transformer-impl transformer_engine"


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    name: str
    ranks: int
    flags: str
    transformer_engine: bool = False
    bound: float = 1e-5
    """Of twins: largest relative difference of a loss."""
    megatron_only: str = ""
    """Flags that ours does not get."""

    def command_flags(self, data: str, iterations: int, log_interval: int) -> Sequence[str]:
        """For both."""
        modules = TE if self.transformer_engine else LOCAL
        given = f"--data-path {data} --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}"
        steps = f"--train-iters {iterations} --log-interval {log_interval}"
        return f"{COMMON} {modules} {self.flags} {given} {steps}".split()


LAYOUTS = (
    Case("DP 2, both overlaps", 2, f"{GROUPED} --overlap-grad-reduce --overlap-param-gather"),
    Case("TP 2 + SP, Transformer Engine", 2, f"{GROUPED} --tensor-model-parallel-size 2 --sequence-parallel", True),
    Case("PP 2", 2, f"{GROUPED} --pipeline-model-parallel-size 2"),
    Case("PP 2 x VPP 2", 2, f"{GROUPED} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    Case("CP 2, bf16, Transformer Engine", 2, f"{GROUPED} --context-parallel-size 2 --cp-comm-type p2p --bf16", True),
    Case("mixture, EP 2, Transformer Engine", 2, f"{MIXTURE} --expert-model-parallel-size 2", True),
)
BF16_BOUND = 2e-3
"""As between the device and a CPU (tests/gpu_path/test_training.py)."""
TWINS = (
    Case("dense, fp32", 1, GROUPED),
    Case("dense, bf16", 1, f"{GROUPED} --bf16", bound=BF16_BOUND),
    Case("dense, TP 2 + SP, fp32, Transformer Engine", 2, LAYOUTS[1].flags, True),
    Case("mixture of 4 experts, EP 2, fp32, Transformer Engine", 2, LAYOUTS[5].flags, True),
    Case("mixture of 4 experts, bf16, Transformer Engine", 1, f"{MIXTURE} --bf16", True, bound=BF16_BOUND),
    Case("multi-latent attention, fp32, Transformer Engine", 1, LATENT, True),
    Case("multi-latent attention, bf16, Transformer Engine", 1, f"{LATENT} --bf16", True, bound=BF16_BOUND),
)
"""Megatron-LM's local modules have no multi-latent attention; a mixture's norm has another key there than elsewhere."""
CONTROL = Case("dense, fp32, but weight decay 0.1 against 0.11: found", 1, GROUPED, megatron_only="--weight-decay 0.11")
"""A difference that the comparison must find."""
