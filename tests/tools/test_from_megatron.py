"""Values of Megatron-LM's flags as fields of a recipe, and Megatron's defaults."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.costs.parameters import num_parameters
from models.families import named
from models.shapes import GPTShape
from program.errors import UserError
from tests.tools.megatron_scripts import (
    DEEPSEEK_V3,
    EXPERTS,
    GPT3_175B,
    LLAMA3_8B,
    MIXTRAL_8X7B,
    SMALLEST,
    drafted,
    recipe_of,
    shape_of,
)
from tools.from_megatron.__main__ import main
from tools.from_megatron.convert import check, read_back
from tools.from_megatron.draft import Draft
from tools.from_megatron.recipe_text import toml
from tools.from_megatron.translate import translate
from training.cli.dry_run import describe
from training.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_megatrons() -> None:
    config = recipe_of(SMALLEST)
    model = config.model
    assert (model.normalization, model.activation, model.add_bias_linear) == ("LayerNorm", "gelu", True)
    assert (model.position_embedding_type, model.untie_embeddings_and_output_weights) == ("learned_absolute", False)
    assert (model.hidden_dropout, model.attention_dropout, model.init_method_std) == (0.1, 0.1, 0.02)
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups, model.norm_epsilon) == (256, 16, 4, 1e-5)
    assert (model.rotary_base, model.rotary_percent, model.make_vocab_size_divisible_by) == (10000, 1.0, 128)
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.min_lr) == (0.01, 1.0, 0.0)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters) == ("linear", 0)
    assert (config.train.seed, config.train.eval_iters, config.train.eval_interval) == (1234, 100, None)
    assert (config.precision.dtype, config.log.tensorboard, config.log.log_interval) == ("fp32", False, 100)
    assert not config.parallel.use_distributed_optimizer


def test_the_recipe_leaves_no_part_of_a_plain_model_to_a_named_shape() -> None:
    """What it does not set is at the default of every shape in the one that it names."""
    model = recipe_of(SMALLEST).model
    base = named(model.shape)
    left = [field for field in dataclasses.fields(GPTShape) if getattr(model, field.name) is None]
    assert not {field.name for field in left if getattr(base, field.name) != field.default}


def test_a_gated_mlp_is_two_thirds_as_wide() -> None:
    assert recipe_of(f"{SMALLEST} --swiglu --hidden-size 4096").model.ffn_hidden_size == 10880


@pytest.mark.parametrize(
    ("flags", "name"),
    [(GPT3_175B, "gpt3_175b"), (LLAMA3_8B, "llama3_8b"), (MIXTRAL_8X7B, "mixtral_8x7b"), (DEEPSEEK_V3, "deepseek_v3")],
    ids=["gpt3_175b", "llama3_8b", "mixtral_8x7b", "deepseek_v3"],
)
def test_published_models_have_their_published_parameters(flags: str, name: str) -> None:
    assert num_parameters(shape_of(flags)) == num_parameters(named(name))


@pytest.mark.parametrize("flags", [GPT3_175B, LLAMA3_8B, MIXTRAL_8X7B, DEEPSEEK_V3])
def test_a_dry_run_of_the_recipe_plans_the_model(flags: str) -> None:
    assert check(drafted(flags)) == []
    assert "plan for" in describe(recipe_of(flags))


def test_published_shapes_come_out_whole() -> None:
    assert shape_of(LLAMA3_8B) == named("llama3_8b")
    assert shape_of(MIXTRAL_8X7B) == named("mixtral_8x7b")


def test_latent_attention_experts_and_depths() -> None:
    shape, config = shape_of(DEEPSEEK_V3), recipe_of(DEEPSEEK_V3)
    assert (shape.rope_scaling, shape.rope_scaling_factor) == ("yarn", 40.0)
    assert (shape.rope_original_max_position_embeddings, shape.mscale_all_dim) == (4096, 1.0)
    assert (sum(shape.moe_blocks), shape.mtp_num_layers, shape.mtp_loss_scaling_factor) == (58, 1, 0.3)
    assert config.train.recompute == "selective:mla_up_proj,layernorm"
    assert not config.kernels.off and not config.model.megatron
    assert (
        config.parallel.virtual_pipeline_model_parallel_size is None or config.parallel.pipeline_model_parallel_layout
    )


def test_fp8_and_megatron_cores_own_fields() -> None:
    config = recipe_of(LLAMA3_8B)
    assert (config.precision.dtype, config.precision.fp8, config.precision.fp8_recipe) == ("bf16", "hybrid", "delayed")
    assert config.precision.grad_reduce_in_fp32
    assert config.model.megatron == ("fp8_amax_history_len=1024", "fp8_amax_compute_algo=max")
    assert not recipe_of(f"{LLAMA3_8B} --grad-reduce-in-bf16").precision.grad_reduce_in_fp32


def test_fp4() -> None:
    config = recipe_of(f"{SMALLEST} --bf16 --fp4-format e2m1")
    assert (config.precision.fp4, config.precision.fp4_recipe, config.precision.fp8) == ("e2m1", "nvfp4", None)
    given = drafted(f"{SMALLEST} --bf16 --fp4-format e2m1 --fp4-recipe nvfp4")
    assert given.sources["precision.fp4_recipe"] == "--fp4-recipe"
    alone = drafted(f"{SMALLEST} --bf16 --fp4-recipe nvfp4").irrelevant
    assert alone == ["--fp4-recipe: has no effect without --fp4-format"]
    own = drafted(f"{SMALLEST} --bf16 --fp4-format e2m1 --fp4-recipe custom --fp4-param-gather").unsupported
    assert own[0] == "--fp4-recipe custom: Triplane has nvfp4."
    assert any("--fp4-param-gather" in line and "products stay in fp4" in line for line in own)


def test_fully_sharded_runs_keep_their_strategy() -> None:
    megatron, name = "--use-megatron-fsdp", "parallel.data_parallel_sharding_strategy"
    for flags, strategy, copies in [
        ("--use-torch-fsdp2", "optim_grads_params", 1),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "optim_grads", 1),
        (f"{megatron} --data-parallel-sharding-strategy optim_grads", "optim_grads", 1),
        (
            f"{megatron} --data-parallel-sharding-strategy optim_grads_params --num-distributed-optimizer-instances 2",
            "optim_grads_params",
            2,
        ),
        (megatron, "no_shard", 1),
    ]:
        values = drafted(f"{SMALLEST} {flags}").values
        assert values[name] == strategy, flags
        assert values.get("parallel.num_distributed_optimizer_instances", 1) == copies


def test_weights_in_fp8_are_kept_where_they_can_be() -> None:
    """The reason is said where they are not."""
    flag, distributed = "--fp8-param-gather", "--use-distributed-optimizer"
    blackwell = f"--fp8-format e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag {distributed}"
    for flags, kept, said in [
        (f"--fp8-format hybrid {distributed}", True, ""),
        (blackwell, True, ""),
        (f"{blackwell} --overlap-grad-reduce --overlap-param-gather", None, "with --fp8-recipe mxfp8"),
        ("--fp8-format hybrid", None, "with --use-distributed-optimizer only"),
        (distributed, None, "has no effect without --fp8-format"),
    ]:
        draft = drafted(f"{SMALLEST} --bf16 {flags} {flag}")
        assert draft.values.get("precision.fp8_param_gather") == kept, flags
        texts = [line for line in (*draft.notes, *draft.irrelevant) if line.startswith(flag)]
        assert (said in texts[0]) if said else not texts, flags


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", 4),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            2,
        ),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
    ],
)
def test_virtual_stages(flags: str, chunks: int) -> None:
    draft = drafted(f"{SMALLEST} {flags}")
    assert draft.values["parallel.virtual_pipeline_model_parallel_size"] == chunks
    assert check(draft) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "cannot be divided into chunks of 3",
        ),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 0", "expected 1 or more, found 0"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 0", "expected 1 or more, found 0"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: expected 1 or more, found 0"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size: expected 1 or more, found 0"),
        ("--expert-model-parallel-size -1", "--expert-model-parallel-size: expected 1 or more, found -1"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by: expected 1 or more, found 0"),
        ("--tokenizer-type NullTokenizer --vocab-size 0", "--vocab-size: expected 1 or more, found 0"),
    ],
)
def test_sizes_that_divide_nothing_are_refused(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        recipe_of(f"{SMALLEST} {flags}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bf16 --fp16", "--fp16 beside --bf16: Megatron-LM refuses both"),
        ("--train-samples 800", "--train-samples beside --train-iters"),
        ("--lr-warmup-iters 5 --lr-warmup-samples 50", "--lr-warmup-samples beside --train-iters"),
        ("--swiglu=true", "--swiglu takes no value"),
        ("--swiglu=false", "--swiglu takes no value"),
        ("\u2013swiglu", "is not --: write --swiglu"),
        ("\u2014bf16 \u2013\u2013swiglu", "is not --: write --bf16"),
        ("--lr \u2212swiglu", "is not --"),
    ],
)
def test_what_contradicts_itself_is_refused(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        recipe_of(f"{SMALLEST} {flags} --bf16")


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    assert not drafted(f"{SMALLEST} --sequence-parallel").values["parallel.sequence_parallel"]
    both = f"{SMALLEST} --sequence-parallel --tensor-model-parallel-size 2"
    assert drafted(both).values["parallel.sequence_parallel"]


def test_rows_of_the_embedding_are_padded_as_by_megatron() -> None:
    flags = f"{SMALLEST} --vocab-size 50257 --tokenizer-type NullTokenizer --tensor-model-parallel-size 8"
    assert shape_of(flags).padded_vocab_size == 51200
    assert shape_of(f"{flags} --padded-vocab-size 50304").padded_vocab_size == 50304


def test_rope_stretched_as_llama_3_is() -> None:
    rope = f"{SMALLEST} --position-embedding-type rope"
    shape = shape_of(f"{rope} --use-rope-scaling --rope-scaling-factor 32")
    assert (shape.rope_scaling, shape.rope_scaling_factor) == ("llama3", 32.0)
    assert (shape.rope_low_freq_factor, shape.rope_high_freq_factor) == (1.0, 4.0)
    assert shape.rope_original_max_position_embeddings == 8192
    assert recipe_of(f"{rope} --use-rope-scaling").model.rope_low_freq_factor == 1.0
    linear = shape_of(f"{rope} --rotary-seq-len-interpolation-factor 4")
    assert (linear.rope_scaling, linear.rope_scaling_factor) == ("linear", 4.0)


def test_windows_and_blocks_without_rope() -> None:
    draft = translate([*SMALLEST.split(), "--window-size", "(127, 0)", "--window-attn-skip-freq", "[1,0]*2"])
    config = read_back_of(draft)
    assert (config.model.window_size, config.model.window_attn_skip_freq) == ((127, 0), "[1,0]*2")


def read_back_of(draft: Draft) -> RunConfig:
    return read_back(toml(draft, "", []))


def test_key_value_heads_count_only_with_grouped_queries() -> None:
    assert recipe_of(f"{SMALLEST} --num-query-groups 2").model.num_query_groups == 4
    assert recipe_of(f"{SMALLEST} --num-query-groups 2 --group-query-attention").model.num_query_groups == 2


def test_packed_documents_are_kept_apart() -> None:
    both = drafted(f"{SMALLEST} --reset-attention-mask --reset-position-ids --eod-mask-loss")
    assert all(both.values[f"data.{name}"] for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"))
    mask, learned, rotary = (
        drafted(f"{SMALLEST} {flags}")
        for flags in (
            "--reset-attention-mask",
            "--reset-position-ids",
            "--reset-position-ids --use-rotary-position-embeddings",
        )
    )
    assert mask.values["data.reset_attention_mask"] and "data.reset_position_ids" not in mask.values
    assert learned.values["data.reset_position_ids"] and not learned.unsupported
    assert "data.reset_position_ids" not in rotary.values  # Megatron's RoPE does not look at position ids
    assert any("--reset-position-ids" in line for line in rotary.irrelevant)


def test_data_with_weights_is_a_blend() -> None:
    single = drafted(f"{SMALLEST} --data-path 1.0 a")
    assert single.values["data.paths"] == ["a"] and not any("data-path" in line for line in single.unsupported)
    blend = drafted(f"{SMALLEST} --data-path 0.3 a 0.7 b")
    assert blend.values["data.blend"] == {"a": 0.3, "b": 0.7} and "data.paths" not in blend.values
    plain = drafted(f"{SMALLEST} --data-path a b")
    assert plain.values["data.paths"] == ["a", "b"] and plain.values["data.split"] == "969,30,1"


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "TikTokenizer"])
def test_a_tokenizer_that_cannot_be_read_is_listed(kind: str) -> None:
    draft = drafted(f"{SMALLEST} --tokenizer-type {kind} --tokenizer-model x")
    assert any(kind in line and "data.tokenizer" in line for line in draft.unsupported)
    assert "data.tokenizer" not in draft.values


def test_a_vocabulary_and_its_merges_are_the_tokenizer() -> None:
    draft = drafted(f"{SMALLEST} --vocab-file d/gpt2-vocab.json --merge-file e/merges.txt")
    assert draft.values["data.tokenizer"] == "d/gpt2-vocab.json,e/merges.txt" and not draft.unsupported
    alone = drafted(f"{SMALLEST} --tokenizer-type GPT2BPETokenizer --vocab-file d/gpt2-vocab.json")
    assert alone.values["data.tokenizer"] == "d/gpt2-vocab.json"


def test_a_tokenizer_of_hugging_face_is_its_folder() -> None:
    draft = drafted(f"{SMALLEST} --tokenizer-type HuggingFaceTokenizer --tokenizer-model models/mine")
    assert draft.values["data.tokenizer"] == "models/mine"
    assert any("tokenizer.json" in line for line in draft.notes)


def test_saving_and_starting() -> None:
    same = drafted(f"{SMALLEST} --save here --load here --save-interval 5")
    assert same.values["run_dir"] == "here" and "checkpoint.load" not in same.values
    assert same.values["checkpoint.save_interval"] == 5 and same.values["checkpoint.keep"] > 1000
    retained = drafted(f"{SMALLEST} --save here --save-interval 5 --save-retain-interval 50").values
    assert (retained["checkpoint.keep"], retained["checkpoint.save_retain_interval"]) == (1, 50)
    other = drafted(f"{SMALLEST} --save here --load there --finetune --no-load-rng")
    assert other.values["checkpoint.load"] == "there" and other.values["checkpoint.finetune"]
    assert other.values["checkpoint.no_load_rng"] and "checkpoint.no_load_optim" not in other.values
    pretrained = drafted(f"{SMALLEST} --save here --load here --pretrained-checkpoint base")
    assert pretrained.values["checkpoint.load"] == "base" and pretrained.values["checkpoint.finetune"]
    assert any("--no-load-optim" in line for line in drafted(f"{SMALLEST} --no-load-optim").unsupported)


def test_profiles() -> None:
    """As Megatron-LM does without --use-pytorch-profiler: for nsys."""
    draft = drafted(f"{SMALLEST} --profile --profile-ranks 0 3 --profile-step-end 20 --record-shapes --nvtx-ranges")
    profile = recipe_of(
        " ".join([SMALLEST, "--profile --profile-ranks 0 3 --profile-step-end 20 --nvtx-ranges"])
    ).profile
    assert (profile.enable_profiling, profile.step_start, profile.step_end) == (True, 10, 20)
    assert (profile.ranks, profile.use_pytorch_profiler, profile.nvtx_ranges) == ((0, 3), False, True)
    assert draft.values["profile.pytorch_profiler_collect_shapes"] is True
    torch_s = recipe_of(f"{SMALLEST} --profile --use-pytorch-profiler --record-memory-history").profile
    assert (torch_s.use_pytorch_profiler, torch_s.ranks, torch_s.record_memory_history) == (True, (0,), True)
    idle = drafted(f"{SMALLEST} --profile-step-start 3 --use-pytorch-profiler")
    assert not [name for name in idle.values if name.startswith("profile.")]
    assert "--profile-step-start: has no effect without --profile" in idle.irrelevant


@pytest.mark.parametrize(
    ("flags", "activation", "is_said"),
    [
        ("", "gelu", False),
        ("--disable-bias-linear", "gelu_exact", False),
        ("--no-bias-gelu-fusion", "gelu_exact", False),
        ("--disable-bias-linear --swiglu", "swiglu", False),
        ("--squared-relu --no-bias-gelu-fusion", "squared_relu", False),
        ("--quick-geglu --no-bias-gelu-fusion", "quick_geglu", False),
        ("--openai-gelu", "gelu", False),
        ("--openai-gelu --no-bias-gelu-fusion", "gelu_exact", True),
    ],
)
def test_the_activation_is_what_megatron_computes(flags: str, activation: str, is_said: bool) -> None:
    """Its fused GELU is the tanh approximation, the other is torch's, by erf."""
    draft = drafted(f"{SMALLEST} {flags}")
    assert draft.values["model.activation"] == activation
    assert [line for line in draft.unsupported if "GELU" in line] == [
        line for line in draft.unsupported if line.startswith("--openai-gelu: ")
    ]
    assert any("--openai-gelu: " in line for line in draft.unsupported) == is_said


