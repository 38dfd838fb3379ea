"""kernel="flex" on a choice of keys: its BlockMask against torch's own of a dense mask, its memory, its results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from fnmodels.inputs import Causal, Everything, to_dense
from fnmodels.inputs.mask import build_mask
from fnmodels.inputs.segments import positions_from_segments, segments_from_lengths
from fnmodels.ops.attention import choice_tiles, flex
from fnmodels.ops.attention.choice import Choice, named_once
from fnmodels.ops.attention.choice_tiles import choice_block_mask
from fnmodels.ops.attention.select import attention
from fnmodels.ops.indexer import chosen, chosen_places, keys_of
from fnmodels.ops.indexers.blocks import places_in_blocks

HEADS = 4


def drawn(rows: int, queries: int, keys: int, count: int, groups: int = 1) -> Choice:
    """Keys that are drawn one by one, the last of each word among them; entries are hidden, and a query has no key."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(rows * groups, queries, count, generator=generator) < 0.8
    seen[0, 3] = False
    index = torch.randint(0, keys, seen.shape, generator=generator)
    index[:, :, 0] = min(31, keys - 1)
    found = named_once(index, seen, keys)
    return Choice(found.index, found.seen, keys, groups)


def of_documents(keys: int) -> Choice:
    """Keys by name in packed rows with padding; a name that a document does not have is of no key."""
    segments = segments_from_lengths([[300, 3, 140], [keys]], keys)
    segments[1, 250:420] = -1
    mask = build_mask(Causal(), positions_from_segments(segments), segments)
    names = torch.randint(0, keys, (2, keys, 40), generator=torch.Generator().manual_seed(0))
    choice = chosen_places(keys_of(mask), names)
    assert choice.dense().equal(chosen(keys_of(mask), names)) and choice.seen.any()
    return choice


def of_blocks(keys: int, groups: int) -> Choice:
    """Two blocks of 128 keys for each head of keys, the same for neighbouring queries: some tiles are full."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-keys // 128)
    names = torch.rand(2, 3, groups, blocks, generator=generator).topk(2, -1).indices.flatten(2)
    names = names.repeat_interleave(128, dim=1)[:, :300]
    positions, ids = torch.arange(keys)[None], torch.ones(1, keys, dtype=torch.int64)
    mask = build_mask(Everything(), positions, ids).select(slice(0, 300), slice(None))
    return places_in_blocks(keys_of(mask), names, groups, 128)


CHOICES: dict[str, Callable[[], Choice]] = {
    "keys": lambda: drawn(2, 300, 700, 90),
    "keys of heads": lambda: drawn(2, 129, 260, 5, groups=2),
    "one row, one tile": lambda: drawn(1, 5, 32, 7),
    "documents": lambda: of_documents(700),
    "blocks": lambda: of_blocks(640, 1),
    "blocks of heads": lambda: of_blocks(640, 2),
    "none": lambda: Choice(torch.zeros(1, 4, 2, dtype=torch.int64), torch.zeros(1, 4, 2, dtype=torch.bool), 9),
}
every_choice = pytest.mark.parametrize("name", CHOICES)


def by_head(choice: Choice) -> Tensor:
    dense = choice.dense()
    return dense if choice.groups == 1 else dense.repeat_interleave(HEADS // choice.groups, dim=1)


def check_tiles(choice: Choice) -> None:
    """That the BlockMask is that of torch, which reads the dense mask, tile by tile and in every query and key."""
    dense, made = by_head(choice), choice_block_mask(choice, HEADS)
    created = torch_flex.create_block_mask(lambda b, h, q, k: dense[b, h, q, k], *dense.shape, device="cpu")
    for got, want in zip(made.as_tuple(), created.as_tuple(), strict=True):
        assert got.equal(want) if isinstance(got, Tensor) else callable(got) or got == want
    assert to_dense(made).equal(dense)


@every_choice
def test_block_mask_of_a_choice_is_that_of_its_dense_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at once and in pieces of one tile of queries."""
    choice = CHOICES[name]()
    check_tiles(choice)
    monkeypatch.setattr(choice_tiles, "_ENTRIES", 1)
    check_tiles(choice)


def test_blocks_that_neighbours_choose_are_full_tiles() -> None:
    """Their predicate is not read."""
    made = choice_block_mask(of_blocks(640, 2), HEADS)
    assert (made.full_kv_num_blocks[:, :, :2] == 2).all() and not made.kv_num_blocks[:, :, :2].any()


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that operations return."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple) else (out,):
            if isinstance(one, Tensor):
                self.size = max(self.size, one.untyped_storage().nbytes())
        return out


