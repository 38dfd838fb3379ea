"""The loss of indexers: divergences by loops, gradients of indexers alone, documents apart, and what is refused."""

import functools
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
from fnmodels.ops import apply_rotary, apply_rotary_interleaved
from fnmodels.ops import indexer as ops
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.mla import query_latent
from fnmodels.ops.rotary import apply_rotary_last
from tests.support.cases import Batch, Case, batch_of, cases, choices_of, generic_params, off, segments, trainable
from train import Balance
from train.losses.indexers.loss import indexer_loss, with_indexers
from train.losses.indexers.teaching import divergence

NOTED = ("axk2", "mistral_large4")  # whose indexers read what no tap shows
NAMES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", *NOTED)
CASES = {case.name: case for case in cases() if case.name in NAMES}
IDS = segments((-2, 11, 4), (6, 9, -2))
STAGES = ("dense", "sparse")


def setting(name: str) -> tuple[Case, Batch, Any]:
    case = CASES[name]
    return case, batch_of(case.config, IDS), generic_params(case.config, torch.float64)


def run(params: Any, batch: Any, config: Any, stage: str, **options: Any) -> tuple[Tensor, Any, Any]:
    """(sum, {path: gradient}, aux), with a gradient of every floating parameter that is reached."""
    leaves = trainable(params)
    flat = tree.flatten(leaves)
    for leaf in flat.values():
        leaf.requires_grad_(leaf.is_floating_point())
    total, _, aux = indexer_loss(leaves, batch, config=config, stage=stage, kernel="math", length=24, **options)
    return total.detach(), _gradients(total, flat), aux


