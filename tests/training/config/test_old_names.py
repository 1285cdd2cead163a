"""Names that fields had before: in recipes and as flags, with their new values, and never silent."""

from pathlib import Path

import pytest

from program.errors import UserError
from training.cli.flags import given, override
from training.config.deprecated import OLD_FIELDS, in_current_names
from training.config.recipe import dump_changed, load, names
from training.config.run_config import RunConfig

CASES: dict[str, tuple[str, str]] = {
    'data.reset = "attention"': (
        "--data.reset attention",
        "[data]\nreset_attention_mask = true\nreset_position_ids = true\n",
    ),
    "data.accept_change = true": ("--data.accept_change", "[data]\nallow_data_change = true\n"),
    "parallel.fit = true": ("--parallel.fit", "[parallel]\nelastic = true\n"),
    "fault.spike_sigma = 7": ("--fault.spike_sigma 7", ""),
    "fault.spike_window = 64": ("--fault.spike_window 64", ""),
    "fault.straggler_ratio = 2.0": ("--fault.straggler_ratio 2", ""),
    "fault.memory_growth_mib = 100.0": ("--fault.memory_growth_mib 100", ""),
    "profile.trace_limit_mib = 10": ("--profile.trace_limit_mib 10", ""),
    "log.prometheus = \"endpoint\"\nlog.prometheus_port = 0": (
        "--log.prometheus endpoint --log.prometheus_port 0",
        '[log]\nprometheus = "127.0.0.1:0"\n',
    ),
    "log.prometheus = \"endpoint\"\nlog.prometheus_address = \"::1\"": (
        "--log.prometheus endpoint --log.prometheus_address ::1",
        '[log]\nprometheus = "[::1]:9464"\n',
    ),
    "log.prometheus_port = 8000": ("--log.prometheus_port 8000", ""),
    "fault.straggler_interval = 20": ("--fault.straggler_interval 20", "[fault]\nwatch_interval = 20\n"),
    "fault.memory_interval = 0\nfault.straggler_interval = 0": (
        "--fault.memory_interval 0 --fault.straggler_interval 0",
        "[fault]\nwatch_interval = 0\n",
    ),
    "fault.memory_interval = 10\nfault.straggler_interval = 0": (
        "--fault.memory_interval 10 --fault.straggler_interval 0",
        "[fault]\nwatch_interval = 10\n",
    ),
    "precision.fp8_shadow_interval = 500": (
        "--precision.fp8_shadow_interval 500",
        '[precision]\nfp8_shadow = "warn:500"\n',
    ),
    "precision.fp8_shadow_interval = 5\nprecision.fp8_shadow_bound = 0.5\nprecision.fp8_shadow_stop = true": (
        "--precision.fp8_shadow_interval 5 --precision.fp8_shadow_bound 0.5 --precision.fp8_shadow_stop",
        '[precision]\nfp8_shadow = "stop:5:0.5"\n',
    ),
    "precision.fp8_shadow_bound = 0.5": ("--precision.fp8_shadow_bound 0.5", ""),
    "precision.fp8_shadow_stop = true": ("--precision.fp8_shadow_stop", ""),
    'kernels.apply_rope_fusion = "off"\nkernels.moe_grouped_gemm = "off"\nkernels.moe_router_fusion = "on"': (
        "--kernels.apply_rope_fusion off --kernels.moe_grouped_gemm off --kernels.moe_router_fusion on",
        '[kernels]\noff = ["apply_rope_fusion", "moe_grouped_gemm"]\n',
    ),
    **{
        f'kernels.{name} = "off"': (f"--kernels.{name} off", f'[kernels]\noff = ["{name}"]\n')
        for name in ("bias_activation_fusion", "cross_entropy_loss_fusion", "gradient_accumulation_fusion",
                     "moe_permute_fusion", "moe_shared_expert_overlap")
    },
    'train.fine_grained_activation_offloading = true\ntrain.offload_modules = ["core_attn"]': (
        "--train.fine_grained_activation_offloading --train.offload_modules core_attn",
        '[train]\noffload_modules = ["core_attn"]\n',
    ),
    "train.min_offloaded_tensor_size = 2\ntrain.activation_offload_fraction = 0.5": (
        "--train.min_offloaded_tensor_size 2 --train.activation_offload_fraction 0.5",
        '[model]\nmegatron = ["min_offloaded_tensor_size=2", "activation_offload_fraction=0.5"]\n',
    ),
    "train.delta_offload_bytes_across_pp_ranks = 5": (
        "--train.delta_offload_bytes_across_pp_ranks 5",
        '[model]\nmegatron = ["delta_offload_bytes_across_pp_ranks=5"]\n',
    ),
    'train.recompute_granularity = "full"\ntrain.recompute_method = "block"\ntrain.recompute_num_layers = 2': (
        "--train.recompute_granularity full --train.recompute_method block --train.recompute_num_layers 2",
        '[train]\nrecompute = "full:block:2"\n',
    ),
    'train.recompute_granularity = "selective"\ntrain.recompute_modules = ["mlp", "core_attn"]': (
        "--train.recompute_granularity selective --train.recompute_modules mlp core_attn",
        '[train]\nrecompute = "selective:mlp,core_attn"\n',
    ),
    'train.recompute_granularity = "selective"': (
        "--train.recompute_granularity selective",
        '[train]\nrecompute = "selective:core_attn"\n',
    ),
    "parallel.use_sharp = true": ("--parallel.use_sharp", '[parallel]\nmegatron = ["use_sharp=True"]\n'),
    "parallel.nccl_ub = true": ("--parallel.nccl_ub true", '[parallel]\nmegatron = ["nccl_ub=True"]\n'),
    'parallel.high_priority_stream_groups = ["dp", "ep"]': (
        "--parallel.high_priority_stream_groups dp ep",
        "[parallel]\nmegatron = [\"high_priority_stream_groups=['dp', 'ep']\"]\n",
    ),
    "optimizer.overlap_cpu_optimizer_d2h_h2d = true": (
        "--optimizer.overlap_cpu_optimizer_d2h_h2d",
        '[optimizer]\nmegatron = ["overlap_cpu_optimizer_d2h_h2d=True"]\n',
    ),
}  # fmt: skip
"""Old recipe -> (old flags, what to write now)."""


