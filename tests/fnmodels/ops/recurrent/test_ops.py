"""Recurrent ops against their definitions token by token, in fp64: chunks, pieces, documents, gradients, transforms."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from fnmodels.inputs import order
from fnmodels.ops import decay
from fnmodels.ops.cpu.recurrent import scan
from fnmodels.ops.norm_taps import watched_norms
from fnmodels.ops.recurrent import conv, conv_reads, delta_rule, gated_norm, selective_scan, ssd, token_shift, two_keys
from tests.fnmodels.ops.recurrent import references
from tests.fnmodels.ops.recurrent.references import ROWS, VALID

KERNELS = ("math", "auto")


@dataclass(frozen=True)
class Op:
    """An op, its definition, and random arguments for [B, S]: those along the sequence, the constants, the state."""

    ours: Callable[..., tuple[Tensor, Tensor]]
    definition: Callable[..., tuple[Tensor, Tensor]]
    along: Callable[[int, int], tuple[Tensor, ...]]
    constants: Callable[[], tuple[Any, ...]]
    state: tuple[int, ...]
    chunked: bool = True

    def arguments(self, B: int, S: int) -> tuple[tuple[Tensor, ...], tuple[Any, ...], Tensor]:
        torch.manual_seed(0)
        return self.along(B, S), self.constants(), torch.randn(B, *self.state, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def delta_inputs(B: int, S: int, *, channels: bool, speed: float, strength: float) -> tuple[Tensor, ...]:
    k = torch.nn.functional.normalize(normal(B, S, 2, 6), dim=-1)
    g = -speed * uniform(B, S, 4, *([6] if channels else []))
    return normal(B, S, 2, 6), k, normal(B, S, 4, 5), g, strength * uniform(B, S, 4)


def delta(channels: bool, speed: float, strength: float) -> Op:
    along = functools.partial(delta_inputs, channels=channels, speed=speed, strength=strength)
    return Op(delta_rule.delta_rule, references.delta, along, tuple, (4, 6, 5))


def two_key_inputs(B: int, S: int, *, speed: float) -> tuple[Tensor, ...]:
    """As in RWKV-7: a = -kappa, b = kappa * rate, with a key kappa of length 1 and rates from 0 to 1."""
    kappa, rate = torch.nn.functional.normalize(normal(B, S, 4, 6), dim=-1), uniform(B, S, 4, 6)
    keys = (normal(B, S, 4, 6), normal(B, S, 4, 6))
    return *keys, normal(B, S, 4, 5), -speed * uniform(B, S, 4, 6), -kappa, kappa * rate


def two_key_rule(speed: float) -> Op:
    along = functools.partial(two_key_inputs, speed=speed)
    return Op(lambda *a, **k: two_keys.two_key_rule(*a, **k), references.two_keys, along, tuple, (4, 6, 5))


def short_conv(bias: bool, silu: bool, step: int = 1) -> Op:
    """The op with its arguments in the order of the others: x, segment ids, state, last, then constants."""

    def adapted(function: Any) -> Any:
        def run(x: Tensor, weight: Tensor, bias: Any, segment_ids: Tensor, *state: Any, **options: Any) -> Any:
            return function(x, weight, bias, segment_ids, *state, silu=silu, step=step, **options)

        return run

    constants = lambda: (normal(7, 4), normal(7) if bias else None)  # noqa: E731
    return Op(
        adapted(lambda *a, **k: conv.short_conv(*a, **k)),
        adapted(references.convolve),
        lambda B, S: (normal(B, S, 7),),
        constants,
        (3 * step, 7),
        chunked=False,
    )


OPS = {
    "conv": short_conv(False, False),
    "conv_bias_silu": short_conv(True, True),
    "conv_silu_steps": short_conv(False, True, 3),
    "delta": delta(False, 0.2, 1.0),
    "delta_negative": delta(False, 2.0, 2.0),
    "delta_channels": delta(True, 0.2, 1.0),
    "delta_channels_fast": delta(True, 30.0, 1.0),
    "two_keys": two_key_rule(0.2),
    "two_keys_fast": two_key_rule(1.0),
    "shift": Op(
        lambda *given, **options: token_shift.token_shift(*given, **options),
        references.shift,
        lambda B, S: (normal(B, S, 7),),
        tuple,
        (1, 7),
        chunked=False,
    ),
    "selective": Op(
        lambda *given, **options: selective_scan.selective_scan(*given, **options),
        references.selective,
        lambda B, S: (normal(B, S, 6), uniform(B, S, 6), normal(B, S, 5), normal(B, S, 5)),
        lambda: (-uniform(6, 5), normal(6)),
        (6, 5),
    ),
    "ssd": Op(
        lambda x, dt, B, C, A, D, *rest, **options: ssd.ssd(x, dt, A, B, C, D, *rest, **options),
        lambda x, dt, B, C, A, D, *rest: references.state_space(x, dt, A, B, C, D, *rest),
        lambda B, S: (normal(B, S, 4, 3), uniform(B, S, 4), normal(B, S, 2, 5), normal(B, S, 2, 5)),
        lambda: (-uniform(4), normal(4)),
        (4, 3, 5),
    ),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def call(op: Op, along: Any, constants: Any, segment_ids: Tensor, *state: Any, chunk: int = 8, kernel: str) -> Any:
    options = {"chunk": chunk} if op.chunked else {}
    return op.ours(*along, *constants, segment_ids, *state, kernel=kernel, **options)


def close(got: Any, want: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check_definition(op: Op, kernel: str, chunk: int = 8) -> None:
    """y of every token that is not padding, and the state, for rows that begin and rows that go on."""
    along, constants, state = op.arguments(*ROWS.shape)
    for before in ((), (state, torch.tensor([1, 1, 9, 2]))):
        got = call(op, along, constants, ROWS, *before, chunk=chunk, kernel=kernel)
        want = op.definition(*along, *constants, ROWS, *before)
        close(got[0][VALID], want[0][VALID])
        close(got[1], want[1])


@every_op
@pytest.mark.parametrize(("kernel", "chunk"), [("math", 8), ("auto", 1), ("auto", 2), ("auto", 8), ("auto", 64)])
def test_definition(op: Op, kernel: str, chunk: int) -> None:
    check_definition(op, kernel, chunk)


def weighted(outputs: tuple[Tensor, Tensor], valid: Tensor = VALID) -> Tensor:
    """A scalar that depends on every output."""
    y, state = outputs
    torch.manual_seed(1)
    return ((y * torch.randn_like(y))[valid]).sum() + (state * torch.randn_like(state)).sum()


@every_op
@every_kernel
def test_gradients(op: Op, kernel: str) -> None:
    """By the inputs, the constants and the state; also where padding lies inside of no document."""
    for segment_ids in (ROWS, torch.tensor([[1] * 12 + [2] * 9 + [0] * 6] * 4)):
        along, constants, state = op.arguments(*ROWS.shape)
        constants = tuple(c for c in constants if c is not None)
        leaves = [t.requires_grad_() for t in (*along, *constants, state)]
        full = (*constants, *([None] if len(constants) == 1 else []))
        rest = (*full, segment_ids, state, torch.tensor([1, 1, 9, 2]))
        options: dict[str, Any] = {"chunk": 8} if op.chunked else {}
        got = torch.autograd.grad(weighted(op.ours(*along, *rest, kernel=kernel, **options), segment_ids > 0), leaves)
        want = torch.autograd.grad(weighted(op.definition(*along, *rest), segment_ids > 0), leaves)
        for ours, theirs in zip(got, want, strict=True):
            close(ours, theirs, 1e-10)


class Earlier:
    """`before.Before` in one process: the pieces before this one left `state`, after a token of segment `last`."""

    kernel = "auto"

    def __init__(self, state: Tensor, last: Tensor) -> None:
        self.given, self.last = state, last

    def segment(self, segment_ids: Tensor) -> Tensor:
        return self.last

    def state(self, transition: Tensor, own: Tensor) -> Tensor:
        given = self.given.view(own.shape)
        self.after = (transition @ given + own).view(self.given.shape)
        return given


@every_op
@pytest.mark.parametrize("elsewhere", [False, True], ids=["given", "elsewhere"])
@pytest.mark.parametrize("cuts", [[5, 22], [1, 1, 25], [15, 2, 10], [1] * 27], ids=str)
def test_pieces_with_the_state_handed_over(op: Op, cuts: list[int], elsewhere: bool) -> None:
    """A row in pieces is the full row, in values and gradients; in pieces of one token too.

    elsewhere: an op is not given the state before the piece, but says how the piece maps it.
    """
    along, constants, state = op.arguments(*ROWS.shape)
    leaves = [t.requires_grad_() for t in along]
    start = (torch.zeros_like(state), torch.zeros(len(ROWS), dtype=torch.int64))

    def pieces() -> tuple[Tensor, Tensor]:
        ys, (state, last) = [], start
        for part in zip(ROWS.split(cuts, 1), *(t.split(cuts, 1) for t in along), strict=True):
            if elsewhere:
                kernel = types.SimpleNamespace(before=Earlier(state, last))
                y, after = call(op, part[1:], constants, part[0], kernel=kernel)
                close(after, kernel.before.after)
                after = kernel.before.after
            else:
                y, after = call(op, part[1:], constants, part[0], state, last, kernel="auto")
            state, last = after, order.last_segment(part[0], last)
            ys.append(y)
        return torch.cat(ys, 1), state

    full = call(op, along, constants, ROWS, kernel="auto")
    got = pieces()
    close(got[0][VALID], full[0][VALID])
    close(got[1], full[1])
    gradients = [torch.autograd.grad(weighted(outputs), leaves) for outputs in (got, full)]
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs, 1e-10)


@every_op
def test_padding_is_not_read(op: Op) -> None:
    along, constants, _ = op.arguments(*ROWS.shape)
    moved = [t + 100 * (~VALID).view(*VALID.shape, *[1] * (t.ndim - 2)) for t in along]
    first, second = (call(op, t, constants, ROWS, kernel="auto") for t in (along, moved))
    assert torch.equal(first[0][VALID], second[0][VALID]) and torch.equal(first[1], second[1])


@every_op
def test_transforms(op: Op) -> None:
    """grad, vmap over rows, jvp, hvp and jacrev of kernel="math", and a second derivative of the fused form."""
    segment_ids = torch.tensor([[1, 1, 1, 2, 0, 3, 3, 3, 3], [1] * 9])
    along, constants, state = op.arguments(*segment_ids.shape)
    direction = tuple(torch.randn_like(t) for t in along)

    def loss(along: Any, rows: Tensor = segment_ids, state: Tensor = state, form: Any = None) -> Tensor:
        last = torch.ones_like(rows[:, 0])
        outputs = (
            op.definition(*along, *constants, rows, state, last)
            if form is None
            else call(op, along, constants, rows, state, last, chunk=4, kernel=form)
        )
        y, after = outputs
        return (y.where((rows > 0).view(*rows.shape, *[1] * (y.ndim - 2)), 0) ** 2).sum() + (after**3).sum()

    math = functools.partial(loss, form="math")
    for ours, theirs in zip(grad(math)(along), grad(loss)(along), strict=True):
        close(ours, theirs, 1e-9)
    close(jvp(math, (along,), (direction,)), jvp(loss, (along,), (direction,)), 1e-9)
    hvp = jvp(grad(math), (along,), (direction,))[1]
    fused = [t.clone().requires_grad_() for t in along]
    first = torch.autograd.grad(loss(fused, form="auto"), fused, create_graph=True)
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, direction, strict=True)), fused)
    wanted = jvp(grad(loss), (along,), (direction,))[1]
    for one, other, want in zip(hvp, second, wanted, strict=True):
        close(one, want, 1e-9)
        close(other, want, 1e-9)
    rows = tuple(t[:, None] for t in (*along, segment_ids, state))
    by_row = vmap(lambda *r: grad(math)(r[: len(along)], r[-2], r[-1]))(*rows)
    for ours, theirs in zip(by_row, grad(math)(along), strict=True):
        close(ours[:, 0], theirs, 1e-9)
    close(jacrev(math)(along), grad(math)(along), 1e-9)


@every_op
def test_fp32_is_near_fp64(op: Op) -> None:
    """Rounding is that of fp32, also where documents change within a chunk and the decay is fast."""
    segment_ids = torch.tensor([[1] * 150 + [2] * 3 + [3] + [4] * 146])
    along, constants, _ = op.arguments(*segment_ids.shape)
    wide = call(op, along, constants, segment_ids, chunk=64, kernel="auto")
    low = [None if t is None else t.float() for t in (*along, *constants)]
    narrow = call(op, low[: len(along)], low[len(along) :], segment_ids, chunk=64, kernel="auto")
    for got, want in zip(narrow, wide, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= 3e-6 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", ["delta", "delta_channels", "ssd", "conv_bias_silu"])
def test_bf16_is_computed_in_fp32(name: str) -> None:
    """bf16 arguments give what the same values in fp32 give, rounded once where the result is bf16."""
    op = OPS[name]
    along, constants, _ = op.arguments(*ROWS.shape)
    low = [None if t is None else t.bfloat16() for t in (*along, *constants)]
    high = [None if t is None else t.float() for t in low]
    n = len(along)
    got = call(op, low[:n], low[n:], ROWS, kernel="auto")
    want = call(op, high[:n], high[n:], ROWS, kernel="auto")
    close(got[0][VALID].float(), want[0][VALID].to(got[0].dtype).float(), 2e-2 if name.startswith("conv") else 0)
    assert got[1].dtype == (torch.bfloat16 if name.startswith("conv") else torch.float32)


def test_normalized_queries_and_keys() -> None:
    along, _, _ = OPS["delta"].arguments(*ROWS.shape)
    q, k, *rest = along
    unit = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k)]
    unit[0] *= 0.3
    for chunk in (1, 8):
        got = delta_rule.delta_rule(q, k, *rest, ROWS, normalize=True, scale=0.3, chunk=chunk)
        close(got, delta_rule.delta_rule(*unit, *rest, ROWS, chunk=chunk))
    leaves = [t.requires_grad_() for t in along]
    options: dict[str, Any] = {"normalize": True, "scale": 0.3, "chunk": 8}
    found, wanted = (
        torch.autograd.grad(weighted(delta_rule.delta_rule(*leaves, ROWS, kernel=kernel, **options)), leaves)
        for kernel in ("auto", "math")
    )
    close(found, wanted)


@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("stretches", [0, 8])
def test_what_a_short_convolution_reads_in_random_rows(
    taps: int, padded: bool, stretches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, tails and gradients are those of the written-out form: short documents, ids that come back."""
    monkeypatch.setattr("fnmodels.ops.cpu.recurrent.conv._STRETCHES", stretches)
    monkeypatch.setattr("fnmodels.ops.cpu.recurrent.conv._ELEMENTS", 7 * 6)  # blocks of 7 tokens
    draw = torch.Generator().manual_seed(taps)
    for length in (1, 2, 3, 5, 17):
        for first in (None, torch.tensor([1, 3])):
            ids = torch.randint(1, 4, (2, length), generator=draw).repeat_interleave(1 + length // 9, 1)[:, :length]
            ids = ids * (torch.rand(2, length, generator=draw) > 0.2) if padded else ids
            x, weight = normal(2, length, 6), normal(6, taps)
            before = (None, None) if first is None else (normal(2, taps - 1, 6), first)
            given, leaves = (ids, *before), (x.requires_grad_(), weight.requires_grad_())
            got = _values_and_gradients(leaves, given, "auto")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(conv_reads, "_near", lambda ids, taps: None)
                close(got, _values_and_gradients(leaves, given, "math"))
            with torch.no_grad():
                close(conv.short_conv(*leaves, None, *given)[0][ids > 0], got[0])


def _values_and_gradients(leaves: Any, given: Any, kernel: str) -> list[Any]:
    y, tail = outputs = conv.short_conv(*leaves, None, *given, kernel=kernel)
    return [y[given[0] > 0], tail, *torch.autograd.grad(weighted(outputs, given[0] > 0), leaves)]


def test_processes_are_asked_for_segments_by_one_tensor() -> None:
    """They remember by its identity what they have agreed on, so that all layers of a batch communicate once."""
    asked = []

    def segment(ids: Tensor) -> Tensor:
        asked.append(ids)
        return ids.new_zeros(len(ids))

    before = types.SimpleNamespace(kernel="auto", segment=segment, state=lambda transition, own: torch.zeros_like(own))
    kernel, ids, x = types.SimpleNamespace(before=before), torch.tensor([[1, 1, 2]]), normal(2, 3, 4)
    for y in (conv.short_conv(x, normal(4, 3), None, ids, kernel=kernel) for _ in range(2)):
        assert y[0].shape == x.shape
    conv_reads.reads_of(ids, 3, 2, kernel=kernel)
    assert len(asked) == 3 and all(each is ids for each in asked)


def test_tails_of_rows_without_padding_are_the_last_inputs_of_their_document() -> None:
    x, ids = normal(3, 4, 2), torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2], [2, 1, 1, 2]])
    tail = conv.short_conv(x, normal(2, 4), None, ids)[1]
    zero = torch.zeros(2, dtype=x.dtype)
    want = torch.stack([x[0, 1:], torch.stack([zero, *x[1, 2:]]), torch.stack([zero, zero, x[2, 3]])])
    assert torch.equal(tail, want)


