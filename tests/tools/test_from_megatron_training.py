"""Iterations, batches, schedules and what is offloaded, of Megatron-LM's flags."""

from tests.tools.megatron_scripts import GPT3_175B, SMALLEST, drafted, recipe_of
from training.config.schedules import learning_schedule


def test_samples_stay_samples_with_a_ramp() -> None:
    config = recipe_of(GPT3_175B)
    assert config.train.rampup_batch_size == (16, 16, 5859375)
    schedule = learning_schedule(config.optimizer, config.train, config.model.seq_length)
    assert (schedule.warmup_samples, schedule.decay_samples) == (183105, 126953125)


def test_samples_that_are_whole_iterations_need_no_word() -> None:
    draft = drafted(SMALLEST.replace("--train-iters 100", "--train-samples 160"))
    assert draft.values["train.train_iters"] == 20
    assert not any("--train-samples" in line for line in draft.notes)


def test_a_warm_up_fraction_is_of_the_decay() -> None:
    config = recipe_of(f"{SMALLEST} --lr-decay-iters 80 --lr-warmup-fraction 0.1")
    assert (config.optimizer.lr_decay_iters, config.optimizer.lr_warmup_fraction) == (80, 0.1)


def test_a_decoupled_rate_is_a_field() -> None:
    config = recipe_of(f"{SMALLEST} --decoupled-lr 1e-2 --decoupled-min-lr 1e-4")
    assert (config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr) == (1e-2, 1e-4)


def test_fill_in_the_middle_is_the_data_sections() -> None:
    data = recipe_of(f"{SMALLEST} --fim-data --fim-rate 0.9 --fim-split-sample '<file>' --fim-fragment-rate 0.4").data
    assert (data.fim_rate, data.fim_spm_rate, data.fim_split_sample, data.fim_fragment_rate) == (
        0.9,
        0.5,
        "<file>",
        0.4,
    )
    assert (data.fim_prefix_token, data.fim_pad_token) == ("<fim_prefix>", "<fim_pad>") and not data.problems()
    assert recipe_of(f"{SMALLEST} --fim-data").data.fim_rate == 0.5  # Megatron-LM's default
    without = drafted(f"{SMALLEST} --fim-rate 0.9 --fim-fragment-rate 0.4")
    assert "data.fim_rate" not in without.values and len([one for one in without.irrelevant if "fim" in one]) == 2
    assert any("--fim-eod-token" in one for one in drafted(f"{SMALLEST} --fim-data --fim-eod-token '<e>'").notes)


def test_a_batch_that_is_not_given_is_the_ranks() -> None:
    flags = SMALLEST.replace("--global-batch-size 8", "--tensor-model-parallel-size 2")
    assert drafted(flags, world=16).values["train.global_batch_size"] == 8
    assert any("--global-batch-size" in line for line in drafted(flags).not_understood)


def test_no_evaluation_needs_no_interval() -> None:
    config = recipe_of(f"{SMALLEST} --eval-interval 0 --eval-iters 0 --exit-interval 0 --save-interval 0")
    assert (config.train.eval_iters, config.train.eval_interval, config.train.exit_interval) == (0, None, None)
    assert config.checkpoint.save_interval is None and not config.problems(1)
    factor = drafted(f"{SMALLEST} --num-experts 4 --moe-router-topk-scaling-factor 0")
    assert factor.values["model.moe_router_topk_scaling_factor"] == 1.0
    assert drafted(SMALLEST.replace("--num-attention-heads 4", "--num-attention-heads 0")).values  # no traceback
    assert recipe_of(f"{SMALLEST} --lr-warmup-iters 5 --lr-warmup-samples 0").optimizer.lr_warmup_iters == 5


def test_activations_that_are_offloaded_by_module() -> None:
    flags = "--fine-grained-activation-offloading --offload-modules core_attn fused_group_mlp"
    draft = drafted(f"{SMALLEST} {flags} --min-offloaded-tensor-size 4096 --activation-offload-fraction 0.5")
    assert draft.values["train.offload_modules"] == ["core_attn"]
    assert {"min_offloaded_tensor_size=4096", "activation_offload_fraction=0.5"} <= {*draft.values["model.megatron"]}
    assert any("--offload-modules fused_group_mlp" in line for line in draft.unsupported)
    without = drafted(f"{SMALLEST} --offload-modules core_attn")
    assert "train.offload_modules" not in without.values
    assert any("--offload-modules" in line for line in without.irrelevant)


def test_iterations_without_an_update_are_a_list() -> None:
    draft = drafted(f"{SMALLEST} --iterations-to-skip 7 12 13")
    assert draft.values["train.iterations_to_skip"] == [7, 12, 13]
    assert any("skips the iteration behind each" in line for line in draft.notes)
    assert recipe_of(f"{SMALLEST} --iterations-to-skip 7 12 13").train.iterations_to_skip == (7, 12, 13)


def test_which_schedule_a_resume_takes() -> None:
    for flag in ("override-opt_param-scheduler", "use-checkpoint-opt-param-scheduler"):
        taken = recipe_of(f"{SMALLEST} --{flag}").checkpoint
        expected = (flag.startswith("override"), flag.startswith("use"))
        assert (taken.override_opt_param_scheduler, taken.use_checkpoint_opt_param_scheduler) == expected
