"""float8 against plain products: exact where 8 bits hold every value, close in a model, in projections alone."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import params as P
import train
from fnmodels import llama, qwen_moe, tree
from fnmodels.ops.float8 import Float8, cast, float8_layers, in_float8
from tests.support.traced import without_generated_code

CONFIG = llama.Config(64, 32, 64, 2, 4, 2)


def _integers(*shape: int, most: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def _batch() -> dict[str, Tensor]:
    tokens, labels = torch.randint(64, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(17).expand(2, 17)
    return {"tokens": tokens, "labels": labels, "positions": positions, "segment_ids": torch.ones_like(tokens)}


@pytest.mark.parametrize("rows", [16, 19])
@pytest.mark.parametrize("unit", [1.0, 2.0**-40, 2.0**60])
def test_products_of_small_integers_and_their_gradients_are_exact(rows: int, unit: float) -> None:
    x, weight = (_integers(rows, 32, most=7) * unit).requires_grad_(), _integers(48, 32, most=7).requires_grad_()
    bias, grad = _integers(48, most=7).requires_grad_(), _integers(rows, 48, most=3)
    leaves = (x, weight, bias)
    want, got = F.linear(x, weight, bias), F.linear(x, Float8(weight), bias)  # type: ignore[arg-type]
    assert torch.equal(got, want)
    pairs = zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_casts_use_the_whole_range_and_keep_zeros() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for largest in (0.0, 1e-30, 0.3, 448.0, 449.0, 1e30):
            value, scale = cast(torch.tensor([largest, -largest / 3]), dtype)
            top = value.float().abs().max().item()
            assert top <= torch.finfo(dtype).max and (top >= torch.finfo(dtype).max / 2 or not largest)
            assert value.float()[0] * scale == pytest.approx(largest, rel=2**-2)


def test_only_projections_multiply_in_float8() -> None:
    config = qwen_moe.Config.from_hf(
        {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "intermediate_size": 32}
    )
    layer = in_float8(P.init(config, 0)["layers"][0])
    found = {path for path, leaf in tree.flatten(layer).items() if isinstance(leaf, Float8)}
    assert found == {f"attention.{name}_proj" for name in "qkvo"}
    odd = {"up_proj": torch.zeros(24, 32), "router": torch.zeros(32, 32), "norm": torch.zeros(32)}
    assert in_float8(odd) == odd
    for made in (P.lora.add(CONFIG, P.init(CONFIG, 0), rank=2), P.packed(P.init(CONFIG, 0))):
        with pytest.raises(NotImplementedError, match=r"attention.q_proj is a \w+, and float8_layers multiplies plain"):
            in_float8(made["layers"][0])


def _gradients(dtype: torch.dtype, **options: Any) -> Tensor:
    """All gradients of the layers as one vector in fp32."""
    leaves = tree.map(lambda leaf: leaf.to(dtype).requires_grad_(), P.init(CONFIG, 0))
    total, _ = train.next_token_loss(leaves, _batch(), config=CONFIG, **options)
    found = torch.autograd.grad(total, tree.leaves(leaves["layers"]))
    return torch.cat([grad.float().flatten() for grad in found])


def test_gradients_of_a_model_have_the_error_of_8_bits() -> None:
    exact = _gradients(torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        error = (_gradients(dtype, layer_fn=float8_layers) - exact).norm() / exact.norm()
        assert 0.005 < error < 0.15, error  # 8 bits have 3 and 2 of mantissa: a rounding is off by up to 1/16 and 1/8


@pytest.mark.parametrize(
    "options", [{"remat": "full"}, pytest.param({"compile": "block"}, marks=pytest.mark.slow)], ids=str
)
def test_remat_and_compiled_blocks_train_alike(options: dict[str, str]) -> None:
    loss = functools.partial(train.next_token_loss, config=CONFIG, layer_fn=float8_layers)

    def losses(**options: str) -> list[float]:
        optimizer = train.adamw(1e-2)
        step, state, found = train.make_step(loss, optimizer, **options), None, []  # type: ignore[arg-type]
        state = train.init_state(P.init(CONFIG, 0), optimizer)
        for _ in range(5):
            state, metrics = step(state, _batch())
            found.append(float(metrics["loss"]))
        return found

    plain = losses()
    assert plain[-1] < plain[0] - 0.5
    with without_generated_code() as graphs:
        assert losses(**options) == pytest.approx(plain, abs=0 if "remat" in options else 5e-3)
    assert bool(graphs) == ("compile" in options)


def test_a_second_derivative_is_refused() -> None:
    x, weight = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(F.linear(x, Float8(weight)).square().sum(), x, create_graph=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
