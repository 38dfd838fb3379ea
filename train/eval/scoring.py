"""Log-probabilities of continuations given their contexts, in batches, for evaluation.

Sequences are packed by the rule of `train.token_budget`. A model whose rotary tables depend on the length (dynamic,
longrope) has one table per row, so that each sequence has a row of its own there, beside ones of similar length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.dtypes import widest
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import ForwardOptions, Kernel
from fnmodels.tree import Tree
from train.data.token_budget import rows_within, token_budget
from train.generation.prompts import activations, empty_caches, prefilled, run_all
from train.losses.next_token import model_states
from train.losses.softmax_stats import scores
from train.losses.token_chunks import chunk_of, per_token

ContextPair = tuple[Sequence[int], Sequence[int]]  # context, at least one id; continuation
ScoredRow = tuple[list[int], int]  # the ids of a pair that fit, the number of continuation tokens

ROW_TOKENS = 4096  # tokens of a batch, padding included
PLACED = 1024  # sequences that are placed in packed rows at once: the time of that grows with their square
SHARED_NEW = 32  # tokens of the longest continuation for which pairs share the pass over their context


@torch.no_grad()
def score_continuations(
    params: Tree,
    config: DecoderConfig,
    pairs: Sequence[ContextPair],
    *,
    batch_tokens: int = ROW_TOKENS,
    kernel: Kernel = "auto",
) -> list[tuple[float, bool]]:
    """(log-probability of the continuation in nats, whether greedy decoding yields it) of each (context, continuation).

    Computed in at least fp32. A context is truncated from the left to fit `max_position_embeddings` + 1 tokens with its
    continuation. batch_tokens: the size of batches; results do not depend on it, with kernel="invariant" to the last
    bit. A context that several pairs share is computed once per batch. ValueError where
    a context is empty, or a continuation alone is too long.
    """
    rows = rows_of_pairs(pairs, config.max_position_embeddings)
    found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    alone, shared = _by_context(rows)
    packed = not tables_depend_on_length(config, rows)
    batches = [(_score_batch, indices) for indices in _batches(rows, [] if packed else alone, batch_tokens)]
    batches += [(_score_packed, indices) for indices in _budgeted(rows, alone if packed else [], batch_tokens)]
    batches += [(_score_shared, indices) for indices in _batches(rows, shared, batch_tokens)]
    options = ForwardOptions(kernel)
    for score, indices in batches:
        logp, likeliest = score(params, config, [rows[i] for i in indices], options)
        for index, value, greedy in zip(indices, logp.tolist(), likeliest.tolist(), strict=True):
            found[index] = (value, greedy)
    return found


def _by_context(rows: list[ScoredRow]) -> tuple[list[int], list[int]]:
    """Indices of rows to score alone, and of those whose context others share, which stand side by side.

    Rows without a continuation are in neither. The longest are first: running out of memory happens at the start.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (tokens, new) in enumerate(rows):
        if new:
            groups.setdefault(tuple(tokens[:-new]), []).append(index)
    longest = sorted(groups.items(), key=lambda item: -max(len(rows[i][0]) for i in item[1]))
    # a context of one token costs nothing, and the logits of a long continuation need chunks
    worth = {c for c, own in longest if len(own) > 1 and len(c) > 1 and max(rows[i][1] for i in own) <= SHARED_NEW}
    alone = sorted((i for c, own in longest if c not in worth for i in own), key=lambda i: -len(rows[i][0]))
    return alone, [i for c, own in longest if c in worth for i in own]


def rows_of_pairs(pairs: Sequence[ContextPair], longest: int) -> list[ScoredRow]:
    """(the ids that fit into `longest` + 1, the number of continuation tokens) of each pair; ValueError as above."""
    return [_row(context, continuation, longest) for context, continuation in pairs]


def _row(context: Sequence[int], continuation: Sequence[int], longest: int) -> ScoredRow:
    """(the ids that fit, the number of continuation tokens)."""
    if not context:
        raise ValueError("A context is empty: it needs at least one token, such as the one that begins a text.")
    if len(continuation) > longest:
        raise ValueError(f"A continuation has {len(continuation)} tokens; the model takes {longest} at most.")
    return [*context, *continuation][-(longest + 1) :], len(continuation)


