"""The MLPs, with a gate and without, against their formulas."""

import pytest
import torch

from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.mlp import ACTIVATIONS, clamped_glu, gated_mlp, limited_glu, plain_mlp

FORMULAS = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}
SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_formulas(activation: str, biased: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    layer = {name: torch.randn(shape, dtype=torch.float64) for name, shape in _shapes(biased).items()}
    act, zero = FORMULAS[SAME.get(activation, activation)], torch.zeros(1, dtype=torch.float64)
    gate = x @ layer["gate_proj"].T + layer.get("gate_bias", zero)
    up = x @ layer["up_proj"].T + layer.get("up_bias", zero)
    want = (act(gate) * up) @ layer["down_proj"].T + layer.get("down_bias", zero)
    torch.testing.assert_close(gated_mlp(layer, x, activation=activation), want)
    want = act(up) @ layer["down_proj"].T + layer.get("down_bias", zero)
    torch.testing.assert_close(plain_mlp(layer, x, activation=activation), want)
    with torch.no_grad():
        torch.testing.assert_close(plain_mlp(layer, x, activation=activation), want)


def _shapes(biased: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}
    return shapes | ({"gate_bias": (8,), "up_bias": (8,), "down_bias": (6,)} if biased else {})


def test_embedding() -> None:
    table, tokens = torch.randn(7, 4), torch.tensor([[0, 6], [3, 3]])
    assert torch.equal(embed_tokens(table, tokens), table[tokens])
    assert torch.equal(embed_tokens(table, {"tokens": tokens, "valid": tokens > 0}), table[tokens])
    vectors = torch.randn(2, 2, 4)
    assert embed_tokens(table, vectors) is vectors


def test_limits_hold_before_or_after_the_activation() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 2.0, 9.0]), torch.tensor([1.0, -9.0, 9.0, 0.5])
    silu, bounded = FORMULAS["silu"], torch.tensor([1.0, -1.5, 1.5, 0.5])
    before = silu(torch.tensor([-9.0, 0.5, 1.5, 1.5])) * bounded
    after = torch.cat((silu(gate[:2]), torch.tensor([1.5, 1.5]))) * bounded
    torch.testing.assert_close(clamped_glu(gate, up, activation="silu", limit=1.5), before)
    torch.testing.assert_close(limited_glu(gate, up, activation="silu", limit=1.5), after)
