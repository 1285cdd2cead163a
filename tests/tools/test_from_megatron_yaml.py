"""Megatron-LM's functional tests and Megatron-Bridge's configurations as recipes; files of other programs by name."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from campaign import param
from program.errors import UserError
from tests.tools.megatron_scripts import SMALLEST
from tools.from_megatron.__main__ import main
from tools.from_megatron.convert import Summary, convert_source, read_back
from tools.from_megatron.sources import Source
from training.config.run_config import RunConfig

FUNCTIONAL = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  BLEND: "1.0 ${DATA_PATH}/a 2.0 ${DATA_PATH}/b"
BASE: &base
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
TEST_TYPE: regular
MODE: pretraining
MODEL_ARGS:
  <<: *base
  --seq-length: 128
  --max-position-embeddings: 128
  --micro-batch-size: 1
  --global-batch-size: 8
  --train-iters: 100
  --lr: 1.0e-3
  --swiglu: true
  --untie-embeddings-and-output-weights: false
  --num-experts: 8
  --moe-layer-freq: ([0]*1+[1]*3)
  --recompute-granularity: selective
  --recompute-modules: [core_attn moe_act]
  --step-note: "two words"
  --data-path: ${BLEND}
  --tokenizer-type: NullTokenizer
  --vocab-size: 1000
  --save: ${OUTPUT}/ckpt
MODEL_ARGS_2:
  --num-layers: 5
"""
RUN_CONFIG = """\
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama32ModelProvider1B
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  add_bias_linear: false
  attention_dropout: 0.0
  bias_activation_fusion: true
  context_parallel_size: 1
  expert_model_parallel_size: 1
  ffn_hidden_size: 8192
  fp8: null
  gated_linear_unit: true
  hidden_dropout: 0.0
  hidden_size: 2048
  kv_channels: 64
  layernorm_epsilon: 1.0e-05
  make_vocab_size_divisible_by: 128
  masked_softmax_fusion: true
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 16
  num_moe_experts: null
  num_query_groups: 8
  pipeline_dtype: null
  pipeline_model_parallel_size: 2
  position_embedding_type: rope
  rope_scaling: true
  rope_scaling_factor: 32.0
  rotary_base: 500000
  seq_length: 8192
  sequence_parallel: true
  share_embeddings_and_output_weights: true
  should_pad_vocab: false
  tensor_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  vocab_size: 128256
  window_size: null
train: {train_iters: 1000, global_batch_size: 512, micro_batch_size: 1, manual_gc: true, manual_gc_interval: 50}
validation: {eval_iters: 32, eval_interval: 200}
optimizer: {optimizer: adam, lr: 0.0003, min_lr: 3.0e-05, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95,
            bf16: true, use_distributed_optimizer: true, clip_grad: 1.0}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 20, lr_decay_iters: 1000, start_weight_decay: 0.1,
            end_weight_decay: 0.1}
dataset:
  _target_: megatron.bridge.training.config.GPTDatasetConfig
  blend: [[/data/a, /data/b], [0.3, 0.7]]
  seq_length: 4096
  split: "99,1,0"
  reset_attention_mask: false
  eod_mask_loss: true
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, grad_reduce_in_fp32: true}
tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 128256}
checkpoint: {save: "${oc.env:RUNS}/llama", save_interval: 50, load_optim: true, finetune: false}
logger: {log_interval: 10, wandb_project: null}
rng: {seed: 7}
mixed_precision: bf16_with_fp8_current_scaling_mixed
profiling: {use_nsys_profiler: false}
"""
OVERRIDES = """\
train: {train_iters: 100, global_batch_size: 8, micro_batch_size: 1, eval_iters: 10, eval_interval: 50}
optimizer: {lr: 0.0003, min_lr: 0.00003}
scheduler: {lr_warmup_iters: 20}
model: {seq_length: 4096, tensor_model_parallel_size: 2}
logger: {log_interval: 10}
rng: {seed: 1234}
"""