def test_megatrons_two_gelus_are_these() -> None:
    """What megatron-core computes with and without its fused kernel, on numbers of both signs."""
    import torch
    from megatron.core.fusions.fused_bias_gelu import bias_gelu

    from models.activations import ACTIVATIONS

    x = torch.linspace(-4, 4, 101)
    tanh, erf = ACTIVATIONS["gelu"].function()(x), ACTIVATIONS["gelu_exact"].function()(x)
    with torch.compiler.set_stance("force_eager"):
        assert torch.allclose(bias_gelu(torch.zeros(101), x), tanh, atol=1e-6)
    assert torch.equal(torch.nn.functional.gelu(x), erf)
    assert not torch.allclose(tanh, erf, atol=1e-5)


def test_flags_of_experts_change_nothing_without_experts() -> None:
    draft = drafted(f"{SMALLEST} --moe-router-topk 4")
    assert "model.moe_router_topk" not in draft.values
    assert any("without --num-experts" in line for line in draft.irrelevant)


def test_what_forks_call_otherwise_and_triplane_has() -> None:
    values = drafted(
        f"{SMALLEST} --xielu --lr-decay-style wsd --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 5 "
        "--attn-logit-softcapping 50 --output-logit-softcapping 30"
    ).values
    assert (values["model.activation"], values["optimizer.lr_decay_style"]) == ("xielu", "WSD")
    assert values["optimizer.lr_wsd_decay_style"] == "minus_sqrt"
    assert (values["model.attn_logit_softcapping"], values["model.final_logit_softcapping"]) == (50, 30)
    draft = drafted(f"{SMALLEST} --lr-decay-style inverse_square_root --data-args-path /d/blend.txt --log-params-norm")
    assert draft.values["optimizer.lr_decay_style"] == "inverse-square-root" and not draft.other_model
    assert (draft.values["data.blend_file"], draft.values["data.split"]) == ("/d/blend.txt", "969,30,1")
    assert draft.values["log.log_params_norm"] and not draft.values["log.log_num_zeros_in_grad"]
    assert not any("built-in corpus" in line for line in draft.notes)
    with pytest.raises(UserError, match="--data-args-path beside --data-path"):
        drafted(f"{SMALLEST} --data-args-path /d/blend.txt --data-path /d/a")


