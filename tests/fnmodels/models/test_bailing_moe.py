"""Ling 1 and 2, which transformers does not have: each document alone in a written-out model, from a file's tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import mtp, tree
from fnmodels.models.common import storage
from fnmodels.models.decoder import bailing_moe
from tests.support.cases import generic_params, positions_of, segments
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.bailing_moe import FIRST, TINY

ROWS = segments((-2, 7, 4), (6, 6, -1))
Values = dict[str, Any]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-2)


def mlp(x: Tensor, state: dict[str, Tensor], at: str) -> Tensor:
    gate, up = (x @ state[f"{at}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ state[f"{at}.down_proj.weight"].T


def rotated(x: Tensor, values: Values) -> Tensor:
    """x [N, S, H]: of the first R elements, pairs (i, i + R/2) turned by S / theta^(2 i / R)."""
    turned, still = x.split([size := int(x.shape[-1] * values.get("partial_rotary_factor", 1)), x.shape[-1] - size], -1)
    angles = torch.arange(x.shape[1])[:, None] * values["rope_theta"] ** (-2 * torch.arange(size // 2) / size)
    a, b = turned.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), still), -1)


def attention(x: Tensor, state: dict[str, Tensor], at: str, values: Values) -> Tensor:
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    fused = F.linear(x, state[f"{at}.query_key_value.weight"], state.get(f"{at}.query_key_value.bias"))
    q, k, v = fused.view(len(x), heads + 2 * groups, -1).transpose(0, 1).split((heads, groups, groups))
    if values.get("use_qk_norm"):
        q, k = norm(q, state[f"{at}.query_layernorm.weight"]), norm(k, state[f"{at}.key_layernorm.weight"])
    k, v = (t.repeat_interleave(heads // groups, 0) for t in (rotated(k, values), v))
    scores = rotated(q, values) @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return F.linear(mixed, state[f"{at}.dense.weight"], state.get(f"{at}.dense.bias"))


def mixture(x: Tensor, state: dict[str, Tensor], at: str, values: Values) -> Tensor:
    """Token by token; a group's score is the sum of its two best experts'."""
    logits, fed = x @ state[f"{at}.gate.weight"].T, mlp(x, state, f"{at}.shared_experts")
    for row, logit in enumerate(logits):
        if values["architectures"] == ["BailingMoeV2ForCausalLM"]:
            share = logit.sigmoid()
            groups = (share + state[f"{at}.gate.expert_bias"]).view(values["n_group"], -1)
            best = groups.topk(2).values.sum(-1).topk(values["topk_group"]).indices
            chosen = torch.full_like(groups, -torch.inf).index_copy(0, best, groups[best])
        else:
            share = chosen = logit.softmax(-1)
        experts = chosen.flatten().topk(values["num_experts_per_tok"]).indices
        weights = share[experts] / share[experts].sum() * values.get("routed_scaling_factor", 1)
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            fed[row] += weight * mlp(x[row], state, f"{at}.experts.{expert}")
    return fed


def reference(tokens: Tensor, state: dict[str, Tensor], values: Values) -> Tensor:
    """Logits [S, V] of one document, from the tensors of its file."""
    x = state["model.word_embeddings.weight"][tokens]
    for i in range(values["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = x + attention(norm(x, state[f"{at}.input_layernorm.weight"]), state, f"{at}.attention", values)
        read = norm(x, state[f"{at}.post_attention_layernorm.weight"])
        dense = f"{at}.mlp.gate.weight" not in state
        x = x + (mlp(read, state, f"{at}.mlp") if dense else mixture(read, state, f"{at}.mlp", values))
    return norm(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


@pytest.mark.parametrize(
    "values", [TINY, FIRST, TINY | {"model_type": "bailing_moe_v2"}], ids=["sigmoid", "softmax", "v2"]
)
def test_logits_are_those_of_a_written_out_model(values: Values, tmp_path: Path, shows: Shows) -> None:
    """With gradients of every parameter."""
    config = bailing_moe.Config.from_hf(values)
    shows(config.model_type, "loops")
    P.save_pretrained(tmp_path, config, generic_params(config))
    state = {name: tensor.requires_grad_() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    again, params = P.load_pretrained(tmp_path)
    assert again == config
    params = tree.map(lambda leaf: leaf.requires_grad_(), params)
    tokens = torch.randint(61, ROWS.shape, generator=torch.Generator().manual_seed(0))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config)
    total = torch.zeros(())
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = ROWS[row] == segment
        theirs = reference(tokens[row, own], state, values)
        assert_close(got[row, own], theirs)
        total = total + theirs.square().sum()
    got[ROWS > 0].square().sum().backward()
    total.backward()
    for path, stored in bailing_moe.hf_names(config).items():
        leaf, named = tree.flatten(params)[path], [state[name].grad for name in storage.disk_names(stored)]
        if all(grad is not None for grad in named) and leaf.grad is not None:
            wanted = storage.extract_parameter(stored, {n: state[n].grad for n in storage.disk_names(stored)})
            assert (leaf.grad - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max())), path


def test_heads_are_those_of_a_written_out_model(tmp_path: Path) -> None:
    """From the tensors of a file: each head reads what the norm of the one before it returns, one token shorter."""
    values = TINY | {"num_nextn_predict_layers": 2}
    config = bailing_moe.Config.from_hf(values)
    P.save_pretrained(tmp_path, config, generic_params(config))
    state = load_file(tmp_path / "model.safetensors")
    again, params = P.load_pretrained(tmp_path)
    assert again == config
    tokens = torch.randint(61, (1, 11), generator=torch.Generator().manual_seed(0))
    inputs, masks, freqs = fnmodels.prepare(config, tokens)
    x: Any = fnmodels.hidden(params, inputs, masks, freqs, config=config)
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), 2, fill=-1)
    found = mtp.hidden(params, x, ahead, masks, freqs, config=config)
    before = norm(x[0], state["model.norm.weight"])
    for k, ours in enumerate(found):
        at, places = f"model.layers.{values['num_hidden_layers'] + k}", tokens.shape[1] - k - 1
        token = norm(state["model.word_embeddings.weight"][tokens[0, k + 1 :]], state[f"{at}.enorm.weight"])
        both = torch.cat((token, norm(before[:places], state[f"{at}.hnorm.weight"])), -1)
        y = both @ state[f"{at}.eh_proj.weight"].T
        y = y + attention(norm(y, state[f"{at}.input_layernorm.weight"]), state, f"{at}.attention", values)
        y = y + mixture(norm(y, state[f"{at}.post_attention_layernorm.weight"]), state, f"{at}.mlp", values)
        before = norm(y, state[f"{at}.final_layernorm.weight"])
        logits = bailing_moe.unembed(mtp.view(params, k), ours, config=config)
        assert_close(logits[0, :places], before @ state["lm_head.weight"].T)