def converted(text: str, path: str = "x.yaml", shape: str = "", **given: str) -> tuple[RunConfig, Summary]:
    recipe, summary = convert_source(Source(text, "", Path(path), shape=shape), given)
    return read_back(recipe), summary


def test_a_functional_test_is_the_command_that_it_starts() -> None:
    config, summary = converted(FUNCTIONAL, DATA_PATH="/d", OUTPUT="/o")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.activation, model.moe_layer_freq) == (
        4,
        64,
        "swiglu",
        "([0]*1+[1]*3)",
    )
    assert not model.untie_embeddings_and_output_weights and config.optimizer.lr == 1e-3
    assert config.train.recompute == "selective:core_attn,moe_act"
    assert (config.data.blend, config.run_dir) == ({"/d/a": 1.0, "/d/b": 2.0}, "/o/ckpt")
    said = [line for block in summary.blocks for line in block]
    assert "--step-note two words is no flag of Megatron-LM 0.19.2." in said
    assert "MODEL_ARGS_2: of the test's later runs, which are not translated." in said


def test_a_functional_test_says_what_is_open_with_its_lines() -> None:
    _, summary = converted(FUNCTIONAL)
    line = FUNCTIONAL.splitlines().index("  --save: ${OUTPUT}/ckpt") + 1
    said = [text for block in summary.blocks for text in block]
    assert f"run_dir: --save $OUTPUT/ckpt, and $OUTPUT is not set (line {line})." in said
    assert any("--set DATA_PATH=VALUE --set OUTPUT=VALUE" in text for text in said)


def test_ranks_of_a_functional_test() -> None:
    recipe, _ = convert_source(Source(FUNCTIONAL, "", Path("x.yaml")), {"GPUS_PER_NODE": "4", "NUM_NODES": "2"})
    assert "Launched on 8 ranks" in recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("MODE: pretraining", "MODE: inference"), "MODE: inference: a test of inference"),
        (("  --seq-length: 128", "  - a"), "line 12: not YAML"),
        (("MODEL_ARGS:\n", "MODEL_ARGS:\n  --heterogeneous-layers-config-path: a.json\n"), ""),
    ],
)
def test_a_functional_test_that_is_none_of_a_gpt_is_refused(change: tuple[str, str], message: str) -> None:
    if not message:
        assert any("another architecture" in line for line in converted(FUNCTIONAL.replace(*change))[1].other_model)
        return
    with pytest.raises(UserError) as caught:
        converted(FUNCTIONAL.replace(*change))
    assert message in str(caught.value)


def test_the_folder_of_a_functional_test_says_its_program() -> None:
    _, summary = converted(FUNCTIONAL, "tests/functional_tests/test_cases/t5/a/model_config.yaml")
    assert summary.other_model == ["pretrain_t5.py: it trains a T5. Triplane's pretrain_gpt.py trains a GPT on text."]


def test_nemos_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="NeMo's recipes"):
        converted("MODEL_ARGS:\n  trainer.num_nodes: 1\n")


