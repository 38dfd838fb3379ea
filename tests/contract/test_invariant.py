"""kernel="invariant": the bits of a token are a function of the weights and of its document's tokens alone."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.common.carried import own_choices
from fnmodels.models.common.family import traits_of
from fnmodels.ops import indexer, linear, mlp
from fnmodels.ops.invariant import attention as tiles
from fnmodels.ops.invariant import rows as invariant
from tests.support.cases import (
    Case,
    attention_of,
    causal,
    choices_of,
    generic_params,
    representatives,
    richest,
    short,
    tokens_of,
    trainable,
)

LENGTHS = (139, 5, 31, 1)  # of the documents; the first has more tokens than a tile
ROOM = 160
ROWS = {  # of (document or None for padding, length)
    "packed": (((0, 139), (1, 5), (2, 31), (3, 1)),),
    "other order": (((3, 1), (2, 31), (None, 3), (0, 139), (1, 5), (None, 6)),),
    "padded": (((0, 139),), ((None, 4), (3, 1), (1, 5), (None, 2), (2, 31), (None, 96))),
}
EACH = tuple((((document, length),),) for document, length in enumerate(LENGTHS))


def long_config(case: Case) -> Any:
    """The case's config; with room for the documents, where positions are parameters."""
    learned = any("position" in path for path in tree.flatten(fnmodels.family_of(case.config).spec(case.config)))
    return replace(case.config, max_position_embeddings=ROOM) if learned else case.config


# layers with keys of windows and those that choose by head of keys refuse it: test_deepseek_v4.py, test_deepseek_v41.py
# and test_minimax_m3.py of tests/fnmodels/models; those with a bias of scores too: test_inkling2.py there
REFUSE = {"indexed_ratio", "index_block_size", "candidate_size"}


def is_here(case: Case) -> bool:
    biased = traits_of(fnmodels.family_of(case.config)).biased
    return causal(case) and REFUSE.isdisjoint(vars(case.config)) and not biased


FAMILIES = tuple(short(case) for case in richest() if is_here(case))
LLAMA = next(case for case in FAMILIES if case.family == "llama")
CHOOSES = tuple(case for case in FAMILIES if own_choices(fnmodels.family_of(case.config).kinds(case.config)))

PARTS = [case for case in representatives() if is_here(case)]
# Gradients have their bits on every other one, and are those of the model on the others.
some_parts = pytest.mark.parametrize("case", PARTS[::2], ids=str)
other_parts = pytest.mark.parametrize("case", [PARTS[0], *PARTS[1::2]], ids=str)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Those of `representatives`, whose operations families share; of each form of attention in both dtypes, others in turn.
FEW = tuple(case for case in FAMILIES if case.name in {case.name for case in PARTS})
FIRST = {attention_of(case): case for case in reversed(FEW)}.values()
PAIRS = [(c, d) for i, c in enumerate(FEW) for j, d in enumerate(DTYPES) if c in FIRST or i % len(DTYPES) == j]
STEPS: dict[str, dict[str, Any]] = {  # of a sampler: prompts in chunks, then token by token over the end of a tile
    "rings": {"chunks": (100, 27, 1, 1, 1, 9), "rings": True, "rows": 3},
    "all slots": {"chunks": (3, 133, 1, 1, 1), "rings": False, "rows": 2},
}


def documents(config: Any) -> tuple[Tensor, ...]:
    return tokens_of(config, 1, sum(LENGTHS))[0].split(LENGTHS)


