"""Heads that predict further tokens: against a loop written from the paper, and that they keep to their document."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import mtp, tree
from fnmodels.models.common.family import function_of, is_routed, parsed
from fnmodels.models.common.mtp import blocks, kinds_of
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.options import ForwardOptions
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    cases,
    generic_params,
    gradients,
    is_ordered,
    off,
    segments,
    trainable,
)
from tests.support.mtp import mtp_cases
from tests.support.mtp import with_heads as most_heads

MIXED = segments((-3, 5, 4), (12,), (7, 1, -4), (1, 2, -1, 8))
MORE = ("deepseek_v3_dense", "glm4_moe_qk_norm")
EVERY = (*mtp_cases(), *(case for case in cases() if case.name in MORE))
every_family = pytest.mark.parametrize("case", EVERY, ids=str)


def with_heads(case: Case) -> Any:
    """With two heads, or one where the model may have no more."""
    return most_heads(case.config, 2)


def logits_of(
    weights: Any, prepared: Any, next_tokens: Tensor, config: Any, *, kernel: str = "math", **options: Any
) -> list[Tensor]:
    """The heads' logits [B, S, V]."""
    family = fnmodels.family_of(config)
    options |= {"config": config, "kernel": kernel}
    states = mtp.hidden(weights, source_of(weights, prepared, **options), next_tokens, *prepared[1:], **options)
    return [family.unembed(mtp.view(weights, k), state, config=config) for k, state in enumerate(states)]


def source_of(weights: Any, prepared: Any, *, config: Any, **options: Any) -> Tensor:
    """What the heads read of the model."""
    taps = mtp.source_taps(config)
    found = fnmodels.hidden(weights, *prepared, config=config, taps=taps, **options)
    return mtp.read(*(found if taps else (found, {})), config)


def next_tokens_of(batch: Batch) -> Tensor:
    return mtp.ahead(batch.tokens, batch.segment_ids, batch.config.num_nextn_predict_layers, fill=-1)


def reference(weights: Any, tokens: Tensor, config: Any) -> list[Tensor]:
    """One document [T] on its own: head k's logits [T - k, V] at the positions where token i + k exists, eq. 21 to 23.

    No mask, no fill value, no padding: the sequence of head k is simply k tokens shorter. Which states a head reads
    stands in READS, by model type, with the implementation that says so.
    """
    family, length = fnmodels.family_of(config), len(tokens)
    one = 1.0 if function_of(family, "stream_norm") is rms_norm_zero_centered else 0.0

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + mtp.norm_eps(config)).sqrt() * (one + weight)

    reads = READS.get(config.model_type, "chained")
    prepared = fnmodels.prepare(config, tokens[None], length=24)
    h = source_of(weights, prepared, config=config, kernel="math")[0]
    h = h if reads in ("raw", "streams") else norm(h, weights["norm"])
    found = []
    for k, head in enumerate(weights["mtp"], start=1):
        if length <= k:
            found.append(weights["embed_tokens"].new_empty(0, config.vocab_size))
            continue
        pairs = []
        for i in range(length - k):
            token = norm(weights["embed_tokens"][tokens[i + k]], head["enorm"])
            if reads == "streams":  # [n, D], of which each row is normed, or all of them together
                rows = norm(h[i].reshape(-1, len(head["hnorm"])), head["hnorm"]).reshape(h[i].shape)
                pairs.append(torch.stack([head["e_proj"] @ token + head["h_proj"] @ row for row in rows]))
            else:
                pairs.append(head["eh_proj"] @ torch.cat((token, norm(h[i], head["hnorm"]))))
        state, streams = one_document(torch.stack(pairs)[None], head["block"], tokens[None, : length - k], config)
        own = head.get("norm", weights.get("norm"))
        normed = state if own is None else norm(state, own)
        found.append(normed @ head.get("lm_head", weights.get("lm_head", weights["embed_tokens"])).T)
        if reads != "shared":
            h = {"raw": state, "streams": streams}.get(reads, normed)
    return found


# Which states heads read: "raw", those before norms, "streams", those before the fold, or "shared", the model's for
# every head. Others: normalized ones.
READS = {"mimo_v2_flash": "shared", "ernie4_5_moe": "raw", "minimax_m3_vl_text": "raw", "minimax_m3_vl": "raw"}
READS |= {"step3p5": "raw", "deepseek_v4": "streams", "qwen4_exp": "streams", "qwen4_exp_text": "streams"}