def test_a_configuration_of_megatron_bridges() -> None:
    config, summary = converted(RUN_CONFIG, RUNS="/r")
    model, parallel = config.model, config.parallel
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_query_groups) == (16, 2048, 8192, 8)
    assert (model.activation, model.normalization, model.add_bias_linear) == ("swiglu", "RMSNorm", False)
    assert (model.rope_scaling, model.rope_scaling_factor, model.rotary_base) == ("llama3", 32.0, 500000)
    assert not model.untie_embeddings_and_output_weights
    assert (model.seq_length, model.max_position_embeddings, model.vocab_size) == (4096, 8192, 128256)
    assert (parallel.tensor_model_parallel_size, parallel.virtual_pipeline_model_parallel_size) == (2, 2)
    assert parallel.sequence_parallel and parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    precision = config.precision
    assert (precision.dtype, precision.fp8, precision.fp8_recipe, precision.first_last_layers_bf16) == (
        "bf16", "hybrid", "tensorwise", True,
    )  # fmt: skip
    assert precision.fp8_param_gather and precision.grad_reduce_in_fp32
    assert (config.optimizer.lr, config.optimizer.adam_beta2, config.optimizer.lr_decay_style) == (3e-4, 0.95, "cosine")
    assert (config.train.eval_iters, config.train.eval_interval, config.train.seed) == (32, 200, 7)
    assert (config.train.manual_gc_interval, config.data.blend) == (50, {"/data/a": 0.3, "/data/b": 0.7})
    assert config.data.eod_mask_loss and config.run_dir == "/r/llama" and config.log.wandb == "off"
    assert summary.complete, summary.blocks


def test_what_another_bridge_model_has_is_refused() -> None:
    changes = {
        "torch.nn.functional.silu": "torch.nn.functional.relu",
        "profiling:": "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8}\nprofiling:",
        "optimizer: adam": "optimizer: sgd",
        "GPTDatasetConfig": "GPTSFTDatasetConfig",
    }
    for old, new in changes.items():
        _, summary = converted(RUN_CONFIG.replace(old, new))
        assert len(summary.other_model) == 1, (new, summary.other_model)


def test_fields_of_the_recipe_that_no_flag_means() -> None:
    for function, gated, name in (("torch.nn.functional.gelu", True, "geglu"), ("a.fast_gelu", True, "geglu"),
                                  ("a.fast_gelu", False, "gelu"), ("a.XIELU", False, "xielu")):  # fmt: skip
        text = RUN_CONFIG.replace("torch.nn.functional.silu", function).replace(
            "gated_linear_unit: true", f"gated_linear_unit: {gated}\n  softmax_scale: 0.1"
        )
        config, summary = converted(text, RUNS="/r")
        assert (config.model.activation, config.model.softmax_scale) == (name, 0.1)
        assert not summary.other_model and not summary.not_understood


def test_a_field_that_no_flag_means_is_listed_unless_it_is_megatron_cores_default() -> None:
    extra = "  deallocate_pipeline_outputs: false\n  apply_query_key_layer_scaling: false\n"
    extra += "  hetereogenous_dist_checkpoint: true\n"
    _, summary = converted(RUN_CONFIG.replace("  window_size: null\n", f"  window_size: null\n{extra}"), RUNS="/r")
    found = "model.hetereogenous_dist_checkpoint = True: no flag of Megatron-LM means it."
    assert ["Not known to Megatron-LM 0.19.2, and left out:", found] in summary.blocks


def test_what_a_bridge_configuration_says_beyond_flags_is_listed_or_refused() -> None:
    layers = "  num_layers: 16\n"
    refused = {
        "model.teacher = {num_layers}": (layers, f"{layers}  teacher: {{num_layers: 4}}\n"),
        "model.softmax_off = 0.1": (layers, f"{layers}  softmax_off: 0.1\n"),
        "GemmaModelProvider7B": ("llama.llama_provider.Llama32ModelProvider1B", "gemma.x.GemmaModelProvider7B"),
        "Qwen25VLModelProvider3B": ("Llama32ModelProvider1B", "Qwen25VLModelProvider3B"),
        "model.transformer_layer_spec = a.b.my_spec": (layers, f"{layers}  transformer_layer_spec: a.b.my_spec\n"),
        "GPTFIMDatasetConfig": ("GPTDatasetConfig", "GPTFIMDatasetConfig"),
        "decoupled_weight_decay": ("clip_grad: 1.0", "clip_grad: 1.0, decoupled_weight_decay: false"),
    }
    for message, change in refused.items():
        _, summary = converted(RUN_CONFIG.replace(*change), RUNS="/r")
        assert len(summary.other_model) == 1 and message in summary.other_model[0], (message, summary.other_model)
    listed = {
        "dataset.blend_per_split = ": (
            "  eod_mask_loss",
            "  blend_per_split: [[[/a], null], null, null]\n  eod_mask_loss",
        ),
        "scheduler.max_steps = 5000": ("lr_warmup_iters: 20", "lr_warmup_iters: 20, max_steps: 5000"),
        "logger.comet_project = x": ("log_interval: 10", "log_interval: 10, comet_project: x"),
        "weird = {a}": ("profiling:", "weird: {a: 1}\nprofiling:"),
        "train.train_iterations = 5": ("manual_gc: true", "manual_gc: true, train_iterations: 5"),
    }
    for message, change in listed.items():
        recipe = RUN_CONFIG.replace(*change)
        assert recipe != RUN_CONFIG
        _, summary = converted(recipe, RUNS="/r")
        assert any(message in line for line in summary.blocks[0]) and not summary.complete, message
        assert bool(summary.not_understood) == ("logger" not in message), message


