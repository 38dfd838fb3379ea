"""The tokens that a server's requests may have: the positions that the model has, with what a scaling adds."""

from typing import Any

import pytest

from fnmodels import gpt2, llama
from fnmodels.errors import UserError
from fnmodels.ops.rotary import Rope
from train.server.command import CONTEXT, context_of

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
YARN = Rope(kind="yarn", factor=4.0, original_max_position_embeddings=8192)


@pytest.mark.parametrize(("rope", "positions"), [(Rope(), 8192), (YARN, 32768)])
def test_scaled_rotary_tables_have_the_positions_of_their_scaling(rope: Rope, positions: int) -> None:
    config = llama.Config(64, **SIZES, **HEADS, max_position_embeddings=8192, rope=rope)
    assert context_of(None, config) == CONTEXT
    assert context_of(positions, config) == positions
    with pytest.raises(UserError, match=f"--context {positions + 1} is more than the {positions} positions"):
        context_of(positions + 1, config)


def test_learned_positions_are_all_that_there_are() -> None:
    config = gpt2.Config(64, 32, 64, 1, 2, max_position_embeddings=100)
    assert context_of(None, config) == 100 == context_of(100, config)
    with pytest.raises(UserError, match="more than the 100 positions"):
        context_of(101, config)