def one_document(x: Tensor, block: Any, tokens: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """x [1, T, ...] after the layers of a head's block, called one by one: [T, D], and the last one's streams."""
    own, first = blocks(config)
    family = fnmodels.family_of(own)
    inputs, masks, tables = fnmodels.prepare(own, tokens, length=24)
    layers = block if isinstance(block, list) else [block]
    for layer, kind in zip(layers, family.kinds(own)[first:], strict=True):
        more = {"valid": inputs["valid"]} if is_routed(family, kind) else {}
        more |= {"options": ForwardOptions("math"), "taps": ("streams",)}
        x, aux = family.block(layer, x, masks[kind], tables[kind], config=own, kind=kind, **more)
    return x[0], aux.get("streams", x)[0]


def test_looking_ahead() -> None:
    tokens = torch.arange(1, 11)[None]
    segment_ids = segments((-1, 4, 1, 2, -2))
    first = got = mtp.ahead(tokens, segment_ids, 3, fill=-1)[0]
    assert got[:, 0].tolist() == [-1, 3, 4, 5, -1, -1, 8, -1, -1, -1]
    assert got[:, 1].tolist() == [-1, 4, 5, -1, -1, -1, -1, -1, -1, -1]
    assert got[:, 2].tolist() == [-1, 5, -1, -1, -1, -1, -1, -1, -1, -1]
    inside = torch.tensor([[1, 1, 0, 1, 1]])  # padding within a document hides what follows it
    got = mtp.ahead(torch.arange(5)[None], inside, 2, fill=-1)[0]
    assert got[:, 0].tolist() == [1, -1, -1, 4, -1] and (got[:, 1] == -1).all()
    assert torch.equal(mtp.ahead(tokens, segment_ids.where(segment_ids > 0, -1), 3, fill=-1)[0], first)
    assert (mtp.ahead(tokens[:, :2], segment_ids[:, 1:3], 5, fill=-1)[0, :, 1:] == -1).all()
    assert mtp.ahead(tokens[:, :0], segment_ids[:, :0], 2, fill=-1).shape == (1, 0, 2)
    with pytest.raises(ValueError, match="depth is 0"):
        mtp.ahead(tokens, segment_ids, 0, fill=-1)


@every_family
def test_the_paper(case: Case) -> None:
    """Packed rows against each document alone in the loop above; loss and every gradient too, fp64."""
    config = with_heads(case)
    weights, batch = trainable(generic_params(config, torch.float64)), batch_of(config, MIXED)
    got = logits_of(weights, batch.prepared(), next_tokens_of(batch), config)
    wanted_loss = torch.zeros((), dtype=torch.float64)
    for b, row in enumerate(batch.segment_ids):
        for document in sorted(set(row.tolist()) - {0}):
            where = (row == document).nonzero().flatten()
            tokens = batch.tokens[b, where]
            for k, wanted in enumerate(reference(weights, tokens, config), start=1):
                assert off(got[k - 1][b, where[: len(wanted)]], wanted) < 1e-10
                smoothed = F.cross_entropy(wanted[:-1], tokens[k + 1 :], reduction="sum", label_smoothing=0.1)
                wanted_loss = wanted_loss + (smoothed + 0.02 * wanted[:-1].logsumexp(-1).square().sum()) / len(got)
    given = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    given = train.losses.look_ahead({**given, "labels": batch.labels}, len(got))
    how = {"config": config, "length": 24, "label_smoothing": 0.1, "z_loss": 0.02}
    plain, count = train.next_token_loss(weights, given, **how)
    wanted = gradients(plain + 0.7 * wanted_loss, weights)
    for chunk in (None, 5):
        total, same = train.mtp_loss(weights, given, **how, weight=0.7, chunk=chunk)
        assert same == count == (batch.labels != -100).sum()
        assert off(total, plain + 0.7 * wanted_loss) < 1e-10
        assert off(gradients(total, weights), wanted) < 1e-9
    assert off(train.mtp_loss(weights, given, **how, weight=0.0)[0], plain) < 1e-12


@pytest.mark.parametrize("case", [case for case in EVERY if not is_ordered(case)], ids=str)
@pytest.mark.parametrize("kernel", ["math", "sdpa"])
def test_permuting_the_sequence(case: Case, kernel: str) -> None:
    """What a roll inside of the model would break."""
    config = with_heads(case)
    weights, batch = generic_params(config), batch_of(config, MIXED)
    prepared, ahead = batch.prepared(), next_tokens_of(batch)
    straight = logits_of(weights, prepared, ahead, config, kernel=kernel)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    *moved, places = fnmodels.permute((*prepared, ahead), order)
    for one, other in zip(logits_of(weights, moved, places, config, kernel=kernel), straight, strict=True):
        valid = moved[0]["valid"]
        assert off(one[valid], other[:, order][valid]) < 1e-5
    halves = fnmodels.split((prepared, ahead), 2)
    parts = [logits_of(weights, *half, config, kernel=kernel) for half in halves]
    assert off([torch.cat(pair) for pair in zip(*parts, strict=True)], straight) < 1e-5


@every_family
def test_a_document_does_not_hear_its_neighbor(case: Case) -> None:
    """Neither through attention nor as the token to come: the last k places of a document see none of the next one."""
    config = with_heads(case)
    weights, batch = generic_params(config), batch_of(config, segments((5, 6, -1)))
    other = batch.tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % config.vocab_size
    before, after = (
        logits_of(weights, b.prepared(), next_tokens_of(b), config)
        for b in (batch, dataclasses.replace(batch, tokens=other))
    )
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one[0, :5], two[0, :5]) and not torch.equal(one[0, 5:11], two[0, 5:11])
    # and within a document a place hears the k-th token ahead, but none further
    moved = batch.tokens.clone()
    moved[0, 4] = (moved[0, 4] + 1) % config.vocab_size
    changed = dataclasses.replace(batch, tokens=moved)
    after = logits_of(weights, changed.prepared(), next_tokens_of(changed), config)
    for k, (one, two) in enumerate(zip(before, after, strict=True), start=1):
        assert torch.equal(one[0, : 4 - k], two[0, : 4 - k]) and not torch.equal(one[0, 4 - k], two[0, 4 - k])