def _gradients(total: Tensor, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    learning = {path: leaf for path, leaf in flat.items() if leaf.requires_grad}
    grads = torch.autograd.grad(total, list(learning.values()), allow_unused=True)
    return {path: grad for path, grad in zip(learning, grads, strict=True) if grad is not None}


class Noting(Context):
    """Notes what each indexer reads: its layer's weights, x, the table, and its settings."""

    notes: ClassVar[list[Any]] = []

    def choose(self, weights: Any, x: Tensor, freqs: Tensor, mask: Any, *, indexer: Indexer) -> Any:
        if "indexer" in weights:
            self.notes.append((weights, x.detach(), freqs, indexer))
        return super().choose(weights, x, freqs, mask, indexer=indexer)


def expected(case: Case, batch: Batch, params: Any, stage: str) -> Tensor:
    """The divergences from taps of a plain forward pass, token by token, over the keys that attention weighs."""
    config = case.config if stage == "sparse" else replace(case.config, index_topk=64)
    inputs, masks, freqs = batch.prepared()
    layers = own_choices(config.layer_kinds)
    names = tuple(f"layers.{i}.{name}" for i in layers for name in ("attention.pattern", "input_layernorm"))
    options: dict[str, Any] = {"kernel": "math", "context": Noting, "taps": names}
    Noting.notes.clear()
    _, taps = fnmodels.forward(params, inputs, masks, freqs, config=config, **options)
    assert len(Noting.notes) == len(layers)
    how = Indexer(1, apply_rotary_interleaved if getattr(config, "index_rope_interleave", False) else apply_rotary)
    latent_eps = 1e-6
    if case.family == "hy_v4":
        rotate = apply_rotary_interleaved if config.rope_interleave else apply_rotary
        last, latent_eps = functools.partial(apply_rotary_last, rotate=rotate), config.latent_eps
        how = Indexer(1, last, config.rms_norm_eps)
    total = torch.zeros((), dtype=torch.float64)
    for i, noted in zip(layers, Noting.notes, strict=True):
        weights, x = params["layers"][i]["attention"], taps[f"layers.{i}.input_layernorm"]
        table = freqs[fnmodels.family_of(config).kinds(config)[i]]
        if case.name in NOTED:
            _, x, table, how = noted
            latent_eps = how.latent_eps
        latent = query_latent(weights, x, latent_eps)
        k = ops.index_keys(weights["indexer"], x, table, how)
        scores = ops.index_scores(*ops.index_queries(weights["indexer"], x, latent, k.shape[-1], table, how), k)
        mass = taps[f"layers.{i}.attention.pattern"].sum(1)
        for b in range(len(IDS)):
            for t in range(IDS.shape[1]):
                keys = mass[b, t] > 0
                if batch.labels[b, t] >= 0:
                    p, q = mass[b, t][keys] / mass[b, t].sum(), scores[b, t][keys].softmax(-1)
                    total += (p * (p / q).log()).sum()
    return total


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_indexer_loss_equals_divergences_by_loops(name: str, stage: str) -> None:
    """Each document alone gives the same; its gradient is of indexers alone, beside that of the next-token loss."""
    case, batch, params = setting(name)
    total, grads, aux = run(params, batch.batch(), case.config, stage, weight=0.5)
    assert off(aux["indexer_kl"], expected(case, batch, params, stage)) < 1e-10
    leaves = trainable(params)
    language, _ = train.next_token_loss(leaves, batch.batch(), config=case.config, kernel="math", length=24)
    indexers = {path for path in tree.flatten(params) if path.startswith("layers.") and ".indexer." in path}
    learned = {path for path, grad in grads.items() if grad.abs().max() > 1e-6}
    if stage == "dense":
        assert off(total, 0.5 * aux["indexer_kl"]) == 0 and learned == indexers == set(grads)
        return
    assert off(total, language + 0.5 * aux["indexer_kl"]) < 1e-10 and learned > indexers
    flat = {path: leaf for path, leaf in tree.flatten(leaves).items() if leaf.is_floating_point()}
    for leaf in flat.values():
        leaf.requires_grad_()
    language, _ = train.next_token_loss(leaves, batch.batch(), config=case.config, kernel="math", length=24)
    for path, want in _gradients(language, flat).items():
        assert path in indexers or off(grads[path], want) < 1e-10, path


def test_indexer_loss_adds_the_terms_of_the_next_token_loss() -> None:
    """Label smoothing, z-loss and balance: the sum, the sums of routers, and gradients of everything else."""
    case, batch, params = setting("deepseek_v32")
    terms: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "balance": Balance(sequence=0.3, z=0.1)}
    total, grads, aux = run(params, batch.batch(), case.config, "sparse", weight=0.5, **terms)
    leaves = trainable(params)
    flat = {path: leaf.requires_grad_() for path, leaf in tree.flatten(leaves).items() if leaf.is_floating_point()}
    how: dict[str, Any] = {"config": case.config, "kernel": "math", "length": 24}
    language, _, sums = train.next_token_loss(leaves, batch.batch(), **how, **terms, aux=True)
    assert off(total, language.detach() + 0.5 * aux["indexer_kl"]) < 1e-10
    assert all(off(aux[name], value) < 1e-10 for name, value in sums.items()) and "sequence_balance" in sums
    wanted = _gradients(language, flat)
    assert all(off(grads[path], want) < 1e-10 for path, want in wanted.items() if ".indexer." not in path)
    for name, term in terms.items():
        with pytest.raises(ValueError, match="In the dense stage the loss is the divergence of indexers alone"):
            run(params, batch.batch(), case.config, "dense", **{name: term})


def test_indexer_loss_gradient_is_softmax_minus_target() -> None:
    """And it is 0 where the scores are the logarithm of the target."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, *s, generator=generator).double() for n, s in ((3, (16, 4)), (5, (4,))))
    share = torch.randn(1, 3, 16, generator=generator).double().requires_grad_()
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(1)[None]
    mass = torch.rand(1, 3, 5, generator=generator).double() * allowed
    scores = ops.index_scores(q, share, k)
    got = torch.autograd.grad(divergence(q, share, k, allowed, mass).sum(), share)[0]
    slope = scores.masked_fill(~allowed, -torch.inf).softmax(-1) - mass / mass.sum(-1, keepdim=True)
    assert off(got, torch.autograd.grad(scores, share, slope.detach())[0]) < 1e-12
    none = divergence(q, share, k, allowed & False, mass * 0)
    assert none.abs().max() == 0
    best = scores.detach().masked_fill(~allowed, -torch.inf).softmax(-1)
    assert divergence(q, share, k, allowed, best).abs().max() < 1e-12


@pytest.mark.parametrize("stage", STAGES)
def test_indexer_loss_of_documents_apart_and_in_pieces(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows, and over queries a few at a time, give the same sum and gradients."""
    case, batch, params = setting("deepseek_v32")
    whole = run(params, batch.batch(), case.config, stage)
    parts = [run(params, part, case.config, stage) for part in fnmodels.split(batch.batch(), 2)]
    assert off(sum(total for total, *_ in parts), whole[0]) < 1e-10
    monkeypatch.setattr(ops, "_MOST", 1)
    pieces = run(params, batch.batch(), case.config, stage)
    assert off(pieces[0], whole[0]) < 1e-10
    assert all(off(pieces[1][path], grad) < 1e-10 for path, grad in whole[1].items())
    joined = replace(batch, segment_ids=batch.segment_ids.clamp(max=1))  # a planted bug: documents joined
    assert off(run(params, joined.batch(), case.config, stage)[2]["indexer_kl"], whole[2]["indexer_kl"]) > 1e-2


