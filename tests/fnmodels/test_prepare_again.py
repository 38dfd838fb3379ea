"""Losses share masks and tables between batches of rows of one short document: the results are those of `prepare`."""

import dataclasses
import functools
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import params as P
import train
from fnmodels import gemma, llama, tree
from fnmodels.errors import PositionWarning
from fnmodels.models.common.decoder import masks_and_tables
from fnmodels.preparation import prepare_again
from train import run_options
from train.losses import next_token

CONFIG = llama.Config(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
GEMMA = gemma.Config.from_hf(
    {
        "model_type": "gemma2",
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 3,
        "max_position_embeddings": 64,
    }
)
ONES = torch.ones(3, 6, dtype=torch.int64)
USUAL = {"positions": ONES.cumsum(1) - 1, "segment_ids": ONES}
PADDED = torch.cat((ONES[:, :5], 0 * ONES[:, :1]), 1)
OTHERS = {
    "padded": {"positions": USUAL["positions"], "segment_ids": PADDED},
    "packed": {"positions": USUAL["positions"] % 3, "segment_ids": 1 + USUAL["positions"] // 3},
    "from position 2": {"positions": USUAL["positions"] + 2, "segment_ids": ONES},
    "second documents": {"positions": USUAL["positions"], "segment_ids": 2 * ONES},
}


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 31, (3, 6), generator=torch.Generator().manual_seed(seed))


def mask_of(prepared: Any) -> Any:
    return next(iter(prepared[1].values()))


def assert_prepared(found: Any, config: Any, tokens: torch.Tensor, **rows: torch.Tensor) -> None:
    want = fnmodels.prepare(config, tokens, **rows)
    assert [part.keys() for part in found] == [part.keys() for part in want]
    for path, leaf in tree.flatten(want).items():
        assert torch.equal(tree.flatten(found)[path], leaf), path


@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=lambda config: config.model_type)
def test_two_batches_of_rows_of_one_document_share_masks_and_tables(config: Any) -> None:
    first = prepare_again(config, tokens_of(0), **USUAL)
    second = prepare_again(config, tokens_of(1), **{name: value.clone() for name, value in USUAL.items()})
    assert mask_of(first) is mask_of(second)
    assert_prepared(first, config, tokens_of(0), **USUAL)
    assert_prepared(second, config, tokens_of(1), **USUAL)


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_prepared_by_themselves(name: str) -> None:
    prepare_again(CONFIG, tokens_of(0), **USUAL)
    found = prepare_again(CONFIG, tokens_of(0), **OTHERS[name])
    assert mask_of(found) is not mask_of(prepare_again(CONFIG, tokens_of(0), **OTHERS[name]))
    assert_prepared(found, CONFIG, tokens_of(0), **OTHERS[name])


def test_what_was_written_to_is_not_shared_again() -> None:
    written = prepare_again(CONFIG, tokens_of(0), **USUAL)
    written[0]["valid"].as_strided((1,), (1,)).zero_()  # the memory of all of its elements
    assert_prepared(prepare_again(CONFIG, tokens_of(0), **USUAL), CONFIG, tokens_of(0), **USUAL)
    assert_prepared(prepare_again(CONFIG, tokens_of(0), **USUAL), CONFIG, tokens_of(0), **USUAL)


def test_dicts_are_the_callers_own() -> None:
    for part, kind in ((0, "valid"), (1, "full"), (2, "full")):
        prepare_again(CONFIG, tokens_of(0), **USUAL)[part].pop(kind)
    assert_prepared(prepare_again(CONFIG, tokens_of(0), **USUAL), CONFIG, tokens_of(0), **USUAL)


def test_a_table_that_learns_is_not_shared_again() -> None:
    prepare_again(CONFIG, tokens_of(0), **USUAL)[2]["full"].requires_grad_()
    for _ in range(2):
        assert not prepare_again(CONFIG, tokens_of(0), **USUAL)[2]["full"].requires_grad