def test_a_value_that_is_the_default_anyway_is_not_a_problem() -> None:
    assert drafted(f"{SMALLEST} --optimizer adam --head-lr-mult 1.0").other_model == []
    assert len(drafted(f"{SMALLEST} --optimizer sgd --head-lr-mult 0.1").other_model) == 2


def test_an_unknown_flag_is_named_with_the_nearest_and_its_values() -> None:
    unknown = drafted(f"{SMALLEST} --num-layer 4 5 --swiglu").not_understood
    assert unknown == ["--num-layer 4 5 is no flag of Megatron-LM 0.19.2. Did you mean --num-layers?"]


def test_words_that_the_shell_has_split_off_are_named_together() -> None:
    lost = drafted(f"{SMALLEST} --seed 1 -v a b --seed 2 c --save my own run --bf16 d")
    said = ['"a b" behind --seed 1 belongs', '"c" behind --seed 2 belongs', '"d" behind --bf16']
    assert len(lost.not_understood) == 3
    assert all(line.startswith(start) for line, start in zip(lost.not_understood, said, strict=True))
    assert lost.open[0].startswith('run_dir: --save my own run, and "my own run" is not known')


def test_a_value_with_an_equals_sign_and_the_last_of_several() -> None:
    draft = drafted(f"{SMALLEST} --seed=5 --seed 6")
    assert draft.values["train.seed"] == 6
    assert drafted(f"{SMALLEST} --seed=7").values["train.seed"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--num-layers 4", "--num-layers four"), '--num-layers: expected a whole number, found "four"'),
        (("--num-layers 4", "--num-layers"), "--num-layers takes 1 value, found 0"),
        (("--num-layers 4", ""), "--num-layers is missing"),
        (("--train-iters 100", ""), "--train-iters (or --train-samples) is missing"),
    ],
)
def test_what_megatron_would_not_start_with_is_an_error(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        drafted(SMALLEST.replace(*change))
    assert message in str(caught.value)


def test_a_word_that_we_do_not_know_is_listed_with_those_that_we_do() -> None:
    draft = drafted(f"{SMALLEST} {EXPERTS} --moe-router-score-function sqrtsoftplus")
    assert any("sqrtsoftplus" in line and '"sigmoid"' in line for line in draft.other_model)


def test_what_a_run_would_refuse_is_said() -> None:
    assert any("divisible" in line or "multiple" in line for line in check(drafted(f"{SMALLEST} --hidden-size 66")))


def test_exit_codes_and_both_streams(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([f"{SMALLEST} --save x --tokenizer-type NullTokenizer --vocab-size 256 --data-path a"]) == 0
    assert "[model]" in capsys.readouterr().out
    assert main([f"{SMALLEST} --moe-paged-stash"]) == 1
    both = capsys.readouterr()
    assert "--moe-paged-stash" in both.err and "# - --moe-paged-stash" in both.out and "[train]" in both.out
    for changes in ("--freeze-all-layers", "--no-such-flag", "stray"):
        assert main([f"{SMALLEST} {changes}"]) == 2
        refused = capsys.readouterr()
        assert changes in refused.err and not refused.out
        assert main([f"{SMALLEST} {changes}", "--allow_partial"]) == 1
        assert changes in capsys.readouterr().out
    assert main([str(tmp_path / "absent.sh")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([SMALLEST, "--set", "NAME"]) == 2


def test_a_message_names_the_script_and_shows_no_more_than_a_screen_can_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    for text in ("torchrun pretrain_gpt.py --num-layers '", f"torchrun pretrain_gpt.py --num-layers {'x' * 100_000}"):
        script.write_text(text)
        assert main([str(script)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"tools.from_megatron: {script}: ") and len(said) < 2000
    script.write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
                      "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 "
                      "--vocab-size 9 --strange\x00\x1b[31m\x9b1m 1")  # fmt: skip
    assert main([str(script), "--allow_partial"]) == 1
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()


@pytest.mark.campaign
def test_the_recipe_runs_and_the_tool_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from tools.from_megatron.__main__ import main; code = main(sys.argv[1:]); "
    code += "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules); raise SystemExit(code)"
    flags = f"{SMALLEST} --swiglu --tokenizer-type NullTokenizer --vocab-size 1000"
    made = subprocess.run([sys.executable, "-c", code, flags], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    (tmp_path / "recipe.toml").write_text(made.stdout)
    command = [sys.executable, "pretrain_gpt.py", str(tmp_path / "recipe.toml"), "--dry_run"]
    planned = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert planned.returncode == 0 and "plan for 1 ranks" in planned.stdout, planned.stderr


def test_going_on_in_megatrons_order_is_explained_where_a_run_is_loaded() -> None:
    short, long = (f"{flags} --data-path /data --load /ckpt" for flags in (SMALLEST, GPT3_175B))
    notes = [next((line for line in drafted(flags).notes if "data.order" in line), "") for flags in (short, long)]
    assert 'data.order = "megatron".' in notes[0] and "data.megatron_train_samples = 146484375" in notes[1]
    assert not any("data.order" in line for line in drafted(short.replace("--load", "--save")).notes)


def test_words_in_another_case_are_the_same_words() -> None:
    recipe = recipe_of(f"{SMALLEST} --normalization rmsnorm --lr-decay-style COSINE")
    assert (recipe.model.normalization, recipe.optimizer.lr_decay_style) == ("RMSNorm", "cosine")


def test_muon_with_megatrons_defaults() -> None:
    found = drafted(
        f"{SMALLEST} --optimizer dist_muon --muon-momentum 0.9 --muon-nesterov --muon-scalar-optimizer lion"
    )
    own = {name.removeprefix("optimizer.muon_"): value for name, value in found.values.items() if "muon_" in name}
    assert found.values["optimizer.optimizer"] == "muon" and own == {
        "momentum": 0.9, "num_ns_steps": 5, "scale_mode": "spectral", "extra_scale_factor": 1.0,
        "coefficient_type": "quintic", "fp32_matmul_prec": "medium", "split_qkv": True, "nesterov": True,
    }  # fmt: skip
    assert found.other_model == ["--muon-scalar-optimizer lion: what is no matrix is AdamW's here."]


def test_muons_other_update_for_each_tp_is_said() -> None:
    tp2 = f"{SMALLEST} --optimizer muon --tensor-model-parallel-size 2"
    assert any("blockwise, Megatron-LM's default" in note for note in drafted(tp2).notes)
    whole = drafted(f"{tp2} --muon-tp-mode distributed")
    assert not any("blockwise" in note for note in whole.notes)
    assert any(line.startswith("--muon-tp-mode: matrices are whole") for line in whole.irrelevant)
    unread = drafted(f"{SMALLEST} --muon-num-ns-steps 6 --muon-no-split-qkv")
    assert sum("has no effect without --optimizer muon" in line for line in unread.irrelevant) == 2
    assert not any("muon" in name for name in unread.values)