def _batches(rows: list[ScoredRow], order: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """The indices `order` of rows in batches of at most `batch_tokens`, padding included, or of one row."""
    while order:
        size, longest = 1, len(rows[order[0]][0])
        while size < len(order) and (size + 1) * max(longest, len(rows[order[size]][0])) <= batch_tokens:
            longest = max(longest, len(rows[order[size]][0]))
            size += 1
        yield order[:size]
        order = order[size:]


def tables_depend_on_length(config: DecoderConfig, rows: list[ScoredRow]) -> bool:
    """Whether rotary tables of these lengths differ, so that a packed row would need several."""
    tokens, longest = torch.zeros(1, 2, dtype=torch.int64), max((len(row) for row, _ in rows), default=1)
    short, long = (fnmodels.tree.leaves(fnmodels.prepare(config, tokens, length=n)[2]) for n in (1, longest))
    return not all(map(torch.equal, short, long))


def _budgeted(rows: list[ScoredRow], order: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """The indices `order` of rows, those of a packed row together: at most `batch_tokens` tokens, or one sequence."""
    for start in range(0, len(order), PLACED):
        some = order[start : start + PLACED]
        lengths = [len(rows[i][0]) - 1 for i in some]
        for numbers in rows_within(lengths, max(batch_tokens, *lengths)):
            yield [some[number] for number in numbers]


def _score_packed(
    params: Tree, config: DecoderConfig, rows: list[ScoredRow], options: ForwardOptions
) -> tuple[Tensor, Tensor]:
    """All in one packed row."""
    ids = [torch.tensor(tokens) for tokens, _ in rows]
    labels = [
        one[1:].index_fill(0, torch.arange(len(one) - 1 - new), IGNORE) for one, (_, new) in zip(ids, rows, strict=True)
    ]
    ((row,),) = token_budget({"tokens": [one[:-1] for one in ids], "labels": labels}, sum(map(len, ids)))
    return _scored(params, config, row.batch, row.batch["segment_ids"] - 1, len(rows), None, options)


def _score_batch(
    params: Tree, config: DecoderConfig, rows: list[ScoredRow], options: ForwardOptions
) -> tuple[Tensor, Tensor]:
    """Each in a row of its own."""
    batch, count = batch_of(rows), len(rows)
    # Rope tables that depend on the length use each row's own, not that of the padded batch.
    length, sequences = batch["segment_ids"].sum(1), torch.arange(count)[:, None].expand(batch["tokens"].shape)
    return _scored(params, config, batch, sequences, count, length, options)


def batch_of(rows: Sequence[ScoredRow]) -> dict[str, Tensor]:
    """The entries [B, S] of a batch with a row for each, padded; labels are those of the continuations."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    shape = (len(rows), width)
    batch = {"tokens": torch.zeros(shape, dtype=torch.int64), "positions": torch.arange(width).expand(shape)}
    batch["segment_ids"] = torch.zeros(shape, dtype=torch.int64)
    batch["labels"] = torch.full(shape, IGNORE)
    for i, (tokens, new) in enumerate(rows):
        ids, size = torch.tensor(tokens), len(tokens) - 1
        batch["tokens"][i, :size], batch["segment_ids"][i, :size] = ids[:-1], 1
        batch["labels"][i, size - new : size] = ids[len(ids) - new :]
    return batch


def _scored(
    params: Tree,
    config: DecoderConfig,
    batch: dict[str, Tensor],
    sequences: Tensor,
    count: int,
    length: Tensor | None,
    options: ForwardOptions,
) -> tuple[Tensor, Tensor]:
    """(the sum of the log-probabilities of the labels, whether all are the likeliest) of each of `count` sequences.

    sequences: that of each token, int64 [B, S]. length: that of each row [B], for rotary tables that depend on it.
    """
    device = next(iter(fnmodels.tree.leaves(params))).device
    layout = fnmodels.inputs.document_layout(batch["positions"], batch["segment_ids"])
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    length = None if length is None else length.to(device)
    x = model_states(params, batch, config=config, length=length, options=replace(options, layout=layout)).x
    family, valid = fnmodels.family_of(config), batch["labels"] != IGNORE

    def one(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with invariant_rows(options.invariant):
            logits = family.unembed(params, x[None], config=config)[0]
        return scores(logits, labels, 1.0)[0], logits.argmax(-1) == labels

    labels, of = batch["labels"][valid], sequences.to(device)[valid]
    chunk = chunk_of("auto", config.vocab_size, device, x.dtype)
    logp, likeliest = per_token(one, (x[valid], labels), labels.shape, chunk)
    wrong = torch.zeros(count, dtype=torch.int64, device=device).index_add(0, of, (~likeliest).long())
    logp = logp.to(widest(logp.device))
    return torch.zeros(count, dtype=logp.dtype, device=device).index_add(0, of, logp), wrong == 0


def _score_shared(
    params: Tree, config: DecoderConfig, rows: list[ScoredRow], options: ForwardOptions
) -> tuple[Tensor, Tensor]:
    """`_score_batch` with a cache: each distinct context is computed once, then all continuations in one step."""
    _, device = activations(params)
    shape = len(rows), max(new for _, new in rows)
    sizes = [len(tokens) - 1 for tokens, _ in rows]
    contexts = [tokens[: len(tokens) - new] for tokens, new in rows]
    empty = empty_caches(params, config, max(sizes))
    chunks = prefilled(params, config, contexts, sizes, empty=empty, chunk=ROW_TOKENS, kernel=options.kernel)
    cache = run_all(chunks).cache
    ids, segment_ids, labels = torch.zeros(shape).long(), torch.zeros(shape).long(), torch.full(shape, IGNORE)
    for i, (tokens, new) in enumerate(rows):
        known = torch.tensor(tokens[len(tokens) - new - 1 :])
        ids[i, :new], labels[i, :new], segment_ids[i, :new] = known[:-1], known[1:], 1
    ids, segment_ids, labels = (tensor.to(device) for tensor in (ids, segment_ids, labels))
    length = torch.tensor(sizes, device=device)
    step = fnmodels.prepare_step(config, ids, cache, segment_ids=segment_ids, length=length)
    logits, _ = fnmodels.decode_(params, *step, cache, config=config, kernel=options.kernel)
    likeliest = (logits.argmax(-1) == labels) | (labels == IGNORE)
    return scores(logits, labels, 1.0)[0].to(widest(labels.device)).sum(1), likeliest.all(1)