def recipe(folder: Path, text: str) -> Path:
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


@pytest.mark.parametrize("old", CASES)
def test_an_old_name_means_what_it_meant_and_says_so_once(
    old: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, new = CASES[old]
    expected = load(recipe(tmp_path, new))
    assert load(recipe(tmp_path, old)) == load(tmp_path / "recipe.toml") == expected
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/recipe.toml: ") and all(
        name in line for each in old.splitlines() if (name := each.partition(" = ")[0]) in OLD_FIELDS
    )
    monkeypatch.setattr("training.config.deprecated._warned", set())
    assert override(RunConfig(), flags.split(), "p") == expected
    assert capfd.readouterr().err.replace("flags: ", f"{tmp_path}/recipe.toml: ") == f"{line}\n"
    assert given(flags.split()) <= set(names())


def test_every_old_name_is_tried_and_is_no_field() -> None:
    tried = {line.partition(" = ")[0] for old in CASES for line in old.splitlines()}
    assert tried - set(names()) == set(OLD_FIELDS)
    assert not set(OLD_FIELDS) & set(names())


@pytest.mark.parametrize("name", OLD_FIELDS)
def test_what_an_old_name_was_by_default_changes_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    section, _, key = name.partition(".")
    default = OLD_FIELDS[name].default
    if default is None:
        return  # TOML has no word for it
    value = list(default) if isinstance(default, tuple) else default
    assert load(recipe(tmp_path, tomli_w.dumps({section: {key: value}}))) == RunConfig()
    assert capfd.readouterr().err == (
        f"warning: {tmp_path}/recipe.toml: {name} can go: default. Old names are accepted until version 0.3.0.\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[data]\naccept_change = true\nallow_data_change = false\n", "data.accept_change and data.allow_data_change"),
        ("[fault]\nmemory_interval = 5\nwatch_interval = 7\n", "fault.memory_interval and fault.watch_interval"),
        ('[data]\nreset = "positions"\n', 'data.reset: expected "none" or "attention", found "positions".'),
        ("[fault]\nspike_window = 1.5\n", "fault.spike_window: expected a whole number, found 1.5."),
        ('[parallel]\nnccl_ub = true\nmegatron = ["nccl_ub=False"]\n', "parallel.nccl_ub and parallel.megatron both"),
        ("[train]\nfine_grained_activation_offloading = true\n", "is what train.offload_modules says, found none"),
        (
            '[train]\nrecompute = "auto:1GiB"\nrecompute_method = "block"\n',
            "which train.recompute_method changes: set one",
        ),
        ('[train]\nrecompute_granularity = "full"\n', "go together: write train.recompute = "),
        ('[train]\nrecompute_method = "block"\n', "go together: write train.recompute = "),
        ('[train]\nrecompute_granularity = "selective"\nrecompute_num_layers = 1\n', "go together: write train.reco"),
        ('[log]\nprometheus = "[::1]:1"\nprometheus_port = 9464\n', "log.prometheus_port and log.prometheus are both"),
        ("[parallel]\nnccl_ub = true\nmegatron = 3\n", "parallel.megatron: expected a list of strings, found 3."),
    ],
)
def test_what_contradicts_or_was_no_value_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        load(recipe(tmp_path, text))
    assert said in str(refused.value)
    assert isinstance(in_current_names({"fault": {"spike_window": 1.5}}), dict)


