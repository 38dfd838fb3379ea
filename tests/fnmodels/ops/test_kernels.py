"""Every kernel against a reference of a few lines; what each refuses; which transforms go through (docs/kernels.md)."""

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import fnmodels
import params as P
from fnmodels import explain_kernel, llama
from fnmodels.apply import run_layers
from fnmodels.inputs import (
    BidirectionalWindow,
    Causal,
    Chunk,
    Everything,
    Layout,
    Mask,
    Rule,
    SameSpan,
    Window,
    build_mask,
    to_block_mask,
    to_cu_seqlens,
    to_dense,
)
from fnmodels.inputs.rules import simplify
from fnmodels.ops.attention.block_sparse import plan_blocks
from fnmodels.ops.attention.select import SHORT, Asks, attention, materialize
from fnmodels.ops.attention.varlen import by_document, varlen_attention, varlen_window
from fnmodels.ops.cpu.tiled import tiles_are_faster
from tests.support.largest import Largest
from tests.support.traced import quickly_compiled

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"


@dataclass(frozen=True)
class Odd(Rule):
    """A rule of a user's own, which says nothing about itself; and whose first query sees nothing."""

    def __call__(self, q: Any, kv: Any) -> Tensor:
        return (kv.positions < q.positions) & ((q.positions + kv.positions) % 3 > 0)


S = 150
RULES = {
    "causal": Causal(),
    "window 1": Causal() & Window(1),
    "window 16": Causal() & Window(16),
    "window 90": Causal() & Window(90),
    "window over S": Causal() & Window(S + 50),
    "chunk": Causal() & Chunk(16),
    "chunk and window": Causal() & Chunk(48) & Window(9),
    "chunk, both ways": Chunk(24),
    "prefix or images": Causal() | SameSpan(),
    "images in a window": (Causal() & Window(20)) | SameSpan(),
    "encoder": Everything(),
    "encoder window": BidirectionalWindow(9),
    "either": Chunk(16) | BidirectionalWindow(5),
    "odd": Odd(),
}
# Documents as (first position, length); length < 0 is padding.
ROWS = {
    "one document": [[(0, S)]],
    "one document, from the middle": [[(7, S)]],
    "two equal rows": [[(0, 100), (0, 50)]] * 2,
    "documents, differing rows": [[(5, 20), (0, 100), (0, 1), (0, 29)], [(0, 1), (3, 140), (143, 9)]],
    "left pad, right pad, all pad": [[(0, -30), (0, 120)], [(2, 70), (0, 40), (0, -40)], [(0, -S)]],
}