@every_family
def test_places_without_a_next_token(case: Case) -> None:
    """They reach no expert and no count, and give no gradient; heads without any place give nothing."""
    config = with_heads(case)
    heads, routed = config.num_nextn_predict_layers, any(kind.routed for kind in parsed(kinds_of(config)))
    batch, weights = batch_of(config, MIXED), trainable(generic_params(config))
    ahead = next_tokens_of(batch)
    prepared = batch.prepared()
    x = source_of(weights, prepared, config=config)
    if routed:
        states, tapped = mtp.hidden(weights, x, ahead, *prepared[1:], config=config, taps=("counts", "expert_indices"))
        assert set(tapped) == {f"mtp.{k}.{n}" for k in range(heads) for n in ("counts", "expert_indices")}
        for k in range(heads):
            assert tapped[f"mtp.{k}.counts"].sum() == (ahead[..., k] >= 0).sum() * config.num_experts_per_tok
    else:
        states = mtp.hidden(weights, x, ahead, *prepared[1:], config=config)
    assert all(state.isfinite().all() for state in states)
    assert not off(list(states), list(mtp.hidden(weights, x, ahead, *prepared[1:], config=config)))

    short = batch_of(config, segments((1, 2, -3), (-6,)))
    given = {"tokens": short.tokens, "positions": short.positions, "segment_ids": short.segment_ids}
    given = train.losses.look_ahead({**given, "labels": short.labels}, heads)
    assert (given["next_tokens"][..., 0] >= 0).sum() == 1 and (given["next_labels"] == -100).all()
    total, _ = train.mtp_loss(weights, given, config=config)
    plain, _ = train.next_token_loss(weights, given, config=config)
    assert total == plain
    assert all(not g.any() for g in tree.leaves(gradients(total, weights)["mtp"]))


@every_family
def test_a_row_that_only_padding_reads_may_be_nan(case: Case) -> None:
    """M1: not even where a place has no next token, and reads some row in its stead."""
    config = with_heads(case)
    batch, weights = batch_of(config, MIXED), trainable(generic_params(config))
    given = {"tokens": batch.tokens.clamp(min=1).where(batch.valid, 0), "positions": batch.positions}
    given |= {
        "segment_ids": batch.segment_ids,
        "labels": batch.labels.where(batch.labels < 0, batch.labels.clamp(min=1)),
    }
    given = train.losses.look_ahead(given, config.num_nextn_predict_layers)
    poisoned = trainable(weights)
    with torch.no_grad():
        poisoned["embed_tokens"][0] = torch.nan
        poisoned.setdefault("lm_head", weights["embed_tokens"])
    found = []
    for params in (poisoned, trainable({**weights, "lm_head": poisoned["lm_head"].detach()})):
        untied = dataclasses.replace(config, tie_word_embeddings=False)
        total, _ = train.mtp_loss(params, given, config=untied, kernel="math", length=24)
        found.append((total.detach(), gradients(total, params)))
    assert off(*found) == 0


