"""Hashed n-grams that layers add to residual streams, against a loop over the tokens of each document."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.segments import preceding_tokens
from fnmodels.models.common.layers import ngrams
from fnmodels.ops.streams.ngrams import XorHash, add_ngrams_to_streams, is_prime, xor_hashes, xor_rows
from tests.support.cases import batch_of, cases, generic_params, segments, trainable

HOW = list(islice(xor_hashes(size=4, heads=2, rows=50, vocabulary=20, seed=3, end=7), 2))[1]
CONFIG: Any = next(case.config for case in cases() if case.name == "qwen4_exp_ngrams")
LENGTHS, EPS = (9, 1, 14), 1e-3
SEGMENTS = fnmodels.segments_from_lengths([list(LENGTHS)])
POSITIONS = fnmodels.positions_from_segments(SEGMENTS)


def rows_by_loop(document: list[int], how: XorHash) -> list[list[int]]:
    """The row of each token for each head, of the tokens since the last end of a text."""
    heads, found = len(how.sizes) // (len(how.multipliers) - 1), []
    for t in range(len(document)):
        before = document[:t][::-1]
        before = before[: before.index(how.end)] if how.end in before else before
        tokens = [document[t], *before, *[how.end] * len(how.multipliers)]
        mixed = [tokens[0] * how.multipliers[0]]
        for token, multiplier in zip(tokens[1:], how.multipliers[1:], strict=False):
            mixed.append(mixed[-1] ^ (token * multiplier))
        starts = [sum(how.sizes[:h]) for h in range(len(how.sizes))]
        found.append([mixed[1 + h // heads] % how.sizes[h] + starts[h] for h in range(len(how.sizes))])
    return found


def tokens_with_ends() -> Tensor:
    tokens = torch.randint(20, (1, 24), generator=torch.Generator().manual_seed(3))
    tokens[0, 4] = tokens[0, 15] = tokens[0, 16] = 7
    return tokens


def test_rows_equal_a_loop_over_each_document() -> None:
    tokens = tokens_with_ends()
    rows = xor_rows(tokens, preceding_tokens(tokens, POSITIONS, SEGMENTS, 3), HOW)[0]
    want = [row for document in tokens[0].split(LENGTHS) for row in rows_by_loop(document.tolist(), HOW)]
    assert rows.tolist() == want
    assert len({*map(tuple, want)}) > 20 and rows.max() < sum(HOW.sizes)


def test_a_row_of_mixed_documents_is_found() -> None:
    """A planted bug: the documents of a row as one."""
    tokens = tokens_with_ends()
    want = [row for document in tokens[0].split(LENGTHS) for row in rows_by_loop(document.tolist(), HOW)]
    mixed = xor_rows(tokens, preceding_tokens(tokens, torch.arange(24)[None], SEGMENTS * 0 + 1, 3), HOW)[0]
    differ = [ours != theirs for ours, theirs in zip(mixed.tolist(), want, strict=True)]
    assert differ == [t in (9, 10, 11, 12) for t in range(24)]  # the tokens at the begin of the second and the third


@pytest.mark.parametrize("start", [0, 1, 20_000_000, (1 << 40) - 200, 341550071728321 - 10])
def test_primes_are_those_of_trial_division(start: int) -> None:
    small = [p for p in range(2, 400) if all(p % d for d in range(2, p))]

    def by_division(number: int) -> bool:
        return number > 1 and all(number % p or number == p for p in small) and (number < 160_000 or trial(number))

    def trial(number: int) -> bool:
        return all(number % d for d in range(401, min(int(number**0.5) + 1, 1 << 20), 2))

    numbers = range(start, start + 60 if start < 1 << 30 else start + 8)
    assert [is_prime(n) for n in numbers] == [by_division(n) for n in numbers]
    assert not is_prime(3215031751) and not is_prime(341550071728321)  # which pass for the first witnesses


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {"table": (sum(HOW.sizes), 3), "key_proj": (10, 18), "value_proj": (5, 18), "conv": (10, 1, 3)}
    sizes |= {f"{name}_norm": (10,) for name in ("key", "query", "conv")}
    return {name: torch.randn(*size, dtype=torch.float64).requires_grad_() for name, size in sizes.items()}


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS) ** -0.5 * (1 + scale.view(x.shape))


def streams_by_loop(w: dict[str, Tensor], x: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """The streams [n, D] after each token of one document x [S, n, D], which reads rows [S, heads]."""
    read: list[Tensor] = []
    for t in range(len(x)):
        e = torch.cat([w["table"][r] for r in rows[t]])
        keys, queries = normed((w["key_proj"] @ e).view(2, 5), w["key_norm"]), normed(x[t], w["query_norm"])
        gates = [k @ q / 5**0.5 for k, q in zip(keys, queries, strict=True)]
        values = torch.stack([torch.sigmoid(g.sign() * g.abs().sqrt()) * (w["value_proj"] @ e) for g in gates])
        read.append(normed(values, w["conv_norm"]).flatten())
        taps = [read[t - 4 * j] * w["conv"][:, 0, 2 - j] for j in range(3) if t >= 4 * j]
        yield x[t] + values + F.silu(sum(taps, torch.zeros(()))).view(2, 5)


@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_streams_equal_a_loop_over_each_document_with_gradients(kernel: str) -> None:
    w, x, rows = weights(), torch.randn(1, 24, 2, 5, dtype=torch.float64), torch.randint(300, (1, 24, 6))
    leaves = [x.requires_grad_(), *w.values()]
    parts = zip(x[0].split(LENGTHS), rows[0].split(LENGTHS), strict=True)
    want = torch.stack([y for part in parts for y in streams_by_loop(w, *part)])
    how: dict[str, Any] = {"step": 4, "eps": EPS, "kernel": kernel}
    got, _ = add_ngrams_to_streams(w, x, rows, SEGMENTS, **how)
    torch.testing.assert_close(got[0], want, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(want)
    grads = [torch.autograd.grad((y * factor).sum(), leaves) for y in (got[0], want)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    across, _ = add_ngrams_to_streams(w, x, rows, SEGMENTS * 0 + 1, **how)  # a planted bug: a row as one document
    differ = (across[0] - want).flatten(1).abs().amax(1) > 1e-6
    assert differ.tolist() == [9 <= t < 10 + 8 for t in range(24)]


@pytest.mark.parametrize("cuts", [(5, 19), (1,) * 24, (10, 1, 13)])
def test_pieces_with_the_state_handed_over_are_the_row(cuts: tuple[int, ...]) -> None:
    w, x, rows = weights(), torch.randn(1, 24, 2, 5, dtype=torch.float64), torch.randint(300, (1, 24, 6))
    how: dict[str, Any] = {"step": 4, "eps": EPS}
    whole, _ = add_ngrams_to_streams(w, x, rows, SEGMENTS, **how)
    state, found, forgotten = None, [], []
    for part in zip(x.split(cuts, 1), rows.split(cuts, 1), SEGMENTS.split(cuts, 1), strict=True):
        y, after = add_ngrams_to_streams(w, *part, state, **how)
        found.append(y)
        forgotten.append(add_ngrams_to_streams(w, *part, **how)[0])
        state = after, part[2][:, -1]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(torch.cat(forgotten, 1), whole, atol=1e-3)  # a planted bug: pieces begin anew


def test_a_model_in_chunks_is_the_whole_and_forgets_nothing() -> None:
    """Prefill in chunks and decoding, with the tokens before and the convolution's state in the cache."""
    params = generic_params(CONFIG, torch.float64)
    tokens = torch.randint(8, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    whole = fnmodels.forward(params, *fnmodels.prepare(CONFIG, tokens), config=CONFIG, kernel="math")

    def chunked(spoil: str = "") -> Tensor:
        cache, found = fnmodels.init_cache(CONFIG, 2, 16, dtype=torch.float64), []
        for part in tokens.split((4, 6, 1, 1, 1), 1):
            inputs, masks, tables = fnmodels.prepare_step(CONFIG, part, cache)
            if spoil == "tokens":
                inputs["preceding"] = torch.full_like(inputs["preceding"], -1)
            if spoil == "state":
                for entry in cache.layers:
                    entry.get("ngrams", torch.zeros(())).zero_()
            logits, cache = fnmodels.decode(params, inputs, masks, tables, cache, config=CONFIG, kernel="math")
            found.append(logits)
        return torch.cat(found, 1)

    torch.testing.assert_close(chunked(), whole, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(chunked("tokens"), whole, atol=1e-3)
    assert not torch.allclose(chunked("state"), whole, atol=1e-3)


@pytest.mark.parametrize("bug", ["", "one document for n-grams", "one document for the convolution"])
def test_packed_documents_are_those_alone(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    params = trainable(generic_params(CONFIG, torch.float64))
    lengths = (9, 3, 12)
    batch = batch_of(CONFIG, segments(lengths))
    factor = torch.randn(1, 24, CONFIG.vocab_size, dtype=torch.float64)

    def gradients(logits: Tensor) -> Tensor:
        leaves = [leaf for path, leaf in tree.flatten(params).items() if ".ngrams." in path]
        grads = torch.autograd.grad((logits * factor).sum(), leaves)
        return torch.cat([grad.flatten() for grad in grads])

    def run(tokens: Tensor, segment_ids: Tensor) -> Tensor:
        positions = fnmodels.positions_from_segments(segment_ids)
        inputs, masks, tables = fnmodels.prepare(CONFIG, tokens, positions=positions, segment_ids=segment_ids)
        if bug == "one document for n-grams":
            order = torch.arange(tokens.shape[1])[None]
            inputs["preceding"] = preceding_tokens(tokens, order, torch.ones_like(segment_ids), 2)
        return fnmodels.forward(params, inputs, masks, tables, config=CONFIG, kernel="math")

    if bug == "one document for the convolution":
        right = ngrams.add_ngrams_to_streams
        monkeypatch.setattr(
            ngrams, "add_ngrams_to_streams", lambda w, x, r, s, t, **k: right(w, x, r, s * 0 + 1, t, **k)
        )
    packed = run(batch.tokens, batch.segment_ids)
    alone = torch.cat([run(part, torch.ones_like(part)) for part in batch.tokens.split(lengths, 1)], 1)
    same = torch.allclose(packed, alone, rtol=1e-9, atol=1e-9)
    assert same == torch.allclose(gradients(packed), gradients(alone), rtol=1e-8, atol=1e-8) == (not bug)


def test_inputs_without_the_tokens_before_are_refused() -> None:
    tokens = torch.ones(1, 4, dtype=torch.long)
    inputs, masks, tables = fnmodels.prepare(CONFIG, tokens)
    vectors = {"tokens": torch.zeros(1, 4, CONFIG.hidden_size), "valid": inputs["valid"]}
    for given in ({name: x for name, x in inputs.items() if name != "preceding"}, vectors):
        with pytest.raises(ValueError, match="This model embeds n-grams of tokens: pass the inputs of"):
            fnmodels.forward(generic_params(CONFIG), given, masks, tables, config=CONFIG)
