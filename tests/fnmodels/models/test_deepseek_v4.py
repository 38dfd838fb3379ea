"""DeepSeek V4: its choices of windows, streams under taps and edits, caches with several documents, and its files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import deepseek_v4
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from fnmodels.inputs import windows
from fnmodels.models.common import mtp
from tests.support.cases import batch_of, generic_params, off, positions_of, segments
from tests.variants.deepseek_v4 import TINY

CONFIG = deepseek_v4.Config.from_hf(TINY)
PARAMS = generic_params(CONFIG, torch.float64)
ROWS = segments((-2, 7, 13), (19, 3), (2, 16, -4))


def logits_of(ids: Tensor, config: Any = CONFIG, **more: Any) -> Tensor:
    batch = batch_of(CONFIG, ids)
    inputs, masks, freqs = fnmodels.prepare(config, batch.tokens, positions=batch.positions, segment_ids=ids)
    found: Tensor = fnmodels.forward(PARAMS, inputs | more, masks, freqs, config=config, kernel="math")
    return found


def test_a_choice_is_replayed_and_names_windows_of_the_document() -> None:
    """By the position of a window's last token, whatever stands around the document."""
    batch = batch_of(CONFIG, ROWS)
    inputs, masks, freqs = batch.prepared()
    how: dict[str, Any] = {"config": CONFIG, "kernel": "math"}
    free, tapped = fnmodels.forward(PARAMS, inputs, masks, freqs, taps=("layers.*.choices",), **how)
    choices = torch.stack([tapped[f"layers.{i}.choices"] for i in (1, 3)], 2)
    ratio, places = CONFIG.indexed_ratio, positions_of(ROWS)
    ended = torch.where(ROWS > 0, (places + 1) // ratio, 0)
    assert torch.equal((choices >= 0).sum(-1), ended.clamp(max=CONFIG.index_topk)[..., None].expand(*ROWS.shape, 2))
    assert ((choices < 0) | (choices % ratio == ratio - 1)).all() and (choices <= places[..., None, None]).all()
    assert torch.equal(fnmodels.forward(PARAMS, inputs | {"choices": choices}, masks, freqs, **how), free)
    other = fnmodels.forward(PARAMS, inputs | {"choices": choices.flip(2)}, masks, freqs, **how)
    assert off(other[ROWS > 0], free[ROWS > 0]) > 1e-3, "a choice applied to the wrong layer"
    every = replace(CONFIG, index_topk=64)
    assert off(logits_of(ROWS, every)[ROWS > 0], free[ROWS > 0]) > 1e-3, "the choice leaves nothing out"


def test_windows_across_documents_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: windows are counted along the row, and a packed document then differs from it alone."""

    def difference() -> float:
        batch = batch_of(CONFIG, ROWS)
        packed, at = batch.forward(PARAMS)[0], ROWS[0] == 2
        alone = fnmodels.prepare(CONFIG, batch.tokens[:1, at])
        return off(fnmodels.forward(PARAMS, *alone, config=CONFIG)[0], packed[at])

    assert difference() < 1e-12
    slots = windows.window_slots

    def along_the_row(positions: Tensor, segments: Tensor, ratio: int) -> Tensor:
        index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return slots(index, torch.ones_like(index), ratio)

    monkeypatch.setattr(windows, "window_slots", along_the_row)
    assert difference() > 1e-3


@pytest.mark.parametrize("inplace", [False, True])
def test_pieces_of_packed_rows_equal_the_rows(inplace: bool) -> None:
    """With two documents in a row, the second of which goes on, in pieces that end inside windows."""
    batch = batch_of(CONFIG, ROWS)
    whole = batch.forward(PARAMS)
    cache, found = fnmodels.init_cache(CONFIG, 3, 22, dtype=torch.float64, rings=False), []
    parts = zip(*(t.split((11, 1, 10), 1) for t in (batch.tokens, batch.positions, ROWS)), strict=True)
    for tokens, positions, ids in parts:
        step = fnmodels.prepare_step(CONFIG, tokens, cache, positions=positions, segment_ids=ids)
        run = fnmodels.decode_ if inplace else fnmodels.decode
        logits, cache = run(PARAMS, *step, cache, config=CONFIG)
        found.append(logits)
    assert off(torch.cat(found, 1)[ROWS > 0], whole[ROWS > 0]) < 1e-12


def test_a_cache_is_resized_with_its_windows() -> None:
    tokens = batch_of(CONFIG, segments((14,), (14,))).tokens
    caches = [fnmodels.init_cache(CONFIG, 2, size, dtype=torch.float64, length=20) for size in (14, 20)]
    after = [
        fnmodels.decode(PARAMS, *fnmodels.prepare_step(CONFIG, tokens[:, :9], c), c, config=CONFIG)[1] for c in caches
    ]
    for cache in (fnmodels.resize(after[0], 20), fnmodels.insert(after[1], [0, 1], after[0])):
        step = fnmodels.prepare_step(CONFIG, tokens[:, 9:], cache)
        got, _ = fnmodels.decode(PARAMS, *step, cache, config=CONFIG)
        step = fnmodels.prepare_step(CONFIG, tokens[:, 9:], after[1])
        assert off(got, fnmodels.decode(PARAMS, *step, after[1], config=CONFIG)[0]) < 1e-12
    with pytest.raises(ValueError, match="cannot go back"):
        fnmodels.truncate(after[0], 4)
    with pytest.raises(ValueError, match="more windows of tokens than 2 tokens have"):
        fnmodels.resize(after[0], 2)


def test_the_mean_of_streams_is_what_a_layer_returns() -> None:
    taps = ("layers.*.output", "layers.*.streams", "layers.*.input", "hidden")
    _, found = batch_of(CONFIG, ROWS).forward(PARAMS, taps=taps)
    for index in range(4):
        streams = found[f"layers.{index}.streams"]
        assert streams.shape == (*ROWS.shape, CONFIG.residual_streams, CONFIG.hidden_size)
        if index < 3:
            assert torch.equal(streams.mean(-2), found[f"layers.{index}.output"])
            assert torch.equal(found[f"layers.{index}.output"], found[f"layers.{index + 1}.input"])
    assert torch.equal(found["layers.3.output"], found["hidden"])
    batch = batch_of(CONFIG, ROWS)
    plain = batch.forward(PARAMS)
    for tap in ("layers.1.output", "layers.1.streams", "layers.2.input", "layers.2.middle"):
        moved = batch.forward(PARAMS, edits={tap: lambda value, where: 1.5 * value})
        assert off(moved[ROWS > 0], plain[ROWS > 0]) > 1e-3, tap


def test_the_batch_invariant_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch-invariant form"):
        batch_of(CONFIG, ROWS).forward(PARAMS, kernel="invariant")


def test_experts_by_token_id_need_ids() -> None:
    inputs, masks, freqs = batch_of(CONFIG, ROWS).prepared()
    vectors = {**inputs, "tokens": PARAMS["embed_tokens"][inputs["tokens"]]}
    assert torch.equal(
        fnmodels.forward(PARAMS, vectors, masks, freqs, config=CONFIG),
        fnmodels.forward(PARAMS, inputs, masks, freqs, config=CONFIG),
    )
    del vectors["token_ids"]
    with pytest.raises(ValueError, match="add int64 ids"):
        fnmodels.forward(PARAMS, vectors, masks, freqs, config=CONFIG)


@pytest.mark.parametrize("number", [-1, CONFIG.n_routed_experts, 2**40])
def test_experts_that_do_not_exist_are_refused(number: int, tmp_path: Path) -> None:
    """In the table of experts by token id, which a file holds and no head of a file shows."""
    tensors = {name: value.clone() for name, value in P.export(CONFIG, PARAMS)}
    P.from_tensors(CONFIG, tensors.items())
    P.save_pretrained(tmp_path, CONFIG, PARAMS)
    P.load_pretrained(tmp_path)
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = number
    save_file(tensors, tmp_path / "model.safetensors")
    said = f"layers.0.mlp.tid2eid, layers.0.ffn.gate.tid2eid: holds {number}, which is no whole number from 0 to 5"
    with pytest.raises(MismatchError, match=said):
        P.from_tensors(CONFIG, tensors.items())
    for copy in (False, True):
        with pytest.raises(MismatchError, match=said):
            P.load_pretrained(tmp_path, copy=copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o_groups": 3}, "o_groups 3 does not divide"),
        ({"index_head_dim": 4}, "index_head_dim 4 is below the 6 dimensions"),
        ({"layer_types": ["full_attention"] * 4}, "'layer_types' is "),
        ({"layer_types": None, "compress_ratios": [0, 4, 7, 4]}, "must be a list of 0, 4 or 128 for each of 4 layers"),
        ({"rope_parameters": {"main": {}, "other": {}}}, "has other beside main and compress"),
    ],
)
def test_what_no_model_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepseek_v4.Config.from_hf(TINY | changes)


def test_mtp_heads_slide() -> None:
    """As the published lists say with a 0 after the layers, also of a model without sliding layers of its own."""
    ratios = {"layer_types": None, "compress_rates": None, "num_nextn_predict_layers": 1}
    config = deepseek_v4.Config.from_hf(TINY | ratios | {"compress_ratios": [128, 4, 128, 4, 0]})
    assert config.num_nextn_predict_layers == 1 and not any("sliding" in kind for kind in config.layer_kinds)
    masks = deepseek_v4.attention_masks(config, torch.arange(8)[None], torch.ones(1, 8, dtype=torch.long))
    assert masks.keys() == {*deepseek_v4.kinds(config), *mtp.kinds_of(config)}
    with pytest.raises(UnsupportedError, match=r"'compress_ratios' has \[4\] for MTP heads"):
        deepseek_v4.Config.from_hf(TINY | ratios | {"compress_ratios": [0, 4, 128, 4, 4]})
    without = TINY | ratios | {"num_nextn_predict_layers": 0}
    assert deepseek_v4.Config.from_hf(without | {"compress_ratios": [0, 4, 128, 4, 4]}).num_nextn_predict_layers == 0
    assert replace(CONFIG, num_nextn_predict_layers=2) == deepseek_v4.Config.from_hf(
        replace(CONFIG, num_nextn_predict_layers=2).to_hf()
    )