def test_indexer_loss_trains_what_its_spec_names() -> None:
    """In the dense stage indexers move and nothing else does."""
    case, batch, params = setting("glm_moe_dsa")
    spec = fnmodels.family_of(case.config).spec(case.config)
    for stage in STAGES:
        optimizer = train.adamw(1e-2, weight_decay=0.1, spec=with_indexers(spec, stage))  # type: ignore[arg-type]
        loss = functools.partial(indexer_loss, config=case.config, stage=stage, length=24)
        state, metrics = train.make_step(loss, optimizer)(train.init_state(params, optimizer), batch.batch())
        before, after = tree.flatten(params), tree.flatten(state.params)
        moved = {path for path in before if not torch.equal(before[path], after[path])}
        indexers = {path for path in before if ".indexer." in path}
        assert moved >= indexers and (stage == "sparse") == bool(moved - indexers)
        assert metrics["aux"]["indexer_kl"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_balances_experts_has_the_same_loss_and_their_counts(stage: str) -> None:
    case, batch, params = setting("glm_moe_dsa")
    optimizer = train.adamw(1e-2, spec=with_indexers(fnmodels.family_of(case.config).spec(case.config), stage))  # type: ignore[arg-type]
    loss = functools.partial(indexer_loss, config=case.config, stage=stage, length=24)
    found = []
    for rate in (None, 0.01):
        step = train.make_step(loss, optimizer, balance_rate=rate)
        state, metrics = step(train.init_state(params, optimizer), batch.batch())
        found.append((tree.flatten(state.params), metrics))
    (plain, alone), (balanced, both) = found
    assert torch.equal(both["loss"], alone["loss"]) and torch.equal(
        both["aux"]["indexer_kl"], alone["aux"]["indexer_kl"]
    )
    moved = {path for path in plain if not torch.equal(plain[path], balanced[path])}
    assert moved and all(path.endswith("bias") for path in moved), moved
    tokens = int((batch.batch()["segment_ids"] > 0).sum())
    assert (both["aux"]["counts"].sum(-1) == tokens * case.config.num_experts_per_tok).all()


def test_indexer_loss_refusals() -> None:
    case, batch, params = setting("deepseek_v32")
    loss = functools.partial(indexer_loss, params, config=case.config)
    with pytest.raises(ValueError, match="stage is 'warm'; it is 'dense', the warm-up, or 'sparse'"):
        loss(batch.batch(), stage="warm")  # type: ignore[arg-type]
    choices = choices_of(params, batch.prepared(), case.config, kernel="math")
    with pytest.raises(ValueError, match="leave choices out of the batch"):
        loss({**batch.batch(), "choices": choices}, stage="dense")
    with pytest.raises(ValueError, match="leave context out"):
        loss(batch.batch(), stage="dense", context=object)
    with pytest.raises(ValueError, match='without kernel="invariant"'):
        loss(batch.batch(), stage="sparse", kernel="invariant")
    llama = next(case for case in cases() if case.name == "llama")
    with pytest.raises(ValueError, match="whose attention chooses its keys; llama does not"):
        indexer_loss({}, batch.batch(), config=llama.config, stage="dense")
    with pytest.raises(ValueError, match="The spec has no indexer"):
        with_indexers(fnmodels.family_of(llama.config).spec(llama.config), "dense")