def test_a_bridge_configuration_in_other_spellings() -> None:
    start, end = RUN_CONFIG.index("  num_layers:"), RUN_CONFIG.index("  seq_length: 8192")
    nested = RUN_CONFIG[start:end].replace("\n  ", "\n    ").rstrip() + "\n"
    text = RUN_CONFIG[:start] + "  transformer:\n  " + nested + RUN_CONFIG[end:]
    text = text.replace("Llama32ModelProvider1B", "BridgeGPTModelConfig")
    text = text.replace("  seq_length: 4096", "  seq_length: ${model.seq_length}").replace(
        "seed: 7", 'seed: "${oc.env:S,9}"'
    )
    text = text.replace(
        "use_nsys_profiler: false", "use_nsys_profiler: true, profile_step_start: 5, profile_ranks: [1]"
    )
    config, summary = converted(text, RUNS="/r")
    assert (config.model.num_layers, config.model.num_query_groups, config.model.seq_length) == (16, 8, 8192)
    assert config.train.seed == 9 and converted(text, RUNS="/r", S="3")[0].train.seed == 3
    assert (config.profile.enable_profiling, config.profile.step_start, config.profile.ranks) == (True, 5, (1,))
    assert not config.profile.use_pytorch_profiler and summary.complete, summary.blocks
    states = "clip_grad: 1.0, exp_avg_dtype: {_target_: torch.float32, _call_: false}"
    assert converted(RUN_CONFIG.replace("clip_grad: 1.0", states), RUNS="/r")[1].complete
    assert not converted(RUN_CONFIG.replace("clip_grad: 1.0", states.replace("32", "16")), RUNS="/r")[1].complete


def test_values_that_are_to_be_filled_in_are_named_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        converted(RUN_CONFIG.replace("/data/a", "<path to a>").replace("hidden_size: 2048", "hidden_size: ???"))
    line = 1 + RUN_CONFIG.splitlines().index("  hidden_size: 2048")
    assert f"line {line}: model.hidden_size: ???" in str(caught.value)
    assert "dataset.blend.0.0: <path to a>" in str(caught.value)


def test_overrides_need_the_model_s_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "llama32_1b_pretrain.yaml"
    path.write_text(OVERRIDES)
    assert main([str(path)]) == 2
    assert "as in --shape llama32_1b" in capsys.readouterr().err
    assert main([str(path), "--shape", "llama32_1b"]) == 1
    recipe = capsys.readouterr().out
    config = read_back(recipe)
    assert (config.model.shape, config.model.num_layers, config.model.seq_length) == ("llama32_1b", None, 4096)
    assert (config.parallel.tensor_model_parallel_size, config.train.train_iters, config.train.eval_iters) == (
        2,
        100,
        10,
    )
    assert "data.tokenizer: this file does not say it" in recipe and "data.paths: this file" in recipe
    assert "init_method_std" not in recipe and "is Triplane's default" in recipe
    assert main([str(path), "--shape", "llama32_1x"]) == 2
    assert main([SMALLEST, "--shape", "llama32_1b"]) == 2
    assert "leave --shape out" in capsys.readouterr().err