def test_gated_norms() -> None:
    assert_gated_norms(normal(3, 8), normal(3, 8), normal(8))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm", ["norm_then_silu", "norm_then_sigmoid", "silu_then_group_norm"])
def test_a_watched_gated_norm_is_one_call(norm: str, grad: bool) -> None:
    """A tap sees the whole output once, and an edit of it counts in the gradient."""
    x, gate, weight = normal(2, 3, 8).requires_grad_(), normal(2, 3, 8), normal(8)
    seen = []

    def doubled(name: str, value: Tensor) -> Tensor:
        seen.append((name, *value.shape))
        return value if name.endswith(".scale") else 2 * value

    with torch.set_grad_enabled(grad):
        plain = getattr(gated_norm, norm)(x, gate, weight, eps=1e-2)
        with watched_norms({"norm": weight}, doubled):
            edited = getattr(gated_norm, norm)(x, gate, weight, eps=1e-2)
    close(edited, 2 * plain)
    assert seen == [("norm.scale", 2, 3, 1), ("norm", 2, 3, 8)]
    if grad:
        close(*(torch.autograd.grad(y.sum() * n, x) for y, n in ((edited, 1), (plain, 2))))


def test_gated_norms_leave_lengths_open_in_exported_graphs() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gated_norm.norm_then_silu(x, x, torch.ones(512, dtype=torch.bfloat16), eps=1e-5)

    length = {"x": {1: torch.export.Dim("S", min=2, max=100_000)}}
    program = torch.export.export(Norm(), (torch.ones(1, 300, 512, dtype=torch.bfloat16),), dynamic_shapes=length)
    assert program.module()(torch.ones(1, 7, 512, dtype=torch.bfloat16)).shape == (1, 7, 512)


