"""Per-token tensors are arguments: no result depends on a token's index, on earlier calls or on other rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
from fnmodels import tree
from fnmodels.inputs.mask import attention_part
from fnmodels.models.common.carried import stream_shape
from fnmodels.models.common.family import field_of
from fnmodels.ops.streams.hyper import opened
from fnmodels.options import ForwardOptions
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    beside,
    causal,
    decisions_of,
    forward,
    generic_params,
    is_ordered,
    keep,
    layer_structures,
    layers_run,
    logits_dtype,
    off,
    positions_of,
    reach_of,
    richest,
    segments,
    tables_of,
    tokens_of,
    with_kernels,
)

every_table = pytest.mark.parametrize("case", richest(tables_of), ids=str)
every_structure = pytest.mark.parametrize("case", layer_structures(), ids=str)
every_structure_and_kernel = with_kernels(layer_structures())
MIXED = segments((-3, 5, 4), (12,), (7, 1, -4), (1, 10, -1))


@every_table
def test_tables_are_fp32_whatever_the_default_dtype(case: Case) -> None:
    """B2: bit for bit, temperatures included. `fnmodels.testing` checks the precision of the phases."""
    positions = torch.tensor([[0, 3, 1000, 999_999]])
    tables = fnmodels.family_of(case.config).freqs_cis(case.config, positions, length=24)
    try:
        torch.set_default_dtype(torch.bfloat16)
        again = fnmodels.family_of(case.config).freqs_cis(case.config, positions, length=24)
    finally:
        torch.set_default_dtype(torch.float32)
    assert off(tree.map(lambda t: t.view(torch.int32), tables), tree.map(lambda t: t.view(torch.int32), again)) == 0
    for table in tree.leaves(tables):
        assert table.dtype == torch.float32 and table.shape[:2] == positions.shape


@every_structure
def test_low_precision_parameters_leave_the_tables_alone(case: Case) -> None:
    """B2: a bf16 forward reads the same fp32 tables; its bf16 logits are close to the fp32 ones."""
    mixed, weights = batch_of(case.config, MIXED), generic_params(case.config)
    inputs, masks, freqs_cis = mixed.prepared()
    # bf16 may choose other experts, or keys, between close scores: use those of fp32
    inputs = {**inputs, **decisions_of(weights, mixed.prepared(), case.config, kernel="math")}
    low = tree.map(lambda p: p.to(torch.bfloat16), weights)
    logits = fnmodels.forward(low, inputs, masks, freqs_cis, config=case.config, kernel="math")
    assert logits.dtype == logits_dtype(case.config, torch.bfloat16)
    wanted = mixed.forward(weights)[mixed.valid]
    assert float((logits[mixed.valid].float() - wanted).std()) < 0.2 * float(wanted.std())


@every_table
def test_tables_depend_on_their_positions_only(case: Case) -> None:
    """B4: the entry of a position has the same bits alone, among others, in another order and in another row."""
    family = fnmodels.family_of(case.config)
    positions = torch.tensor([[3, 0, 17, 5, 900, 5], [5, 900, 1, 1, 0, 3]])
    whole = family.freqs_cis(case.config, positions, length=24)
    for b in range(2):
        for t in range(6):
            alone = family.freqs_cis(case.config, positions[b : b + 1, t : t + 1], length=24)
            assert off(tree.map(lambda x, b=b, t=t: x[b : b + 1, t : t + 1], whole), alone) == 0
    assert off(family.freqs_cis(case.config, positions, length=torch.tensor([24, 24])), whole) == 0


@every_structure
def test_positions_of_several_axes(case: Case) -> None:
    """Refused by each model without such tables, never read as a single axis; equal axes are one."""
    mixed = batch_of(case.config, MIXED)
    given: dict[str, Any] = {
        "positions": mixed.positions[..., None].expand(*MIXED.shape, 3),
        "segment_ids": MIXED,
        "length": 24,
    }
    if field_of(case.config, "mrope_section"):
        tables = fnmodels.prepare(case.config, mixed.tokens, **given)[2]
        assert tree.leaves(tables) and all(map(torch.equal, tree.leaves(tables), tree.leaves(mixed.prepared()[2])))
        return
    with pytest.raises(ValueError, match=r"positions must be \[B, S\], not \[4, 12, 3\]"):
        fnmodels.prepare(case.config, mixed.tokens, **given)


def orders(length: int, batch: int) -> list[Tensor]:
    """Head-tail (context parallelism's balance), one random order, one per row."""
    halves = torch.arange(length).view(4, -1)
    generator = torch.Generator().manual_seed(0)
    return [
        halves[[0, 3, 1, 2]].flatten(),
        torch.randperm(length, generator=generator),
        torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)]),
    ]


