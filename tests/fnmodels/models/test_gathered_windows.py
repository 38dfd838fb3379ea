"""DeepSeek V4 and V4.1 by kernels that read places: as with a mask, each document alone, in pieces, by flex."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import fnmodels
import train
from fnmodels import tree
from fnmodels.models.common.deepseek_v4 import windows
from fnmodels.ops.attention import choice, flex
from fnmodels.ops.attention.choice import Choice
from fnmodels.ops.indexers import tokens_and_windows
from fnmodels.ops.indexers.tokens_and_windows import TokensAndWindows, windows_of
from fnmodels.stack.loop import LayerSideInputs
from tests.support.cases import Batch, batch_of, cases, generic_params, off, segments, summed_loss, trainable
from tests.support.oracle import logits_of, params_of, shared_model

CASES = {case.name: case for case in cases() if case.family.endswith(("deepseek_v4", "deepseek_v41"))}
ROWS = segments((-2, 7, 13), (19, 3))
every_model = pytest.mark.parametrize("name", CASES)


@functools.cache
def made(name: str) -> tuple[Batch, Any]:
    config = CASES[name].config
    return batch_of(config, ROWS), generic_params(config, torch.float64)


def run(batch: Batch, params: Any, kernel: Any, **options: Any) -> tuple[Tensor, Any]:
    """(logits of tokens, the tree of gradients of the loss)."""
    leaves = trainable(params)
    logits = batch.forward(leaves, kernel=kernel, **options)
    flat = {path: leaf for path, leaf in tree.flatten(leaves).items() if leaf.requires_grad}
    grads = torch.autograd.grad(summed_loss(logits, batch.labels), list(flat.values()), allow_unused=True)
    found = {path: torch.zeros_like(flat[path]) if g is None else g for path, g in zip(flat, grads, strict=True)}
    return logits.detach()[batch.valid], tree.unflatten(found)


def without_masks(patch: pytest.MonkeyPatch) -> None:
    """No mask of all keys can be made of a choice, or of what queries read."""
    patch.setattr(Choice, "dense", None)
    patch.setattr(TokensAndWindows, "dense", None)


@every_model
def test_gathered_windows_equal_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients, by "sparse" and where "auto" finds that it pays; no mask of all keys is made."""
    batch, params = made(name)
    want = run(batch, params, "math")
    assert max(float(g.abs().max()) for path, g in tree.flatten(want[1]).items() if "sinks" in path) > 1e-4
    with monkeypatch.context() as patch:
        without_masks(patch)
        patch.setattr(choice, "SHARED", 1)
        patch.setattr(choice, "WORTH", 0.0)
        patch.setattr(tokens_and_windows, "START", 0)
        for kernel in ("sparse", "auto"):
            assert off(run(batch, params, kernel), want) < 1e-10
    with monkeypatch.context() as patch:  # 4 heads of short rows, which are masked
        patch.setattr(TokensAndWindows, "places", None)
        assert off(run(batch, params, "auto"), want) < 1e-10


@every_model
def test_gathered_windows_of_documents_alone(name: str) -> None:
    """Logits, and gradients, which are the sums of those of the documents."""
    batch, params = made(name)
    logits, grads = run(batch, params, "sparse")
    alone, total = [], tree.map(torch.zeros_like, grads)
    for row in range(len(ROWS)):
        for document in range(1, int(ROWS[row].max()) + 1):
            tokens = batch.tokens[row, ROWS[row] == document][None]
            one = replace(batch_of(batch.config, torch.ones_like(tokens)), tokens=tokens)
            found = run(one, params, "sparse")
            alone.append(found[0])
            total = tree.map(torch.add, total, found[1])
    assert off(torch.cat(alone), logits) < 1e-10
    assert off(total, grads) < 1e-10


def test_gathered_windows_equal_transformers() -> None:
    """Logits of each document alone, in fp32."""
    case = CASES["deepseek_v4"]
    params, batch = params_of(shared_model(case.values), case.config), batch_of(case.config, ROWS, seed=3)
    ours = batch.forward(params, kernel="sparse")
    for row in range(len(ROWS)):
        for document in range(1, int(ROWS[row].max()) + 1):
            at = ROWS[row] == document
            assert off(ours[row, at], logits_of(case.values, batch.tokens[row, at][None])[0]) < 2e-5