@every_family
def test_the_forward_pass_leaves_heads_alone(case: Case) -> None:
    config = with_heads(case)
    batch, weights = batch_of(config, MIXED), generic_params(config)
    alone = {name: value for name, value in weights.items() if name != "mtp"}
    without = Batch(case.config, batch.tokens, batch.positions, batch.segment_ids, batch.length)
    assert torch.equal(batch.forward(weights), without.forward(alone))
    extra = P.count(config) - P.count(case.config)
    assert extra == sum(leaf.numel() for leaf in tree.leaves(weights["mtp"])) and hash(config) != hash(case.config)
    assert type(config).from_hf(config.to_hf()) == config


def test_what_does_not_fit_is_said() -> None:
    case = next(case for case in cases() if case.name == "deepseek_v3")
    config = with_heads(case)
    batch, weights = batch_of(config, segments((4, 2))), generic_params(config)
    prepared = batch.prepared()
    x = fnmodels.hidden(weights, *prepared, config=config)
    with pytest.raises(ValueError, match=r"must be \[1, 6, 2\].*not \[1, 6, 1\]"):
        mtp.hidden(weights, x, mtp.ahead(batch.tokens, batch.segment_ids, 1, fill=-1), *prepared[1:], config=config)
    with pytest.raises(ValueError, match="each of the 0 heads"):
        mtp.hidden(
            generic_params(case.config),
            x,
            mtp.ahead(batch.tokens, batch.segment_ids, 1, fill=-1),
            *prepared[1:],
            config=case.config,
        )
    with pytest.raises(ValueError, match=r"x is \[1, 6, 1, 32\], and the heads of this model read states \[B, S, D\]"):
        mtp.hidden(weights, x[:, :, None], next_tokens_of(batch), *prepared[1:], config=config)
    with pytest.raises(ValueError, match=r"train.losses.look_ahead\(batch, heads\)"):
        train.mtp_loss(weights, {"tokens": batch.tokens}, config=config)
    given = {"tokens": batch.tokens, "segment_ids": batch.segment_ids, "labels": batch.labels}
    with pytest.raises(ValueError, match="The batch has no positions; its keys are"):
        train.mtp_loss(weights, train.losses.look_ahead(given, 2), config=config)


def test_a_training_step_moves_the_heads() -> None:
    """Through the step: split in parts, with layers checkpointed, equal to the loss at once; biases by the counts."""
    case = next(case for case in cases() if case.name == "deepseek_v3")
    config = dataclasses.replace(case.config, num_nextn_predict_layers=1)
    weights, batch = generic_params(config), batch_of(config, MIXED)
    given = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    given = train.losses.look_ahead({**given, "labels": batch.labels}, 1)

    def loss(params: Any, batch: Any, **options: Any) -> Any:
        return train.mtp_loss(params, batch, config=config, length=24, **options)

    def with_aux(params: Any, batch: Any, *, aux: bool = False, layer_fn: Any = None) -> Any:
        return loss(params, batch, aux=aux, layer_fn=layer_fn)

    optimizer = train.sgd(0.1, spec=fnmodels.family_of(config).spec(config))
    results = []
    for options in ({}, {"accumulate": 2, "remat": "full"}):
        step = train.make_step(with_aux, optimizer, balance_rate=0.01, **options)
        state, metrics = step(train.init_state(weights, optimizer), given)
        results.append((state.params, metrics["loss"]))
    assert off(results[1], results[0]) < 1e-5
    before, after = (tree.flatten(params) for params in (weights, results[0][0]))
    assert all(not torch.equal(leaf, before[path]) for path, leaf in after.items())
    counts = loss(weights, given, aux=True)[2]["counts"]
    assert counts.shape == (3, config.n_routed_experts)  # two layers and the head
    assert counts[2].sum() == (given["next_tokens"] >= 0).sum() * config.num_experts_per_tok
    for path, of_layer in zip((p for p in after if p.endswith("selection_bias")), counts, strict=True):
        assert torch.equal(after[path], train.losses.update_bias(before[path], of_layer, 0.01)), path


