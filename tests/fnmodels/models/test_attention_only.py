"""A decoder with intermediate_size 0 has no MLPs: its layers are attention alone."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import params as P
import train
from fnmodels import llama, tree
from tests.support.cases import batch_of, generic_params, off, segments
from tests.support.traced import without_generated_code

WIDE = llama.Config(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
CONFIG = replace(WIDE, intermediate_size=0)


def test_it_is_the_model_whose_mlps_add_nothing(tmp_path: Path) -> None:
    wide, rows = generic_params(WIDE), segments((5, 3), (-1, 7))
    params = tree.map_with_path(
        lambda path, leaf: leaf if ".mlp." not in path else leaf[:, :0] if "down" in path else leaf[:0], wide
    )
    edits = {"layers.*.mlp": lambda value, name: torch.zeros_like(value)}
    logits = batch_of(CONFIG, rows).forward(params)
    assert off(logits, batch_of(WIDE, rows).forward(wide, edits=edits)) < 1e-6
    assert off(logits, batch_of(WIDE, rows).forward(wide)) > 1e-2
    assert P.count(CONFIG) == P.count(WIDE) - 2 * 3 * 16 * 24
    P.save_pretrained(tmp_path, CONFIG, params)
    config, again = P.load_pretrained(tmp_path)
    assert config == CONFIG and all(map(torch.equal, tree.leaves(again), tree.leaves(params)))


@pytest.mark.slow
def test_it_trains() -> None:
    """Leaves without elements stay as they are; the others move, compiled too."""
    batch = batch_of(CONFIG, segments((12,), (7, 5)))
    given = {name: getattr(batch, name) for name in ("tokens", "labels", "positions", "segment_ids")}
    for how in ("none", "block"):
        optimizer = train.adamw(1e-2)
        step = train.make_step(functools.partial(train.next_token_loss, config=CONFIG), optimizer, compile=how)
        state, losses = train.init_state(P.init(CONFIG, 0), optimizer), []
        with without_generated_code() as graphs:
            for _ in range(20):
                state, metrics = step(state, given)
                losses.append(float(metrics["loss"]))
        assert bool(graphs) == (how == "block")
        assert losses[-1] < losses[0] - 0.5
