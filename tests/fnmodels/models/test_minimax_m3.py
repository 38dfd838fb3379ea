"""MiniMax M3: its choices of blocks replayed and gathered, its published names, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import minimax_m3
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.ops.indexers import blocks
from tests.support.cases import batch_of, generic, generic_params, gradients, off, positions_of, segments, trainable
from tests.support.status import Shows
from tests.variants.minimax_m3 import TINY

CONFIG = minimax_m3.Config.from_hf(TINY)
PARAMS = generic_params(CONFIG, torch.float64)
ROWS = segments((-2, 7, 13), (19, 3), (2, 16, -4))
KINDS = CONFIG.layer_kinds


def logits_of(config: Any = CONFIG, kernel: str = "math", **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    batch = batch_of(CONFIG, ROWS)
    inputs, masks, freqs = fnmodels.prepare(config, batch.tokens, positions=batch.positions, segment_ids=ROWS)
    how: dict[str, Any] = {"config": config, "kernel": kernel, "taps": ("layers.*.choices",)}
    found: tuple[Tensor, dict[str, Tensor]] = fnmodels.forward(PARAMS, inputs | more, masks, freqs, **how)
    return found


def test_a_choice_is_replayed_and_names_blocks_of_the_document() -> None:
    free, tapped = logits_of()
    choices = torch.stack([tapped[f"layers.{i}.choices"] for i in (1, 2)], 2)
    size, count = CONFIG.index_block_size, CONFIG.index_topk_blocks
    own = torch.where(ROWS > 0, positions_of(ROWS) // size, -1)
    named = choices.unflatten(-1, (CONFIG.num_key_value_heads, count))
    assert torch.equal((named >= 0).sum(-1), (own + 1).clamp(max=count)[..., None, None].expand(named.shape[:-1]))
    assert (named <= own[..., None, None, None]).all()
    assert (named == own[..., None, None, None]).any(-1).all(), "its own block is always chosen"
    assert not torch.equal(named[..., 0, :].sort(-1).values, named[..., 1, :].sort(-1).values)
    assert torch.equal(logits_of(choices=choices)[0], free)
    seen = ROWS > 0
    assert off(logits_of(choices=choices.flip(2))[0][seen], free[seen]) > 1e-3, "a choice applied to the wrong layer"
    turned = named.flip(-2).flatten(-2)
    assert off(logits_of(choices=turned)[0][seen], free[seen]) > 1e-3, "a choice applied to the wrong heads"
    every = replace(CONFIG, index_topk_blocks=64)
    assert off(logits_of(every)[0][seen], free[seen]) > 1e-3, "the choice leaves nothing out"


def test_gathered_blocks_equal_a_mask() -> None:
    """Logits and gradients of packed rows."""
    batch, leaves = batch_of(CONFIG, ROWS), trainable(PARAMS)
    found = []
    for kernel in ("math", "sparse", "sdpa"):
        logits = batch.forward(leaves, kernel=kernel)
        found.append((logits.detach(), gradients(logits[ROWS > 0].square().mean(), leaves)))
    assert off(found[1], found[0]) < 1e-10 and off(found[2], found[0]) < 1e-10


def test_steps_on_a_cache_choose_alike() -> None:
    """In chunks and by every kernel; index keys of the cache that are not rotated are found."""
    row = batch_of(CONFIG, segments((22,)))
    whole = row.forward(PARAMS)

    def difference(kernel: str) -> float:
        cache, steps = fnmodels.init_cache(CONFIG, 1, 24, dtype=torch.float64, length=24), []
        for tokens in row.tokens.split([9, 1, 1, 11], dim=1):
            step = fnmodels.prepare_step(CONFIG, tokens, cache)
            logits, cache = fnmodels.decode(PARAMS, *step, cache, config=CONFIG, kernel=kernel)
            steps.append(logits)
        return off(torch.cat(steps, 1), whole)

    assert difference("math") < 1e-10 and difference("sparse") < 1e-10
    with pytest.MonkeyPatch.context() as patch:
        right = blocks.index_keys
        still = {"rotate": lambda x, _: x}
        patch.setattr(blocks, "index_keys", lambda w, x, f, how: right(w, x, f, replace(how, **still)))
        assert difference("math") > 1e-3


def test_published_names_are_those_of_transformers(tmp_path: Path, shows: Shows) -> None:
    """A model with images, saved by transformers: its text is read, and gives the text model's logits."""
    shows("minimax_m3_vl", "parity")
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"text_config": TINY, "vision_config": vision, "projector_hidden_size": 12, "image_token_index": 9}
    config = transformers.AutoConfig.for_model("minimax_m3_vl", **values, video_token_index=8)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
    assert off(ours, theirs) < 2e-5 and config.model_type == "minimax_m3_vl"
    P.save_pretrained(tmp_path / "again", config, params)
    saved = P.load_pretrained(tmp_path / "again")[1]
    assert off(saved, params) == 0


def test_published_fields_are_read_and_others_refused() -> None:
    text = {name: value for name, value in TINY.items() if name not in ("layer_types", "mlp_layer_types")}
    text = {name: value for name, value in text.items() if not name.startswith("index_")} | {"hidden_act": "swigluoai"}
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 10, "sparse_block_size": 3, "sparse_topk_blocks": 3}
    sparse |= {"sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1]}
    old = text | {"moe_layer_freq": [0, 1, 0], "sparse_attention_config": sparse}
    read = minimax_m3.Config.from_hf
    assert read(old) == CONFIG
    for change, words in (
        ({"sparse_score_type": "mean"}, "'sparse_score_type' is .mean."),
        ({"sparse_init_block": 1}, "'sparse_init_block' is 1"),
        ({"sparse_disable_index_value": [0, 0, 1]}, "'sparse_disable_index_value' is"),
        ({"sparse_num_index_heads": 1}, "'index_n_heads' is 1"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            read(old | {"sparse_attention_config": sparse | change})
    with pytest.raises(ConfigError, match="'sparse_block_size' and 'index_block_size' disagree"):
        read(old | {"index_block_size": 4})
    with pytest.raises(ConfigError, match=r"'moe_layer_freq' is .*, but must be a list of 0 and 1"):
        read(old | {"moe_layer_freq": [0, 1, 2]})
    with pytest.raises(ConfigError, match="'layer_types' names 2 layers, and there are 3"):
        read(TINY | {"layer_types": TINY["layer_types"][:2]})
    with pytest.raises(ConfigError, match="index_local_blocks 4 is above index_topk_blocks"):
        read(TINY | {"index_local_blocks": 4})


@pytest.mark.parametrize("kernel", ["blocks", "invariant"])
def test_kernels_that_read_rules_are_refused(kernel: str) -> None:
    batch = batch_of(CONFIG, ROWS)
    layout = fnmodels.layout(batch.prepared()[1])
    with pytest.raises(ValueError, match='kernel="math"'):
        batch.forward(PARAMS, kernel=kernel, **({"layout": layout} if kernel == "blocks" else {}))