def test_old_flags_are_put_over_a_recipe(tmp_path: Path) -> None:
    base = load(recipe(tmp_path, '[precision]\nfp8 = "hybrid"\nfp8_shadow = "warn:500"\n'))
    stops = override(base, ["--precision.fp8_shadow_stop"], "p")
    assert 'fp8_shadow = "stop:500"' in dump_changed(stops)
    full = load(recipe(tmp_path, '[train]\nrecompute = "full:uniform:1"\n'))
    assert override(full, ["--train.recompute_num_layers", "3"], "p").train.recompute == "full:uniform:3"
    assert override(full, ["--train.recompute_granularity", "None"], "p").train.recompute is None
    assert override(full, ["--train.recompute_granularity", "selective"], "p").train.recompute == "selective:core_attn"
    kept = load(recipe(tmp_path, '[train]\nrecompute = "auto:1GiB"\nrecompute_modules = ["core_attn"]\n'))
    assert kept.train.recompute == "auto:1GiB"  # as a run of then has saved it
    some = load(recipe(tmp_path, '[kernels]\noff = ["apply_rope_fusion", "moe_grouped_gemm"]\n'))
    assert override(some, ["--kernels.apply_rope_fusion", "auto"], "p").kernels.off == ("moe_grouped_gemm",)
    assert override(base, ["--precision.fp8_shadow_interval", "None"], "p").precision.fp8_shadow is None
    served = load(recipe(tmp_path, '[log]\nprometheus = "[::1]:9464"\n'))
    assert override(served, ["--log.prometheus_port", "0"], "p").log.prometheus == "[::1]:0"
    with pytest.raises(UserError, match=r"flags: fault\.memory_interval and fault\.watch_interval are both there"):
        override(base, ["--fault.memory_interval", "5", "--fault.watch_interval", "7"], "p")
    with pytest.raises(UserError, match=r"--fault\.spike_window: expected a whole number, found 1\.5\."):
        override(base, ["--fault.spike_window", "1.5"], "p")


TWICE = [
    ("--train.recompute selective:mlp --train.recompute_granularity selective", "train.recompute_granularity and tr"),
    ("--train.recompute full:uniform:1 --train.recompute_granularity None", "train.recompute_granularity and tr"),
    ("--train.recompute auto:70GiB --train.recompute_granularity full", "which train.recompute_granularity changes"),
    ('--parallel.megatron nccl_ub=True --parallel.nccl_ub false', "parallel.nccl_ub and parallel.megatron both"),
    (
        "--train.offload_modules core_attn --train.fine_grained_activation_offloading false",
        "fine_grained_activation_offloading = false and train.offload_modules disagree",
    ),
]  # fmt: skip
"""Flags of an old name beside flags of its new one, and what is said."""