def batch(rows: list[list[tuple[int, int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """positions, segment ids and spans [B, S]."""
    positions, segments = [], []
    for row in rows:
        positions.append([p for first, n in row for p in range(first, first + abs(n))])
        segments.append([0 if n < 0 else i + 1 for i, (_, n) in enumerate(row) for _ in range(abs(n))])
    spans = torch.randint(0, 4, (len(rows), S), generator=torch.Generator().manual_seed(1))
    return torch.tensor(positions), torch.tensor(segments), spans


def mask_of(rule: str, rows: str) -> tuple[Mask, Layout]:
    positions, segments, spans = batch(ROWS[rows])
    mask = build_mask(RULES[rule], positions, segments, spans=spans)
    layout = fnmodels.layout({"kind": mask})
    assert isinstance(mask, Mask) and layout is not None
    return mask, layout


def heads(
    rows: int, *, q: int = 4, kv: int = 2, width: int = 8, v_width: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v [B, S, heads, width]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((q, width), (kv, width), (kv, v_width))
    return [torch.randn(rows, S, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def reference(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """In fp64, with keys and values repeated for the queries' heads, and the sink as one more column of scores."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(repeat, 2) for t in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q.double(), k) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = torch.where(allowed, scores, -1e300)
    if sinks is not None:
        scores = torch.cat([sinks.double()[:, None, None].expand(*scores.shape[:-1], 1), scores], -1)
    weights = scores.softmax(-1)[..., -k.shape[1] :]
    return torch.einsum("bnqk,bknh->bqnh", torch.where(allowed, weights, 0), v)


def worst(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a.detach().double() - b.detach().double()).abs().max().item() for a, b in zip(got, wanted, strict=True))


def check(
    rule: str, rows: str, kernel: str, *, bound: float, softcap: float | None = None, sink: bool = False, **shape: Any
) -> None:
    """The result and all gradients."""
    mask, layout = mask_of(rule, rows)
    q, k, v = heads(len(ROWS[rows]), **shape)
    sinks = torch.randn(q.shape[2], generator=torch.Generator().manual_seed(2)).requires_grad_() if sink else None
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    wanted = reference(q, k, v, mask.dense(), 0.4, softcap, sinks)
    out = attention(q, k, v, mask, kernel=kernel, scale=0.4, softcap=softcap, sinks=sinks, layout=layout)
    assert out.shape == wanted.shape and out.dtype == q.dtype
    upward = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    got = [out, *torch.autograd.grad(out, inputs, upward.to(out.dtype))]
    assert worst(got, [wanted, *torch.autograd.grad(wanted, inputs, upward.double())]) < bound
    blind = ~mask.dense().any(-1).transpose(1, 2)[..., None].expand_as(out)  # queries that see no key
    assert not got[0][blind].any()
    if not sink:
        assert not got[1][blind.any(-1)].any()


trained = pytest.mark.parametrize("kernel", ["math", "sdpa", "blocks", "auto"])


@trained
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str, rows: str, kernel: str) -> None:
    check(rule, rows, kernel, bound=1e-5)


@trained
@pytest.mark.parametrize("rule", ["causal", "window 16", "prefix or images", "encoder"])
@pytest.mark.parametrize("rows", ["one document", "left pad, right pad, all pad"])
@pytest.mark.parametrize("v_width", [4, 16])
def test_values_of_another_width(rule: str, rows: str, kernel: str, v_width: int) -> None:
    check(rule, rows, kernel, bound=1e-5, v_width=v_width)


@trained
@pytest.mark.parametrize("rule", ["causal", "window 16", "prefix or images", "encoder"])
@pytest.mark.parametrize("rows", ["one document", "left pad, right pad, all pad"])
@pytest.mark.parametrize("v_width", [8, 4])
def test_sinks(rule: str, rows: str, kernel: str, v_width: int) -> None:
    check(rule, rows, kernel, bound=1e-5, sink=True, v_width=v_width)


@pytest.mark.parametrize("kernel", ["math", "blocks", "auto"])
@pytest.mark.parametrize("rule", ["causal", "window 16", "prefix or images", "encoder"])
@pytest.mark.parametrize("rows", ["one document", "left pad, right pad, all pad"])
@pytest.mark.parametrize("sink", [False, True])
def test_softcap(rule: str, rows: str, kernel: str, sink: bool) -> None:
    check(rule, rows, kernel, bound=1e-5, softcap=1.5, sink=sink)


@trained
@pytest.mark.parametrize(("q", "kv"), [(1, 1), (4, 4), (6, 1), (6, 3)])
def test_groups_of_heads(kernel: str, q: int, kv: int) -> None:
    check("window 16", "documents, differing rows", kernel, bound=1e-5, q=q, kv=kv)


@trained
@pytest.mark.parametrize("rule", ["causal", "window 16", "prefix or images"])
@pytest.mark.parametrize("sink", [False, True])
def test_bfloat16(rule: str, kernel: str, sink: bool) -> None:
    """Inputs and results have 8 bits; sums of S terms are accumulated in more."""
    check(rule, "documents, differing rows", kernel, bound=0.1, dtype=torch.bfloat16, sink=sink)


@trained
def test_double_precision(kernel: str) -> None:
    check("window 16", "documents, differing rows", kernel, bound=1e-12, dtype=torch.float64)


def test_the_logit_of_a_sink_is_not_rounded_to_bfloat16() -> None:
    """At this scale bf16 has steps of 0.06 around the sink's score: one column alone would be off by that."""
    mask, layout = mask_of("causal", "one document")
    q, k, v = (torch.zeros(1, S, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.tensor([1.2345])
    out = attention(q, k, v + 1, mask, kernel="sdpa", scale=0.1, sinks=sinks, layout=layout)
    seen = torch.arange(1, S + 1)
    assert (out[0, :, 0, 0].float() - seen / (seen + sinks.exp())).abs().max() < 2**-8


# The form of the mask


@pytest.mark.parametrize("rule", ["window 16", "prefix or images"])
@pytest.mark.parametrize("rows", ["documents, differing rows", "left pad, right pad, all pad"])
def test_masks_in_other_forms(rule: str, rows: str) -> None:
    """A bool tensor, a BlockMask, and what `materialize` makes of them give what the Mask gives."""
    mask, layout = mask_of(rule, rows)
    q, k, v = heads(len(ROWS[rows]))
    wanted = attention(q, k, v, mask, kernel="math", scale=0.4)
    block_mask = to_block_mask(mask)
    assert to_block_mask(block_mask) is block_mask
    created = create_block_mask(mask.mask_mod(), len(ROWS[rows]), None, S, S, device="cpu")
    for one, other in zip(block_mask.as_tuple(), created.as_tuple(), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else callable(one) or one == other
    assert torch.equal(to_dense(block_mask), mask.dense())
    for form, kernel in itertools.product((mask.dense(), block_mask), ("math", "sdpa", "auto")):
        assert worst([attention(q, k, v, form, kernel=kernel, scale=0.4, layout=layout)], [wanted]) < 1e-5
    for kernel in ("math", "sdpa", "blocks", "auto"):
        ready = materialize(mask, kernel, layout)
        assert materialize(ready, kernel, layout) is ready
        assert worst([attention(q, k, v, ready, kernel=kernel, scale=0.4, layout=layout)], [wanted]) < 1e-5


def test_a_dense_mask_per_head() -> None:
    q, k, v = heads(1)
    allowed = torch.rand(1, 4, S, S, generator=torch.Generator().manual_seed(5)) < 0.3
    wanted = reference(q, k, v, allowed, 0.4, None, None)
    for kernel in ("math", "sdpa", "auto"):
        assert worst([attention(q, k, v, allowed, kernel=kernel, scale=0.4)], [wanted]) < 1e-5


def test_other_queries_than_keys() -> None:
    """Decoding: the last tokens look at all. Without a layout, since it speaks of rows of whole documents."""
    positions, segments, _ = batch(ROWS["one document"])
    mask = Mask(positions[:, -3:], segments[:, -3:], positions, segments, None, None, Causal() & Window(40))
    q, k, v = heads(1)
    wanted = reference(q[:, -3:], k, v, mask.dense(), 0.4, None, None)
    assert fnmodels.layout({"full": mask}) is None
    for kernel in ("math", "sdpa", "auto"):
        assert worst([attention(q[:, -3:], k, v, mask, kernel=kernel, scale=0.4)], [wanted]) < 1e-5


def test_a_sliced_block_mask_is_refused() -> None:
    mask, _ = mask_of("causal", "two equal rows")
    with pytest.raises(ValueError, match="was sliced"):
        to_dense(to_block_mask(mask)[0])


def test_what_is_no_mask_is_refused() -> None:
    q, k, v = heads(1)
    with pytest.raises(ValueError, match="must be bool"):
        attention(q, k, v, torch.zeros(1, 1, S, S), scale=1.0)
    with pytest.raises(TypeError, match="not a str"):
        attention(q, k, v, "causal", scale=1.0)


@pytest.mark.parametrize(
    ("rows", "offsets", "tokens", "longest"),
    [
        ([[(0, 3), (0, 2)]], [0, 3, 5], None, 3),
        ([[(0, 3), (0, -2)], [(4, 1), (0, 4)]], [0, 3, 4, 8], [0, 1, 2, 5, 6, 7, 8, 9], 4),
        ([[(0, -5)]], [0], [], 0),
        ([[(0, -1), (0, 2), (0, -1), (0, 1)]], [0, 2, 3], [1, 2, 4], 2),
    ],
)
def test_offsets_of_documents(
    rows: list[list[tuple[int, int]]], offsets: list[int], tokens: list[int] | None, longest: int
) -> None:
    positions, segments, _ = batch(rows)
    layout = fnmodels.inputs.document_layout(positions, segments)
    assert layout is not None
    packed = to_cu_seqlens(layout)
    assert packed.offsets.dtype == torch.int32 and packed.offsets.tolist() == offsets
    assert (packed.tokens if packed.tokens is None else packed.tokens.tolist()) == tokens
    assert packed.longest == longest


def test_a_block_mask_takes_memory_linear_in_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fnmodels.inputs.block_mask, "ELEMENTS", 1 << 18)
    positions = torch.arange(2048)[None]
    mask = build_mask(Causal() & Window(300), positions, torch.ones_like(positions))
    with Largest() as largest:
        block_mask = to_block_mask(mask)
    assert largest.numel <= 1 << 18
    assert torch.equal(to_dense(block_mask), to_dense(mask))


def test_a_layout_of_copied_masks() -> None:
    """Another device, another process: the tensors are equal, not the same."""
    mask, layout = mask_of("causal", "documents, differing rows")
    copy = fnmodels.tree.map(torch.clone, mask)
    assert fnmodels.layout({"full": mask, "sliding": copy}) == layout
    assert fnmodels.layout({"full": mask, "sliding": fnmodels.permute(mask, torch.arange(S).flip(0))}) is None


def test_a_layout_knows_where_positions_begin() -> None:
    _, layout = mask_of("causal", "left pad, right pad, all pad")
    assert layout.rows == (((30, 150),), ((0, 70), (70, 110)), ())
    assert layout.firsts == ((0,), (2, 0), ())


# What rules say of themselves


@pytest.mark.parametrize("rule", RULES)
def test_facts_about_rules(rule: str) -> None:
    """`visible`, `covers`, `period` and `simplify` against the predicate, over many ranges of positions."""
    positions = torch.arange(40)[None]
    spans = torch.randint(0, 4, (1, 40), generator=torch.Generator().manual_seed(4))
    ones = torch.ones_like(positions)
    mask = Mask(positions, ones, positions, ones, spans, spans, RULES[rule])
    seen = mask.dense()[0, 0]
    period = mask.rule.period()
    if 0 < period < 40:
        assert torch.equal(seen[period:, period:], seen[:-period, :-period])
    for q0, q1, k0, k1 in itertools.product(range(0, 40, 7), (0, 3, 16, 39), range(0, 40, 5), (2, 15, 33, 39)):
        if q0 > q1 or k0 > k1:
            continue
        low, high = mask.rule.visible((q0, q1))
        outside = (torch.arange(40) < low) | (torch.arange(40) > high)
        assert not seen[q0 : q1 + 1, outside].any()
        part = (slice(q0, q1 + 1), slice(k0, k1 + 1))
        if mask.rule.covers((q0, q1), (k0, k1)):
            assert seen[part].all()
        simple = Mask(positions, ones, positions, ones, spans, spans, simplify(mask.rule, (q0, q1), (k0, k1)))
        assert torch.equal(simple.dense()[0, 0][part], seen[part])


@pytest.mark.parametrize(
    ("rule", "pieces", "masks"),
    [
        (Causal(), 1, 0),
        (Everything(), 1, 0),
        (Causal() & Window(1000), 1, 0),
        (Causal() & Chunk(250), 1, 0),  # four equal parts
        (Causal() & Window(128), 16, 3),  # blocks of 64: causality, two blocks of keys, three, and a shorter last one
        (Causal() & Chunk(500) & Window(128), 16, 3),  # the same in each chunk
        (Causal() | SameSpan(), 1, 1),
    ],
)
def test_plans(rule: Rule, pieces: int, masks: int) -> None:
    """Dense masks are small, and shared by all places of one geometry."""
    positions = torch.arange(1000)[None]
    mask = build_mask(rule, positions, torch.ones_like(positions), spans=torch.zeros_like(positions))
    layout = fnmodels.layout({"kind": mask})
    assert isinstance(mask, Mask) and layout is not None
    plan = plan_blocks(mask, layout)
    assert (len(plan.steps), len(plan.masks)) == (pieces, masks)
    assert sum(plan.sizes) == 1000


def test_equal_documents_take_one_call() -> None:
    """Neighbours of one length are a batch; others, and rules that say more than positions do, stay apart."""
    segment_ids = torch.tensor(
        [[1] * 5 + [2] * 5 + [3] * 4 + [0] * 3 + [4] * 5 + [5] * 5, [1] * 7 + [2] * 7 + [3] * 13]
    )
    positions = torch.cat([torch.arange(n) for n in (5, 5, 4, 3, 5, 5, 7, 7, 13)]).view(2, 27)
    mask = build_mask(Causal(), positions, segment_ids)
    layout = fnmodels.layout({"kind": mask})
    assert isinstance(mask, Mask) and layout is not None
    plan = plan_blocks(mask, layout)
    assert plan.sizes == (10, 4, 3, 10, 14, 13)
    assert [step and step.count for step in plan.steps] == [2, 1, None, 2, 2, 1]
    spans = build_mask(Causal() | SameSpan(), positions, segment_ids, spans=torch.zeros_like(positions))
    assert isinstance(spans, Mask)
    assert all(step is None or step.count == 1 for step in plan_blocks(spans, layout).steps)


@pytest.mark.parametrize("rule", [Causal(), Everything(), Causal() & Window(100), Causal() & Chunk(32)])
def test_equal_documents_beside_others(rule: Rule) -> None:
    """A document as long as the first block of the next one, which later blocks read; values and gradients."""
    lengths = (64, 64, 300, 64, 64)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = build_mask(rule, positions, torch.repeat_interleave(torch.arange(1, 6), torch.tensor(lengths))[None])
    layout = fnmodels.layout({"kind": mask})
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 556, 4, 8), (1, 556, 2, 8), (1, 556, 2, 8))
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    found = []
    for kernel in ("blocks", "math"):
        out = attention(*inputs, mask, kernel=kernel, scale=0.4, layout=layout)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*found)


# Memory and garbage


def test_a_window_over_131072_tokens() -> None:
    """No tensor grows with the square of the sequence: neither in the plan nor in the result and its gradient."""
    length = 131_072
    positions = torch.arange(length)[None]
    with Largest() as largest:
        mask = build_mask(Causal() & Window(512), positions, torch.ones_like(positions))
        layout = fnmodels.layout({"sliding": mask})
        plan = materialize(mask, "auto", layout)
        q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
        out = attention(q, k, v, plan, scale=0.4)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert out.isfinite().all()
    assert largest.numel <= 10 * length


def test_a_forward_pass_without_a_layout_has_no_dense_mask() -> None:
    """In eager mode it finds the documents of its masks: no tensor grows with the square of the row."""
    length = 4096
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": length}
    config = llama.Config.from_hf(
        {"model_type": "llama", **sizes, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    )
    positions = (torch.arange(length) % (length // 4))[None]
    segments = torch.arange(4).repeat_interleave(length // 4)[None] + 1
    given = fnmodels.prepare(config, torch.zeros_like(positions), positions=positions, segment_ids=segments)
    with torch.no_grad(), Largest() as largest:
        fnmodels.forward(P.init(config, 0), *given, config=config)
    assert largest.numel <= length**2 // 8


@pytest.mark.parametrize("rule", ["causal", "window 16", "prefix or images"])
def test_blocks_never_read_padding_nor_other_documents(rule: str) -> None:
    """0 times NaN is NaN, so only what is not read cannot leak: "math" and "sdpa" need padding that is finite."""
    mask, layout = mask_of(rule, "left pad, right pad, all pad")
    clean = heads(3)
    wanted = attention(*clean, mask, kernel="blocks", scale=0.4, layout=layout)
    pad = (mask.q_segments == 0)[..., None, None]
    dirty = [torch.where(pad, torch.nan, t) for t in clean]
    out = attention(*dirty, mask, kernel="blocks", scale=0.4, layout=layout)
    assert torch.equal(out, wanted)
    for gradient in torch.autograd.grad(out.sum(), clean):
        assert gradient.isfinite().all() and not (gradient * pad).any()


# The choice


@pytest.mark.parametrize(
    ("rule", "rows", "given", "kernel"),
    [
        ("causal", "one document", {}, "sdpa"),
        ("causal", "one document", {"dtype": torch.bfloat16}, "blocks"),
        ("causal", "one document, from the middle", {}, "sdpa"),
        ("encoder", "one document", {}, "sdpa"),
        ("window over S", "one document", {}, "sdpa"),
        ("causal", "one document", {"layout": None}, "sdpa"),
        ("causal", "two equal rows", {"layout": None}, "blocks"),
        ("causal", "two equal rows", {}, "blocks"),
        ("window 16", "one document", {}, "blocks"),
        ("prefix or images", "one document", {}, "blocks"),
        ("window 16", "one document", {"sinks": torch.zeros(4)}, "blocks"),
        ("causal", "one document", {"sinks": torch.zeros(4)}, "blocks"),
        ("causal", "one document", {"softcap": 2.0}, "blocks"),
        ("causal", "one document", {"softcap": 2.0, "layout": None}, "blocks"),
        ("causal", "one document", {"softcap": 2.0, "layout": None, "compiled": True}, "math"),
        ("causal", "one document", {"compiled": True}, "sdpa"),
        ("causal", "one document", {"compiled": True, "softcap": 2.0}, "blocks"),
        ("causal", "two equal rows", {"compiled": True}, "blocks"),
        ("causal", "two equal rows", {"device": "cuda", "dtype": torch.bfloat16}, "varlen"),
        ("window 16", "one document", {"device": "cuda", "dtype": torch.float16}, "varlen"),
        ("causal", "one document", {"device": "cuda", "dtype": torch.bfloat16}, "sdpa"),
        ("causal", "two equal rows", {"device": "cuda"}, "flex"),
        ("causal", "two equal rows", {"device": "cuda", "layout": None}, "sdpa"),
        ("chunk", "one document", {"device": "cuda", "dtype": torch.bfloat16}, "flex"),
        ("window 16", "one document", {"device": "cuda", "dtype": torch.bfloat16, "softcap": 2.0}, "flex"),
    ],
)
def test_the_choice(rule: str, rows: str, given: dict[str, Any], kernel: str) -> None:
    mask, layout = mask_of(rule, rows)
    chosen, reason = explain_kernel(mask, **{"layout": layout, **given})
    assert chosen == kernel and reason


@pytest.mark.parametrize(("length", "kernel"), [(SHORT, "sdpa"), (SHORT + 1, "blocks")])
def test_the_choice_for_rows_of_one_document_depends_on_their_length(length: int, kernel: str) -> None:
    positions = torch.arange(length)[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions))
    assert explain_kernel(mask, layout=fnmodels.layout({"full": mask}))[0] == kernel


def test_the_choice_for_other_forms_of_masks() -> None:
    mask, layout = mask_of("window 16", "one document")
    assert explain_kernel(mask.dense(), layout=layout)[0] == "sdpa"
    assert explain_kernel(mask.dense(), softcap=1.0)[0] == "math"
    assert explain_kernel(to_block_mask(mask))[0] == "sdpa"
    assert explain_kernel(to_block_mask(mask), device="cuda")[0] == "flex"
    assert explain_kernel(materialize(mask, "auto", layout))[0] == "blocks"
    mask, layout = mask_of("causal", "one document")
    assert explain_kernel(materialize(mask, "sdpa", layout))[0] == "sdpa"


def test_the_form_is_that_of_the_kernel_which_is_explained() -> None:
    """By device, dtype and softcap of the attention to come: what is made for another is made again in every layer."""
    mask, layout = mask_of("window 16", "two equal rows")
    block_mask = to_block_mask(mask)
    assert materialize(block_mask, "auto", layout, device="cuda") is block_mask
    assert materialize(block_mask, "auto", layout, device="cpu").dtype == torch.bool
    half = {"device": "cuda", "dtype": torch.bfloat16}
    assert explain_kernel(mask, layout=layout, **half)[0] == "varlen"
    documents = materialize(mask, "varlen", layout)
    assert (documents.offsets.tolist(), documents.longest, documents.window) == ([0, 100, 150, 250, 300], 128, (15, 0))
    assert explain_kernel(documents)[0] == "varlen" and materialize(documents, "auto", None) is documents
    for how in ({"device": "cuda"}, {**half, "softcap": 2.0}):
        assert explain_kernel(mask, layout=layout, **how)[0] == "flex"
        asks = Asks(how.pop("softcap", None) is not None)
        assert type(materialize(mask, "auto", layout, asks=asks, **how)) is type(block_mask)


def test_kinds_with_one_mask_share_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    dense = Mask.dense
    monkeypatch.setattr(Mask, "dense", lambda self: made.append(self) or dense(self))
    kinds = ("full", "full_nope", "sliding", "sliding_nope")
    config = llama.Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=3,
        layer_kinds=kinds,
    )
    _, masks, freqs_cis = fnmodels.prepare(config, torch.zeros(1, 5, dtype=torch.long))
    run_layers(P.init(config, 0), torch.zeros(1, 5, 8), masks, freqs_cis, 0, 4, config=config, kernel="math")
    assert len(made) == 2


# What is refused


@pytest.mark.parametrize(
    ("kernel", "given", "words"),
    [
        ("fused", {}, "unknown; known are auto, math"),
        ("sdpa", {"softcap": 2.0}, 'kernel="math"'),
        ("blocks", {"layout": None}, 'layout=fnmodels.layout.*kernel="sdpa"'),
        ("blocks", {"dense": True}, 'kernel="sdpa"'),
        ("flex", {"sinks": torch.zeros(4)}, 'no sinks on the CPU.*kernel="math"'),
        ("flex", {"dtype": torch.float64}, 'not in torch.float64.*kernel="math" do'),
        ("varlen", {"layout": None}, 'kernel="sdpa"'),
        ("varlen", {"dense": True}, 'kernel="sdpa"'),
        ("varlen", {"rule": "chunk"}, 'kernel="flex"'),
        ("varlen", {"rule": "prefix or images"}, 'kernel="flex"'),
        ("varlen", {"softcap": 2.0}, 'kernel="flex"'),
        ("varlen", {"sinks": torch.zeros(4)}, 'kernel="flex"'),
        ("varlen", {}, 'not in torch.float32 on cpu; kernel="blocks"'),
    ],
)
def test_what_a_kernel_cannot_do_names_one_that_can(kernel: str, given: dict[str, Any], words: str) -> None:
    mask, layout = mask_of(given.get("rule", "causal"), "two equal rows")
    form = mask.dense() if given.get("dense") else mask
    options = {name: given[name] for name in ("softcap", "sinks") if name in given}
    tensors = heads(2, dtype=given.get("dtype", torch.float32))
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        attention(*tensors, form, kernel=kernel, scale=0.4, layout=given.get("layout", layout), **options)


def test_a_layout_of_another_batch_is_refused() -> None:
    mask, layout = mask_of("causal", "documents, differing rows")
    with pytest.raises(ValueError, match=r"describes 2 rows of 150 tokens, the queries are \[1, 150\]"):
        attention(*heads(1), mask, kernel="blocks", scale=0.4, layout=layout)
    part = mask.select(slice(1, None), slice(1, None))
    for kernel in ("sdpa", "blocks", "auto"):
        with pytest.raises(ValueError, match="rows of 150 tokens, the mask 149 queries and 149 keys"):
            attention(*heads(2), part, kernel=kernel, scale=0.4, layout=layout)


@pytest.mark.parametrize("kernel", ["math", "sdpa", "blocks", "auto"])
@pytest.mark.parametrize("rows", ["one document", "two equal rows", "left pad, right pad, all pad"])
def test_a_layout_of_other_documents_is_refused(rows: str, kernel: str) -> None:
    """Of the same shape it would leak one document into another; with or without a transform around the call."""
    mask, layout = mask_of("causal", rows)
    q, k, v = heads(len(ROWS[rows]))

    def loss(q: Tensor, mask: Mask) -> Tensor:
        return attention(q, k, v, mask, kernel=kernel, scale=0.4, layout=layout).sum()

    other = fnmodels.tree.map(torch.clone, mask)
    other.q_segments[:, 20:] += 7
    other.kv_segments[:, 20:] += 7
    moved = fnmodels.permute(mask, torch.arange(S).flip(0))
    for wrong in (other, moved):
        for call, given in ((loss, q), (grad(loss), q), (vmap(loss, in_dims=(0, None)), q[None])):
            with pytest.raises(ValueError, match="describes other documents than the mask"):
                call(given, wrong)
    assert grad(loss)(q, fnmodels.tree.map(torch.clone, mask)).isfinite().all()
    assert vmap(grad(loss), in_dims=(0, None))(q[None], mask).isfinite().all()


def test_a_mask_that_vmap_runs_over_is_not_read() -> None:
    """Its values are not there; the layout is taken at its word."""
    mask, layout = mask_of("causal", "two equal rows")
    stacked = fnmodels.tree.map(lambda t: torch.stack([t, t]), mask)
    q, k, v = heads(2)
    wanted = attention(q, k, v, mask, kernel="math", scale=0.4)

    def one(mask: Mask) -> Tensor:
        return attention(q, k, v, mask, kernel="blocks", scale=0.4, layout=layout)

    assert worst(list(vmap(one)(stacked)), [wanted, wanted]) < 1e-5


def test_a_tracer_does_not_see_that_a_mask_is_read() -> None:
    mask, layout = mask_of("causal", "two equal rows")
    tensors = [t.detach() for t in heads(2)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask, kernel="blocks", scale=0.4, layout=layout)

    traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    assert torch.equal(traced(*tensors), call(*tensors)) and "nonzero" not in traced.code


@pytest.mark.parametrize(("softcap", "sink"), [(None, False), (1.5, False), (None, True)])
def test_a_batch_of_nothing_but_padding_has_a_gradient(softcap: float | None, sink: bool) -> None:
    """Of 0, whatever the padding holds: the step of a batch without documents is a step that changes nothing."""
    positions, segments, _ = batch([[(0, -S)]] * 2)
    mask = build_mask(Causal(), positions, segments)
    layout = fnmodels.layout({"kind": mask})
    inputs = [t.detach().fill_(torch.nan).requires_grad_() for t in heads(2)]
    sinks = torch.zeros(4, requires_grad=True) if sink else None
    out = attention(*inputs, mask, kernel="blocks", scale=0.4, softcap=softcap, sinks=sinks, layout=layout)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), inputs + ([] if sinks is None else [sinks])):
        assert not gradient.any()


# Kernels that run elsewhere


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (Everything(), (-1, -1)),
        (Causal(), (-1, 0)),
        (Causal() & Window(1), (0, 0)),
        (Window(5) & Causal() & Window(9), (4, 0)),
        (BidirectionalWindow(3), (3, 3)),
        (BidirectionalWindow(3) & Causal(), (3, 0)),
        (Causal() & Chunk(4), None),
        (Causal() | SameSpan(), None),
    ],
)
def test_windows_of_variable_length_attention(rule: Rule, window: tuple[int, int] | None) -> None:
    assert varlen_window(rule) == window


@pytest.mark.parametrize("rule", ["causal", "window 16", "encoder", "encoder window"])
@pytest.mark.parametrize("rows", ["documents, differing rows", "left pad, right pad, all pad"])
@pytest.mark.parametrize("v_width", [8, 5, 12])
def test_arguments_of_variable_length_attention(
    rule: str, rows: str, v_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's CUDA function is called with, by a stand-in that follows its documentation."""
    from torch.nn.attention import varlen

    def stand_in(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        longest = int(cu_seq_q.diff().max())
        assert enable_gqa and cu_seq_q is cu_seq_k and max_q == max_k and longest <= max_q < 2 * longest
        assert query.shape[0] == key.shape[0] == value.shape[0] == cu_seq_q[-1]
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        out = []
        for start, stop in itertools.pairwise(cu_seq_q.tolist()):
            one = [t[None, start:stop] for t in (query, key, value)]
            back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            left, right = window_size
            allowed = ((left < 0) | (back <= left)) & ((right < 0) | (-back <= right))
            out.append(reference(*one, allowed, scale, None, None)[0].float())
        return torch.cat(out)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    mask, layout = mask_of(rule, rows)
    q, k, v = heads(len(ROWS[rows]), v_width=v_width)
    window = varlen_window(mask.rule)
    assert window is not None
    out = varlen_attention(q, k, v, by_document(layout, window, "cpu"), scale=0.4)
    wanted = reference(q, k, v, mask.dense(), 0.4, None, None)
    assert worst([out], [wanted]) < 1e-5
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert worst(list(got), list(torch.autograd.grad(wanted.sum(), (q, k, v)))) < 1e-5


@pytest.mark.parametrize("length", [5, 0])
def test_variable_length_attention_over_padding_alone(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's function is not called with no documents; the result has a gradient, of 0, whatever the padding holds."""
    from torch.nn.attention import varlen

    def stand_in(*given: Any, **options: Any) -> Tensor:
        raise AssertionError("there is nothing to attend to")

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    positions = torch.zeros(2, length, dtype=torch.long)
    layout = fnmodels.inputs.document_layout(positions, positions)
    assert layout is not None
    shapes = ((4, 8), (2, 8), (2, 6))
    inputs = [torch.full((2, length, *shape), torch.nan).requires_grad_() for shape in shapes]
    q, k, v = inputs
    out = varlen_attention(q, k, v, by_document(layout, (-1, 0), "cpu"), scale=0.4)
    assert out.shape == (2, length, 4, 6) and not out.any()
    for tensor, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.shape == tensor.shape and not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "rows", "given"),
    [
        ("causal", "documents, differing rows", {"q": 6, "kv": 1, "v_width": 24}),
        ("window 16", "left pad, right pad, all pad", {"v_width": 8, "softcap": 1.5}),
        ("chunk", "documents, differing rows", {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_flex_on_the_cpu(rule: str, rows: str, given: dict[str, Any]) -> None:
    """Forward only, compiled; queries that see nothing give 0."""
    torch.compiler.reset()
    mask, layout = mask_of(rule, rows)
    softcap = given.get("softcap")
    shape = {"width": 16, "v_width": 16} | {name: value for name, value in given.items() if name != "softcap"}
    q, k, v = heads(len(ROWS[rows]), **shape)
    with torch.no_grad():
        out = attention(q, k, v, mask, kernel="flex", scale=0.4, softcap=softcap, layout=layout)
    assert out.dtype == q.dtype
    bound = 1e-5 if q.dtype == torch.float32 else 0.05
    assert worst([out], [reference(q, k, v, mask.dense(), 0.4, softcap, None)]) < bound
    assert not out[~mask.dense().any(-1)[:, 0]].any()


@pytest.mark.slow
def test_flex_on_the_cpu_takes_one_shape_after_another() -> None:
    """And a BlockMask for a Mask. (Compiled with sizes left open, torch 2.13's code for the CPU is no C++.)"""
    torch.compiler.reset()
    for rows in ("one document", "two equal rows"):
        mask, _ = mask_of("causal", rows)
        q, k, v = heads(len(ROWS[rows]), width=16, v_width=16)
        with torch.no_grad():
            out = attention(q, k, v, to_block_mask(mask), kernel="flex", scale=0.4)
        assert worst([out], [reference(q, k, v, mask.dense(), 0.4, None, None)]) < 1e-5


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen and the backward of flex run on CUDA only")


@on_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kernel", "rule", "given"),
    [
        ("varlen", "causal", {}),
        ("varlen", "window 16", {"v_width": 32}),
        ("varlen", "encoder", {"q": 6, "kv": 1}),
        ("flex", "causal", {"q": 4, "kv": 4}),
        ("flex", "prefix or images", {}),
        ("flex", "window 16", {"sink": True}),
        ("flex", "chunk", {"softcap": 1.5, "v_width": 32}),
        ("auto", "window 16", {}),
        ("auto", "chunk", {}),
        ("auto", "causal", {"sink": True}),
        ("blocks", "window 16", {"sink": True}),
        ("sdpa", "causal", {"sink": True}),
        ("sdpa", "window 16", {}),  # a dense mask, with rows of which nothing is seen
    ],
)
def test_training_on_cuda(kernel: str, rule: str, given: dict[str, Any], compiled: bool) -> None:
    """The result and all gradients in bf16, as kernel="math" has them in bf16; queries that see nothing give 0."""
    torch.compiler.reset()
    mask, _ = mask_of(rule, "left pad, right pad, all pad")
    mask = fnmodels.tree.map(lambda t: t.cuda(), mask)
    layout = fnmodels.inputs.document_layout(mask.q_positions, mask.q_segments)
    shape = {"width": 64, "v_width": 64} | {name: given[name] for name in ("q", "kv", "v_width") if name in given}
    q, k, v = (t.detach().cuda().bfloat16().requires_grad_() for t in heads(3, **shape))
    noise = torch.randn(q.shape[2], generator=torch.Generator().manual_seed(2))
    sinks = noise.cuda().requires_grad_() if given.get("sink") else None
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    options = {"scale": 0.125, "softcap": given.get("softcap"), "sinks": sinks, "layout": layout}
    run = torch.compile(attention, fullgraph=True) if compiled else attention
    results = []
    for out in (run(q, k, v, mask, kernel=kernel, **options), attention(q, k, v, mask, kernel="math", **options)):
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).norm() < 0.02 * wanted.norm()
    assert not results[0][0][~mask.dense().any(-1)[:, 0]].any()


@on_cuda
@pytest.mark.parametrize("kernel", ["varlen", "flex", "auto"])
def test_a_model_trains_on_cuda(kernel: str) -> None:
    """Full and sliding layers in bf16: gradients as near to fp32's as those of kernel="math" in bf16 are."""
    config = llama.Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=16,
        layer_kinds=("full", "sliding"),
    )
    positions, segments, _ = (t.cuda() for t in batch(ROWS["left pad, right pad, all pad"]))
    tokens = torch.randint(64, positions.shape, generator=torch.Generator().manual_seed(0)).cuda()
    prepared = fnmodels.prepare(config, tokens, positions=positions, segment_ids=segments)
    layout, weights = fnmodels.layout(prepared[1]), P.init(config, 0, device="cuda")

    def gradients(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        flat = {path: leaf.to(dtype).requires_grad_() for path, leaf in P.flatten(weights).items()}
        logits = fnmodels.forward(P.unflatten(flat), *prepared, config=config, kernel=kernel, layout=layout)
        loss = torch.nn.functional.cross_entropy(logits[segments > 0].float(), tokens[segments > 0])
        return [t.float() for t in torch.autograd.grad(loss, list(flat.values()))]

    exact = gradients("math", torch.float32)
    got, noise = (
        [(a - b).norm() / b.norm() for a, b in zip(gradients(k, torch.bfloat16), exact, strict=True)]
        for k in (kernel, "math")
    )
    for one, other in zip(got, noise, strict=True):
        assert one < 2 * other + 1e-3


# Transforms

Loss = Callable[[Tensor], Tensor]


def second_backward(loss: Loss, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def batched_second_backward(loss: Loss, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    first = jacobian(loss, x, vectorize=True, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def backward_of_grad(loss: Loss, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(grad(loss)(x).square().sum(), x)


def tangent_of_grad(loss: Loss, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(grad(loss)(forward_ad.make_dual(x, x))).tangent


def compiled(loss: Loss, x: Tensor) -> Any:
    torch.compiler.reset()
    x = x.clone().requires_grad_()
    return torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)


def exported(loss: Loss, x: Tensor) -> torch.export.ExportedProgram:
    class Shell(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return loss(x)

    torch.compiler.reset()
    return torch.export.export(Shell(), (x,))


TRANSFORMS: dict[str, Callable[[Loss, Tensor], Any]] = {
    "backward": lambda f, x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf),
    "grad": lambda f, x: grad(f)(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "is_grads_batched": lambda f, x: jacobian(f, x, vectorize=True),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, -x])),
    "vmap(grad)": lambda f, x: vmap(grad(f))(torch.stack([x, -x])),
    "grad(vmap)": lambda f, x: grad(lambda xs: vmap(f)(xs).sum())(torch.stack([x, -x])),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "linearize": lambda f, x: linearize(f, x),
    "jvp(grad), hvp": lambda f, x: jvp(grad(f), (x,), (x,)),
    "grad(jvp), hvp": lambda f, x: grad(lambda y: jvp(f, (y,), (x,))[1])(x),
    "grad(grad)": lambda f, x: grad(lambda y: grad(f)(y).square().sum())(x),
    "double backward": second_backward,
    "the same, is_grads_batched": batched_second_backward,
    "backward of grad": backward_of_grad,
    "tangent of grad": tangent_of_grad,
    "compile, fullgraph": compiled,
    "export": lambda f, x: exported(f, x).module()(x),
}
FIRST = set(TRANSFORMS) - {
    "jvp", "jacfwd", "linearize", "jvp(grad), hvp", "grad(jvp), hvp", "grad(grad)", "double backward",
    "the same, is_grads_batched", "backward of grad", "tangent of grad",
}  # fmt: skip
SUPPORTED = {"math": set(TRANSFORMS), "sdpa": FIRST, "blocks": FIRST, "flex": {"export"}, "varlen": set()}
SUPPORTED["sparse"] = FIRST - {"compile, fullgraph", "export", "is_grads_batched"}
YES, OURS, TORCHS = "yes", "says so", "torch's error"
PACKAGE = {"math": YES, "sdpa": YES, "blocks": YES, "flex": TORCHS, "varlen": OURS, "sparse": OURS}  # AOTInductor
EAGER = ("compile, fullgraph", "export", "is_grads_batched", "the same, is_grads_batched")
EAGER += ("backward of grad", "tangent of grad")
INSIDE = [name for name in TRANSFORMS if name not in EAGER]  # of a compiled function


def eagerly(kernel: str, transform: str) -> str:
    return YES if transform in SUPPORTED[kernel] else OURS


def inside(kernel: str, transform: str) -> str:
    """Of `torch.compile(lambda x: transform(loss)(x))`."""
    second = transform in ("grad(grad)", "double backward")
    if kernel == "sparse":
        return OURS
    if (transform == "linearize" and kernel != "varlen") or (second and kernel in ("sdpa", "blocks")):
        return TORCHS
    return eagerly(kernel, transform)


PARTS = {
    "jacrev": {"grad"},
    "vmap(grad)": {"vmap", "grad"},
    "grad(vmap)": {"vmap", "grad"},
    "jacfwd": {"jvp"},
    "jvp(grad), hvp": {"jvp", "grad"},
    "grad(jvp), hvp": {"jvp", "grad"},
    "grad(grad)": {"grad"},
    "double backward": {"backward"},
}


def shown_by_another(kernel: str, transform: str) -> bool:
    """Whether it is a part of one that goes through inside of compiled code, or has a part that is refused there."""
    wanted = inside(kernel, transform)
    if wanted == YES:
        return any(transform in parts and inside(kernel, whole) == YES for whole, parts in PARTS.items())
    return wanted == OURS and any(inside(kernel, part) == OURS for part in PARTS.get(transform, ()))


def problem(kernel: str) -> tuple[Loss, Tensor]:
    positions, segments = torch.tensor([[3, 4, 5, 0, 1, 0, 1, 2, 3, 0]]), torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0]])
    mask = build_mask(Causal() & Window(2), positions, segments)
    layout = fnmodels.layout({"kind": mask})
    generator = torch.Generator().manual_seed(0)
    x, k, v = (torch.randn(1, 10, n, 4, generator=generator) for n in (4, 2, 2))

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, mask, kernel=kernel, scale=0.5, layout=layout).square().sum()

    return loss, x


def problem_in_tiles(kernel: str) -> tuple[Loss, Tensor]:
    """Of a document that blocks cuts in tiles, keys and values included."""
    positions = torch.arange(3, 263)[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions))
    layout = fnmodels.layout({"kind": mask})
    x = torch.randn(1, 260, 4, 4, generator=torch.Generator().manual_seed(0))

    def loss(x: Tensor) -> Tensor:
        k, v = x.split(2, dim=2)
        return attention(x, k, v, mask, kernel=kernel, scale=0.5, layout=layout)[:, ::25].square().sum()

    return loss, x


def assert_so(wanted: str, call: Callable[[], Any], value: Callable[[], Any] | None, while_traced: bool) -> None:
    """yes: it runs, with this value. says so: our sentence. torch's error: any that does not name kernel="math"."""
    if wanted == YES:
        got = call()
        if value is not None:
            leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (got, value())]
            assert worst(*leaves) < 1e-5
    elif wanted == OURS:  # torch wraps what is raised while it traces
        with pytest.raises(Exception if while_traced else (NotImplementedError, ValueError), match=SENTENCE):
            call()
    else:
        with pytest.raises(Exception, match=r".") as error:
            call()
        assert not re.search(SENTENCE, str(error.value))


SENTENCE = 'kernel="math" supports|kernel="blocks" does the same work'  # the second is varlen's off CUDA
pairs = pytest.mark.parametrize("kernel", SUPPORTED)
quiet = pytest.mark.filterwarnings("ignore:There is a performance drop")


@quiet
@pytest.mark.parametrize("transform", TRANSFORMS)
@pairs
def test_transforms(kernel: str, transform: str) -> None:
    """F1: what the table says goes through, with the values of kernel="math"; the rest raises our sentence."""
    (loss, x), (math, _), run = problem(kernel), problem("math"), TRANSFORMS[transform]
    value = None if transform == "linearize" else lambda: run(math, x)
    assert_so(eagerly(kernel, transform), lambda: run(loss, x), value, transform in ("compile, fullgraph", "export"))


@quiet
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_tiles(transform: str) -> None:
    (loss, x), (math, _), run = problem_in_tiles("blocks"), problem_in_tiles("math"), TRANSFORMS[transform]
    assert tiles_are_faster(x)
    value = None if transform == "linearize" else lambda: run(math, x)
    assert_so(eagerly("blocks", transform), lambda: run(loss, x), value, transform in ("compile, fullgraph", "export"))


@on_cuda
@pytest.mark.parametrize("transform", ["vmap", "vmap(grad)", "jvp", "jacfwd", "linearize", "double backward"])
@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_what_is_refused_on_cuda(kernel: str, transform: str) -> None:
    torch.compiler.reset()
    positions = torch.arange(64, device="cuda")[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions))
    x = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    layout = fnmodels.layout({"kind": mask})

    def loss(q: Tensor) -> Tensor:
        return attention(q, x, x, mask, kernel=kernel, scale=0.125, layout=layout).float().square().sum()

    with pytest.raises(NotImplementedError, match='kernel="math" supports'):
        TRANSFORMS[transform](loss, x)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("kernel", "transform"),
    [(kernel, name) for kernel in SUPPORTED for name in INSIDE if not shown_by_another(kernel, name)],
)
def test_transforms_inside_of_compiled_code(kernel: str, transform: str) -> None:
    (loss, x), (math, _), run = problem(kernel), problem("math"), TRANSFORMS[transform]
    torch.compiler.reset()
    whole = torch.compile(lambda x: run(loss, x), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # for torch.autograd.grad inside of it
        assert_so(inside(kernel, transform), lambda: whole(x), lambda: run(math, x), True)


def packaged(losses: list[Loss], x: Tensor, folder: Path) -> Tensor:
    """AOTInductor: code that runs without Python."""
    program = exported(lambda x: torch.stack([loss(x) for loss in losses]), x)
    with quickly_compiled():
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(path)(x)


@pytest.mark.slow
def test_packages(tmp_path: Path) -> None:
    """All kernels that can in one, because each takes C++ ten seconds."""
    losses, (math, x) = [problem(kernel)[0] for kernel in PACKAGE if PACKAGE[kernel] == YES], problem("math")
    assert_so(YES, lambda: packaged(losses, x, tmp_path), lambda: math(x).expand(len(losses)), True)


@pytest.mark.parametrize("kernel", [kernel for kernel in PACKAGE if PACKAGE[kernel] != YES])
def test_what_is_not_packaged(kernel: str, tmp_path: Path) -> None:
    loss, x = problem(kernel)
    assert_so(PACKAGE[kernel], lambda: packaged([loss], x, tmp_path), None, True)


def test_forward_mode_without_gradients() -> None:
    """Where nothing is recorded no guard stands in front of the fused kernel, and its own error is translated."""
    loss, x = problem("sdpa")
    with torch.no_grad(), pytest.raises(NotImplementedError, match='kernel="math" supports'):
        jvp(loss, (x,), (x,))


def table(first: str, rows: dict[str, Callable[[str], str]]) -> str:
    lines = [f"| {first} | " + " | ".join(SUPPORTED) + " |", "|---" * (len(SUPPORTED) + 1) + "|"]
    for name, cell in rows.items():
        lines.append(f"| {name} | " + " | ".join(cell(kernel) for kernel in SUPPORTED) + " |")
    return "\n".join(lines)


def test_the_tables_in_the_docs() -> None:
    """FNMODELS_UPDATE_DOCS=1 writes them."""
    eager = {name: partial(eagerly, transform=name) for name in TRANSFORMS} | {"AOTInductor": PACKAGE.__getitem__}
    in_graph = {name: partial(inside, transform=name) for name in INSIDE}
    wanted = DOCS.read_text()
    for mark, rows in {"transforms": eager, "inside of compiled code": in_graph}.items():
        begin, end = f"<!-- {mark}: written by tests/fnmodels/ops/test_kernels.py -->\n", "\n<!-- end -->"
        before, rest = wanted.split(begin)
        _, after = rest.split(end, 1)
        wanted = before + begin + table("transform", rows) + end + after
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted
