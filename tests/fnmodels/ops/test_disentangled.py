"""Disentangled attention: rows of distances as transformers', scores as a loop's, pieces of rows as whole ones."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from fnmodels.ops.attention.disentangled import DisentangledBias, DistanceEmbeddings, rows_of_distances


@pytest.mark.parametrize(
    ("span", "most", "logarithmic"), [(256, 512, True), (32, 64, True), (6, 12, True), (20, 20, False)]
)
def test_rows_of_distances_are_those_of_transformers(span: int, most: int, logarithmic: bool) -> None:
    """Longer distances than `most` too, which have the rows of the ends."""
    length = 2 * most + 9
    tokens = torch.zeros(1, length, 1)
    theirs = build_relative_position(tokens, tokens, span if logarithmic else -1, most if logarithmic else -1)
    wanted = (theirs + span).clamp(0, 2 * span - 1)[0, :, 0].tolist()  # of each query with key 0
    rows = rows_of_distances(span, most, logarithmic=logarithmic)
    assert wanted == rows[most:] + rows[-1:] * (length - most - 1)
    wanted = (theirs + span).clamp(0, 2 * span - 1)[0, 0].tolist()
    assert wanted == rows[most::-1] + rows[:1] * (length - most - 1)


def test_scores_are_those_of_a_loop() -> None:
    """A query and a key of each head, at any positions, with the projections of both."""
    torch.manual_seed(0)
    table, q, k = torch.randn(8, 6), torch.randn(2, 3, 2, 4), torch.randn(2, 5, 2, 4)
    weights = {f"{name}_proj": torch.randn(8, 6) for name in "qkv"} | {f"{name}_bias": torch.randn(8) for name in "qkv"}
    at, keys_at = torch.tensor([[0, 4, 2], [7, 1, 1]]), torch.tensor([[3, 0, 9, 2, 5], [1, 0, 6, 2, 2]])
    rows = torch.tensor(rows_of_distances(4, 4, logarithmic=False))
    made = DistanceEmbeddings(table, rows, at, keys_at).of_layer(weights, q, k, scale=0.5)
    found = made.dense()
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, 3, 5))).tolist():
        row = table[min(max(int(at[b, i] - keys_at[b, j]) + 4, 0), 7)]
        key = (weights["k_proj"] @ row + weights["k_bias"])[4 * h : 4 * h + 4]
        query = (weights["q_proj"] @ row + weights["q_bias"])[4 * h : 4 * h + 4]
        torch.testing.assert_close(found[b, h, i, j], 0.5 * (q[b, i, h] @ key + k[b, j, h] @ query))
    part = made.of(tuple(t[:, 1:] for t in made.queries), tuple(t[:, :3] for t in made.keys))
    assert isinstance(part, DisentangledBias)
    torch.testing.assert_close(part.dense(), found[:, :, 1:, :3])