@pytest.mark.parametrize("name", USUAL)
def test_other_dtypes_are_converted_or_refused_as_by_prepare(name: str) -> None:
    prepare_again(CONFIG, tokens_of(0), **USUAL)
    with pytest.raises(ValueError, match=f"{name}.*float32"):
        prepare_again(CONFIG, tokens_of(0), **USUAL | {name: USUAL[name].float()})
    narrow = USUAL | {name: USUAL[name].to(torch.int32)}
    assert_prepared(prepare_again(CONFIG, tokens_of(0), **narrow), CONFIG, tokens_of(0), **USUAL)


def test_large_batches_are_not_kept() -> None:
    def is_kept(rows: int) -> bool:
        ones = torch.ones(rows, 1024, dtype=torch.int64)
        config = dataclasses.replace(CONFIG, max_position_embeddings=1024)
        made = [
            prepare_again(config, 0 * ones, positions=ones.cumsum(1) - 1, segment_ids=ones.clone()) for _ in range(2)
        ]
        return mask_of(made[0]) is mask_of(made[1])

    assert is_kept(4) and not is_kept(5)


def test_a_patch_is_in_the_tables_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = prepare_again(CONFIG, tokens_of(0), **USUAL)[2]["full"]
    with monkeypatch.context() as patch:
        made = masks_and_tables.rotary_table
        patch.setattr(masks_and_tables, "rotary_table", lambda *args: 0.5 * made(*args))
        assert torch.equal(prepare_again(CONFIG, tokens_of(0), **USUAL)[2]["full"], 0.5 * before)
    assert torch.equal(prepare_again(CONFIG, tokens_of(0), **USUAL)[2]["full"], before)


def test_tensors_of_inference_mode_are_not_shared() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=37)  # of which nothing is kept yet
    with torch.inference_mode():
        inside = prepare_again(config, tokens_of(0), **USUAL)
    outside = prepare_again(config, tokens_of(0), **USUAL)
    assert mask_of(inside) is not mask_of(outside)
    assert not any(leaf.is_inference() for leaf in tree.leaves(outside))


def test_rows_beyond_the_range_of_positions_warn_in_every_call() -> None:
    config = dataclasses.replace(CONFIG, max_position_embeddings=4)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepare_again(config, tokens_of(0), **USUAL)
        assert [warning.category for warning in caught] == [PositionWarning]


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def steps_of(config: Any, count: int) -> Any:
    """(the loss of each step, the parameters after them)."""
    optimizer = train.adamw(1e-2)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer)
    state, losses = train.init_state(P.init(config, 0), optimizer), []
    for seed in range(count):
        tokens = tokens_of(seed)
        state, metrics = step(state, {"tokens": tokens, "labels": tokens.roll(-1, 1), **USUAL})
        losses.append(metrics["loss"])
    return losses, state.params


@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=lambda config: config.model_type)
def test_steps_have_the_bits_of_steps_that_prepare_each_batch(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_of(config, 3)
    monkeypatch.setattr(next_token, "prepare_again", fnmodels.prepare)
    monkeypatch.setattr(run_options, "_finds_layout", lambda masks: False)
    want = steps_of(config, 3)
    for path, leaf in tree.flatten(want).items():
        assert torch.equal(tree.flatten(found)[path], leaf), path


def test_a_later_step_makes_no_tables() -> None:
    steps_of(CONFIG, 1)
    names = _Names()
    with names:
        steps_of(CONFIG, 1)
    assert "aten.mm.default" in names.names and "aten.cos.default" not in names.names


def test_gradients_of_transforms_share_them_and_vmap_over_rows_does_not() -> None:
    weights, batch = P.init(CONFIG, 0), {"tokens": tokens_of(0), "labels": tokens_of(1), **USUAL}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = train.next_token_loss(params, batch, config=CONFIG, chunk=None)[0]
        return total

    whole = torch.func.grad(loss)(weights, batch)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, fnmodels.rows(batch))
    for path, leaf in tree.flatten(whole).items():
        torch.testing.assert_close(tree.flatten(each)[path].sum(0), leaf)
