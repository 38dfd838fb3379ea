"""GLM 5.3 Flash's text: its choices replayed, gathered, cached and shared, planted bugs, its files, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import glm5_next
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.ops.indexers import gated_pools
from fnmodels.ops.streams import hyper
from tests.support.cases import batch_of, generic, generic_params, gradients, off, segments, trainable
from tests.support.oracle import assert_close, model_of, params_of
from tests.variants.glm5_next import TINY, published

CONFIG = glm5_next.Config.from_hf(TINY)
PARAMS = generic_params(CONFIG, torch.float64)
ROWS = segments((-2, 7, 19), (22, 6), (2, 20, -6))


def logits_of(config: Any = CONFIG, kernel: str = "math", **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    batch = batch_of(CONFIG, ROWS)
    inputs, masks, freqs = fnmodels.prepare(config, batch.tokens, positions=batch.positions, segment_ids=ROWS)
    how: dict[str, Any] = {"config": config, "kernel": kernel, "taps": ("layers.*.choices",)}
    found: tuple[Tensor, dict[str, Tensor]] = fnmodels.forward(PARAMS, inputs | more, masks, freqs, **how)
    return found


def test_a_choice_is_replayed_and_names_blocks_of_the_document() -> None:
    free, tapped = logits_of()
    assert [*tapped] == ["layers.1.choices"], "layer 2 shares that of layer 1"
    choices, seen = tapped["layers.1.choices"].unsqueeze(2), ROWS > 0
    batch, size, count = batch_of(CONFIG, ROWS), CONFIG.index_block_size, CONFIG.index_topk - 2
    whole = (batch.positions + 1) // size
    complete, ends = choices[:, :, 0, :count], choices[:, :, 0, count:]
    assert torch.equal((complete >= 0).sum(-1)[seen], whole.clamp(max=count)[seen])
    assert (complete < whole[..., None])[seen].all()
    assert torch.equal(ends[..., 0][seen], torch.where((batch.positions + 1) % size > 0, whole, -1)[seen])
    assert (ends[..., 1] == -1).all() and (choices[~seen] == -1).all()
    assert torch.equal(logits_of(choices=choices)[0], free)
    fewer = choices.where(choices != complete.amax(-1)[..., None, None], -1)
    assert off(logits_of(choices=fewer)[0][seen], free[seen]) > 1e-3, "another choice"
    assert off(logits_of(replace(CONFIG, indexer_budget=60))[0][seen], free[seen]) > 1e-3, (
        "the choice leaves nothing out"
    )


def test_a_choice_of_the_wrong_layer_is_found() -> None:
    """Two layers with indexers choose differently: a model whose second takes the first's choice has other logits."""
    own = glm5_next.Config.from_hf(TINY | {"indexer_types": ["full", "full", "full"]})
    params, batch = generic_params(own, torch.float64), batch_of(own, ROWS)
    inputs, masks, freqs = fnmodels.prepare(own, batch.tokens, positions=batch.positions, segment_ids=ROWS)
    how: dict[str, Any] = {"config": own, "kernel": "math"}
    free, tapped = fnmodels.forward(params, inputs, masks, freqs, **how, taps=("layers.*.choices",))
    choices = torch.stack([tapped["layers.1.choices"], tapped["layers.2.choices"]], 2)
    again = fnmodels.forward(params, inputs | {"choices": choices}, masks, freqs, **how)
    assert torch.equal(again, free)
    swapped = fnmodels.forward(params, inputs | {"choices": choices.flip(2)}, masks, freqs, **how)
    assert off(swapped[ROWS > 0], free[ROWS > 0]) > 1e-3


def test_gathered_blocks_equal_a_mask() -> None:
    """Logits and gradients of packed rows."""
    batch, leaves = batch_of(CONFIG, ROWS), trainable(PARAMS)
    found = []
    for kernel in ("math", "sparse", "sdpa"):
        logits = batch.forward(leaves, kernel=kernel)
        found.append((logits.detach(), gradients(logits[ROWS > 0].square().mean(), leaves)))
    assert off(found[1], found[0]) < 1e-10 and off(found[2], found[0]) < 1e-10


