"""GLM 5.3 Flash's MTP head: a loop over the modules of transformers, planted bugs, losses beside it, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fnmodels
import params as P
from fnmodels import glm5_next, mtp, tree
from fnmodels.errors import ConfigError
from fnmodels.models.common import storage
from fnmodels.models.common.mtp import blocks
from params.checkpoint.tensor_map import stored_leaves
from tests.support.cases import batch_of, cases, generic_params, off, segments, trainable
from tests.support.oracle import assert_close
from tests.variants.glm5_next import TINY
from train.losses.indexers.loss import indexer_loss
from train.losses.multi_token import look_ahead, mtp_loss

CASES = {case.name: case for case in cases() if case.family == "glm5_next" and "wrapped" not in case.name}
LENGTH = 20  # at which queries have more blocks than they choose


def with_heads(name: str, heads: int) -> Any:
    return replace(CASES[name].config, num_nextn_predict_layers=heads)


def row(config: Any) -> Tensor:
    return torch.randint(3, config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def ours(config: Any, params: Any) -> tuple[Tensor, list[Tensor]]:
    """(the mean of the model's streams before the final norm, the logits of each head where it has a token ahead)."""
    tokens, how = row(config), {"config": config, "kernel": "math"}
    prepared = fnmodels.prepare(config, tokens)
    x = fnmodels.hidden(params, *prepared, **how)
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), len(params["mtp"]), fill=-1)
    states = mtp.hidden(params, x, ahead, *prepared[1:], **how)
    logits = [glm5_next.unembed(mtp.view(params, k), state, config=config) for k, state in enumerate(states)]
    return x, [of_head[:, : LENGTH - k - 1] for k, of_head in enumerate(logits)]


def loaded(folder: Path) -> Any:
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **eager).eval()


def joined(token: Tensor, state: Tensor) -> Tensor:
    return torch.cat((token, state), -1)


def theirs(
    config: Any,
    params: Any,
    folder: Path,
    *,
    own: Any = None,
    shift: int = 1,
    state: Tensor | None = None,
    join: Callable[[Tensor, Tensor], Tensor] = joined,
) -> list[Tensor]:
    """The logits of each head: `ours` with modules of transformers, and what stands around them written out.

    own: the Config of the layer. shift: how far ahead the first head's token is. state: what the first head reads in
    place of the model's normed states. join: of what eh_proj reads.
    """
    own = own or blocks(config)[0]
    tokens, whole = row(config), generic_params(own)
    plain = {name: leaf for name, leaf in params.items() if name != "mtp"}
    P.save_pretrained(folder / "model", replace(config, num_nextn_predict_layers=0), plain)
    model, eps = loaded(folder / "model").model, config.rms_norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    found = []
    with torch.no_grad():
        state = model(tokens, use_cache=False).last_hidden_state if state is None else state
        for k, head in enumerate(params["mtp"]):
            layers, places = [whole["layers"][0] | head["block"]], LENGTH - k - 1
            P.save_pretrained(folder / f"head{k}", own, {**whole, "layers": layers})
            layer = loaded(folder / f"head{k}").model.layers[0]
            token = norm(model.embed_tokens(tokens.roll(-k - shift, 1)[:, :places]), head["enorm"])
            x = join(token, norm(state[:, :places], head["hnorm"])) @ head["eh_proj"].mT
            seen = torch.ones(1, places, dtype=torch.bool)
            x = x + layer.self_attn(layer.input_layernorm(x), seen)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            state = norm(x, head["norm"])
            found.append(state @ params.get("lm_head", params["embed_tokens"]).mT)
    return found


@pytest.mark.parametrize("name", CASES)
def test_heads_equal_layers_of_transformers_on_one_stream(name: str, tmp_path: Path) -> None:
    """Of a model whose last layer has experts, and of one whose last layer is a dense one of delta attention."""
    config = with_heads(name, 2)
    params = generic_params(config)
    wanted = theirs(config, params, tmp_path)
    assert len(wanted) == 2
    for one, other in zip(ours(config, params)[1], wanted, strict=True):
        assert_close(one, other)


