"""train.offload_modules: what it needs and cannot be with is found before any rank starts."""

import pytest

from training.cli.parse import parse_config

DEBUG = "slurm/recipes/debug.toml"
OFFLOADED = "--train.offload_modules"
GPU = f"--device cuda {OFFLOADED} core_attn"
FP8 = "--precision.dtype bf16 --precision.fp8 hybrid"
FIELD = "train.offload_modules"


def problems(flags: str, world_size: int = 1) -> list[str]:
    return parse_config([DEBUG, *flags.split()]).problems(world_size)


@pytest.mark.parametrize(
    "flags",
    [
        GPU,
        f"--device auto {OFFLOADED} qkv_linear core_attn attn_proj",
        f"--model.shape mixtral_tiny --device cuda {OFFLOADED} core_attn mlp_norm expert_fc1 moe_act",
        f"--model.shape gpt2_tiny --device cuda {OFFLOADED} qkv_linear",
        f"--model.shape deepseek_v3_tiny --device cuda {OFFLOADED} attn_norm qkv_linear",
        f"{GPU} --model.megatron min_offloaded_tensor_size=0 activation_offload_fraction=0.5",
        f"{GPU} --train.recompute selective:mlp",
        f"{GPU} {FP8}",
    ],
)
def test_what_can_run(flags: str) -> None:
    assert problems(flags) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            f"--device cpu {OFFLOADED} core_attn",
            f'{FIELD} needs a GPU and Transformer Engine, found device = "cpu". Leave it out; '
            "train.cpu_offloading_num_layers works on a CPU, too.",
        ),
        (f"--device cuda {OFFLOADED} attn_proj", 'offload_modules "attn_proj" needs "core_attn" beside it, found none'),
        (f"{GPU} --model.megatron activation_offload_fraction=2", "fraction must be a number from 0 to 1, found 2"),
        (f"{GPU} --model.megatron min_offloaded_tensor_size=-1", "must be a whole number, 0 or more, found -1"),
        (f"--device cuda {OFFLOADED} attn_norm", '"attn_norm" needs a model with latent attention (elsewhere the norm'),
        (f"--device cuda {OFFLOADED} mlp_norm", '"mlp_norm" needs a model with experts (elsewhere'),
        (f"--device cuda {OFFLOADED} moe_act", '"moe_act" needs a model with experts (moe_grouped'),
        (
            f"--model.shape mixtral_tiny --device cuda {OFFLOADED} expert_fc1 --kernels.off moe_grouped_gemm",
            '"expert_fc1" needs a model with experts (moe_grouped_gemm not in kernels.off), found none',
        ),
        *((f"{GPU} {flags}", f"{FIELD} cannot be with {what}") for flags, what in [
            ("--train.cpu_offloading_num_layers 1", "train.cpu_offloading_num_layers: it offloads the same"),
            ("--train.recompute full:block:1",
             'train.recompute = "full"'),
            ("--train.recompute auto:70GiB", 'train.recompute = "auto": it was not compared'),
            ("--model.shape mixtral_tiny --train.offload_modules moe_act --train.recompute "
             "selective:moe", 'train.recompute = "selective:moe" and offload_modules'),
            ("--train.compile True", "train.compile"),
            ("--train.rampup_batch_size 2 2 8", "train.rampup_batch_size: the first iteration decides"),
            (f"{FP8} --precision.fp8_shadow warn:10", "precision.fp8_shadow"),
            (f"{FP8} --precision.fp8_param_gather True", "precision.fp8_param_gather"),
            (f"{FP8} --model.shape mixtral_tiny --precision.fp8_recipe delayed --train.offload_modules expert_fc1",
             'offload_modules "expert_fc1" and precision.fp8_recipe = "delayed"'),
            ("--kernels.cuda_graph_impl local", "kernels.cuda_graph_impl"),
            ("--model.shape gpt2_tiny", 'offload_modules "core_attn" in attention without rotary embeddings'),
            ("--model.shape smollm3_tiny", 'offload_modules "core_attn" in attention without rotary embeddings'),
        ]),
        ("--model.megatron offload_modules=1", "offload_modules is set by Triplane's own fields"),
        ("--model.megatron delay_offload_until_cuda_graph=True", f"{FIELD} cannot be with CUDA graphs"),
    ],
)  # fmt: skip
def test_what_cannot(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found
