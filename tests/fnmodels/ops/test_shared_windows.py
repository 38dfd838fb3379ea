"""Keys of windows that layers share, against loops over each document: full, reindex and reuse layers, packed rows."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.convert import to_dense
from fnmodels.inputs.mask import build_mask
from fnmodels.inputs.rules import Causal, Window
from fnmodels.inputs.windows import Windows, build_windows, window_slots
from fnmodels.models.common.context import Context
from fnmodels.models.common.deepseek_v4.attention import rotate
from fnmodels.models.common.deepseek_v4.windows import Compressor, keys_and_beside
from fnmodels.ops import Rope, rotary_table
from fnmodels.ops import indexer as ops
from fnmodels.ops.attention.select import attention
from fnmodels.ops.indexer import Indexer, Keys
from fnmodels.ops.indexers import shared_windows
from fnmodels.ops.indexers.blocks import chosen_blocks
from fnmodels.ops.indexers.candidates import candidates
from fnmodels.ops.indexers.shared_windows import Blocks, SharedKeys, choose_shared, index_of
from fnmodels.ops.indexers.tokens_and_windows import TokensAndWindows, windows_of
from fnmodels.options import ForwardOptions
from tests.support.cases import generic, positions_of, segments
from tests.support.largest import Largest

D, H, WIDTH, HEADS, RANK, NEAR, EPS = 10, 8, 6, 32, 7, 3, 1e-3
ROPE, COUNT = Rope(theta=30.0, partial=0.5), 2
LENGTHS = (15, 6, 1, 16)
IDS = segments(LENGTHS)
Weights = dict[str, Tensor]


def drawn(ratio: int) -> tuple[list[Weights], list[Tensor]]:
    """Weights and inputs of three layers: full, reindex and reuse."""
    shapes = {
        "kv_proj": (H, D),
        "gate_proj": (H, D),
        "key_scale": (H,),
        "k_proj": (WIDTH, H),
        "k_scale": (WIDTH,),
    }
    shapes = shapes if ratio > 1 else {name: shape for name, shape in shapes.items() if name != "gate_proj"}
    of_queries = {"q_b_proj": (HEADS * WIDTH, RANK), "weights_proj": (HEADS, D), "q_a": (RANK, D), "q": (H, D)}
    layers = []
    for layer, names in enumerate((shapes | of_queries, of_queries, {"q": (H, D)})):
        made = {n: generic(f"{layer}{n}", torch.empty(shape)).double().requires_grad_() for n, shape in names.items()}
        layers.append(made)
    xs = [generic(f"x{i}", torch.empty(1, IDS.shape[1], D)).double().requires_grad_() for i in range(3)]
    return layers, xs


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return scale * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def turned(x: Tensor, position: int) -> Tensor:
    """x [..., d] rotated for one position, by pairs of its last dimensions."""
    table = rotary_table(ROPE, H, torch.tensor([[position]]))
    return rotate(x.reshape(1, 1, -1, x.shape[-1]), table).reshape(x.shape)


def by_loops(layers: list[Weights], xs: list[Tensor], ratio: int, blocks: Blocks | None) -> list[Tensor]:
    """What each layer of one document reads, [S, H]: its last tokens and chosen windows, which are values too."""
    full, n = layers[0], xs[0].shape[0]
    keys, index = [], []
    for c in range(n // ratio):
        tokens = xs[0][c * ratio : (c + 1) * ratio]
        gates = F.linear(tokens, full["gate_proj"]) if ratio > 1 else torch.zeros(1, H, dtype=torch.float64)
        key = norm((F.linear(tokens, full["kv_proj"]) * gates.softmax(0)).sum(0), full["key_scale"])
        keys.append(turned(key, c * ratio))
        index.append(turned(norm(F.linear(key, full["k_proj"]), full["k_scale"]), c * ratio))
    picked: list[list[int]] = []
    kept: list[set[int]] | None = None
    outputs = []
    for layer, (own, x) in enumerate(zip(layers, xs, strict=True)):
        near = [turned(F.linear(x[t], own["q"]), t) for t in range(n)]
        if layer < 2:
            scores = [scores_of(own, x[t], index, t) for t in range(n)]
            seen = [[c for c in range((t + 1) // ratio) if kept is None or c in kept[t]] for t in range(n)]
            picked = [sorted(s, key=lambda c, t=t: -float(scores[t][c]))[:COUNT] for t, s in enumerate(seen)]
            if blocks is not None and layer == 0:
                kept = [best_blocks(scores[t], (t + 1) // ratio, blocks) for t in range(n)]
        rows = []
        for t in range(n):
            read = torch.stack([*near[max(0, t + 1 - NEAR) : t + 1], *(keys[c] for c in picked[t])])
            rows.append((near[t] @ read.mT * H**-0.5).softmax(-1) @ read)
        outputs.append(torch.stack(rows))
    return outputs


def scores_of(own: Weights, x: Tensor, index: list[Tensor], t: int) -> list[Tensor]:
    q = turned(F.linear(F.linear(x, own["q_a"]), own["q_b_proj"]).view(HEADS, WIDTH), t)
    share = F.linear(x, own["weights_proj"])
    return [sum(share[h] * F.relu(q[h] @ k) for h in range(HEADS)) for k in index]  # type: ignore[misc]


def best_blocks(scores: list[Tensor], visible: int, how: Blocks) -> set[int]:
    """The windows of the best blocks; that of the last visible window is one of them."""
    count = -(-visible // how.size)
    best = {
        b: max(float(scores[c]) for c in range(b * how.size, min(visible, (b + 1) * how.size))) for b in range(count)
    }
    best |= {count - 1: float("inf")} if count else {}
    kept = sorted(best, key=lambda b: -best[b])[: how.count]
    return {c for b in kept for c in range(b * how.size, min(visible, (b + 1) * how.size))}


def make_shared(weights: Weights, x: Tensor, windows: Windows, starts: Tensor) -> SharedKeys:
    """The keys of a full layer, by the compressor that DeepSeek V4 has too."""
    how = Compressor("window", False, EPS, rotate, functools.partial(index_of, weights, eps=EPS))
    keys, index = keys_and_beside(Context(ForwardOptions("math"), (), {}), weights, x, windows, starts, how=how)
    assert index is not None
    return SharedKeys(keys, index)


def run(layers: list[Weights], xs: list[Tensor], ratio: int, blocks: Blocks | None, ids: Tensor = IDS) -> list[Tensor]:
    """What each layer of the packed row reads, [1, S, H]."""
    positions, indexer = positions_of(ids), Indexer(COUNT, rotate)
    windows, table = build_windows(positions, ids, ratio), rotary_table(ROPE, H, positions)
    starts = rotary_table(ROPE, H, positions - positions % ratio)
    near = build_mask(Causal() & Window(NEAR), positions, ids)
    shared = make_shared(layers[0], xs[0], windows, starts)
    outputs = []
    for layer, (own, x) in enumerate(zip(layers, xs, strict=True)):
        if layer < 2:
            latent, of = F.linear(x, own["q_a"]), blocks if layer == 0 else None
            shared = choose_shared(own, (x, latent), table, shared, windows, indexer=indexer, blocks=of)
        q = rotate(F.linear(x, own["q"]).unsqueeze(-2), table)
        keys = torch.cat((q, shared.windows.keys.unsqueeze(-2)), 1)
        seen = TokensAndWindows(near, windows_of(shared.windows, windows), shared.last_choice()).dense()
        outputs.append(attention(q, keys, keys, seen, kernel="math", scale=H**-0.5).squeeze(-2))
    return outputs


def difference(ratio: int, blocks: Blocks | None) -> float:
    """The largest between both, of what layers read and of gradients of everything."""
    layers, xs = drawn(ratio)
    ours = [layer[0] for layer in run(layers, xs, ratio, blocks)]
    documents = zip(*(x[0].split(LENGTHS) for x in xs), strict=True)
    theirs = [
        torch.cat(parts) for parts in zip(*(by_loops(layers, list(d), ratio, blocks) for d in documents), strict=True)
    ]
    leaves = [*xs, *(leaf for layer in layers for leaf in layer.values())]
    # no gradient reaches the weights of a choice
    both = [
        torch.autograd.grad(sum(y.sin().sum() for y in found), leaves, allow_unused=True)  # type: ignore[arg-type]
        for found in (ours, theirs)
    ]
    found = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(*both, strict=True):
        assert (a is None) == (b is None)
        found = max(found, 0.0 if a is None else float((a - b).abs().max()))
    return found


BLOCKS = Blocks(count=2, size=2)


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["all", "candidates"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_layers_that_share_keys_equal_loops(ratio: int, blocks: Blocks | None) -> None:
    """Packed documents, one of them shorter than a window, with gradients of all layers' inputs and weights."""
    assert difference(ratio, blocks) < 1e-10