CHANGED = """\
model: {seq_length: 1024, moe_aux_loss_coeff: 0.02, moe_z_loss_coeff: 1.0e-3, moe_token_dispatcher_type: alltoall,
        moe_router_topk: 3, cross_entropy_loss_fusion: false, moe_permute_fusion: false, apply_rope_fusion: false,
        share_embeddings_and_output_weights: true, qk_layernorm: false, add_qkv_bias: true, num_query_groups: 32,
        moe_layer_freq: [1, 0], position_embedding_type: none, hidden_dropout: 0.1}
train: {train_samples: 10000, global_batch_size: 64, micro_batch_size: 1, manual_gc: true, manual_gc_interval: 7}
scheduler: {lr_warmup_fraction: 0.1, lr_decay_style: WSD, lr_wsd_decay_samples: 100}
optimizer: {lr: 1.0e-3, use_distributed_optimizer: false}
ddp: {grad_reduce_in_fp32: false}
dataset: {reset_attention_mask: true, reset_position_ids: true}
checkpoint: {pretrained_checkpoint: /p}
"""


def test_overrides_lose_nothing() -> None:
    config, summary = converted(CHANGED, shape="mixtral_8x7b")
    model, kernels, optimizer = config.model, config.kernels, config.optimizer
    assert (model.moe_aux_loss_coeff, model.moe_z_loss_coeff, model.moe_router_topk) == (0.02, 1e-3, 3)
    assert (model.seq_length, model.num_query_groups, model.moe_layer_freq) == (1024, 32, "[1, 0]")
    assert (model.untie_embeddings_and_output_weights, model.qk_layernorm, model.add_qkv_bias) == (False, False, True)
    assert (model.position_embedding_type, model.hidden_dropout) == ("none", 0.1)
    assert model.max_position_embeddings is None and model.activation is None  # the named shape's
    assert config.parallel.moe_token_dispatcher_type == "alltoall" and not config.parallel.use_distributed_optimizer
    assert {*kernels.off} == {"cross_entropy_loss_fusion", "moe_permute_fusion", "apply_rope_fusion"}
    assert (optimizer.lr, optimizer.lr_warmup_fraction, optimizer.lr_decay_style) == (1e-3, 0.1, "WSD")
    assert (optimizer.lr_decay_samples, optimizer.lr_wsd_decay_samples) == (10000, 100)
    assert (config.train.train_iters, config.train.global_batch_size) == (156, 64)
    assert config.train.manual_gc_interval == 7 and not config.precision.grad_reduce_in_fp32
    assert config.data.reset_attention_mask and (config.checkpoint.load, config.checkpoint.finetune) == ("/p", True)
    assert not summary.not_understood and not summary.other_model, summary.blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {seq_length: 64, merge_file: x}", "--merge-file x: what it changes depends on the recipe"),
        ("optimizer: {lr: 0.1, finetune_lr: 0.2}", "optimizer.finetune_lr = 0.2"),
        ("train: {train_samples: 100}", "how many iterations they are depends on the global batch size"),
        ("model: {activation_func: torch.nn.functional.gelu, gated_linear_unit: false}", "activation_func = gelu: set"),
        (
            "optimizer: {lr: 0.1}\noptimizer_config_override_provider: {_target_: a.Other}",
            "Other may train some weights",
        ),
        ("mixed_precision: mixed_of_my_own\noptimizer: {lr: 0.1}", "mixed_of_my_own: no recipe of numbers"),
    ],
)
def test_what_of_overrides_is_not_understood_is_no_recipe(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert main([str(tmp_path / "x.yaml"), "--shape", "llama3_8b"]) == 2
    assert message in capsys.readouterr().err


FLAGSCALE = """\
system:
  tensor_model_parallel_size: 2
  no_shared_fs: ${experiment.runner.no_shared_fs}
  precision: {bf16: true, attention_softmax_in_fp32: true}
  checkpoint:
    save_interval: ${experiment.save_steps}
    load: ${experiment.load}
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 128
  max_position_embeddings: 128
  micro_batch_size: 1
  global_batch_size: 8
  train_samples: 803
  untie_embeddings_and_output_weights: false
  seed: ${experiment.seed}
  optimizer:
    weight_decay: 1e-2
    lr_scheduler: {lr: 1.0e-3, lr_warmup_fraction: .1, lr_decay_style: cosine}
data:
  data_path: /d/text
  split: 1
  tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 1000}
"""
FLAGSCALE_RUN = """\
defaults:
  - _self_
  - train: tiny
experiment:
  seed: 42
  save_steps: 10
  load: null
  task: {type: train, backend: megatron, entrypoint: flagscale/train/train_gpt.py}
  runner: {backend: torchrun, nnodes: 2, nproc_per_node: 8, no_shared_fs: false}
action: run
"""


def test_flags_of_flagscales_are_those_of_megatron_lm(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "tiny.yaml").write_text(FLAGSCALE)
    recipe, summary = convert_source(Source(FLAGSCALE_RUN, "", tmp_path / "run.yaml"), {})
    config = read_back(recipe)
    assert (config.model.num_layers, config.model.seq_length, config.train.seed) == (4, 128, 42)
    assert (config.train.train_iters, config.optimizer.lr_decay_samples) == (100, 803)
    assert (config.optimizer.lr_warmup_fraction, config.optimizer.weight_decay) == (0.1, 0.01)
    assert (config.checkpoint.load, config.checkpoint.save_interval, config.data.split) == (None, 10, "1")
    assert "Launched on 16 ranks" in recipe and summary.complete, summary.blocks
    alone, summary = converted(FLAGSCALE, "tiny.yaml", **{"experiment.seed": "42", "experiment.save_steps": "10"})
    assert alone.model == config.model and alone.optimizer == config.optimizer
    assert any("the program: these are flags of FlagScale's" in line for block in summary.blocks for line in block)
    within = "train:\n" + "".join(f"  {line}\n" for line in FLAGSCALE.splitlines())
    assert converted(FLAGSCALE_RUN + within, "run.yaml")[0] == config
    given = {"experiment.seed": "42", "experiment.save_steps": "10"}
    assert converted(within, "run.yaml", **given)[0].model == config.model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("type: train", "type: serve"), "a file of FlagScale's, whose task is serve by megatron"),
        (("tiny", "other"), "whose flags are in train/other.yaml beside it"),
        (("- train: tiny", "- serve: tiny"), "names no flags"),
    ],
)
def test_a_file_of_flagscales_that_has_no_flags_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        converted(FLAGSCALE_RUN.replace(*change), "run.yaml")
    assert message in str(caught.value)


