"""Llama-Nemotron, which transformers lacks: each document alone in a written-out model, from a file's tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import nemotron_nas
from fnmodels.errors import ConfigError, UnsupportedError
from tests.support.cases import generic_params, positions_of, segments
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.nemotron_nas import LAYERS, TINY, blocks

ROWS = segments((-2, 7, 4), (6, 6, -1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-2)


def rotated(x: Tensor) -> Tensor:
    """x [N, S, H]: pairs (i, i + H/2) turned by S / 50^(2 i / H)."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * 50.0 ** (-2 * torch.arange(size // 2) / size)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def reference(tokens: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Logits [S, V] of one document, from the tensors of its file."""
    x = state["model.embed_tokens.weight"][tokens]
    for i, (group, ratio) in enumerate(LAYERS):
        own = {name.removeprefix(f"model.layers.{i}."): t for name, t in state.items() if f"layers.{i}." in name}
        if group:
            read = norm(x, own["input_layernorm.weight"])
            q, k, v = ((read @ own[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, 8).transpose(0, 1) for n in "qkv")
            assert len(q) == 4 and len(k) == 4 // group
            scores = rotated(q) @ rotated(k).repeat_interleave(group, 0).mT * 8**-0.5
            weights = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf).softmax(-1)
            mixed = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
            x = x + mixed @ own["self_attn.o_proj.weight"].T
        if ratio:
            read = norm(x, own["post_attention_layernorm.weight"])
            gate, up = (read @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            assert gate.shape[1] == {1.0: 256, 13.0: 512}[ratio]  # 2/3 x ratio x 32, rounded up to a multiple of 256
            x = x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


def test_logits_are_those_of_a_written_out_model(tmp_path: Path, shows: Shows) -> None:
    """A layer without sublayers has no tensor, and those after it keep their numbers in the file."""
    shows("nemotron-nas", "loops")
    config = nemotron_nas.Config.from_hf(TINY)
    P.save_pretrained(tmp_path, config, generic_params(config))
    state = load_file(tmp_path / "model.safetensors")
    again, params = P.load_pretrained(tmp_path)
    assert again == config and len(params["layers"]) == 4 and not any("layers.2." in name for name in state)
    tokens = torch.randint(61, ROWS.shape, generator=torch.Generator().manual_seed(0))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config)
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = ROWS[row] == segment
        assert_close(got[row, own], reference(tokens[row, own], state))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_configs": blocks(*LAYERS[:3])}, "'block_configs' must be a list of 5 layers, num_hidden_layers"),
        ({"block_configs": blocks(*[(3, 1.0)] * 5)}, "is 0 or divides num_attention_heads, 4"),
        ({"block_configs": blocks(*[(0, 0.0)] * 5)}, "one at least has a sublayer"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' is 2; only null is supported"),
    ],
)
def test_wrong_layers_are_errors(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        nemotron_nas.Config.from_hf(TINY | changes)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("attention", "replace_with_linear", True),
        ("attention", "num_sink_tokens", 4),
        ("ffn", "sparsify", ["2:4"]),
        ("ffn", "moe", {"num_local_experts": 4}),
    ],
)
def test_sublayers_of_other_kinds_are_refused(part: str, name: str, value: Any) -> None:
    layers = blocks(*LAYERS)
    layers[1][part][name] = value
    with pytest.raises((ConfigError, UnsupportedError), match=rf"block_configs.1., {part}.*{name}"):
        nemotron_nas.Config.from_hf(TINY | {"block_configs": layers})