@every_model
def test_gathered_windows_in_another_order(name: str) -> None:
    batch, params = made(name)
    order = torch.randperm(ROWS.shape[1], generator=torch.Generator().manual_seed(0))
    forward = functools.partial(fnmodels.forward, params, config=batch.config)
    moved = forward(*fnmodels.permute(batch.prepared(), order), kernel="sparse")
    assert (
        off(moved[batch.valid[:, order]], forward(*batch.prepared(), kernel="math")[:, order][batch.valid[:, order]])
        < 1e-10
    )


@every_model
@pytest.mark.parametrize("rings", [False, True])
def test_gathered_windows_in_pieces_on_a_cache(name: str, rings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end inside windows, single tokens among them, and two documents in a row; empty slots hold NaN."""
    config, params = CASES[name].config, made(name)[1]
    batch = batch_of(config, segments((22,), (22,)) if rings else ROWS)
    whole = batch.forward(params)
    cache, found = fnmodels.init_cache(config, len(whole), 26, dtype=torch.float64, rings=rings, length=24), []
    cache = tree.map(lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t, cache)
    without_masks(monkeypatch)
    for part in zip(
        *(t.split((9, 1, 1, 11), 1) for t in (batch.tokens, batch.positions, batch.segment_ids)), strict=True
    ):
        given = {} if rings else {"positions": part[1], "segment_ids": part[2]}
        step = fnmodels.prepare_step(config, part[0], cache, **given)
        logits, cache = fnmodels.decode(params, *step, cache, config=config, kernel="sparse")
        found.append(logits)
    assert off(torch.cat(found, 1)[batch.valid], whole[batch.valid]) < 1e-10


@every_model
def test_prepare_refuses_a_position_twice_in_a_document(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of the tokens, and in steps; without the check, a mask sees both tokens and places are of one."""
    config, params = CASES[name].config, made(name)[1]
    tokens = batch_of(config, torch.ones(2, 12, dtype=torch.long)).tokens
    ids, twice = torch.ones_like(tokens), torch.tensor([[*range(12)], [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10]])
    prepared = functools.partial(fnmodels.prepare, config, tokens, length=24)
    with pytest.raises(ValueError, match=r"Row 1 has position 3 twice in document 1, at tokens 3 and 4"):
        prepared(positions=twice, segment_ids=ids)
    with pytest.raises(ValueError, match=r"Row 1 has position 3 twice in document 1, at tokens 7 and 8"):
        prepared(positions=twice.flip(1), segment_ids=ids)
    prepared(positions=twice, segment_ids=torch.tensor([[1] * 12, [1] * 4 + [2] * 8]))
    prepared(positions=twice, segment_ids=torch.tensor([[1] * 12, [1] * 4 + [0] * 8]))
    cache = fnmodels.init_cache(config, 2, 20, dtype=torch.float64, length=24)
    _, cache = fnmodels.decode(params, *fnmodels.prepare_step(config, tokens, cache), cache, config=config)
    for given, sentence in (([12, 12], "position 12 twice in document 1, at tokens 0 and 1"), ([11, 12], "not above")):
        positions = torch.tensor([[12, 13], given])
        with pytest.raises(ValueError, match=f"Row 1 has .*{sentence}"):
            fnmodels.prepare_step(config, tokens[:, :2], cache, positions=positions, segment_ids=ids[:, :2])
    monkeypatch.setattr("fnmodels.inputs.windows.check_own_positions", lambda *given: None)
    both = [
        fnmodels.forward(params, *prepared(positions=twice, segment_ids=ids), config=config, kernel=kernel)
        for kernel in ("math", "sparse")
    ]
    assert off(both[0][0], both[1][0]) < 1e-10 and off(both[0][1], both[1][1]) > 1e-3


@every_model
def test_gathered_windows_under_transforms(name: str) -> None:
    """vmap of grad over rows is a loop; forward mode is refused with a sentence."""
    batch, params = made(name)
    prepared = fnmodels.rows(batch.prepared())
    embedded = params["embed_tokens"]

    def total(table: Tensor, rows: Any, kernel: str) -> Tensor:
        out = fnmodels.forward({**params, "embed_tokens": table}, *rows, config=batch.config, kernel=kernel)
        return torch.where(rows[0]["valid"].unsqueeze(-1), out, 0).sin().sum()

    got = torch.func.vmap(torch.func.grad(lambda table, rows: total(table, rows, "sparse")), (None, 0))(
        embedded, prepared
    )
    for row in range(len(ROWS)):
        one = tree.map(lambda t, row=row: t[row], prepared)
        assert off(got[row], torch.func.grad(total)(embedded, one, "math")) < 1e-10
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.jvp(lambda table: total(table, batch.prepared(), "sparse"), (embedded,), (embedded,))


@every_model
@pytest.mark.slow
def test_flex_reads_places_of_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients, those of sinks too, by FlexAttention's maths without a compiler, and no dense mask."""
    batch, params = made(name)
    want = run(batch, params, "math")
    monkeypatch.setattr(flex, "_compiled", lambda: dict.fromkeys((None, False), torch_flex.flex_attention))
    monkeypatch.setattr(flex, "_on_the_cpu", lambda q, k, v, sinks: (q, k, v))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *given: None)
    without_masks(monkeypatch)
    assert off(run(batch, params, "flex"), want) < 1e-10


