"""Hy4: initial values of hyper-connections and the names on disk against transformers, its lists, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import hy_v4, mtp, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import context
from params.initialize import draw
from tests.support.cases import batch_of, generic, generic_params, off, segments
from tests.variants.hy_v4 import TINY, published

CONFIG = hy_v4.Config.from_hf(TINY)
PARAMS = generic_params(CONFIG, torch.float64)


def reference(**changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(**TINY | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_hyper_connections_and_sinks_begin_as_in_transformers() -> None:
    """The weights of all streams together are 1; and a shard of a leaf is that part of it."""
    fresh, theirs = P.init(CONFIG, 0)["layers"], reference().model
    for ours, layer in zip(fresh, theirs.layers, strict=True):
        for name, other in (("attention_hyper", layer.attn_hc), ("mlp_hyper", layer.ffn_hc)):
            assert torch.equal(ours[name]["base"], other.base) and torch.equal(ours[name]["scale"], other.scale)
        assert torch.equal(ours["attention"]["sinks"], layer.self_attn.sinks)
    fold = fresh[-1]["fold"]
    assert torch.equal(fold["base"], theirs.hc_head.hc_base) and torch.equal(fold["scale"], theirs.hc_head.hc_scale)
    leaf = hy_v4.spec(CONFIG)["layers"][0]["attention_hyper"]["base"]
    assert torch.equal(draw(leaf, 0, "base", (slice(2, 5),)), theirs.layers[0].attn_hc.base[2:5])


def test_a_file_of_transformers_is_read_under_tencents_names(tmp_path: Path) -> None:
    """Under its own names for what it renames wrongly, and under the published ones, which are written."""
    model = reference()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path)
    tokens = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert off(ours, model(input_ids=tokens, use_cache=False).logits) < 2e-5
    P.save_pretrained(tmp_path / "again", config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_published_weights_rotate_neighbours() -> None:
    """With the rows that rotate in that order, logits are those of halves, which are transformers'."""
    rows = segments((-2, 7, 13), (19, 3))
    half, places = CONFIG.qk_rope_head_dim // 2, torch.arange(CONFIG.qk_rope_head_dim)
    order = places // 2 + half * (places % 2)  # of the row at each place, in halves
    batch = batch_of(CONFIG, rows)

    def moved(path: str, leaf: Tensor) -> Tensor:
        """The last rows of each head, or of the latent's projection, in the order of neighbours."""
        heads = CONFIG.index_n_heads if ".indexer." in path else CONFIG.num_attention_heads
        heads = heads if path.endswith("q_b_proj") else 1
        if path.rpartition(".")[2] not in _TURNED[".indexer." in path]:
            return leaf
        grouped = leaf.unflatten(0, (heads, -1))
        still, turned = grouped.split([grouped.shape[1] - 2 * half, 2 * half], 1)
        return torch.cat((still, turned[:, order]), 1).flatten(0, 1)

    neighbours = tree.unflatten({path: moved(path, leaf) for path, leaf in tree.flatten(PARAMS).items()})
    config = replace(CONFIG, rope_interleave=True)
    wanted = batch.forward(PARAMS, kernel="math")[rows > 0]
    inputs, masks, freqs = fnmodels.prepare(config, batch.tokens, positions=batch.positions, segment_ids=rows)

    def logits(params: Any) -> Tensor:
        return fnmodels.forward(params, inputs, masks, freqs, config=config, kernel="math")[rows > 0]

    assert off(logits(neighbours), wanted) < 1e-10 and off(logits(PARAMS), wanted) > 1e-2
    assert hy_v4.Config.from_hf({k: v for k, v in TINY.items() if k != "rope_interleave"}) == config
    assert config.to_hf()["rope_interleave"] is True


# Leaves whose last rows rotate: of attention, and of its indexer.
_TURNED = (("q_b_proj", "kv_a_proj"), ("q_b_proj", "k_proj", "k_norm", "k_norm_bias"))


def test_a_count_of_two_is_of_one_head() -> None:
    """As the publisher's files have it, by vLLM's reader of their heads."""
    values = CONFIG.to_hf()
    one, two = (hy_v4.Config.from_hf(values | {"num_nextn_predict_layers": count}) for count in (1, 2))
    assert one == two and one.num_nextn_predict_layers == 1
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        hy_v4.Config.from_hf(values | {"num_nextn_predict_layers": 3})


