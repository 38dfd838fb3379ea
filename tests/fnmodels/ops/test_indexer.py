"""The indexer against loops: scores, which keys are the best, ties, and names of keys turned into masks."""

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.mask import Mask
from fnmodels.ops import indexer
from fnmodels.ops.indexer import Indexer, Keys, all_visible, choose, chosen, index_keys, keys_of
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from tests.support.cases import generic, positions_of, segments

D, RANK, HEADS, WIDTH, R = 10, 6, 4, 8, 4
IDS = segments((-2, 7, 3), (5, 6, -1))
HOW = Indexer(3, apply_rotary)
SHAPES = {"q_b_proj": (HEADS * WIDTH, RANK), "k_proj": (WIDTH, D), "weights_proj": (HEADS, D)}
WEIGHTS = {name: generic(name, torch.empty(shape)).double() for name, shape in SHAPES.items()}
WEIGHTS |= {name: generic(name, torch.empty(WIDTH)).double() for name in ("k_norm", "k_norm_bias")}


def mask_of(ids: Tensor) -> Mask:
    mask: Mask = fnmodels.inputs.build_mask(fnmodels.inputs.Causal(), positions_of(ids), ids)
    return mask


def drawn(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x, the queries' latents, the rotary table) of a batch."""
    x, latent = (generic(name, torch.empty(*ids.shape, n)).double() for name, n in (("x", D), ("latent", RANK)))
    return x, latent, rotary_table(Rope(50.0), R, positions_of(ids))


def scores_by_loops(x: Tensor, latent: Tensor, table: Tensor) -> Tensor:
    """[B, S, S]: sum over heads of w relu(q . k / sqrt d), pair by pair."""
    keys = index_keys(WEIGHTS, x, table, HOW)
    found = torch.zeros(*x.shape[:2], x.shape[1], dtype=x.dtype)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            q = (WEIGHTS["q_b_proj"] @ latent[b, t]).view(1, 1, HEADS, WIDTH)
            q = apply_rotary(q, table[b, t][None, None])[0, 0]
            share = WEIGHTS["weights_proj"] @ x[b, t] / HEADS**0.5
            for u in range(x.shape[1]):
                found[b, t, u] = sum(share[h] * max(0.0, float(q[h] @ keys[b, u])) / WIDTH**0.5 for h in range(HEADS))
    return found


@pytest.mark.parametrize("most", [1 << 26, 1])
def test_the_best_keys(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of one query."""
    monkeypatch.setattr(indexer, "_MOST", most)
    x, latent, table = drawn(IDS)
    keys, places = keys_of(mask_of(IDS)), positions_of(IDS)
    got = choose(WEIGHTS, x, latent, index_keys(WEIGHTS, x, table, HOW), table, keys, HOW)
    scores = scores_by_loops(x, latent, table)
    for b, row in enumerate(IDS.tolist()):
        for t, document in enumerate(row):
            seen = [u for u in range(t + 1) if document and row[u] == document]
            best = sorted(seen, key=lambda u: float(scores[b, t, u]), reverse=True)[:3]
            assert got[b, t].tolist() == [int(places[b, u]) for u in best] + [-1] * (3 - len(best))


def test_the_key_is_normalized_and_rotates_in_part() -> None:
    x, _, table = drawn(IDS)
    k = torch.nn.functional.layer_norm(
        x @ WEIGHTS["k_proj"].T, (WIDTH,), WEIGHTS["k_norm"], WEIGHTS["k_norm_bias"], eps=1e-6
    )
    got = index_keys(WEIGHTS, x, table, HOW)
    assert torch.allclose(got[..., R:], k[..., R:], atol=1e-12)
    assert torch.allclose(got[..., :R], apply_rotary(k[:, :, None, :R], table).squeeze(2), atol=1e-12)
    assert not torch.allclose(got[..., :R], k[..., :R], atol=1e-3)


def test_equal_scores_are_ranked_by_position() -> None:
    """In any order of the keys in the row: the latest first."""
    x, latent, table = drawn(IDS)
    order = torch.randperm(IDS.shape[1], generator=torch.Generator().manual_seed(0))
    none = WEIGHTS | {"weights_proj": torch.zeros(HEADS, D).double()}
    found = []
    for at in (torch.arange(IDS.shape[1]), order):
        k = index_keys(none, x[:, at], table[:, at], HOW)
        found.append(choose(none, x[:, at], latent[:, at], k, table[:, at], keys_of(mask_of(IDS).select(at, at)), HOW))
    assert found[0][0, 6].tolist() == [4, 3, 2] and found[0][1, 5].tolist() == [0, -1, -1]
    assert torch.equal(found[1], found[0][:, order])


def test_names_become_a_mask() -> None:
    """Each key by its position in the query's document; -1, other documents, invisible and unknown keys: none."""
    mask = mask_of(IDS)
    keys, places = keys_of(mask), positions_of(IDS)
    drawn_names = torch.randint(-1, 9, (*IDS.shape, 4), generator=torch.Generator().manual_seed(0))
    drawn_names[0, 5, 0] = 10**6
    got, dense = chosen(keys, drawn_names), mask.dense()
    assert got.shape == (2, 1, *[IDS.shape[1]] * 2)
    for b in range(2):
        for t in range(IDS.shape[1]):
            for u in range(IDS.shape[1]):
                named = int(places[b, u]) in drawn_names[b, t].tolist()
                assert bool(got[b, 0, t, u]) == (named and bool(dense[b, 0, t, u]))
    everything = all_visible(keys)
    assert torch.equal(chosen(keys, everything), dense)


def test_masks_without_positions_name_keys_by_index() -> None:
    dense = mask_of(IDS).dense()
    keys = keys_of(dense)
    names = torch.tensor([5, 2, -1]).expand(*IDS.shape, 3)
    wanted = torch.zeros(IDS.shape[1], dtype=torch.bool).index_fill(0, torch.tensor([2, 5]), True)
    assert torch.equal(chosen(keys, names), dense & wanted)
    per_head = torch.cat((dense, dense.tril(-1)), dim=1)
    assert torch.equal(keys_of(per_head).allowed(), dense[:, 0])
    assert torch.equal(chosen(keys_of(per_head), names), per_head & wanted)
    assert isinstance(keys, Keys)