def test_another_program_of_flagscales_is_another_model(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "tiny.yaml").write_text(FLAGSCALE)
    text = FLAGSCALE_RUN.replace("train_gpt.py", "train_rwkv.py")
    _, summary = convert_source(Source(text, "", tmp_path / "run.yaml"), {})
    assert summary.other_model == [
        "flagscale/train/train_rwkv.py: it trains an RWKV. Triplane's pretrain_gpt.py trains a GPT on text."
    ]


FOREIGN = {
    "a recipe of Triplane itself": ("a.toml", "[model]\nshape = 'gpt2'\n[train]\ntrain_iters = 3\n"),
    "torchtitan": ("a.toml", "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nsteps = 3\n"),
    "nanotron": ("a.yaml", "general:\n  run: x\nparallelism:\n  dp: 2\ntokens:\n  micro_batch_size: 1\n"),
    "GPT-NeoX": ("a.yml", '{"pipe_parallel_size": 1, "num_layers": 12}\n'),
    "DeepSpeed": ("ds_config.json", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}'),
    "OLMo-core": ("a.yaml", "train_module:\n  rank_microbatch_size: 1\nmodel:\n  d_model: 64\n"),
    "OLMo": ("a.yaml", "run_name: x\nmodel:\n  d_model: 64\nmax_duration: 3T\nsave_folder: s\n"),
    "Hugging Face transformers": ("config.json", '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'),
    "Accelerate": ("a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"),
    "NeMo": ("a.yaml", "trainer:\n  devices: 8\nexp_manager:\n  name: x\nmodel:\n  mcore_gpt: true\n"),
    "LLaMA-Factory": ("a.yaml", "model_name_or_path: x\nstage: pt\nfinetuning_type: full\ntemplate: llama3\n"),
    "Axolotl": ("a.yaml", "base_model: x\ndatasets:\n  - path: y\nsequence_len: 2048\n"),
    "LLM Foundry": ("a.yaml", "max_seq_len: 2048\nmodel:\n  name: mpt_causal_lm\ntrain_loader:\n  name: text\n"),
    "Levanter": ("a.yaml", "trainer:\n  num_train_steps: 10\nmodel:\n  type: llama\n"),
    "MaxText": ("a.yml", "base_emb_dim: 2048\nbase_num_decoder_layers: 16\n"),
    "torchtune": ("a.yaml", "model:\n  _component_: torchtune.models.llama3.llama3_8b\n"),
    "Primus": ("a.yaml", "work_group: amd\nmodules:\n  pre_trainer:\n    overrides: {train_iters: 5, lr: 1.0e-5}\n"),
    "Primus's": ("llama3_8B.yaml", "extends:\n  - llama3_base.yaml\nnum_layers: 32\nhidden_size: 4096\n"),
    "verl": ("a.yaml", "actor_rollout_ref:\n  model: {path: x}\n"),
    "Kubernetes": ("a.yaml", "apiVersion: v1\nkind: Job\n"),
    "a notebook": ("a.ipynb", '{"cells": [], "nbformat": 4}'),
    "Megatron-LM's list of tests": ("a.yaml", "type: basic\nspec:\n  script: ls\n  script_setup: x\nproducts: []\n"),
    "a Python program": ("pretrain_gpt.py", '"""Pretrain GPT."""\nimport torch\n'),
    "a Dockerfile": ("Dockerfile", "FROM nvcr.io/nvidia/pytorch:24.01-py3\nRUN ls\n"),
    "another shell than bash": ("run.fish", "#!/usr/bin/env fish\nset A 1\n"),
    "YAML of no program": ("a.yaml", "a: 1\nb: [2]\n"),
    "JSON of no program": ("a.json", '{"a": 1}'),
}