def difference(kernel: str = "math", pooled: Any = gated_pools._pooled) -> float:
    """How far steps on a cache, in chunks, are from one pass. pooled: what makes the keys of blocks in these steps."""
    row = batch_of(CONFIG, segments((26,)))
    whole = row.forward(PARAMS)
    cache, steps = fnmodels.init_cache(CONFIG, 1, 28, dtype=torch.float64, length=28), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_pools, "_pooled", pooled)
        for tokens in row.tokens.split([9, 1, 1, 15], dim=1):
            step = fnmodels.prepare_step(CONFIG, tokens, cache)
            logits, cache = fnmodels.decode(PARAMS, *step, cache, config=CONFIG, kernel=kernel)
            steps.append(logits)
    return off(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("kernel", ["math", "sparse", "auto"])
def test_steps_on_a_cache_choose_alike(kernel: str) -> None:
    assert difference(kernel) < 1e-10


def test_a_cache_without_the_gates_of_earlier_tokens_is_found() -> None:
    """A planted bug."""
    right = gated_pools._pooled

    def forgetful(k: Tensor, gates: Tensor, slots: Tensor, count: int) -> Tensor:
        return right(k, torch.cat((torch.zeros_like(gates[:, :9]), gates[:, 9:]), 1), slots, count)

    assert difference(pooled=forgetful) > 1e-3


@pytest.mark.parametrize("change", ["iterations", "rows_first", "transposed"])
def test_planted_bugs_of_mixed_streams_are_found(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration of Sinkhorn too few, columns before rows, and streams that are mixed the other way round."""
    reference, tokens = model_of(TINY), torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = reference(input_ids=tokens, use_cache=False).logits
    params = params_of(reference, CONFIG)
    right, connect = hyper.sinkhorn, hyper.connect

    def ours() -> Tensor:
        return fnmodels.forward(params, *fnmodels.prepare(CONFIG, tokens), config=CONFIG, kernel="math")

    assert_close(ours(), theirs)
    if change == "iterations":
        monkeypatch.setattr(hyper, "sinkhorn", lambda comb, n, eps: right(comb, n - 1, eps))
    elif change == "rows_first":
        monkeypatch.setattr(hyper, "sinkhorn", lambda comb, n, eps: right(comb.mT, n, eps).mT)
    else:
        swapped = lambda x, y, maps: connect(x, y, maps._replace(comb=maps.comb.mT))  # noqa: E731
        monkeypatch.setattr(hyper, "connect", swapped)
    with pytest.raises(AssertionError):
        assert_close(ours(), theirs)


def wrapped(folder: Path) -> Any:
    """A model with images, saved by transformers under published names."""
    vision = {"hidden_size": 16, "intermediate_size": 20, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"projection_intermediate_size": 24, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    values = {"text_config": TINY, "vision_config": vision}
    config = transformers.AutoConfig.for_model("glm5_next", **values)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(folder)
    return model


def test_published_names_are_those_of_transformers(tmp_path: Path) -> None:
    """The text of a model with images, with an MTP layer beside it, gives that model's logits."""
    model = wrapped(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "model.language_model.layers.0.hc_attn_fn" in tensors
    assert "model.language_model.layers.1.self_attn.indexer.index_kpool_compress_ape" in tensors
    mtp = {f"model.language_model.layers.3.{name}.weight": torch.ones(4) for name in ("eh_proj", "shared_head.norm")}
    save_file(tensors | mtp, path, {"format": "pt"})
    config, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(ours, model(input_ids=tokens, use_cache=False).logits)
    assert config.model_type == "glm5_next"
    P.save_pretrained(tmp_path / "again", config, params)
    assert off(P.load_pretrained(tmp_path / "again")[1], params) == 0
    stranger = {"model.language_model.layers.1.eh_proj.weight": torch.ones(4)}
    save_file(tensors | stranger, path, {"format": "pt"})
    with pytest.raises(P.MismatchError, match=r"layers\.1\.eh_proj\.weight' in .*: unexpected"):
        P.load_pretrained(tmp_path, part="text")


def test_leaves_begin_as_in_transformers() -> None:
    """Decays that have a bound begin at 1, those without are drawn; and hyper-connections begin alike."""
    fresh, theirs = P.init(CONFIG, 0)["layers"], model_of(TINY)
    theirs = transformers.AutoModelForCausalLM.from_config(theirs.config).model.layers[0]
    assert torch.equal(fresh[0]["attention"]["A_log"], theirs.self_attn.forget_gate.A_log)
    assert torch.equal(fresh[0]["attention_hyper"]["base"], theirs.attn_hc.base)
    assert torch.equal(fresh[0]["attention_hyper"]["scale"], theirs.attn_hc.scale)
    free = glm5_next.Config.from_hf(TINY | {"linear_lower_bound": None})
    assert (P.init(free, 0)["layers"][0]["attention"]["A_log"] > 0).all()


def test_the_published_file_is_the_preset() -> None:
    values = published()["glm_5_3_flash"]
    config = glm5_next.Config.from_hf(values)
    assert config == fnmodels.preset("glm-5.3-flash") and config.layer_kinds[3] == "indexed_moe"
    outer = {"model_type": "glm5_next", "tie_word_embeddings": False, "image_token_id": 154854}
    assert glm5_next.Config.from_hf(outer | {"text_config": values}) == config
    assert glm5_next.Config.from_hf(values | outer) == config, "a file whose text has no object of its own"


def test_sizes_of_delta_layers_stand_in_an_object_of_their_own() -> None:
    read, own = glm5_next.Config.from_hf, {"num_heads": 2, "head_dim": 10, "short_conv_kernel_size": 4}
    plain = {name: value for name, value in TINY.items() if not name.startswith("linear_")}
    assert read(plain | {"linear_attn_config": own | {"gate_lower_bound": -3.0}}) == CONFIG
    assert read(plain | {"linear_attn_config": own}).linear_lower_bound == -5.0
    assert read(plain | {"linear_attn_config": own | {"gate_lower_bound": None}}).linear_lower_bound == -5.0
    unbound = own | {"gate_lower_bound": None, "safe_gate": False}
    assert read(plain | {"linear_attn_config": unbound}).linear_lower_bound is None
    assert read(TINY | {"linear_lower_bound": None}).linear_lower_bound is None
    with pytest.raises(ConfigError, match="'head_dim' and 'linear_head_dim' disagree: 11, 10"):
        read(TINY | {"linear_attn_config": own | {"head_dim": 11}})
    with pytest.raises(UnsupportedError, match="linear_attn_config: 'kda_layers'"):
        read(TINY | {"linear_attn_config": own | {"kda_layers": [0, 1]}})


def test_what_is_not_read_is_refused() -> None:
    read = glm5_next.Config.from_hf
    for name, value in (("qk_rope_head_dim", 8), ("index_kpool_always_select_tail", False), ("mhc", False)):
        with pytest.raises(UnsupportedError, match=name):
            read(TINY | {name: value})
    with pytest.raises(UnsupportedError, match="'num_key_value_heads' must be 3"):
        read(TINY | {"num_key_value_heads": 1})
    for change, words in (
        ({"indexer_types": ["full", "shared", "full"]}, "Layer 1 takes the choice of keys of the layer before it"),
        ({"index_topk": 9}, "indexer_budget 9 is not a multiple of indexer_compress_ratio 2"),
        ({"hc_mult": 1}, "residual_streams is 1"),
        ({"swiglu_limit": 0.0}, "'swiglu_limit' is 0"),
        ({"q_lora_rank": 0}, "'q_lora_rank' is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(TINY | change)
    batch = batch_of(CONFIG, ROWS)
    assert train.next_token_loss(PARAMS, batch.batch(), config=CONFIG, kernel="math")[0].isfinite()