def test_weights_of_tokens_and_losses_of_routers() -> None:
    """A token's weight is that of its label, whichever head predicts it; routers add what they add without heads."""
    case = next(case for case in cases() if case.name == "deepseek_v3")
    config = with_heads(case)
    weights, batch = generic_params(config, torch.float64), batch_of(config, MIXED)
    given = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    given |= {"labels": batch.labels, "weights": torch.rand(MIXED.shape, generator=torch.Generator().manual_seed(1))}
    options: dict[str, Any] = {"config": config, "length": 24, "balance": train.Balance(sequence=0.1, z=0.01)}
    plain, count = train.next_token_loss(weights, given, **options)
    zero, same = train.mtp_loss(weights, train.losses.look_ahead(given, 2), weight=0.0, **options)
    assert off(zero, plain) < 1e-12 and same == count
    full = train.mtp_loss(weights, train.losses.look_ahead(given, 2), **options)[0]
    halved = {**given, "weights": given["weights"] / 2}
    # all tokens count as before, so the routers' part stays, and the rest is halved
    routers = train.next_token_loss(weights, {**given, "weights": given["weights"] * 1e-30}, **options)[0]
    half = train.mtp_loss(weights, train.losses.look_ahead(halved, 2), **options)[0]
    assert off(half - routers, (full - routers) / 2) < 1e-9
    # those of weight 0 are learnt by no head, as labels that are not there
    chosen = given["weights"] > 0.5
    some = {**given, "weights": chosen.double()}
    fewer = {name: given[name] for name in given if name != "weights"} | {"labels": batch.labels.where(chosen, -100)}
    of_both = [
        train.mtp_loss(weights, train.losses.look_ahead(of, 2), config=config, length=24) for of in (some, fewer)
    ]
    assert off(*of_both) < 1e-12
    ahead = train.losses.look_ahead(given, 2)
    counts = train.mtp_loss(weights, ahead, **options, aux=True)[2]["counts"][-2:]
    assert torch.equal(counts.sum(1), (ahead["next_tokens"] >= 0).sum((0, 1)) * config.num_experts_per_tok)
    _, tapped = batch.forward(weights, taps=("layers.*.expert_indices",))
    routing = torch.stack(list(tapped.values()), dim=2)
    math = {**options, "kernel": "math"}
    free = train.mtp_loss(weights, ahead, **math)[0]
    assert torch.equal(train.mtp_loss(weights, {**ahead, "routing": routing}, **math)[0], free)
    assert off(train.mtp_loss(weights, {**ahead, "routing": routing.flip(1)}, **math)[0], free) > 1e-6
    for experts in ("loop", "dense"):
        assert off(train.mtp_loss(weights, ahead, **options, experts=experts)[0], full) < 1e-9
    with pytest.raises(ValueError, match="experts is 'quick'"):
        train.mtp_loss(weights, ahead, **options, experts="quick")
    late = train.losses.look_ahead({name: given[name] for name in given if name != "weights"}, 2) | given
    with pytest.raises(ValueError, match="has no next_weights"):
        train.mtp_loss(weights, late, **options)


@every_family
def test_transforms(case: Case) -> None:
    """Gradients of each row by vmap, which add up to that of the batch; forward mode, against the two of reverse."""
    config = with_heads(case)
    weights, batch = generic_params(config, torch.float64), batch_of(config, MIXED)
    given = (*batch.prepared(), next_tokens_of(batch))

    def loss(weights: Any, inputs: Any, masks: Any, freqs_cis: Any, ahead: Tensor) -> Tensor:
        found = logits_of(weights, (inputs, masks, freqs_cis), ahead, config)
        known = (ahead >= 0).unbind(-1)
        parts = (torch.where(k[..., None], x.log_softmax(-1), 0).sum() for x, k in zip(found, known, strict=True))
        return sum(parts, torch.zeros((), dtype=torch.float64))

    whole = torch.func.grad(loss)(weights, *given)
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0, 0))(weights, *fnmodels.rows(given))
    assert off(tree.map(lambda g: g.sum(0), rows), whole) < 1e-9
    tangent = tree.map(torch.ones_like, weights)
    _, along = torch.func.jvp(lambda w: loss(w, *given), (weights,), (tangent,))
    assert off(along, torch.stack([g.sum() for g in tree.leaves(whole)]).sum()) < 1e-9