@pytest.mark.parametrize(("flags", "said"), TWICE)
def test_an_old_flag_and_its_new_one_are_refused(flags: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        override(RunConfig(), flags.split(), "p")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('recompute = "selective:mlp"\nrecompute_modules = ["core_attn", "mlp"]\n', "recompute_modules and train.rec"),
        ('recompute = "selective:mlp"\nrecompute_granularity = "selective"\n', "recompute_granularity and train.rec"),
        ('offload_modules = ["core_attn"]\nfine_grained_activation_offloading = false\n', "disagree: leave both out"),
    ],
)
def test_an_old_name_and_its_new_one_are_refused_in_a_recipe(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        load(recipe(tmp_path, f"[train]\n{text}"))
    assert said in str(refused.value)
    with pytest.raises(UserError, match="both set nccl_ub"):  # what an old name was by default contradicts, too
        load(recipe(tmp_path, '[parallel]\nnccl_ub = false\nmegatron = ["nccl_ub=True"]\n'))


def test_what_every_saved_file_said_beside_a_new_name_is_no_contradiction(tmp_path: Path) -> None:
    for text, kept in (
        ('recompute = "selective:mlp"\nrecompute_modules = ["core_attn"]\n', "selective:mlp"),
        ('recompute = "auto:70GiB"\nrecompute_modules = ["mlp"]\n', "auto:70GiB"),  # which a budget does not read
    ):
        assert load(recipe(tmp_path, f"[train]\n{text}")).train.recompute == kept
    budget = load(tmp_path / "recipe.toml")
    assert override(budget, ["--train.recompute_modules", "mlp"], "p").train.recompute == "auto:70GiB"
    modules = load(recipe(tmp_path, "[train]\noffload_modules = []\nfine_grained_activation_offloading = false\n"))
    assert modules == RunConfig()


def test_an_old_flag_goes_over_what_a_recipe_hands_megatron(tmp_path: Path) -> None:
    base = load(
        recipe(tmp_path, '[parallel]\nmegatron = ["use_sharp=True", "nccl_ub=True", "average_in_collective=True"]\n')
    )
    off = override(base, ["--parallel.nccl_ub", "false"], "p").parallel
    assert off.megatron == ("use_sharp=True", "average_in_collective=True", "nccl_ub=False") and not off.nccl_ub
    old = load(recipe(tmp_path, "[train]\nactivation_offload_fraction = 0.5\n"))
    new = override(old, ["--train.activation_offload_fraction", "0.25"], "p")
    assert new.model.megatron == ("activation_offload_fraction=0.25",)
    with pytest.raises(UserError, match=r"both set nccl_ub"):  # the flag of the list, too
        override(base, ["--parallel.megatron", "nccl_ub=True", "--parallel.nccl_ub", "false"], "p")


def test_one_watch_off_leaves_the_other_on(tmp_path: Path) -> None:
    old = recipe(tmp_path, "[fault]\nstraggler_interval = 0\nmemory_interval = 50\n")
    assert load(old).fault.watch_interval == 50
    assert override(RunConfig(), ["--fault.straggler_interval", "0"], "p").fault.watch_interval == 50
    assert override(load(old), ["--fault.memory_interval", "20"], "p").fault.watch_interval == 20


def test_a_small_bound_of_the_shadow_resumes(tmp_path: Path) -> None:
    text = '[precision]\nfp8 = "hybrid"\nfp8_shadow_interval = 500\nfp8_shadow_bound = 5e-05\n'
    precision = load(recipe(tmp_path, text)).precision
    assert precision.fp8_shadow == "warn:500:0.00005" and precision.shadow and precision.shadow.bound == 5e-5
    assert not precision.problems()
    odd = load(recipe(tmp_path, '[precision]\nfp8 = "hybrid"\nfp8_shadow = "warn:500:abc"\n'))
    stops = override(odd, ["--precision.fp8_shadow_stop"], "p").precision
    assert any('found "warn:500:abc"' in problem for problem in stops.problems())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[train]\nrecompute_modules = ["mlp"]\n', "train.recompute_modules alone does nothing, and no flag finds it"),
        ("[precision]\nfp8_shadow_bound = 0.5\nfp8_shadow_stop = true\n", "alone do nothing, and no flag finds them"),
    ],
)
def test_what_waited_for_a_flag_is_said_to_do_nothing(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert load(recipe(tmp_path, text)) == RunConfig()
    assert said in capfd.readouterr().err
