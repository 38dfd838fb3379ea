"""Attention over depth, gates of messages, and convolutions beside their input, against loops over tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs.order import last_segment
from fnmodels.ops.attention.relative_bias import DistanceBias
from fnmodels.ops.attention.select import attention
from fnmodels.ops.mlp import softcapped_swiglu
from fnmodels.ops.norm import l2_clip
from fnmodels.ops.recurrent.dynamic_conv import dynamic_conv, preceding, residual_conv
from fnmodels.ops.streams.depth import attend_depth, gate_message, mix_depth
from tests.support.cases import segments

ROWS = segments((-2, 7, 4), (6, 6, -1))
D, TAPS, HEADS = 8, 3, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean() + eps).sqrt()


def test_attention_over_depth_is_a_loop_over_tokens() -> None:
    query, blocks, x = drawn(3, D), drawn(2, 5, 4, D, seed=1), drawn(2, 5, D, seed=2)
    got = attend_depth(query, blocks, x)
    assert len(got) == 3
    for b in range(2):
        for t in range(5):
            states = [normed(state) for state in (*blocks[b, t], x[b, t])]
            for q in range(3):
                shares = torch.stack([query[q] @ state / D**0.5 for state in states]).softmax(0)
                want = sum(share * state for share, state in zip(shares, states, strict=True))
                torch.testing.assert_close(got[q][b, t], want)


def test_a_mixture_of_states_is_a_loop_over_tokens() -> None:
    """By scores of the norms, which are not mixed; a state alone is returned as it is."""
    query, blocks, x = drawn(D), drawn(2, 5, 4, D, seed=1), 3 * drawn(2, 5, D, seed=2)
    got = mix_depth(query, blocks, x, eps=0.1)
    for b in range(2):
        for t in range(5):
            states = [*blocks[b, t], x[b, t]]
            shares = torch.stack([query @ normed(state, 0.1) for state in states]).softmax(0)
            want = sum(share * state for share, state in zip(shares, states, strict=True))
            torch.testing.assert_close(got[b, t], want)
    assert torch.equal(mix_depth(query, blocks[..., :0, :], x, eps=0.1), x)
    assert mix_depth(query.float(), blocks, x.bfloat16(), eps=0.1).dtype == torch.bfloat16


def test_attention_over_depth_without_blocks_is_a_norm() -> None:
    x = drawn(2, 5, D)
    (got,) = attend_depth(drawn(1, D), x[..., None, :][..., :0, :], x)
    torch.testing.assert_close(got, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_bits_are_the_same_with_and_without_gradients() -> None:
    query, blocks, x = (t.float() for t in (drawn(3, D), drawn(2, 5, 4, D, seed=1), drawn(2, 5, D, seed=2)))
    with torch.no_grad():
        plain = attend_depth(query, blocks, x)
    for a, b in zip(plain, attend_depth(query.requires_grad_(), blocks, x), strict=True):
        assert torch.equal(a, b)


def test_a_gate_mixes_a_message() -> None:
    weights = {"down_proj": drawn(3, 2 * D), "forget_proj": drawn(D, 3, seed=1), "message_proj": drawn(D, 3, seed=2)}
    x, message = drawn(2, 5, D, seed=3), drawn(2, 5, D, seed=4)
    got = gate_message(weights, x, message, eps=0.1)
    for b in range(2):
        for t in range(5):
            narrow = weights["down_proj"] @ torch.cat((normed(x[b, t], 0.1), normed(message[b, t], 0.1)))
            forget, gain = ((weights[f"{name}_proj"] @ narrow).tanh() for name in ("forget", "message"))
            torch.testing.assert_close(got[b, t], (1 - forget) * x[b, t] + gain * message[b, t])


def test_a_norm_is_clipped_and_shorter_vectors_are_not() -> None:
    x = drawn(6, D) * torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 9.0])[:, None]
    got = l2_clip(x, 2.0)
    norms = x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(got, torch.where(norms > 2, 2 * x / (norms + 1e-6), x))
    leaf = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(l2_clip(leaf, 2.0).sum(), leaf, create_graph=True)
    assert bool((grad == 1).all())
    assert torch.autograd.gradcheck(lambda t: l2_clip(t, 2.0), drawn(3, D).requires_grad_())


def test_both_halves_are_capped_and_the_sigmoid_is_not() -> None:
    gate, up = 4 * drawn(7), 9 * drawn(7, seed=1)
    want = 1.5 * (gate / 1.5).tanh() * gate.sigmoid() * 2.5 * (up / 2.5).tanh()
    torch.testing.assert_close(softcapped_swiglu(gate, up, gate_cap=1.5, up_cap=2.5), want)


def before(x: Tensor, row: int, t: int, back: int) -> Tensor:
    """x of the token `back` places before t in its document, zeros where there is none."""
    places = [i for i in range(t + 1) if ROWS[row, i] == ROWS[row, t] and ROWS[row, i] > 0]
    return x[row, places[-1 - back]] if back < len(places) else torch.zeros_like(x[row, t])


def convolved(x: Tensor, weight: Tensor, dynamic: Tensor | None, row: int, t: int) -> Tensor:
    """The sum of a token and its convolution; weight [K, C], the current token first."""
    total = x[row, t]
    for j in range(TAPS):
        factors = weight[j] if dynamic is None else weight[j] + dynamic[row, t, :, j].repeat_interleave(D // HEADS)
        total = total + factors * before(x, row, t, j)
    return total


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_convolutions_are_loops_over_documents(kind: str) -> None:
    x, weight, own = drawn(*ROWS.shape, D), drawn(TAPS, D, seed=1), drawn(*ROWS.shape, HEADS, TAPS, seed=2)
    if kind == "static":
        got, scale = residual_conv(x, weight.t().flip(1).unsqueeze(1), ROWS)[0], (TAPS + 1) ** 0.5
    else:
        got, scale = dynamic_conv(x, weight, own, ROWS)[0], (2 * TAPS + 1) ** 0.5
    for row, t in (ROWS > 0).nonzero().tolist():
        torch.testing.assert_close(
            got[row, t] * scale, convolved(x, weight, own if kind == "dynamic" else None, row, t)
        )


@pytest.mark.parametrize("cut", [1, 3, 6, 9])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_pieces_are_the_whole(kind: str, cut: int) -> None:
    """Pieces of any length, down to one token, continue from the tail."""
    x, weight, own = drawn(*ROWS.shape, D), drawn(TAPS, D, seed=1), drawn(*ROWS.shape, HEADS, TAPS, seed=2)

    def run(part: slice, state: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor]:
        if kind == "static":
            return residual_conv(x[:, part], weight.t().flip(1).unsqueeze(1), ROWS[:, part], *state)
        return dynamic_conv(x[:, part], weight, own[:, part], ROWS[:, part], *state)

    whole, end = run(slice(None))
    first, tail = run(slice(0, cut))
    last = ROWS[:, :cut].where(ROWS[:, :cut] > 0, 0).amax(1)
    found = [first]
    for at in range(cut, ROWS.shape[1]):
        piece, tail = run(slice(at, at + 1), (tail, last))
        last = ROWS[:, at].where(ROWS[:, at] > 0, last)
        found.append(piece)
    valid = ROWS > 0
    torch.testing.assert_close(torch.cat(found, 1)[valid], whole[valid])
    torch.testing.assert_close(tail, end)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_pieces_take_the_tokens_before_from_other_processes(cut: int) -> None:
    """As a rank of context parallelism with the second piece, which gets the tail of the first."""
    x, ids = drawn(*ROWS.shape, D), ROWS[:, :cut]

    class Before:
        kernel = "auto"

        def segment(self, segment_ids: Tensor) -> Tensor:
            return last_segment(ids).expand(len(ids))

        def state(self, transition: Tensor, own: Tensor) -> Tensor:
            return preceding(x[:, :cut], ids, 2)[1]

    class Elsewhere:
        before = Before()

    whole, end = preceding(x, ROWS, 2)
    found, tail = preceding(x[:, cut:], ROWS[:, cut:], 2, kernel=Elsewhere())
    for read, wanted in zip(found, whole, strict=True):
        seen = (ROWS > 0)[:, cut:]
        torch.testing.assert_close(read[seen], wanted[:, cut:][seen])
    torch.testing.assert_close(tail, end)


def biased(kernel: str, bias: DistanceBias, sinks: Tensor, mask: Tensor) -> Tensor:
    q, k, v = drawn(2, 6, 4, D), drawn(2, 9, 2, D, seed=1), drawn(2, 9, 2, 5, seed=2)
    return attention(q, k, v, mask, kernel=kernel, scale=0.3, sinks=sinks, bias=bias)


@pytest.mark.parametrize("kernel", ["math", "sdpa"])
def test_biases_of_distances_beside_sinks_of_tokens(kernel: str) -> None:
    """A query of its own bias for each distance from 0 to 3, and of its own sink, in a loop over heads and queries."""
    places, seen = torch.arange(9.0).expand(2, -1), torch.arange(9)[None] <= torch.arange(3, 9)[:, None]
    values, sinks = drawn(2, 6, 4, 4, seed=3), drawn(2, 6, 4, seed=4)
    got = biased(kernel, DistanceBias(values, places[:, 3:], places), sinks, seen[None, None])
    q, k, v = drawn(2, 6, 4, D), drawn(2, 9, 2, D, seed=1), drawn(2, 9, 2, 5, seed=2)
    for b in range(2):
        for t in range(6):
            for n in range(4):
                logits = [0.3 * q[b, t, n] @ k[b, j, n // 2] for j in range(t + 4)]
                logits = [s + (values[b, t, n, t + 3 - j] if t + 3 - j < 4 else 0) for j, s in enumerate(logits)]
                weights = torch.stack([*logits, sinks[b, t, n]]).softmax(0)[:-1]
                torch.testing.assert_close(got[b, t, n], weights @ v[b, : t + 4, n // 2])


def test_sinks_of_tokens_need_a_bias() -> None:
    q = drawn(1, 3, 2, D)
    with pytest.raises(ValueError, match="Sinks of each token"):
        attention(q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool), kernel="math", scale=1.0, sinks=drawn(1, 3, 2))