def test_the_chosen_windows_of_another_layer_are_found() -> None:
    """A planted bug, by replay."""
    for name in ("deepseek_v4", "deepseek_v41"):
        batch, params = made(name)
        inputs, masks, freqs = batch.prepared()
        forward = functools.partial(fnmodels.forward, params, config=batch.config, kernel="sparse")
        own = [f"layers.{i}.choices" for i in ((1, 3) if name == "deepseek_v4" else (1, 2, 4))]
        free, taps = forward(inputs, masks, freqs, taps=tuple(own))
        choices = torch.stack([taps[layer] for layer in own], 2)
        assert torch.equal(forward({**inputs, "choices": choices}, masks, freqs), free)
        assert off(forward({**inputs, "choices": choices.flip(2)}, masks, freqs)[batch.valid], free[batch.valid]) > 1e-3


SIDE, KEEP = tokens_and_windows._side_by_side, LayerSideInputs.keep


def near_off_by_one(tokens: Any) -> int:
    return 5 if tokens.rule.right.size == 6 else 4


def later(keys: Any, seen: Any, among: Any = None) -> Any:
    """A window is seen by the token before its last one."""
    found = windows_of(keys, seen, among)
    return replace(found, mask=replace(found.mask, kv_positions=found.positions - 1))


def across(keys: Any, seen: Any, among: Any = None) -> Any:
    """Windows of every document are seen, by position alone."""
    found, one = windows_of(keys, seen, among), torch.ones_like
    ids, documents = one(seen.segments), one(keys.segments)
    return replace(
        found, mask=replace(found.mask, q_segments=ids, kv_segments=documents), q_segments=ids, segments=documents
    )


def places_off_by_one(near: Choice, far: Choice, rows: int) -> Choice:
    return SIDE(near, replace(far, index=(far.index - 1).clamp(min=0)), rows)


def twice(*given: Any, sinks: Tensor, **how: Any) -> Tensor:
    """A sink in each of both parts."""
    return ATTENTION(*given, sinks=sinks + torch.tensor(2.0, dtype=sinks.dtype).log(), **how)


def first_choice(self: Any, kind: str, aux: Any) -> None:
    """Layers that share a choice take the first one of the stack."""
    KEEP(self, kind, aux if self.chosen is None else aux | {"chosen": self.chosen})


ATTENTION = windows.attention
BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the last tokens off by one": (tokens_and_windows, "_near", near_off_by_one),
    "a window ends later": (windows, "windows_of", later),
    "windows across documents": (windows, "windows_of", across),
    "places of windows off by one": (tokens_and_windows, "_side_by_side", places_off_by_one),
    "a sink counts twice": (windows, "attention", twice),
    "a choice of the wrong layer": (LayerSideInputs, "keep", first_choice),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the road of places alone; the reference is made before."""
    name = "deepseek_v41" if "layer" in bug else "deepseek_v4"
    batch, params = made(name)
    want = batch.forward(params)[batch.valid]
    assert off(batch.forward(params, kernel="sparse")[batch.valid], want) < 1e-10
    monkeypatch.setattr(*BUGS[bug])
    assert off(batch.forward(params, kernel="sparse")[batch.valid], want) > 1e-3


def test_the_loss_of_gathered_windows_has_the_same_gradients_with_remat() -> None:
    batch, params = made("deepseek_v4")
    found = []
    for remat in ("none", "full"):
        optimizer = train.sgd(0.1, spec=fnmodels.family_of(batch.config).spec(batch.config))
        loss = functools.partial(train.next_token_loss, config=batch.config, kernel="sparse")
        step = train.make_step(loss, optimizer, remat=remat, inplace=False)  # type: ignore[arg-type]
        found.append(step(train.init_state(params, optimizer), batch.batch())[0].params)
    assert off(found[0], found[1]) == 0 and off(found[0], params) > 1e-4
