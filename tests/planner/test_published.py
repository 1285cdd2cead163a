"""Tables of runs that others wrote: other spellings, cells that no run can have, and what is taken for empty ones."""

from pathlib import Path

import pytest

from models.costs.parameters import num_parameters
from models.families import SHAPES
from tests.planner.machines import cluster_of
from tests.planner.models import billions, dimensions, guessed, model_name, shape_of
from tests.planner.rows import PUBLISHED, read
from tools.plan.__main__ import main

HEADER = "id,model,seq_len,gpu,n_gpus,tp,pp,dp,mbs,gbs,step_s"


def table(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    "name, known",
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3"),
        ("DeepSeek V3 671B", "deepseek_v3"),
        ("DeepSeek-V2-Lite 16B", "deepseek_v2_lite"),
        ("Qwen/Qwen3-235B-A22B", "qwen3_235b_a22b"),
        ("Qwen3 30B", "qwen3_30b_a3b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral_8x7b"),
        ("Llama 3.1 405B", "llama31_405b"),
        ("llama3.1 405b", "llama31_405b"),
        ("Llama 3 405B", "llama31_405b"),
        ("Meta-Llama-3-8B-Instruct", "llama3_8b"),
        ("Llama-2-70B", "llama2_70b"),
        ("LLaMA 2 70B", "llama2_70b"),
        ("LLaMA-65B", "llama_65b"),
        ("GPT-3 175B", "gpt3_175b"),
        ("GPT-3-175B", "gpt3_175b"),
        ("GPT-3 6.7B", "gpt3_6_7b"),
        ("Qwen2.5-72B", "qwen25_72b"),
        ("qwen2_0_5b", "qwen2_0_5b"),
        ("Mistral 7B v0.3", "mistral_7b"),
        ("mosaicml/mpt-125m", "mpt_125m"),
        ("Grok-1 314B", "grok_1"),
        ("Nemotron-4 340B", "nemotron4_340b"),
        ("openai/gpt-oss-20b", "gpt_oss_20b"),
        ("Llama-4-Maverick-17B-128E", "llama4_maverick"),
        ("Kimi-K2-Instruct", "kimi_k2"),
    ],
)
def test_names_are_found_however_they_are_spelled(name: str, known: str) -> None:
    assert model_name({"model": name}) == known
    assert not guessed({"model": name})


@pytest.mark.parametrize(
    "name, size",
    [
        ("Llama-3-170B", 170),  # not Llama 3.1 70B
        ("GPT-2.7B", 2.7),  # not GPT-2
        ("GPT-20B", 20),
        ("GPT3-5B", 5),
        ("Llama3-80B", 80),
        ("Unheard-13B", 13),
    ],
)
def test_another_size_is_never_taken_for_a_known_one(name: str, size: float) -> None:
    assert model_name({"model": name}) not in SHAPES and f"({size:g} B)" in guessed({"model": name})
    assert num_parameters(shape_of({"model": name})) == pytest.approx(size * 1e9, rel=0.1)


def test_what_follows_a_known_name_stands_apart_from_it() -> None:
    assert model_name({"model": "Kimi-K2-0905"}) == "kimi_k2"
    assert "no size given" in guessed({"model": "Kimi-K25"}) and "no size given" in guessed({"model": "Grok-1.5"})


def test_llama_2_has_its_own_vocabulary() -> None:
    shape = shape_of({"model": "meta-llama/Llama-2-70b-hf"})
    assert (shape.vocab_size, shape.num_layers) == (32000, 80)


def test_dimensions_are_of_the_size_in_their_names() -> None:
    for name, shape in dimensions().items():
        size = billions(name.replace("_", " ", 1).replace("_", "."))
        if size is not None and not name.startswith("mpt"):
            assert num_parameters(shape) / 1e9 == pytest.approx(size, rel=0.12), name