def batch_in(config: Any, rows: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(the batch, where each document is in it: bool [B, S])."""
    given = documents(config)
    found: list[list[tuple[Tensor, ...]]] = []
    for row in rows:
        parts = []
        for segment, (document, length) in enumerate(row, 1):
            known = document is not None
            tokens = given[document] if known else torch.zeros(length, dtype=torch.long)
            labels = F.pad(tokens[1:], (0, 1), value=-100) if known else torch.full_like(tokens, -100)
            ids = (torch.full_like(tokens, n) for n in (segment * known, document if known else -1))
            parts.append((tokens, labels, torch.arange(length), *ids))
        found.append([torch.cat(column) for column in zip(*parts, strict=True)])
    tokens, labels, positions, segments, owner = (torch.stack(column) for column in zip(*found, strict=True))
    batch = {"tokens": tokens, "labels": labels, "positions": positions, "segment_ids": segments}
    return batch, [owner == document for document in range(len(LENGTHS))]


def logprobs(config: Any, params: Any, rows: Any, **options: Any) -> dict[int, Tensor]:
    """{document: its log-probabilities}."""
    batch, places = batch_in(config, rows)
    how = {"kernel": "invariant", "length": ROOM, "chunk": 64} | options
    logp, _, _ = train.token_logprobs(params, batch, config=config, **how)
    return {document: logp[place] for document, place in enumerate(places) if place.any()}


def alone(config: Any, params: Any) -> dict[int, Tensor]:
    """Each document in a row of its own, without padding."""
    return {n: logp for rows in EACH for n, logp in logprobs(config, params, rows).items()}


def assert_bits(got: dict[int, Tensor], wanted: dict[int, Tensor], where: str) -> None:
    for document, logp in got.items():
        want = wanted[document]
        assert torch.equal(logp, want), f"{where}, document {document}: off by {(logp - want).abs().max()}"


def gradients(config: Any, params: Any, rows: Any) -> dict[int, Tensor]:
    """{document: the gradient of its embedded tokens, before any sum over tokens}."""
    return logprobs_and_gradients(config, params, rows)[1]


def logprobs_and_gradients(config: Any, params: Any, rows: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What `logprobs` and `gradients` say, by one pass."""
    batch, places = batch_in(config, rows)
    inputs, masks, freqs = fnmodels.prepare(
        config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"], length=ROOM
    )
    x = fnmodels.family_of(config).embed(params, inputs, config=config).detach().requires_grad_()
    logits = fnmodels.forward(params, {**inputs, "tokens": x}, masks, freqs, config=config, kernel="invariant")
    logp, _ = train.logprobs(logits, batch["labels"])
    (found,) = torch.autograd.grad(logp.sum(), x)
    here = [(document, place) for document, place in enumerate(places) if place.any()]
    return {n: logp.detach()[place] for n, place in here}, {n: found[place] for n, place in here}


def sampled(config: Any, params: Any, chunks: tuple[int, ...], *, rings: bool, rows: int = 4) -> dict[int, Tensor]:
    """Log-probabilities by decoding the first documents side by side, in chunks of so many tokens."""
    lengths, longest, dtype = torch.tensor(LENGTHS[:rows])[:, None], max(LENGTHS), params["embed_tokens"].dtype
    tokens = torch.stack([F.pad(d, (0, longest - len(d))) for d in documents(config)[:rows]])
    segment_ids = (torch.arange(longest) < lengths).long()
    cache = fnmodels.init_cache(config, rows, ROOM, dtype=dtype, rings=rings, length=ROOM)
    logits = []
    for part, ids in zip(tokens.split(chunks, 1), segment_ids.split(chunks, 1), strict=True):
        step = fnmodels.prepare_step(config, part, cache, segment_ids=ids)
        found, cache = fnmodels.decode_(params, *step, cache, config=config, kernel="invariant")
        logits.append(found)
    labels = F.pad(tokens[:, 1:], (0, 1)).masked_fill(torch.arange(longest) >= lengths - 1, -100)
    got, _ = train.logprobs(torch.cat(logits, 1), labels)
    return {row: got[row, :length] for row, length in enumerate(LENGTHS[:rows])}


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
def test_a_document_has_its_bits_in_any_batch_and_in_the_sampler(case: Case, dtype: str) -> None:
    """The first with each form of attention in all batches and steps in fp32, the others in one of each in turn."""
    config = long_config(case)
    params = generic_params(config, DTYPES[dtype])
    wanted, turn = alone(config, params), FAMILIES.index(case) // len(DTYPES)
    every = case in FIRST and dtype == "fp32"
    for name in ROWS if every else [("other order", "padded")[turn % 2]]:  # both have padding
        assert_bits(logprobs(config, params, ROWS[name]), wanted, name)
    for name in STEPS if every else [[*STEPS][turn % len(STEPS)]]:
        assert_bits(sampled(config, params, **STEPS[name]), wanted, name)


@some_parts
def test_gradients_of_a_document_have_their_bits(case: Case) -> None:
    config = long_config(case)
    params = generic_params(config)
    wanted = {n: grad for rows in EACH for n, grad in gradients(config, params, rows).items()}
    assert_bits(gradients(config, params, ROWS["other order"]), wanted, "other order")


@other_parts
def test_it_is_the_model(case: Case) -> None:
    """The same loss and gradients as kernel="math", up to rounding, on packed rows."""
    config = long_config(case)
    params = trainable(generic_params(config))
    batch, _ = batch_in(config, ROWS["other order"])
    found = []
    for kernel in ("invariant", "math"):
        total, count = train.next_token_loss(params, batch, config=config, kernel=kernel, length=ROOM, chunk=50)
        leaves = [leaf for leaf in tree.leaves(params) if leaf.is_floating_point()]
        grads = torch.autograd.grad(total / count, leaves, allow_unused=True)
        found.append([total / count, *(g for g in grads if g is not None)])
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() < 2e-5 * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    config = LLAMA.config
    params, before = generic_params(config), torch.get_num_threads()
    wanted = alone(config, params)
    try:
        torch.set_num_threads(threads)
        assert_bits(logprobs(config, params, ROWS["packed"]), wanted, f"{threads} threads")
        assert_bits(sampled(config, params, (100, 27, *[1] * 3, 9), rings=True), wanted, f"{threads} threads, sampled")
    finally:
        torch.set_num_threads(before)


BUGS = {
    "a single row is not computed twice": (invariant, "LEAST_ROWS", 1),
    "activations are not filled up to blocks": (mlp, "elementwise", lambda function, x: function(x)),
    "products of one row by another kernel": (linear, "INVARIANT", SimpleNamespace(get=lambda: False)),
    "attention of one query has one row": (tiles, "least_rows", lambda width: 1),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(LLAMA.config, num_key_value_heads=LLAMA.config.num_attention_heads)  # one query is one row
    params = generic_params(config)
    module, name, wrong = BUGS[bug]
    monkeypatch.setattr(module, name, wrong)
    wanted = alone(config, params)
    one_row = sampled(config, params, (100, 30, *[1] * 9), rings=True, rows=1)
    got = one_row, logprobs(config, params, ROWS["packed"])
    assert any(not torch.equal(found[n], wanted[n]) for found in got for n in found)


@pytest.mark.parametrize(("family", "module"), [("qwen3_next", "delta_rule"), ("mamba2", "ssd"), ("rwkv7", "two_keys")])
def test_chunks_of_a_recurrence_are_found(family: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks begin with the row, and a token of a sampler is a chunk of its own."""
    config = next(case.config for case in FAMILIES if case.family == family)
    params = generic_params(config)
    monkeypatch.setattr(f"fnmodels.ops.recurrent.{module}.rows_are_invariant", lambda: False)
    wanted, got = alone(config, params), logprobs(config, params, ROWS["other order"])
    assert any(not torch.equal(got[n], wanted[n]) for n in got)
    assert not torch.equal(sampled(config, params, (100, 27, *[1] * 3, 9), rings=True, rows=1)[0], wanted[0])


def test_adapters_have_their_bits() -> None:
    config = LLAMA.config
    params = tree.map(lambda leaf: leaf + 0.01, P.lora.add(config, generic_params(config), rank=2, seed=0))
    assert_bits(sampled(config, params, (100, 27, *[1] * 3, 9), rings=True, rows=1), alone(config, params), "sampled")


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_every_thread_has_whole_blocks(threads: int) -> None:
    """As torch splits an elementwise operation: over threads with GRAIN elements at least, and a gelu over all."""
    for count in (1, 63, 64, 14336, 16384, 31968, 32768, 32769, 71680, 787968, 3145728 + 5):
        filled = invariant._whole_blocks(count, threads)
        shared = {min(threads, -(-filled // invariant.GRAIN)), threads if filled > invariant.GELU_GRAIN else 1}
        assert filled >= count and all(-(-filled // parts) % invariant.BLOCK == 0 for parts in shared)
        assert filled - count < invariant.BLOCK * math.lcm(*shared) * 2


def test_experts_without_tokens_have_gradients() -> None:
    case = next(case for case in FAMILIES if case.family == "mixtral")
    params = trainable(generic_params(case.config))
    batch, _ = batch_in(case.config, ((((1, 5)),),))
    found = []
    for kernel in ("invariant", "math"):
        total, _ = train.next_token_loss(params, batch, config=case.config, kernel=kernel, length=ROOM)
        found.append(torch.autograd.grad(total, tree.leaves(params)))
    assert all((got - want).abs().max() < 1e-4 for got, want in zip(*found, strict=True))
    with pytest.raises(NotImplementedError, match='kernel="invariant" has experts of its own'):
        train.next_token_loss(params, batch, config=case.config, kernel="invariant", experts="grouped")


def test_explain_invariance() -> None:
    found = fnmodels.explain_invariance()
    assert len(found) == 7
    assert all(found.values()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [(32, 12), (16, 48), (256, 8), (4, 3)], ids=str)
def test_rows_of_tiny_products_have_their_bits(width: tuple[int, int], dtype: torch.dtype) -> None:
    """Torch computes a half-precision product of at most 4,096 multiplications by another kernel."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width[0], generator=draw).to(dtype) for n in (600, width[1]))
    with invariant.invariant_rows(True):
        whole = invariant.invariant_linear(x, weight, None)
        for count in (1, 2, 3, 5, 8, 17):
            parts = [invariant.invariant_linear(part.clone(), weight, None) for part in x.split(count)]
            assert torch.equal(torch.cat(parts), whole), count


def test_bf16_products_of_cpus_with_amx_are_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a row of a bf16 product over 512 inputs has other bits among 37 rows than among 600."""
    monkeypatch.setattr(invariant, "MATRIX_TILES", True)
    monkeypatch.setattr(invariant, "WIDENED", 512 * 100)  # a weight in several parts
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((600, 512), (256, 512), (256,)))
    given = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), bias.bfloat16()
    with invariant.invariant_rows(True):
        whole = invariant.invariant_linear(*given)
        for lo, hi in ((0, 1), (7, 9), (0, 37), (33, 333)):
            assert torch.equal(invariant.invariant_linear(given[0][lo:hi], *given[1:]), whole[lo:hi])
    exact = torch.nn.functional.linear(*(t.double() for t in given))
    assert (whole - exact).norm() < 2e-3 * exact.norm()  # rounded once
    up = torch.randn(exact.shape, generator=draw).bfloat16()
    for got, wanted in zip(
        torch.autograd.grad(whole, given[:2], up), torch.autograd.grad(exact, given[:2], up.double()), strict=True
    ):
        assert got.dtype is torch.bfloat16 and (got - wanted).norm() < 4e-3 * wanted.norm()


def test_scores_of_keys_have_their_bits() -> None:
    """Of one query or many, of a row of keys or its beginning, alone and beside other rows."""
    parts = [(slice(0, rows), slice(lo, lo + n)) for rows in (1, 2) for n in (1, 2, 3, 7, 40) for lo in (0, 77)]

    def differ(heads: int) -> int:
        draw = torch.Generator().manual_seed(0)
        q, k, share = (torch.randn(2, 200, *shape, generator=draw) for shape in ((heads, 24), (24,), (heads,)))
        whole, found = indexer.index_scores(q, share, k), 0
        for rows, at in parts:
            for length in (117, 200):
                got = indexer.index_scores(q[rows, at], share[rows, at], k[rows, :length])
                found += not torch.equal(got, whole[rows, at, :length])
        return found

    with torch.no_grad(), invariant.invariant_rows(True):
        assert sum(map(differ, (1, 3, 4))) == 0
    with torch.no_grad():
        assert sum(map(differ, (1, 3, 4))) > 0


@pytest.mark.parametrize("case", CHOOSES, ids=str)
def test_chosen_keys_are_those_of_other_kernels(case: Case) -> None:
    """A choice made by another kernel, replayed, gives this kernel's logits: the mask of its tiles is the choice."""
    batch, _ = batch_in(case.config, ROWS["other order"])
    params = generic_params(case.config)
    inputs, masks, freqs = fnmodels.prepare(
        case.config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"], length=ROOM
    )
    replay = {**inputs, "choices": choices_of(params, (inputs, masks, freqs), case.config, kernel="math")}
    got, wanted = (
        fnmodels.forward(params, replay, masks, freqs, config=case.config, kernel=kernel)
        for kernel in ("invariant", "math")
    )
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_other_forms_are_refused() -> None:
    config, params = LLAMA.config, generic_params(LLAMA.config)
    batch, _ = batch_in(config, EACH[1])
    ready = fnmodels.prepare(config, batch["tokens"])

    def run(tokens: Tensor, masks: Any = ready[1]) -> Any:
        return fnmodels.forward(params, tokens, masks, ready[2], config=config, kernel="invariant")

    with pytest.raises(ValueError, match=r'kernel="invariant" reads positions: give it a fnmodels.inputs.Mask'):
        run(batch["tokens"], {kind: mask.dense() for kind, mask in ready[1].items()})
    with pytest.raises(NotImplementedError, match='kernel="math" supports every transform'):
        torch.func.vmap(lambda t: run(t[None]))(batch["tokens"])
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.jvp(
            lambda x: run(x), (params["embed_tokens"][batch["tokens"]],), (torch.ones(1, 5, config.hidden_size),)
        )
    same = fnmodels.prepare(config, batch["tokens"], positions=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="positions that differ within a document"):
        fnmodels.forward(params, *same, config=config, kernel="invariant")