def test_the_mtp_head_is_a_layer_on_one_stream(tmp_path: Path) -> None:
    """Its block is made of the modules of a layer of transformers, without hyper-connections; after it, norm and head.

    Their layer is that of a model of one layer, whose other parameters nothing reads here.
    """
    config = replace(CONFIG, num_nextn_predict_layers=1)
    params = generic_params(config)
    tokens = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    inputs, masks, freqs = fnmodels.prepare(config, tokens)
    x = fnmodels.hidden(params, inputs, masks, freqs, config=config, kernel="math")
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), 1, fill=-1)
    (state,) = mtp.hidden(params, x, ahead, masks, freqs, config=config, kernel="math")
    found = hy_v4.unembed(mtp.view(params, 0), state, config=config)[:, :-1]

    one = replace(CONFIG, num_hidden_layers=1, layer_kinds=("indexed_moe",))
    head, whole = params["mtp"][0], generic_params(one)
    ends = {name: params[name] for name in ("embed_tokens", "lm_head")}
    P.save_pretrained(tmp_path, one, {**whole, "layers": [whole["layers"][0] | head["block"]], **ends})
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    layer, eps = model.model.layers[0], config.rms_norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    with torch.no_grad():
        before = norm(norm(x, params["norm"])[:, :-1], head["hnorm"])
        both = torch.cat((norm(model.model.embed_tokens(tokens[:, 1:]), head["enorm"]), before), -1)
        y = both @ head["eh_proj"].mT
        tables = model.model.rotary_emb(y, torch.arange(19)[None])
        mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
        y = y + layer.self_attn(layer.input_layernorm(y), tables, mask)[0]
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        assert off(found, model.lm_head(norm(y, head["norm"]))) < 2e-5


@pytest.mark.parametrize("kernel", ["math", "sparse"])
def test_queries_on_latents_have_sinks(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection of keys and values applied to queries and results, on a cache; attention without sinks differs."""
    row = batch_of(CONFIG, segments((26,)))
    whole = row.forward(PARAMS)

    def difference(params: Any = PARAMS) -> float:
        cache, steps = fnmodels.init_cache(CONFIG, 1, 28, dtype=torch.float64), []
        for tokens in row.tokens.split([10, 1, 1, 14], dim=1):
            step = fnmodels.prepare_step(CONFIG, tokens, cache)
            logits, cache = fnmodels.decode(params, *step, cache, config=CONFIG, kernel=kernel)
            steps.append(logits)
        return off(torch.cat(steps, 1), whole)

    calls = []
    monkeypatch.setattr(context, "pays_to_absorb", lambda *given, **widths: calls.append(given) or True)
    assert difference() < 1e-10 and calls
    leaves = tree.flatten(PARAMS)
    far = {path: leaf - 30 if path.endswith(".sinks") else leaf for path, leaf in leaves.items()}
    assert difference(tree.unflatten(far)) > 1e-3


def test_the_published_file_is_the_preset() -> None:
    config = hy_v4.Config.from_hf(published()["hy4_preview"])
    assert replace(config, num_nextn_predict_layers=0) == fnmodels.preset("hy4-preview")
    assert config.num_key_value_heads == 64 and config.num_nextn_predict_layers == 1
    own = [i for i, kind in enumerate(config.layer_kinds) if "shared" not in kind]
    assert own == [0, *range(1, 78, 4)] and config.layer_kinds[0] == "indexed"


def test_what_is_not_read_is_refused() -> None:
    read = hy_v4.Config.from_hf
    for name, value in (("gated_mla", False), ("gating_type", "headwise"), ("learnable_sink", False)):
        with pytest.raises(UnsupportedError, match=name):
            read(TINY | {name: value})
    for change, words in (
        ({"indexer_types": ["shared", "full", "full"]}, "The first layer must have an indexer"),
        ({"hc_mult": 1}, "'hc_mult' is 1"),
        ({"swiglu_limit": 0.0}, "'swiglu_limit' is 0"),
        ({"num_key_value_heads": "8"}, "'num_key_value_heads' is \"8\""),
    ):
        with pytest.raises(ConfigError, match=words):
            read(TINY | change)
    with pytest.raises(ConfigError, match="residual_streams is 1"):
        replace(CONFIG, residual_streams=1)
