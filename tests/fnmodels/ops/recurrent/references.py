"""The recurrent ops token by token, as their definitions say, and rows of documents that show where they go wrong."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Documents of one and two tokens, long ones across every border of chunks of 8, padding before, between, inside of and
# after documents, and an id that comes back after another document.
ROWS = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0],
        [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1],
        [5, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
        [0] * 27,
    ]
)
VALID = ROWS > 0


def by_row(segment_ids: Tensor, state: Tensor, last: Tensor | None, step: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """y[b, t], state = step(state of t's document, b, t) for every token that is not padding; 0 at padding."""
    rows, states = [], []
    for b in range(len(segment_ids)):
        h, current, row = state[b], 0 if last is None else int(last[b]), []
        for t, segment in enumerate(segment_ids[b].tolist()):
            if segment > 0:
                y, h = step(h if segment == current else torch.zeros_like(h), b, t)
                current = segment
            row.append(y if segment > 0 else None)
        zero = next((torch.zeros_like(y) for y in row if y is not None), torch.zeros(1))
        rows.append([zero if y is None else y for y in row])
        states.append(h)
    shape = max((row[0].shape for row in rows), key=len)
    return torch.stack([torch.stack([y.expand(shape) for y in row]) for row in rows]), torch.stack(states)


def convolve(x, weight, bias, segment_ids, tail=None, last=None, *, silu=False, step=1):  # type: ignore[no-untyped-def]
    def next_token(tail: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        window = torch.cat((tail, x[b, t][None]))
        y = (window[::step] * weight.T).sum(0) + (0 if bias is None else bias)
        return F.silu(y) if silu else y, window[1:]

    start = x.new_zeros(len(x), (weight.shape[1] - 1) * step, x.shape[2]) if tail is None else tail
    return by_row(segment_ids.expand(x.shape[:2]), start, last, next_token)


def delta(q, k, v, g, beta, segment_ids, state=None, last=None):  # type: ignore[no-untyped-def]
    group = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
    decay = (g if g.ndim == 4 else g[..., None]).exp()

    def step(S: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        S = decay[b, t][..., None] * S
        error = v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t])
        S = S + torch.einsum("hk,hv->hkv", k[b, t], beta[b, t][:, None] * error)
        return torch.einsum("hkv,hk->hv", S, q[b, t]), S

    start = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    return by_row(segment_ids.expand(v.shape[:2]), start, last, step)


def selective(x, dt, B, C, A, D, segment_ids, state=None, last=None):  # type: ignore[no-untyped-def]
    def step(h: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        h = (dt[b, t][:, None] * A).exp() * h + torch.outer(dt[b, t] * x[b, t], B[b, t])
        return h @ C[b, t] + D * x[b, t], h

    start = x.new_zeros(len(x), x.shape[2], B.shape[2]) if state is None else state
    return by_row(segment_ids.expand(x.shape[:2]), start, last, step)


def state_space(x, dt, A, B, C, D, segment_ids, state=None, last=None):  # type: ignore[no-untyped-def]
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))

    def step(h: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        h = (dt[b, t] * A).exp()[:, None, None] * h
        h = h + torch.einsum("hp,hn->hpn", dt[b, t][:, None] * x[b, t], B[b, t])
        return torch.einsum("hpn,hn->hp", h, C[b, t]) + D[:, None] * x[b, t], h

    start = x.new_zeros(len(x), x.shape[2], x.shape[3], B.shape[3]) if state is None else state
    return by_row(segment_ids.expand(x.shape[:2]), start, last, step)


def two_keys(r, k, v, g, a, b, segment_ids, state=None, last=None):  # type: ignore[no-untyped-def]
    def step(S: Tensor, i: int, t: int) -> tuple[Tensor, Tensor]:
        u = torch.einsum("hkv,hk->hv", S, a[i, t])
        S = g[i, t].exp()[..., None] * S + torch.einsum("hk,hv->hkv", b[i, t], u)
        S = S + torch.einsum("hk,hv->hkv", k[i, t], v[i, t])
        return torch.einsum("hkv,hk->hv", S, r[i, t]), S

    start = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    return by_row(segment_ids.expand(v.shape[:2]), start, last, step)


def shift(x, segment_ids, tail=None, last=None):  # type: ignore[no-untyped-def]
    start = x.new_zeros(len(x), 1, x.shape[2]) if tail is None else tail
    return by_row(segment_ids.expand(x.shape[:2]), start, last, lambda tail, b, t: (tail[0], x[b, t][None]))
