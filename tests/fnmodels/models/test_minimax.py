"""MiniMax-Text-01: lightning attention is the recurrence that its paper writes, and sublayers add by factors."""

import dataclasses

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels.models.decoder import minimax
from fnmodels.ops import rms_norm
from tests.support.cases import batch_of, generic_params, off, segments
from tests.variants.minimax import TINY, published

CONFIG = minimax.Config.from_hf(TINY)
ROWS = segments((5, 3), (-1, 6, 1))


def test_sublayers_add_to_their_normed_input() -> None:
    """In place of test_what_sublayers_add_is_what_the_taps_hold."""
    params, batch = generic_params(CONFIG), batch_of(CONFIG, ROWS)
    names = ("input", "attention", "middle", "mlp", "output")
    _, taps = batch.forward(params, taps=tuple(f"layers.*.{name}" for name in names))
    alphas = {True: CONFIG.linear_attn_alpha_factor, False: CONFIG.full_attn_alpha_factor}
    for i, kind in enumerate(CONFIG.layer_kinds):
        layer, tap = params["layers"][i], {name: taps[f"layers.{i}.{name}"][batch.valid] for name in names}

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(x, weight, eps=CONFIG.rms_norm_eps)

        alpha = alphas[kind.startswith("linear")]
        middle = alpha * normed(tap["input"], layer["input_layernorm"]) + tap["attention"]
        assert off(middle, tap["middle"]) < 1e-6
        output = CONFIG.mlp_alpha_factor * normed(middle, layer["post_attention_layernorm"]) + tap["mlp"]
        assert off(output, tap["output"]) < 1e-6


@pytest.mark.parametrize("layer", [0, 1])
def test_lightning_attention_is_its_recurrence(layer: int) -> None:
    """Token by token, each document from an empty state; arXiv 2501.08313 and the rates of the publisher's code."""
    params, batch = generic_params(CONFIG), batch_of(CONFIG, ROWS)
    names = tuple(f"layers.{layer}.{name}" for name in ("input", "attention"))
    _, taps = batch.forward(params, taps=names)
    weights, heads, H = params["layers"][layer]["attention"], CONFIG.num_attention_heads, CONFIG.head_dim
    x = rms_norm(taps[names[0]], params["layers"][layer]["input_layernorm"], eps=CONFIG.rms_norm_eps)
    q, k, v = (torch.nn.functional.silu(x @ weights[f"{n}_proj"].T).unflatten(-1, (heads, H)) for n in "qkv")
    factor = 1 - layer / (CONFIG.num_hidden_layers - 1 + 1e-5) + 1e-5
    decay = torch.exp(-torch.tensor([2.0 ** (-8 * (h + 1) / heads) * factor for h in range(heads)]))[:, None, None]
    for row, ids in enumerate(ROWS.tolist()):
        state, document = torch.zeros(heads, H, H), 0
        for t, segment in enumerate(ids):
            if not segment:
                continue
            state, document = state * (segment == document) * decay, segment
            state = state + k[row, t][:, :, None] * v[row, t][:, None, :]
            read = (q[row, t][:, None] @ state).flatten()
            gated = torch.sigmoid(x[row, t] @ weights["z_proj"].T) * rms_norm(read, weights["norm"], eps=1e-6)
            found = taps[names[1]][row, t] / CONFIG.linear_attn_beta_factor
            assert off(gated @ weights["o_proj"].T, found) < 1e-5


def test_the_published_rotary_dim_is_followed() -> None:
    """transformers 5.24 ignores it, and rotates whole heads."""
    config = minimax.Config.from_hf(published()["minimax_text_01"])
    assert config.rope.partial == 0.5 and config == fnmodels.preset("minimax-text-01")
    with pytest.raises(P.UnsupportedError, match="'rotary_dim' and 'partial_rotary_factor' disagree"):
        minimax.Config.from_hf(published()["minimax_text_01"] | {"partial_rotary_factor": 0.25})
    half = dataclasses.replace(CONFIG.rope, partial=0.4)
    table = minimax.freqs_cis(dataclasses.replace(CONFIG, rope=half), torch.arange(4)[None])["full_moe"]
    assert table.shape == (1, 4, 2, 2)


def test_kinds_of_files_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(P.UnsupportedError, match="'attn_type_list' is"):
        minimax.Config.from_hf(TINY | {"attn_type_list": [1, 0, 0]})