def test_block_mask_of_a_choice_takes_a_bit_of_memory_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is larger than the words, an eighth of the dense mask, which the dense mask of course is."""
    monkeypatch.setattr(choice_tiles, "_ENTRIES", 128 * 8)
    queries, keys = 1024, 4096
    choice = drawn(1, queries, keys, 8)
    with _Largest() as largest:
        choice_block_mask(choice, HEADS)
    assert largest.size == queries * keys // 8
    with _Largest() as largest:
        choice.dense()
    assert largest.size >= queries * keys


def test_choice_of_no_keys_is_refused() -> None:
    empty = Choice(torch.zeros(1, 3, 0, dtype=torch.int64), torch.zeros(1, 3, 0, dtype=torch.bool), 0)
    with pytest.raises(ValueError, match="a query and a key at least, this choice has 3 and 0"):
        choice_block_mask(empty, HEADS)


def inputs_of(choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, groups, queries, keys = choice.shape
    sizes = ((queries, HEADS, 16), (keys, max(groups, 2), 16), (keys, max(groups, 2), 24))
    q, k, v = (torch.randn(rows, *size, generator=generator) for size in sizes)
    return q, k, v


def eager(patch: pytest.MonkeyPatch) -> None:
    """FlexAttention as it is without a compiler, which reads the predicate of every query and key."""
    patch.setattr(flex, "_compiled", lambda: dict.fromkeys((None, False), torch_flex.flex_attention))


@pytest.mark.slow
@every_choice
def test_flex_on_a_choice_equals_math_on_its_dense_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = CHOICES[name]()
    eager(monkeypatch)
    monkeypatch.setattr(Choice, "dense", None)  # which must not be made
    q, k, v = inputs_of(choice)
    with torch.no_grad():
        out = attention(q, k, v, choice, kernel="flex", scale=0.25, softcap=2.0)
    monkeypatch.undo()
    want = attention(q, k, v, choice, kernel="math", scale=0.25, softcap=2.0)
    assert out.dtype == q.dtype and (out - want).abs().max() < 1e-5
    assert not out[~choice.seen.unflatten(0, (-1, choice.groups)).any(-1).any(1)].any()


def test_gradients_of_flex_on_a_choice_equal_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """By FlexAttention's maths without a compiler, whose check against gradients on a CPU is left out here."""
    choice = drawn(2, 129, 260, 5, groups=2)
    inputs = tuple(t.double().requires_grad_() for t in inputs_of(choice))
    want = torch.autograd.grad(attention(*inputs, choice, kernel="math", scale=0.25).sin().sum(), inputs)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *given: None)
    q, k, v = (t.transpose(1, 2) for t in inputs)
    out = torch_flex.flex_attention(q, k, v, block_mask=choice_block_mask(choice, HEADS), scale=0.25, enable_gqa=True)
    assert isinstance(out, Tensor)
    for got, wanted in zip(torch.autograd.grad(out.sin().sum(), inputs), want, strict=True):
        assert (got - wanted).abs().max() < 1e-12


def compiled_error(choice: Choice) -> float:
    q, k, v = inputs_of(choice)
    with torch.no_grad():
        out = attention(q, k, v, choice, kernel="flex", scale=0.25)
    return float((out - attention(q, k, v, choice, kernel="math", scale=0.25)).abs().max())


def _tile_left_out(patch: pytest.MonkeyPatch) -> None:
    right = choice_tiles._tiles_of

    def tiles(words: Tensor) -> tuple[Tensor, Tensor]:
        touched, full = right(words)
        touched[0, 0, 1] = full[0, 0, 1] = False
        return touched, full

    patch.setattr(choice_tiles, "_tiles_of", tiles)


def _last_bit_lost(patch: pytest.MonkeyPatch) -> None:
    right = choice_tiles._looked_up
    patch.setattr(choice_tiles, "_looked_up", lambda words, repeats: right(words & 0x7FFFFFFF, repeats))


def _heads_mixed(patch: pytest.MonkeyPatch) -> None:
    right = choice_tiles._looked_up
    patch.setattr(choice_tiles, "_looked_up", lambda words, repeats: right(words.flip(1), repeats))


@pytest.mark.parametrize("plant", [_tile_left_out, _last_bit_lost, _heads_mixed])
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    choice = drawn(2, 129, 260, 5, groups=2)
    check_tiles(choice)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_tiles(choice)


@pytest.mark.slow
def test_compiled_flex_on_a_choice_reads_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel of the CPU equals math, and with a tile left out it does not."""
    choice = CHOICES["blocks of heads"]()
    torch.compiler.reset()
    assert compiled_error(choice) < 1e-5
    _tile_left_out(monkeypatch)
    assert compiled_error(choice) > 1e-3


def test_compiled_graph_reads_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, without a dense mask."""
    choice = drawn(2, 129, 260, 5, groups=2)
    q, k, v = inputs_of(choice)
    want = attention(q, k, v, choice, kernel="math", scale=0.25)
    monkeypatch.setattr(Choice, "dense", None)

    def attended(q: Tensor, k: Tensor, v: Tensor, index: Tensor, seen: Tensor) -> Tensor:
        return attention(q, k, v, Choice(index, seen, choice.keys, choice.groups), kernel="flex", scale=0.25)

    torch.compiler.reset()
    with torch.no_grad():
        run = torch.compile(attended, fullgraph=True, backend="aot_eager")
        out = run(q, k, v, choice.index, choice.seen)
    assert (out - want).abs().max() < 1e-5
