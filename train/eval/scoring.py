"""Log-probabilities of continuations given their contexts, in batches, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree
from train.losses.lm_head import CHUNK
from train.losses.next_token import model_states
from train.losses.softmax_stats import scores
from train.losses.token_chunks import per_token

Pair = tuple[Sequence[int], Sequence[int]]  # context, at least one id; continuation

ROW_TOKENS = 4096  # tokens of a batch, padding included


@torch.no_grad()
def score_continuations(
    params: Tree, config: DecoderConfig, pairs: Sequence[Pair], *, batch_tokens: int = ROW_TOKENS
) -> list[tuple[float, bool]]:
    """(log-probability of the continuation in nats, whether greedy decoding yields it) of each (context, continuation).

    Computed in at least fp32. A context is truncated from the left to fit `max_position_embeddings` + 1 tokens with its
    continuation. batch_tokens: the size of batches, of rows of similar length; results do not depend on it. ValueError
    where a context is empty, or a continuation alone is too long.
    """
    longest = config.max_position_embeddings
    rows = [_row(context, continuation, longest) for context, continuation in pairs]
    found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    for indices in _batches([len(tokens) for tokens, _ in rows], batch_tokens):
        logp, likeliest = _score_batch(params, config, [rows[i] for i in indices])
        for index, value, greedy in zip(indices, logp.tolist(), likeliest.tolist(), strict=True):
            found[index] = (value, greedy)
    return found


def _row(context: Sequence[int], continuation: Sequence[int], longest: int) -> tuple[list[int], int]:
    """(the ids that fit, the number of continuation tokens)."""
    if not context:
        raise ValueError("A context is empty: it needs at least one token, such as the one that begins a text.")
    if len(continuation) > longest:
        raise ValueError(f"A continuation has {len(continuation)} tokens; the model takes {longest} at most.")
    return [*context, *continuation][-(longest + 1) :], len(continuation)


def _batches(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows per batch, the longest first, so that running out of memory happens at the start."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        rows = max(1, batch_tokens // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]


def _score_batch(params: Tree, config: DecoderConfig, rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    width = max(len(tokens) for tokens, _ in rows) - 1
    shape = (len(rows), width)
    batch = {"tokens": torch.zeros(shape, dtype=torch.int64), "positions": torch.arange(width).expand(shape)}
    batch["segment_ids"] = torch.zeros(shape, dtype=torch.int64)
    batch["labels"] = torch.full(shape, IGNORE)
    for i, (tokens, new) in enumerate(rows):
        ids, size = torch.tensor(tokens), len(tokens) - 1
        batch["tokens"][i, :size], batch["segment_ids"][i, :size] = ids[:-1], 1
        batch["labels"][i, size - new : size] = ids[len(ids) - new :]
    device = next(iter(fnmodels.tree.leaves(params))).device
    layout = fnmodels.document_layout(batch["positions"], batch["segment_ids"])
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    # Rope tables that depend on the length use each row's own, not that of the padded batch.
    length = batch["segment_ids"].sum(1)
    x = model_states(params, batch, config=config, length=length, options=ForwardOptions(layout=layout)).x
    family, valid = fnmodels.family_of(config), batch["labels"] != IGNORE

    def one(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = family.unembed(params, x[None], config=config)[0]
        return scores(logits, labels, 1.0)[0], logits.argmax(-1) == labels

    if not valid.any():
        return x.new_zeros(len(rows)), torch.ones(len(rows), dtype=torch.bool)
    labels = batch["labels"][valid]
    logp, likeliest = per_token(one, (x[valid], labels), labels.shape, CHUNK)
    row = valid.nonzero()[:, 0]
    wrong = torch.zeros(len(rows), dtype=torch.int64, device=device).index_add(0, row, (~likeliest).long())
    return torch.zeros(len(rows), dtype=torch.float64, device=device).index_add(0, row, logp.double()), wrong == 0