def assert_gated_norms(x: Tensor, gate: Tensor, weight: Tensor) -> None:

    def rms(t: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-2).sqrt()

    silu = gate * gate.sigmoid()
    close(gated_norm.norm_then_silu(x, gate, weight, eps=1e-2), rms(x) * weight * silu)
    close(gated_norm.norm_then_sigmoid(x, gate, weight, eps=1e-2), rms(x) * weight * gate.sigmoid())
    grouped = rms((x * silu).view(3, 2, 4)).view(3, 8) * weight
    close(gated_norm.silu_then_group_norm(x, gate, weight, eps=1e-2, groups=2), grouped)
    normed_first = rms(x.view(3, 2, 4)).view(3, 8) * weight * silu
    close(gated_norm.group_norm_then_silu(x, gate, weight, eps=1e-2, groups=2), normed_first)


def no_reset(segment_ids: Tensor, last: Any = None) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(segment_ids), torch.zeros_like(segment_ids)


def wrong_handover(segment_ids: Tensor, last: Any = None) -> tuple[Tensor, Tensor]:
    return order.runs(segment_ids, None if last is None else last + 1)


def taps_across(segment_ids: Tensor, K: int) -> Any:
    index = torch.arange(segment_ids.shape[1]).expand_as(segment_ids)
    return [(index - j).clamp(min=-1) for j in range(1, K)], order.runs(segment_ids)[0]


