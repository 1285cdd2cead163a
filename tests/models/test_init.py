"""Initial weights: a pure function of (seed, canonical name, element index), evaluated for the local shard only."""

import tracemalloc

import pytest
import torch

from models import init
from models.costs.parameters import parameters
from models.families import SHAPES
from models.init import constant_of, fill_normal, fill_uniform, normal, std_of, uniform_of
from models.names import canonical, checkpoint_key

SHAPE = (300, 77)


def whole(name: str = "layers.3.mlp.linear_fc1.weight", seed: int = 1, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    tensor = torch.empty(shape)
    fill_normal(tensor, seed, name, shape, (0,) * len(shape), 1.0)
    return tensor


@pytest.mark.parametrize(
    ("offset", "size"), [((0, 0), (300, 77)), ((150, 0), (150, 77)), ((7, 13), (101, 33)), ((299, 76), (1, 1))]
)
def test_a_shard_is_a_slice_of_the_whole_bit_for_bit(offset: tuple[int, int], size: tuple[int, int]) -> None:
    shard = torch.empty(size)
    fill_normal(shard, 1, "layers.3.mlp.linear_fc1.weight", SHAPE, offset, 1.0)
    assert torch.equal(shard, whole()[offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]])


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    once = whole()
    monkeypatch.setattr(init, "BLOCK", 100)
    assert torch.equal(whole(), once)


def test_cost_is_of_the_local_shard_only() -> None:
    """A tensor of 4 TB, of which this rank holds 16 numbers."""
    tracemalloc.start()
    fill_normal(torch.empty(4, 4), 1, "w", (1 << 20, 1 << 20), (1 << 19, 5), 1.0)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_moments_and_independence() -> None:
    big = whole(shape=(1000, 1000))
    assert abs(big.mean().item()) < 5e-3
    assert abs(big.std().item() - 1) < 5e-3
    assert abs((big**4).mean().item() - 3) < 0.05
    for other in (
        whole(seed=2, shape=(1000, 1000)),
        whole("layers.4.mlp.linear_fc1.weight", shape=(1000, 1000)),
        big.roll(1),
        big.t(),
    ):
        assert abs((big * other).mean().item()) < 5e-3


def test_values_never_change() -> None:
    """The first numbers of one tensor: a different generator would be a different model for the same seed."""
    index = torch.arange(3, dtype=torch.int64)
    expected = torch.tensor([-0.82626122, 0.73309243, 0.77919257])
    assert torch.allclose(normal(1234, "word_embeddings.weight", index), expected, atol=1e-6)


def test_standard_deviations_are_megatrons() -> None:
    shape = SHAPES["gpt2_tiny"]
    std = shape.init_method_std
    assert std_of("word_embeddings.weight", shape) == std
    assert std_of("layers.0.mlp.linear_fc2.weight", shape) == std / 8**0.5
    assert std_of("layers.0.self_attention.linear_proj.weight", shape) == std / 8**0.5
    assert std_of("layers.0.self_attention.linear_qkv.layer_norm_weight", shape) is None
    assert std_of("layers.0.self_attention.q_layernorm.weight", shape) is None
    assert std_of("layers.0.self_attention.linear_proj.bias", shape) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_canonical_names_round_trip(shape: str) -> None:
    for parameter in parameters(SHAPES[shape]):
        assert canonical(checkpoint_key(parameter.name)) == parameter.name
    with pytest.raises(KeyError, match=r"no canonical name for decoder\.other"):
        canonical("decoder.other")


@pytest.mark.parametrize("name, gain", [("llama2_tiny", 1.0), ("olmo2_tiny", 1.0), ("gemma3_tiny", 0.0)])
def test_every_norm_multiplies_by_one_at_first(name: str, gain: float) -> None:
    """Its weight, or with model.layernorm_zero_centered_gamma 1 + its weight; wherever it stands."""
    shape = SHAPES[name]
    norms = [parameter.name for parameter in parameters(shape) if "norm" in parameter.name]
    assert len(norms) > 2 * shape.num_layers
    assert {constant_of(norm, shape) for norm in norms if std_of(norm, shape) is None} == {gain}
    assert all(std_of(norm, shape) is None for norm in norms)


def test_xielu_starts_as_published() -> None:
    """softplus of both is 0.8, the second with 0.5 added (arXiv:2411.13010, section 4.1)."""
    alphas = [
        constant_of(f"layers.0.mlp.activation_func.{one}", SHAPES["apertus_tiny"]) for one in ("alpha_p", "alpha_n")
    ]
    found = torch.nn.functional.softplus(torch.tensor(alphas))
    torch.testing.assert_close(found + torch.tensor([0.0, 0.5]), torch.tensor([0.8, 0.8]))


def test_mixers_begin_as_megatrons_do() -> None:
    """Decays of 1 to 16, steps of 0.001 to 0.1, taps of at most 1/2 (megatron-core 0.19.2, ssm/); a gain of 1."""

    def drawn(name: str) -> torch.Tensor:
        even, tensor = uniform_of(name), torch.empty(4096)
        assert even is not None
        fill_uniform(tensor, 1, name, (4096,), (0,), even)
        return tensor

    for place in ("mixer", "self_attention"):
        decays, taps = drawn(f"layers.0.{place}.A_log").exp(), drawn(f"layers.0.{place}.conv1d.weight")
        assert 1 <= decays.min() < 1.1 and 15.9 < decays.max() <= 16
        assert -0.5 <= taps.min() < -0.49 and 0.49 < taps.max() < 0.5
    steps = torch.nn.functional.softplus(drawn("layers.0.mixer.dt_bias"))
    assert 0.000999 < steps.min() < 0.0011 and 0.09 < steps.max() < 0.1001 and 0.009 < steps.median() < 0.011
    mamba, delta = SHAPES["mamba2_tiny"], SHAPES["qwen3_next_tiny"]
    ones = [(mamba, "mixer.D"), (mamba, "mixer.norm.weight"), (delta, "self_attention.out_norm.weight"),
            (delta, "self_attention.dt_bias")]  # fmt: skip
    for shape, name in ones:
        assert any(parameter.name == f"layers.0.{name}" for parameter in parameters(shape)), name
        assert (std_of(f"layers.0.{name}", shape), constant_of(f"layers.0.{name}", shape)) == (None, 1.0)
    assert uniform_of("layers.0.self_attention.dt_bias") is None
