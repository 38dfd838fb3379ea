"""The loss of indexers that choose blocks or windows of keys: divergences by loops, gradients of indexers alone."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from fnmodels.models.common.carried import own_choices
from fnmodels.models.common.context import Context
from fnmodels.ops import indexer as ops
from fnmodels.ops.attention.windows import window_mask
from fnmodels.ops.indexer import keys_of
from fnmodels.ops.indexers.tokens_and_windows import windows_of
from tests.support.cases import Batch, Case, batch_of, cases, generic_params, off, segments, trainable
from train.losses.indexers import teaching
from train.losses.indexers.loss import indexer_loss

WINDOWS = ("deepseek_v4", "deepseek_v41")
BLOCKS = ("minimax_m3", "minimax_m3_local_tied", "qwen4_exp", "glm5_next", "glm5_next_groups_tied")
CASES = {case.name: case for case in cases() if case.name in (*BLOCKS, *WINDOWS)}
IDS = segments((-2, 13, 5), (7, 11, -2))
STAGES = ("dense", "sparse")
every_case = pytest.mark.parametrize("name", CASES)
every_stage = pytest.mark.parametrize("stage", STAGES)


def setting(name: str) -> tuple[Case, Batch, Any]:
    case = CASES[name]
    return case, batch_of(case.config, IDS), generic_params(case.config, torch.float64)


def run(params: Any, batch: Any, config: Any, stage: str, **options: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """(sum, {path: gradient}, aux), with a gradient of every floating parameter that is reached."""
    leaves = trainable(params)
    flat = {path: leaf.requires_grad_() for path, leaf in tree.flatten(leaves).items() if leaf.is_floating_point()}
    total, _, aux = indexer_loss(leaves, batch, config=config, stage=stage, length=24, **{"kernel": "math"} | options)
    grads = torch.autograd.grad(total, list(flat.values()), allow_unused=True)
    return total.detach(), {p: g for p, g in zip(flat, grads, strict=True) if g is not None}, aux


class Noting(Context):
    """Notes the scores of each layer's choice, and lets attention see all keys in the dense stage."""

    notes: ClassVar[list[Any]] = []
    dense: ClassVar[bool] = False

    def chose_blocks(self, weights: Any, x: Any, freqs: Any, mask: Any, seen: Any, *, indexer: Any, groups: int) -> Any:
        if weights is not None:
            keys = keys_of(mask)
            scored = indexer.scores(weights, x, indexer.index(weights, x, freqs), freqs, keys)
            each = torch.arange(x[0].shape[-2]).expand(len(IDS), -1)  # a key is a block of its own
            slots, fewest = (each, 1) if scored.blocks is None else (scored.blocks.slots, indexer.size)
            self.notes.append((slots, scored.of(slice(None)) * scored.scale, keys.allowed(), fewest))
        return mask if self.dense else seen

    def chose_windows(
        self, weights: Any, inputs: Any, mask: Any, freqs: Any, choices: Any, *, indexer: Any, keys: Any
    ) -> Any:
        keys = keys()
        queries = ops.index_queries(weights, *inputs, keys.keys.shape[-1], freqs["table"], indexer)
        ended, choices = window_mask(mask["windows"], keys).dense(), None if self.dense else choices
        each = torch.arange(ended.shape[-1]).expand(len(ended), -1)  # a window is a block of one key
        seen = ended if choices is None else ops.chosen(windows_of(keys, mask["windows"]), choices)
        self.notes.append((each, ops.index_scores(*queries, keys.keys).unsqueeze(2), seen[:, 0], 1))
        return choices


def expected(case: Case, batch: Batch, params: Any, stage: str, patch: pytest.MonkeyPatch) -> Tensor:
    """The divergences from taps of a plain forward pass, token by token and block by block."""
    patch.setattr(Noting, "notes", [])
    patch.setattr(Noting, "dense", stage == "dense")
    layers = own_choices(fnmodels.family_of(case.config).kinds(case.config))
    names = tuple(f"layers.{i}.attention.pattern" for i in layers)
    options: dict[str, Any] = {"kernel": "math", "context": Noting, "taps": names}
    _, taps = fnmodels.forward(params, *batch.prepared(), config=case.config, **options)
    total = torch.zeros((), dtype=torch.float64)
    assert len(Noting.notes) == len(layers)
    for (slots, scores, allowed, fewest), name in zip(Noting.notes, names, strict=True):
        groups = scores.shape[2]
        mass = taps[name].detach().unflatten(1, (groups, -1)).sum(2)[..., -allowed.shape[-1] :]
        for b, t in batch.labels.ge(0).nonzero().tolist():
            for group in range(groups):
                given = scores[b, t, group], allowed[b, t], mass[b, group, t]
                total = total + _of_token(slots[b], *given, fewest) / groups
    return total


