"""Flags as launch scripts of Megatron-LM give them, and what tools.from_megatron makes of them."""

import shlex

from models.resolve import resolve
from models.shapes import GPTShape
from tools.from_megatron.convert import convert, read_back
from tools.from_megatron.draft import Draft
from tools.from_megatron.translate import translate
from training.config.run_config import RunConfig

NO_VOCABULARY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3"
)
SMALLEST = f"{NO_VOCABULARY} --vocab-size 1000"
EXPERTS = "--num-experts 4 --disable-bias-linear"
GPT3_175B = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1536
    --rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --init-method-std 0.006
    --fp16 --data-path /data/pile --split 949,50,1 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
"""
LLAMA3_8B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --vocab-size 128256 --tokenizer-type NullTokenizer
    --mock-data --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --bf16
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --use-distributed-optimizer
"""
MIXTRAL_8X7B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --use-rotary-position-embeddings
    --no-position-embedding --rotary-base 1000000 --swiglu --normalization RMSNorm --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --vocab-size 32000
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8
    --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path /data/text_document
"""
DEEPSEEK_V3 = """
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope --swiglu --normalization RMSNorm
    --norm-epsilon 1e-6 --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --qk-layernorm
    --untie-embeddings-and-output-weights --vocab-size 129280 --multi-latent-attention --q-lora-rank 1536
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40
    --mscale 1.0 --mscale-all-dim 1.0 --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --expert-model-parallel-size 64 --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Ett|(tt|)*29t|mL' --micro-batch-size 1 --global-batch-size 15360
    --train-iters 1000 --lr 2.2e-4 --bf16 --mock-data --recompute-granularity selective
    --recompute-modules mla_up_proj layernorm --moe-permute-fusion
"""


def drafted(flags: str, world: int | None = None) -> Draft:
    return translate(shlex.split(flags), world)


def recipe_of(flags: str) -> RunConfig:
    return read_back(convert(flags, "", {})[0])


def shape_of(flags: str) -> GPTShape:
    return resolve(recipe_of(flags).model, None)
