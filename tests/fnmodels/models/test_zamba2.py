"""Zamba 2: blocks that several layers read stand once in params and files, with adapters for each use."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
from fnmodels import tree, zamba2
from fnmodels.errors import ConfigError, UnsupportedError
from params import lora
from tests.support.cases import generic_params, tokens_of
from tests.support.doubles import KeepsDoubles, doubled, with_exact_frequencies
from tests.support.oracle import model_of, params_of
from tests.variants.zamba2 import TINY

# Layers 0 and 3 read the first block, layer 2 the second one.
VALUES = TINY | {
    "num_mem_blocks": 2,
    "num_hidden_layers": 4,
    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"],
}
CONFIG = zamba2.Config.from_hf(VALUES)


def test_blocks_are_read_in_turn() -> None:
    """In float64, since errors of fp32 grow with the depth; a planted bug, the adapters of another use, is found."""
    model = with_exact_frequencies(doubled(model_of(VALUES)), CONFIG)
    params, tokens = params_of(model, CONFIG), tokens_of(CONFIG, 2, 24)
    with KeepsDoubles(), torch.no_grad():
        prepared = fnmodels.prepare(CONFIG, tokens)
        wanted = model(input_ids=tokens, use_cache=False).logits
    how: dict[str, Any] = {"config": CONFIG, "kernel": "math"}
    assert (fnmodels.forward(params, *prepared, **how) - wanted).abs().max() < 1e-6
    assert CONFIG.passes == (4, 0, 1, 5, 2, 4, 3) and zamba2.kinds(CONFIG)[5] == "full_1"
    params["layers"][4]["adapters"].reverse()
    assert (fnmodels.forward(params, *prepared, **how) - wanted).abs().max() > 1e-2


def test_a_file_may_repeat_a_block(tmp_path: Path) -> None:
    """Under the names of each layer that reads it, with the same bits; a save writes it once."""
    params = generic_params(CONFIG)
    once = dict(P.export(CONFIG, params))
    copies = zamba2.hf_copies(CONFIG)
    assert copies and not once.keys() & copies.keys() and all(".layers.3." in name for name in copies)
    first = {copy: once[copy.replace(".layers.3.", ".layers.0.")] for copy in copies}
    loaded = P.from_tensors(CONFIG, {**once, **first}.items())
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(loaded), tree.leaves(params), strict=True))
    name = "model.layers.3.shared_transformer.feed_forward.down_proj.weight"
    with pytest.raises(P.MismatchError, match=f"{name}: differs from"):
        P.from_tensors(CONFIG, {**once, **first, name: first[name] + 1}.items())


def test_adapters_of_a_shared_block_are_not_pefts(tmp_path: Path) -> None:
    """Ours acts in every use of the block, and PEFT has one for each."""
    adapted = lora.add(CONFIG, generic_params(CONFIG), rank=2, targets=["layers.4.mlp.down_proj"], seed=0)
    with pytest.raises(
        UnsupportedError, match=r"layers\.4\.mlp\.down_proj has an adapter that PEFT's format has no place"
    ):
        lora.save_adapters(tmp_path, CONFIG, adapted)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers_block_type": ["mamba", "hybrid"]}, "'layers_block_type' names 2 layers; it must name 4"),
        ({"num_mem_blocks": 4}, "shared_blocks is 4; 3 layers read one"),
        ({"num_key_value_heads": 2}, "with adapters of attention it must be num_attention_heads, 4"),
        ({"hybrid_layer_ids": [0, 1]}, "'hybrid_layer_ids' is .0, 1.; only .0, 2, 3. is supported"),
        ({"tie_word_embeddings": False}, "'tie_word_embeddings' is false; only true is supported"),
    ],
)
def test_wrong_blocks_are_errors(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        zamba2.Config.from_hf(VALUES | changes)