def _of_token(slots: Tensor, scores: Tensor, visible: Tensor, mass: Tensor, fewest: int) -> Tensor:
    members: dict[int, list[int]] = {}
    for u in visible.nonzero().flatten().tolist():
        members.setdefault(int(slots[u]), []).append(u)
    looked = {block: float(mass[keys].max()) for block, keys in members.items() if len(keys) >= fewest}
    looked = {block: seen for block, seen in looked.items() if seen > 0}
    if not looked:
        return scores.new_zeros(())
    p = torch.tensor(list(looked.values()), dtype=torch.float64) / sum(looked.values())
    return (p * (p.log() - scores[list(looked)].log_softmax(0))).sum()


@every_case
@every_stage
def test_block_indexer_loss_equals_divergences_by_loops(name: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values and its gradients, which only indexers have in the dense stage."""
    case, batch, params = setting(name)
    total, grads, aux = run(params, batch.batch(), case.config, stage, weight=0.5)
    leaves = trainable(params)
    own = {p: leaf.requires_grad_() for p, leaf in tree.flatten(leaves).items() if ".indexer." in p}
    by_loops = expected(case, batch, leaves, stage, monkeypatch)
    assert aux["indexer_kl"] > 1e-2 and off(aux["indexer_kl"], by_loops.detach()) < 1e-9
    for path, grad in zip(own, torch.autograd.grad(by_loops, list(own.values())), strict=True):
        assert grad.abs().max() > 1e-6 and off(grads[path], 0.5 * grad) < 1e-9, path
    if stage == "dense":
        assert off(total, 0.5 * aux["indexer_kl"]) == 0 and set(grads) == set(own)
    else:
        language, _ = train.next_token_loss(leaves, batch.batch(), config=case.config, kernel="math", length=24)
        assert off(total, language.detach() + 0.5 * aux["indexer_kl"]) < 1e-9 and set(grads) > set(own)


@every_case
def test_block_indexer_loss_of_documents_apart_and_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows apart, few queries at a time and gathered keys give the same sums and gradients."""
    case, batch, params = setting(name)
    whole = run(params, batch.batch(), case.config, "sparse")
    parts = [run(params, part, case.config, "sparse")[2]["indexer_kl"] for part in fnmodels.split(batch.batch(), 2)]
    assert off(sum(parts), whole[2]["indexer_kl"]) < 1e-9
    gathered = run(params, batch.batch(), case.config, "sparse", kernel="sparse")
    monkeypatch.setattr(ops, "_MOST", 1)
    for other in (run(params, batch.batch(), case.config, "sparse"), gathered):
        assert off(other[0], whole[0]) < 1e-9
        assert all(off(other[1][path], grad) < 1e-9 for path, grad in whole[1].items())
    order = torch.arange(batch.tokens.shape[1]).expand_as(batch.positions)
    joined = replace(
        batch, segment_ids=batch.segment_ids.clamp(max=1), positions=order
    )  # a planted bug: documents joined
    assert off(run(params, joined.batch(), case.config, "sparse")[2]["indexer_kl"], whole[2]["indexer_kl"]) > 1e-2


@pytest.mark.parametrize("bug", ["weights of all groups", "blocks that are not complete"])
def test_a_mistake_in_the_target_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "minimax_m3" if bug == "weights of all groups" else "glm5_next"
    case, batch, params = setting(name)
    want = expected(case, batch, params, "dense", monkeypatch)
    if name == "minimax_m3":
        mean = teaching._looked_at
        monkeypatch.setattr(
            teaching, "_looked_at", lambda *given: mean(*given).mean(1, keepdim=True).expand_as(mean(*given))
        )
    else:
        made = teaching._OfBlocks
        monkeypatch.setattr(teaching, "_OfBlocks", lambda scored, keys, _, groups: made(scored, keys, 1, groups))
    assert off(run(params, batch.batch(), case.config, "dense")[2]["indexer_kl"], want) > 1e-3