@pytest.mark.parametrize("program", FOREIGN)
def test_a_file_of_another_program_is_refused_by_name(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = FOREIGN[program]
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert program.removesuffix("'s") in said.err and not said.out and len(said.err) < 700


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\n" + "".join(f"{two}: &{two} [{f'*{one},' * 9}]\n" for one, two in itertools.pairwise("abcdefgh")),
        "MODEL_ARGS: !!python/object/apply:os.system [ls]\n",
        "MODEL_ARGS: {--num-layers: 2",
        "[" * 5000,
        "MODEL_ARGS: [1, 2]\n",
        "\tMODEL_ARGS: 1\n",
        "MODEL_ARGS:\n  --lr: *nothing\n",
        "- a\n- b\n",
        "",
        json.dumps({"MODEL_ARGS": {"--num-layers": [[1]]}}),
    ],
)
def test_yaml_that_is_wrong_or_hostile_is_one_message(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert main([str(tmp_path / "x.yaml")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("rotary_base: 500000", "rotary_base: 500000.0"),
        ("train_iters: 1000", "train_iters: 1e3"),
        ("sequence_parallel: true", 'sequence_parallel: "True"'),
        ("add_bias_linear: false", "add_bias_linear: 'False'"),
        ("gated_linear_unit: true", 'gated_linear_unit: "true"'),
        ("manual_gc: true", 'manual_gc: "True"'),
    ],
)
def test_values_that_are_written_otherwise_are_the_same(field: str, written: str) -> None:
    assert field in RUN_CONFIG
    assert converted(RUN_CONFIG.replace(field, written)) == converted(RUN_CONFIG)


@pytest.mark.parametrize(
    "text",
    [
        "train: {train_iters: 50, global_batch_size: 8}\noptimizer: {lr: 0.001}\n",
        "optimizer: {lr: 0.001}\n",
        "mixed_precision: bf16_mixed\ntrain: {train_iters: 50}\ncheckpoint: {save: runs/a}\n",
    ],
)
def test_overrides_of_few_sections(text: str) -> None:
    config, _ = converted(text, shape="llama3_8b")
    assert config.model.shape == "llama3_8b"
    assert "lr" not in text or config.optimizer.lr == 0.001
    assert "checkpoint" not in text or config.run_dir == "runs/a"


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("--swiglu: true", "--swiglu: True"),
        param(("--untie-embeddings-and-output-weights: false", "--untie-embeddings-and-output-weights: no")),
        param(("--untie-embeddings-and-output-weights: false", "--squared-relu: False")),
        ("--untie-embeddings-and-output-weights: false", "--rotary-base: null"),
        ("--moe-layer-freq: ([0]*1+[1]*3)", "--moe-layer-freq: [0, 1, 1, 1]"),
        ("--train-iters: 100", '--train-iters: 100\n  --rampup-batch-size: "8 8 1000"'),
    ],
)
def test_values_of_a_functional_test_that_are_written_otherwise(field: str, written: str) -> None:
    assert field in FUNCTIONAL
    one, other = converted(FUNCTIONAL), converted(FUNCTIONAL.replace(field, written))
    layers = lambda found: dataclasses.replace(found[0].model, moe_layer_freq=None)  # noqa: E731
    assert layers(one) == layers(other) and len(one[1].blocks) == len(other[1].blocks)