@every_structure
def test_permuted_arguments_are_those_of_the_permuted_rows(case: Case) -> None:
    """B5: a batch can be permuted once, before `prepare` or after it. `fnmodels.testing` checks the logits.

    Models that read tokens in the order of the row refuse both.
    """
    mixed = batch_of(case.config, MIXED)
    given = (mixed.tokens, mixed.positions, mixed.segment_ids)
    for order in orders(*reversed(MIXED.shape)):
        if is_ordered(case):
            with pytest.raises(ValueError, match="in their order"):
                fnmodels.permute(mixed.prepared(), order)
            with pytest.raises(ValueError, match="read tokens in the order of the row"):
                Batch(case.config, *fnmodels.permute(given, order), mixed.length).prepared()
            continue
        anew = Batch(case.config, *fnmodels.permute(given, order), mixed.length).prepared()
        assert off(fnmodels.permute(mixed.prepared(), order), anew) == 0


@every_structure
def test_documents_in_any_order_and_in_pieces(case: Case) -> None:
    """A document behind one of a higher number, and one that goes on behind another: as alone, or refused."""
    segment_ids = segments((2, 3, 4))
    swapped, pieces = (3 - segment_ids) % 3 + 1, torch.tensor([[1, 1, 2, 2, 2, 1, 1, 3, 3]])
    params, tokens = generic_params(case.config, torch.float64), tokens_of(case.config, 1, 9)
    for ids in (swapped, pieces):
        positions = torch.stack([(ids[0, :place] == ids[0, place]).sum() for place in range(9)])[None]
        batch = Batch(case.config, tokens, positions, ids, 9)
        if ids is pieces and is_ordered(case):
            with pytest.raises(ValueError, match="Row 0 goes on with document 1 at token 5, behind another one"):
                batch.prepared()
            continue
        logits = batch.forward(params)
        for document in (1, 2, 3):
            alone = Batch(
                case.config,
                tokens[ids == document][None],
                positions[ids == document][None],
                ids[ids == document][None],
                9,
            )
            assert off(logits[ids == document][None], alone.forward(params)) < 1e-10


