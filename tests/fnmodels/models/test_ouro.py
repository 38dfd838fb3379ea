"""Ouro: its loop written out, what the head reads of its passes, an entry of a cache for each pass."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
from fnmodels import ouro, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.family import stored_layers
from tests.support.cases import batch_of, generic_params, segments, tokens_of
from tests.support.status import Shows
from tests.variants.ouro import TINY, published

CONFIG = ouro.Config.from_hf(TINY)
EXPECTED = dataclasses.replace(CONFIG, exit="expected")
FIRST = dataclasses.replace(CONFIG, exit="threshold", exit_threshold=0.6)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """The published rotary embedding, halves against halves: x [B, N, S, H]."""
    frequencies = TINY["rope_theta"] ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = torch.cat((positions[:, None, :, None] * frequencies,) * 2, -1).to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def states_of(params: Any, tokens: Tensor, loops: int) -> list[Tensor]:
    """The normed state after each pass of the stack, as the published code computes them, by plain torch."""
    eps, heads, kv = CONFIG.rms_norm_eps, CONFIG.num_attention_heads, CONFIG.num_key_value_heads
    last, positions = params["layers"][-1], torch.arange(tokens.shape[1]).expand_as(tokens)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    x, states = params["embed_tokens"][tokens], []
    for _ in range(loops):
        for layer in params["layers"]:
            own, normed = layer["attention"], norm(x, layer["input_layernorm"])
            q, k, v = (F.linear(normed, own[f"{n}_proj"]).unflatten(-1, (-1, 6)).transpose(1, 2) for n in "qkv")
            q, k = rotated(q, positions), rotated(k, positions)
            k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
            scores = (q @ k.mT / 6**0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
            x = x + norm(F.linear(mixed, own["o_proj"]), layer["input_layernorm_2"])
            normed, own = norm(x, layer["post_attention_layernorm"]), layer["mlp"]
            fed = F.silu(F.linear(normed, own["gate_proj"])) * F.linear(normed, own["up_proj"])
            x = x + norm(F.linear(fed, own["down_proj"]), layer["post_attention_layernorm_2"])
        x = norm(x, last["final_norm"])
        states.append(x)
    return states


def exits_of(params: Any, states: list[Tensor]) -> Tensor:
    """The chance of each pass [B, S, loops], step by step as published."""
    gate, left, chances = params["layers"][-1]["exit_gate"], torch.ones(()), []
    for index, state in enumerate(states):
        own = F.linear(state, gate["weight"], gate["bias"])[..., 0].sigmoid()
        chances.append(own * left if index < len(states) - 1 else left.expand_as(own))
        left = left * (1 - own)
    return torch.stack(chances, -1)


def written_out(params: Any, tokens: Tensor, config: Any) -> Tensor:
    """Logits [B, S, V]: of the last pass, of the first that reaches the threshold, or of all by their chances."""
    states = states_of(params, tokens, config.loops)
    logits = torch.stack([F.linear(state, params["lm_head"]) for state in states], -1)
    exits = exits_of(params, states)
    if config.exit == "last":
        return logits[..., -1]
    if config.exit == "expected":
        return (logits * exits[..., None, :]).sum(-1)
    found = logits[..., -1].clone()
    for b in range(tokens.shape[0]):
        for s in range(tokens.shape[1]):
            reached = [t for t in range(config.loops) if exits[b, s, : t + 1].sum() >= config.exit_threshold]
            found[b, s] = logits[b, s, :, reached[0] if reached else -1]
    return found


def logits_of(params: Any, tokens: Tensor, config: Any) -> Tensor:
    return fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")


@pytest.mark.parametrize("config", [CONFIG, EXPECTED, FIRST], ids=lambda config: config.exit)
def test_the_loop_written_out(config: Any, shows: Shows) -> None:
    """Logits, and gradients of all parameters, those of the gate where logits have one."""
    shows("ouro", "loops")
    params = tree.map(lambda leaf: leaf.double().requires_grad_(), generic_params(config))
    tokens = tokens_of(config, 2, 9)
    ours, wanted = logits_of(params, tokens, config), written_out(params, tokens, config)
    assert (ours - wanted).abs().max() < 1e-6 * wanted.abs().max()  # our rotary tables and chances are fp32
    leaves = tree.leaves(params)
    both = [torch.autograd.grad(x.square().sum(), leaves, allow_unused=True) for x in (ours, wanted)]
    for path, mine, other in zip(tree.flatten(params), *both, strict=True):
        mine, other = (torch.zeros(()) if gradient is None else gradient for gradient in (mine, other))
        assert (mine - other).abs().max() < 1e-5 * (1 + other.abs().max()), path
        assert bool(mine.any()) == ("exit_gate" not in path or config is EXPECTED), path


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.6, 0.9, 1.0])
def test_each_token_leaves_at_its_own_pass(threshold: float) -> None:
    config = dataclasses.replace(FIRST, exit_threshold=threshold)
    params, tokens = generic_params(config), tokens_of(config, 2, 16)
    exits = exits_of(params, states_of(params, tokens, config.loops))
    passes = (exits.cumsum(-1)[..., :-1] < threshold).sum(-1)
    assert len(passes.unique()) == {0.0: 1, 1.0: 1}.get(threshold, len(passes.unique()))
    assert threshold != 0.6 or len(passes.unique()) > 1
    assert (logits_of(params, tokens, config) - written_out(params, tokens, config)).abs().max() < 1e-4


def test_taps_name_the_chances_of_the_passes() -> None:
    params, batch = generic_params(EXPECTED), batch_of(EXPECTED, segments((9,)))
    last = EXPECTED.num_hidden_layers - 1
    _, taps = batch.forward(params, taps=(f"layers.{last}.exits",))
    exits = taps[f"layers.{last}.exits"]
    assert exits.shape == (1, 9, 3) and (exits.sum(-1) - 1).abs().max() < 1e-6
    states = states_of(params, batch.tokens, 3)
    assert (exits - exits_of(params, states)).abs().max() < 1e-5


def test_each_pass_has_an_entry_of_a_cache() -> None:
    """A planted bug: entries that the passes of a layer share give other logits."""
    params, tokens = generic_params(EXPECTED), tokens_of(EXPECTED, 2, 9)
    whole = logits_of(params, tokens, EXPECTED)
    cache = fnmodels.init_cache(EXPECTED, 2, 16)
    assert len(cache.layers) == len(ouro.kinds(EXPECTED)) == 6 and len(params["layers"]) == 2
    how: dict[str, Any] = {"config": EXPECTED, "kernel": "math"}
    _, cache = fnmodels.prefill(params, *fnmodels.prepare_step(EXPECTED, tokens[:, :8], cache), cache, **how)
    step = fnmodels.prepare_step(EXPECTED, tokens[:, 8:], cache)
    logits, _ = fnmodels.prefill(params, *step, cache, **how)
    assert (logits - whole[:, -1]).abs().max() < 2e-5
    stored = stored_layers(EXPECTED, cache.kinds)
    last = [max(i for i, layer in enumerate(stored) if layer == own) for own in stored]
    shared = dataclasses.replace(cache, layers=tuple(cache.layers[i] for i in last))
    wrong, _ = fnmodels.prefill(params, *step, shared, **how)
    assert (wrong - whole[:, -1]).abs().max() > 1e-2


def test_published_names() -> None:
    """The gate and the final norm stand beside the layers on disk, as the remote code has them."""
    config = ouro.Config.from_hf(published()["ouro_1_4b"])
    names = set(ouro.hf_names(config).values())
    layer = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    layer += tuple(f"self_attn.{name}_proj" for name in "qkvo") + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    around = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    around |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert names == around | {f"model.layers.{i}.{name}.weight" for i in range(24) for name in layer}


def test_only_an_expected_exit_trains_the_gate() -> None:
    for config in (CONFIG, EXPECTED, FIRST):
        gate = ouro.spec(config)["layers"][-1]["exit_gate"]
        assert {leaf.trainable for leaf in tree.leaves(gate)} == {config.exit == "expected"}
    assert P.count(CONFIG) == P.count(EXPECTED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"total_ut_steps": 999}, "2 layers run 999 times; 1000 passes are most"),
        ({"early_exit_threshold": 1.5}, "exit_threshold is 1.5; it must be from 0 to 1"),
        ({"exit": "first"}, "'exit' is .first.; supported are last, threshold, expected"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' is"),
        ({"early_exit_step": 1}, "'early_exit_step' is 1; only null is supported"),
    ],
)
def test_wrong_loops_are_errors(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        ouro.Config.from_hf(TINY | changes)


def test_a_threshold_in_the_file_is_read_and_written() -> None:
    values = TINY | {"early_exit_threshold": 0.7}
    config = ouro.Config.from_hf(values)
    assert config.exit == "threshold" and "exit" not in config.to_hf()
    assert EXPECTED.to_hf()["exit"] == "expected" and "exit" not in CONFIG.to_hf()
    assert config.to_hf()["num_hidden_layers"] == 2 and config.to_hf()["rope_theta"] == 1e4