def test_names_alone_give_the_shipped_rows_their_columns() -> None:
    """But where a table's name is of several models: BigScience's trials, and models cut to some layers."""
    alone = ("params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "experts", "topk", "moe_ffn")
    for row in read(PUBLISHED):
        bare = {column: cell for column, cell in row.text.items() if column not in alone}
        if "BigScience" in row.source or row.text.get("layers") in ("8", "30", "62") or guessed(row.text):
            continue
        assert not guessed(bare), row.text["model"]
        assert num_parameters(shape_of(bare)) == pytest.approx(num_parameters(row.shape), rel=0.12), row.id


def test_columns_win_over_the_name() -> None:
    """What a row leaves out goes with what it tells; layers that it tells are never changed by a rounded size."""
    odd = shape_of({"model": "vt-24", "layers": "24", "hidden": "1920", "heads": "20"})
    assert (odd.num_layers, odd.ffn_hidden_size, odd.num_query_groups, odd.kv_channels) == (24, 7680, 20, 96)
    assert shape_of({"model": "Small-1b", "layers": "24", "hidden": "2048"}).num_layers == 24
    cut = shape_of({"model": "Llama3-8B", "layers": "8", "hidden": "2048"})
    assert (cut.num_layers, cut.ffn_hidden_size, cut.vocab_size) == (8, 7168, 128256)


@pytest.mark.parametrize(
    "label, cluster, gib",
    [
        ("NVIDIA A100-SXM4-80GB", "a100_ib", 79.2),
        ("a100", "a100_ib", 79.2),
        ("A100-SXM4-40GB", "a100_40_ib", 40),
        ("A100 40 GB", "a100_40_ib", 40),
        ("NVIDIA B200", "b200_ib", 168),
        ("8xH100", "h100_ib", 79.6),
        ("H100 NVL 94GB", "h100_ib_94gb", 94),
        ("NVIDIA H200 141GB", "h200_ib", 131),
        ("GB200 NVL72", "gb200", 173),
        ("NVIDIA B300 SXM6", "b300", 260),
        ("Tesla T4", "t4_ethernet", 15),
        ("A100-80GB-JZ", "jean_zay", 79.2),
    ],
)
def test_cards_are_found_however_they_are_spelled(label: str, cluster: str, gib: float) -> None:
    found = cluster_of({"gpu": label})
    assert (found.name, found.gpu.memory_gib) == (cluster, gib)


def test_what_is_taken_for_a_row_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(
        tmp_path,
        "a,Unheard-13B,4096,A100-80GB,64,1,1,64,1,128,3,1",
        "b,nothing,4096,V100,64,1,1,64,1,128,3,1",
        "c,Llama3-8B,,GH200,,1,1,8,1,,3,1",
        "d,Llama3-8B,8192,NVIDIA H100 80GB HBM3,8,1,1,8,1,128,3,1",
        header=f"{HEADER},etp",
    )
    assert main(["backtest", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "2 rows' models are guessed from their size: Unheard-13B (13 B), nothing (no size given: 8 B)" in printed
    assert "2 rows' cards are not known, and priced as an H100 of 80 GB: V100, GH200" in printed
    for column, taken in (("seq_len", "4,096 tokens"), ("n_gpus", "8 GPUs"), ("gbs", "one microbatch")):
        assert f"1 row's {column} is empty, and taken as {taken}" in printed
    assert "columns that nothing is read from: etp" in printed


def test_what_does_not_fit_together_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(
        tmp_path,
        "world,Llama3-8B,8192,H100,64,2,1,8,1,128,3,bf16",
        "batch,Llama3-8B,8192,H100,8,1,1,8,1,100,3,bf16",
        "format,Llama3-8B,8192,A100,8,1,1,8,1,128,3,fp8",
        header=f"{HEADER},precision",
    )
    assert main(["backtest", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "1 row's TP x PP x CP x DP is not n_gpus: world" in printed
    assert "1 row's gbs is no multiple of mbs x DP, and rounded: batch" in printed
    assert "1 row's number formats are none of their cards', and priced in 16 bits: fp8 on NVIDIA A100" in printed
    assert main(["backtest", str(PUBLISHED)]) == 0
    assert "TP x PP x CP x DP is not" not in (printed := capsys.readouterr().out) and "no multiple" not in printed


def test_megatrons_own_columns_are_read(tmp_path: Path) -> None:
    header = (
        "id,model,Seq Length,GPU,num_gpus,tensor_model_parallel_size,pipeline_model_parallel_size,"
        "context_parallel_size,expert_model_parallel_size,micro_batch_size,global_batch_size,num_layers,hidden_size,"
        "sequence_parallel,precision,step_s"
    )
    (row,) = read(table(tmp_path, "a,Qwen3-30B-A3B,8192,H100,64,4,2,2,8,2,256,24,2048,True,FP8,3", header=header))
    layout = row.case.layout
    assert (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp, layout.mbs) == (4, 2, 2, 8, 4, 2)
    assert (layout.sequence_parallel, layout.precision, layout.microbatches) == (True, "fp8", 32)
    assert (row.shape.num_layers, row.case.model.seq_length) == (24, 8192)


GOOD = "a,Llama3-8B,8192,H100,8,1,1,8,1,128"


@pytest.mark.parametrize(
    "lines, header, words",
    [
        ([f"{GOOD},-5"], HEADER, ["line 2 (a)", "step_s is -5", "seconds", "above 0"]),
        ([f"{GOOD},nan"], HEADER, ["step_s is nan", "empty cell"]),
        ([f"{GOOD},inf"], HEADER, ["step_s is inf", "empty cell"]),
        ([f"{GOOD},3", GOOD.replace("H100,8", "H100,0") + ",3"], HEADER, ["line 3", "n_gpus is 0", "GPUs"]),
        ([f"{GOOD},3,61000"], f"{HEADER},mem_gb", ["mem_gb is 61000", "GiB", "MiB, write 59.6"]),
        (
            [GOOD],
            HEADER.replace("step_s", "step_time_ms"),
            ["step_time_ms: convert it from milliseconds", "any of step_s"],
        ),
        ([GOOD], HEADER.replace("step_s", "Step time (ms)"), ["Step time (ms): convert it from milliseconds"]),
        ([GOOD], HEADER.replace("step_s", "iteration_min"), ["iteration_min", "convert it from minutes"]),
        ([f"{GOOD},3,2"], f"{HEADER},tensor_model_parallel_size", ["two columns tell tp: 1 and 2"]),
    ],
)
def test_what_no_run_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], header: str, words: list[str]
) -> None:
    assert main(["backtest", str(table(tmp_path, *lines, header=header))]) == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in [*words, "runs.csv"]), printed


def test_no_peaks_and_no_order_are_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(table(tmp_path, *[f"{GOOD},3"] * 4))]) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed and "memory: no published peaks" in printed


def test_a_cell_without_an_end_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(table(tmp_path, f'{GOOD},"{"3" * 200_000}'))]) == 2
    assert "cannot be read as CSV" in capsys.readouterr().err


def test_a_missing_folder_is_noticed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["backtest", str(table(tmp_path, f"{GOOD},3")), "--output", str(tmp_path / "none" / "out.csv")]
    assert main(asked) == 2
    printed = capsys.readouterr()
    assert "there is no folder" in printed.err and not printed.out
    assert main([*asked[:3], str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
