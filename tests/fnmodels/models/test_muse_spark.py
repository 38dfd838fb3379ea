"""Muse Spark's text: what joins the residual stream, and configs that are refused."""

import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.models.decoder import muse_spark
from tests.support.cases import generic_params, off, tokens_of
from tests.variants.muse_spark import TINY

CONFIG = muse_spark.Config.from_hf(TINY)


def test_a_gate_weighs_the_stream_and_what_joins_it() -> None:
    """b = sigmoid(g / temperature): sqrt(1 - b^2) of the stream, and b of what the tap of the sublayer holds."""
    params = tree.map(torch.clone, generic_params(CONFIG))
    params["layers"][1]["post_feedforward_residual_gate"][:3] = 20  # whose share of the stream is the least
    taps = ("input", "attention", "middle", "mlp", "output")
    prepared = fnmodels.prepare(CONFIG, tokens_of(CONFIG, 1, 12))
    _, found = fnmodels.forward(params, *prepared, config=CONFIG, taps=tuple(f"layers.*.{name}" for name in taps))
    for index, layer in enumerate(params["layers"]):
        tap = {name: found[f"layers.{index}.{name}"].double() for name in taps}
        for before, added, after in (("input", "attention", "middle"), ("middle", "mlp", "output")):
            gate = layer[f"post_{'attention' if added == 'attention' else 'feedforward'}_residual_gate"].double()
            share = (gate / CONFIG.residual_temperature).sigmoid()
            kept = (1 - share.square()).clamp(min=1e-3).sqrt()
            assert off(kept * tap[before] + share * tap[added], tap[after]) < 1e-5, (index, after)
            assert kept.min() < 0.99 * kept.max()


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="'hidden_size' 32 is not a multiple of 'num_attention_heads' 12"):
        muse_spark.Config.from_hf(TINY | {"num_attention_heads": 12})
    with pytest.raises(ValueError, match="moe_hidden_size"):
        muse_spark.Config.from_hf(TINY | {"moe_hidden_size": 0})
    with pytest.raises(ValueError, match=r"'layer_rope_theta' is .* must have 0 or 50, the rope_theta"):
        muse_spark.Config.from_hf(TINY | {"layer_rope_theta": [50.0, 60.0, 0, 0]})