def test_the_choice_leaves_something_out() -> None:
    """Each of candidates, a new choice and a choice at all changes what later layers read."""
    layers, xs = drawn(2)
    plain, few = run(layers, xs, 2, None), run(layers, xs, 2, BLOCKS)
    assert torch.equal(plain[0], few[0])
    assert (plain[1] - few[1]).abs().max() > 1e-2 and (plain[2] - few[2]).abs().max() > 1e-2


def without_new_choice(weights: Weights, inputs: Any, table: Tensor, shared: Any, *rest: Any, **how: Any) -> Any:
    """A reindex layer that reuses the choice before it."""
    return shared if shared.choices is not None else choose_shared(weights, inputs, table, shared, *rest, **how)


def across(positions: Tensor, ids: Tensor, ratio: int) -> Tensor:
    return window_slots(torch.arange(ids.shape[1]).expand_as(ids), torch.ones_like(ids), ratio)


def rotated_index_first(weights: Weights, *given: Any, **how: Any) -> SharedKeys:
    """Index keys of keys that are rotated already."""
    made = make_shared(weights, *given, **how)
    return SharedKeys(made.windows, F.linear(made.windows.keys, weights["k_proj"]))


def any_block(scores: Any, parts: Any, keys: Keys, **how: Any) -> Tensor:
    """Without the block of the last visible key."""
    named = replace(keys, mask=to_dense(keys.mask) & (keys.positions < 20)[:, None, None])
    return candidates(lambda rows: -scores(rows), parts, named, **how)