def zero_tail(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], index.shape[1], x.shape[2], dtype=x.dtype)


def all_earlier(run: Tensor) -> Tensor:
    return torch.ones(run.shape[1], run.shape[1], dtype=torch.bool).tril().expand(len(run), -1, -1)


def decay_once(g: Tensor, same: Tensor) -> Tensor:
    """Of each token alone, and not of those before it."""
    return g.double()


@pytest.mark.parametrize(("length", "chunk"), [(1, 8), (2, 8), (31, 32), (32, 32), (71, 100)])
def test_steps_of_any_length_are_the_selective_scan(length: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an exported graph, which has one number of them for rows of every length."""
    along, constants, state = OPS["selective"].arguments(2, length)
    ids = torch.tensor([[2] * (length // 2) + [3] * (length - length // 2), [4] * (length - 1) + [0]])
    arguments = *along, *constants, ids, state, torch.tensor([2, 7])
    want = selective_scan.selective_scan(*arguments, chunk=chunk)
    asked: list[int] = []
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: not asked.append(length))
    close(selective_scan.selective_scan(*arguments, chunk=chunk), want)
    assert asked


BUGS = {
    "delta: the state is not reset": (OPS["delta"], delta_rule, "runs", no_reset),
    "delta: the state of another document goes on": (OPS["delta"], delta_rule, "runs", wrong_handover),
    "selective: the state is not reset": (OPS["selective"], selective_scan, "runs", no_reset),
    "selective: the state of another document goes on": (OPS["selective"], selective_scan, "runs", wrong_handover),
    "ssd: the state is not reset": (OPS["ssd"], ssd, "runs", no_reset),
    "ssd: the state of another document goes on": (OPS["ssd"], ssd, "runs", wrong_handover),
    "two keys: the state is not reset": (OPS["two_keys"], two_keys, "runs", no_reset),
    "two keys: the state of another document goes on": (OPS["two_keys"], two_keys, "runs", wrong_handover),
    "two keys: tokens of other documents are read": (OPS["two_keys"], two_keys, "earlier_of_document", all_earlier),
    "two keys: decays begin before the document": (OPS["two_keys"], two_keys, "decay_in_document", decay_once),
    "shift: across documents": (OPS["shift"], conv_reads, "_sources", taps_across),
    "shift: no tail": (OPS["shift"], conv, "taken", zero_tail),
    "conv: taps across documents": (OPS["conv"], conv_reads, "_sources", taps_across),
    "conv: no tail": (OPS["conv"], conv, "taken", zero_tail),
    "delta: decays of pairs ignored": (
        OPS["delta_channels"],
        delta_rule,
        "_decayed_products",
        lambda both, k, cum: both @ k[..., None, :, :].transpose(-1, -2),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, module, name, wrong = BUGS[bug]
    check_definition(op, "auto")
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check_definition(op, "auto")


def test_a_tail_taken_after_the_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = conv.taken
    monkeypatch.setattr(conv, "taken", lambda x, *rest: torch.nn.functional.silu(right(x, *rest)))
    with pytest.raises(AssertionError):
        check_definition(OPS["conv_bias_silu"], "auto")


def test_the_fused_form_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """kernel="auto" saves one state per chunk where a gradient is needed; "math" does not."""
    calls: list[int] = []
    apply = scan._Scan.apply
    monkeypatch.setattr(scan._Scan, "apply", lambda *a: calls.append(1) or apply(*a))
    along, constants, _ = OPS["ssd"].arguments(*ROWS.shape)
    along[0].requires_grad_()
    for kernel in KERNELS:
        call(OPS["ssd"], along, constants, ROWS, kernel=kernel)
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_and_their_products_are_no_subnormal_numbers(dtype: torch.dtype) -> None:
    """A product of two decays is 0 or a normal number; what is left out is less than 1e-18; no gradient is NaN."""
    log = torch.linspace(-800, 0, 4001, dtype=dtype, requires_grad=True)
    decays = decay.decay_of(log)
    tiny = torch.finfo(dtype).tiny
    assert all(((x == 0) | (x >= tiny)).all() for x in (decays, decays.square()))
    assert (decays - log.exp()).abs().max() < 1e-18
    decays.sum().backward()
    assert log.grad is not None and torch.equal(log.grad, decays)
