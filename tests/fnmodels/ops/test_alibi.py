"""ALiBi equals its definition, written out, and half precision holds the places of keys exactly."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from fnmodels.ops.attention.alibi import alibi_slopes, places_of, with_alibi


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    places = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)  # slope times 0 to 4
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), places[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 255, 256, 257, 2047, 65535]])
    places = places_of(positions.float(), dtype).double()
    assert torch.equal(places[..., 0] * 256 + places[..., 1], positions.double())


def test_scores_grow_by_slope_times_position() -> None:
    """Whatever the scale and the groups of heads."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(2, 5, 2, 8, dtype=torch.float64)
    positions = torch.tensor([[3.0, 4, 9, 300, 700], [0, 1, 2, 3, 4]])
    slopes = torch.tensor(alibi_slopes(4)).expand(2, 3, 4)
    for scale in (1.0, 8**-0.5):
        wide_q, wide_k = with_alibi(q, k, slopes, places_of(positions, torch.float64), scale=scale)
        for head in range(4):
            plain = torch.einsum("bqh,bkh->bqk", q[:, :, head], k[:, :, head // 2]) * scale
            found = torch.einsum("bqh,bkh->bqk", wide_q[:, :, head], wide_k[:, :, head // 2]) * scale
            bias = alibi_slopes(4)[head] * positions[:, None].double()
            torch.testing.assert_close(found, plain + bias, rtol=1e-6, atol=1e-5)