BUGS: dict[str, tuple[str, Any]] = {
    "a choice applied to the wrong layer": ("choose_shared", without_new_choice),
    "a window across documents": ("window_slots", across),
    "index keys of rotated keys": ("make_shared", rotated_index_first),
    "candidates of the worst blocks": ("candidates", any_block),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_shared_keys_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = BUGS[bug]
    if name == "candidates":
        monkeypatch.setattr(shared_windows, name, wrong)
    elif name == "window_slots":
        monkeypatch.setattr("fnmodels.inputs.windows.window_slots", wrong)
    else:
        monkeypatch.setitem(globals(), name, _first(wrong, globals()[name]))
    assert difference(2, BLOCKS) > 1e-2


def _first(wrong: Any, right: Any) -> Any:
    """`wrong`, within which the right function has its place again."""

    def run(*given: Any, **how: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), right.__name__, right)
            return wrong(*given, **how)

    return run


def test_keys_without_a_choice_are_refused() -> None:
    layers, xs = drawn(1)
    positions = positions_of(IDS)
    windows, table = build_windows(positions, IDS, 1), rotary_table(ROPE, H, positions)
    shared = make_shared(layers[0], xs[0], windows, table)
    with pytest.raises(ValueError, match="No layer has chosen among these keys"):
        shared.last_choice()