@every_structure
def test_split_arguments_are_those_of_the_rows(case: Case) -> None:
    """B3: the same for microbatches."""
    mixed = batch_of(case.config, MIXED)
    for n in (1, 2, 4):
        size = len(MIXED) // n
        for i, part in enumerate(fnmodels.split(mixed.prepared(), n)):
            assert off(part, mixed.take(slice(i * size, (i + 1) * size), slice(None)).prepared()) == 0


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor created (tracemalloc does not see torch's memory)."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return out


@every_structure
def test_masks_cost_linear_memory(case: Case) -> None:
    """B7: at 131,072 tokens a dense mask would have 1.7e10 elements."""
    length = 131_072
    positions = torch.arange(length)[None]
    segment_ids = torch.ones_like(positions)
    with Largest() as largest:
        masks = fnmodels.family_of(case.config).attention_masks(case.config, positions, segment_ids)
    assert largest.numel <= 4 * length
    assert all(t.untyped_storage().nbytes() <= 32 * length for t in tree.leaves(masks))
    with Largest() as largest:
        fnmodels.prepare(case.config, torch.zeros_like(positions), segment_ids=segment_ids, length=length)
    assert largest.numel <= 256 * length  # the tables


@every_structure_and_kernel
def test_gradients_flow_from_the_past_only(case: Case, kernel: str) -> None:
    """B10: d logits[t] / d embedding[u] is exactly 0 if u is later, in another document or padding, else nonzero."""
    row = batch_of(case.config, segments((-1, 3, 5, -1)))
    positions, segment_ids, times = row.positions[0], row.segment_ids[0], row.valid[0].nonzero().flatten()
    # A row for each t: one backward pass gives all gradients.
    tokens = row.tokens.expand(len(times), -1)
    weights = generic_params(case.config)
    prepared = Batch(
        case.config, tokens, row.positions.expand_as(tokens), row.segment_ids.expand_as(tokens), row.length
    ).prepared()
    x = fnmodels.family_of(case.config).embed(weights, prepared[0], config=case.config).requires_grad_()
    logits = forward(weights, ({**prepared[0], "tokens": x}, *prepared[1:]), config=case.config, kernel=kernel)
    same = (segment_ids[:, None] == segment_ids) & row.valid[0]
    may = same & (positions[:, None] >= positions) if causal(case) else same
    reach = reach_of(row)
    assert not (reach & ~may & ~torch.eye(len(positions), dtype=torch.bool)).any()
    (gradient,) = torch.autograd.grad(logits[torch.arange(len(times)), times].sin().sum(), x)
    assert torch.equal((gradient != 0).any(-1), reach[times])


@every_structure
def test_positions_segments_and_tokens_are_independent(case: Case) -> None:
    """P2: each tensor that `prepare` returns depends on its own argument only."""
    mixed = batch_of(case.config, MIXED)
    inputs, masks, freqs_cis = mixed.prepared()
    documents = (MIXED + 7).where(MIXED > 0, torch.arange(MIXED.shape[1]) + 40)  # each padding token a document
    other = Batch(case.config, mixed.tokens, mixed.positions, documents, 24).prepared()
    assert off(freqs_cis, other[2]) == 0
    assert off(inputs["tokens"], other[0]["tokens"]) == 0
    assert other[0]["valid"].all() and torch.equal(inputs["valid"], MIXED > 0)
    shifted = Batch(case.config, mixed.tokens, mixed.positions + 2, MIXED, 24).prepared()
    assert torch.equal(shifted[0]["valid"], inputs["valid"])
    for kind, mask in masks.items():
        if isinstance(mask, fnmodels.inputs.Segments):
            assert torch.equal(mask.segment_ids, MIXED) and torch.equal(shifted[1][kind].segment_ids, MIXED)
            continue
        mask, moved = attention_part(mask), attention_part(shifted[1][kind])
        assert torch.equal(mask.kv_segments, MIXED) and torch.equal(mask.kv_positions, mixed.positions)
        assert torch.equal(moved.kv_segments, MIXED)


@every_structure
def test_several_documents_need_their_positions(case: Case) -> None:
    with pytest.raises(ValueError, match="Row 1 holds several documents"):
        fnmodels.prepare(case.config, tokens_of(case.config, 2, 5), segment_ids=segments((5,), (2, 3)))


@every_structure
def test_one_document_gets_positions_from_zero(case: Case) -> None:
    segment_ids = segments((-2, 3, -1), (6,), (-6,))
    inputs, _, _ = fnmodels.prepare(case.config, tokens_of(case.config, 3, 6), segment_ids=segment_ids)
    assert torch.equal(inputs["positions"][segment_ids > 0], positions_of(segment_ids)[segment_ids > 0])


@with_kernels(layer_structures(), in_turn=True)
def test_a_row_of_tables_serves_all_rows_of_a_block(case: Case, kernel: str) -> None:
    """A block accepts tables and masks with batch 1; `prepare` returns them expanded."""
    family, weights = fnmodels.family_of(case.config), generic_params(case.config)
    tokens = tokens_of(case.config, 3, 8)
    inputs, masks, freqs_cis = fnmodels.prepare(case.config, tokens, length=24)
    _, one_mask, one_table = fnmodels.prepare(case.config, tokens[:1], length=24)
    assert all(t.shape[0] == 3 for t in tree.leaves((inputs, masks, freqs_cis)))
    x = family.embed(weights, inputs, config=case.config)
    lent: dict[str, Any] = {}
    layers = layers_run(case.config, weights["layers"])
    for index, (layer, kind) in enumerate(zip(layers, family.kinds(case.config), strict=True)):
        options: dict[str, Any] = {"config": case.config, "kind": kind, "options": ForwardOptions(kernel)}
        options |= beside(case.config, weights, inputs, index, lent)
        streams = stream_shape(case.config, index)
        before = x if len(streams) == 1 else opened(x, streams[0])
        wanted, aux = family.block(layer, before, masks[kind], freqs_cis[kind], **options)
        got, _ = family.block(layer, before, one_mask[kind], one_table[kind], **options)
        assert torch.equal(got, wanted)
        keep(lent, kind, aux)