def test_planted_bugs_are_found(tmp_path: Path) -> None:
    """States before the final norm, another order of both, another token, and a head that sees all keys."""
    config = with_heads("glm5_next", 1)
    params = generic_params(config)
    x, (found,) = ours(config, params)
    every_key = replace(blocks(config)[0], indexer_budget=2 * LENGTH)
    bugs: list[dict[str, Any]] = [{"state": x}, {"join": lambda token, state: joined(state, token)}]
    bugs += [{"shift": 2}, {"own": every_key}]
    for number, bug in enumerate(bugs):
        (wrong,) = theirs(config, params, tmp_path / str(number), **bug)
        assert off(found[:, :-1], wrong[:, :-1]) > 1e-3, bug


def test_files_have_the_tensors_of_published_ones() -> None:
    """889 of the head, which are layer 45's: no hyper-connections, and no copies of embedding and output head."""
    config = fnmodels.preset("glm-5.3-flash")
    stored = [name for one in stored_leaves(config) for name in storage.disk_names(one.stored)]
    names = {name.removeprefix("model.layers.45.") for name in stored if name.startswith("model.layers.45.")}
    assert config.num_nextn_predict_layers == 1 and len(names) == 889
    pools = {f"self_attn.indexer.index_kpool_compress_{name}" for name in ("gate", "ape")}
    assert pools | {f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")} < names
    assert not {name for name in names if "hc_" in name or "embed_tokens" in name or "shared_head.head" in name}


def test_losses_beside_heads() -> None:
    """The loss of indexers is that of a model without heads; the heads' trains all of a head but its indexer."""
    config, ids = with_heads("glm5_next", 1), segments((-2, 13, 5), (7, 11, -2))
    params, how = generic_params(config, torch.float64), {"kernel": "math", "length": 24}
    batch = batch_of(config, ids).batch()

    def run(loss: Any, weights: Any, data: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        leaves = trainable(weights)
        flat = {path: leaf for path, leaf in tree.flatten(leaves).items() if leaf.requires_grad}
        total, *_ = loss(leaves, data, **{"config": config} | how | more)
        grads = torch.autograd.grad(total, list(flat.values()), allow_unused=True)
        return total.detach(), dict(zip(flat, grads, strict=True))

    without = {name: leaf for name, leaf in params.items() if name != "mtp"}
    for stage in ("dense", "sparse"):
        total, grads = run(indexer_loss, params, batch, stage=stage)
        wanted, alone = run(indexer_loss, without, batch, stage=stage, config=CASES["glm5_next"].config)
        assert off(total, wanted) == 0 and any(".indexer." in path for path, grad in grads.items() if grad is not None)
        assert all(grad is None for path, grad in grads.items() if path.startswith("mtp."))
        for path, grad in alone.items():
            assert (grads[path] is None) == (grad is None) and (grad is None or off(grads[path], grad) == 0), path
    _, grads = run(mtp_loss, params, look_ahead(batch, 1))
    heads = {path: grad for path, grad in grads.items() if path.startswith("mtp.")}
    reached = {path for path, grad in heads.items() if grad is not None and grad.abs().max() > 0}
    assert heads and heads.keys() - reached == {path for path in heads if ".indexer." in path or "selection" in path}


def test_a_model_of_delta_layers_has_no_head_unless_it_counts_one() -> None:
    plain = {name: value for name, value in TINY.items() if name != "num_nextn_predict_layers"}
    linear = plain | {"layer_types": ["linear_attention"] * 3, "indexer_types": ["full"] * 3}
    assert glm5_next.Config.from_hf(plain).num_nextn_predict_layers == 1
    assert glm5_next.Config.from_hf(linear).num_nextn_predict_layers == 0
    with pytest.raises(ConfigError, match="none that attends like it"):
        glm5_next.Config.from_hf(linear | {"num_nextn_predict_layers": 1})