def wide(ratio: int, length: int) -> Callable[[], SharedKeys]:
    """A call that chooses and finds candidates in one document of this many windows, with the keys already made."""
    layers, _ = drawn(ratio)
    ids = torch.ones(1, length * ratio, dtype=torch.long)
    positions, own = positions_of(ids), layers[0]
    windows, table = build_windows(positions, ids, ratio), rotary_table(ROPE, H, positions)
    x = generic("wide", torch.empty(1, length * ratio, D)).double()
    starts = rotary_table(ROPE, H, positions - positions % ratio)
    shared = make_shared(own, x, windows, starts)
    inputs, indexer, blocks = (x, F.linear(x, own["q_a"])), Indexer(COUNT, rotate), Blocks(count=6, size=2)
    return lambda: choose_shared(own, inputs, table, shared, windows, indexer=indexer, blocks=blocks)


def everything_at_once(queries: int, scores: int) -> tuple[slice, ...]:
    return (slice(None),)


@pytest.mark.parametrize("form", [lambda mask: mask, to_dense], ids=["rule", "dense"])
def test_keys_to_choose_among_bound_every_reading_of_a_choice(form: Any) -> None:
    """A choice that names all keys is of those in `among` that queries see, as a mask, as places and by blocks."""
    positions = positions_of(IDS)
    mask, among = build_mask(Causal(), positions, IDS), generic("among", torch.empty(1, *[IDS.shape[1]] * 2)) > 0
    keys = Keys(form(mask), IDS, IDS, positions, among)
    expected = to_dense(mask)[:, 0] & among
    every = torch.arange(IDS.shape[1]).expand_as(among)
    assert torch.equal(keys.allowed(), expected) and not torch.equal(expected, to_dense(mask)[:, 0])
    assert torch.equal(keys.allowed(slice(9, 20)), expected[:, 9:20])
    assert torch.equal(ops.chosen(keys, every)[:, 0], expected)
    assert torch.equal(ops.chosen_places(keys, every).dense()[:, 0], expected)
    assert torch.equal(chosen_blocks(keys, every, 1, 3)[:, 0], expected)


def outputs_of(ratio: int, monkeypatch: pytest.MonkeyPatch, most: int | None) -> tuple[list[Tensor], Tensor]:
    """What the packed rows read, and the candidates of a longer one, with pieces of so many scores; None: in one."""
    with monkeypatch.context() as patch:
        if most is None:
            patch.setattr(shared_windows, "pieces", everything_at_once)
        else:
            patch.setattr(ops, "_MOST", most)
        layers, xs = drawn(ratio)
        among = wide(ratio, 40)().among
        assert among is not None
        return run(layers, xs, ratio, BLOCKS), among


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("queries", [1, 7])
def test_candidates_do_not_depend_on_how_many_queries_are_scored_at_once(
    ratio: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; pieces of one query, and of so many that the last piece is shorter."""
    read, among = outputs_of(ratio, monkeypatch, None)
    again, others = outputs_of(ratio, monkeypatch, queries * HEADS * 40)
    assert torch.equal(among, others) and among.any() and not among.all()
    assert all(torch.equal(a, b) for a, b in zip(read, again, strict=True))


def test_candidates_of_a_piece_that_takes_the_mask_of_the_first_queries_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug: each piece is masked as the first one."""
    _, among = outputs_of(1, monkeypatch, None)
    allowed = Keys.allowed
    monkeypatch.setattr(Keys, "allowed", lambda keys, rows: allowed(keys, slice(0, rows.stop - rows.start)))
    _, wrong = outputs_of(1, monkeypatch, HEADS * 40)
    assert not torch.equal(among, wrong)


def test_scores_of_all_windows_are_never_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is larger than the scores of a piece, or a mask of the windows; all scores are 32 times that."""
    length, most = 256, 1 << 16
    monkeypatch.setattr(ops, "_MOST", most)
    call = wide(1, length)
    with Largest() as largest:
        call()
    assert largest.numel <= max(most, length**2)
    monkeypatch.setattr(shared_windows, "pieces", everything_at_once)
    with Largest() as largest:
        call()
    assert largest.numel >= HEADS * length**2