@pytest.mark.parametrize("written", ["", " {}", " [1, 2]", " '--num-layers 4'"])
def test_model_args_that_are_no_flags_are_said(written: str) -> None:
    with pytest.raises(UserError, match="MODEL_ARGS: expected flags"):
        converted(f"MODE: pretraining\nMODEL_ARGS:{written}\n")


def test_an_alias_within_itself_is_said() -> None:
    with pytest.raises(UserError, match="an alias"):
        converted("MODEL_ARGS: &a\n  --lr: *a\n")


@pytest.mark.parametrize("blend", ["[a, b]", "a", "[[a, b], [0.5]]", "[[a, b], 0.5]"])
def test_a_blend_that_is_no_list_of_paths_is_said(blend: str) -> None:
    _, summary = converted(RUN_CONFIG.replace("[[/data/a, /data/b], [0.3, 0.7]]", blend))
    assert not summary.complete
    assert any("dataset.blend" in line for block in summary.blocks for line in block)


def test_a_list_is_no_number() -> None:
    with pytest.raises(UserError, match="--num-layers: expected a whole number"):
        converted(RUN_CONFIG.replace("num_layers: 16", "num_layers: [16]"))


def test_a_key_that_stands_twice_is_said() -> None:
    config, summary = converted(FUNCTIONAL.replace("  --seq-length: 128", "  --lr: 5.0\n  --seq-length: 128"))
    line = FUNCTIONAL.splitlines().index("  --lr: 1.0e-3") + 2
    assert config.optimizer.lr == 1e-3
    assert any(f"line {line}: --lr stands here again" in one for block in summary.blocks for one in block)
