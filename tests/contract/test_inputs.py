"""Order-sensitive tensors are arguments: nothing depends on where a token stands, on earlier calls or on neighbors."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
from fnmodels import tree
from tests.support import (
    Batch,
    Case,
    batch_of,
    cases,
    causal,
    forward,
    generic_params,
    gradients,
    off,
    positions_of,
    segments,
    structures,
    summed_loss,
    tokens_of,
    trainable,
    with_kernels,
)

every_case = pytest.mark.parametrize("case", cases(), ids=str)
every_structure = pytest.mark.parametrize("case", structures(), ids=str)
every_case_and_kernel = with_kernels(cases())
every_structure_and_kernel = with_kernels(structures())
MIXED = segments((-3, 5, 4), (12,), (7, 1, -4), (1, 10, -1))


@every_case
def test_tables_are_fp32_and_precise(case: Case) -> None:
    """B2: whatever the default dtype; and near 10^6 the phase is 999 times that at 10^3 and the rest, to 1e-3 rad."""
    family, rest = fnmodels.family_of(case.config), [1, 123, 333, 456, 777, 999]
    positions = torch.tensor([[1000, *rest, *(999_000 + r for r in rest)]])
    tables = family.freqs_cis(case.config, positions, length=24)
    try:
        torch.set_default_dtype(torch.bfloat16)
        again = family.freqs_cis(case.config, positions, length=24)
    finally:
        torch.set_default_dtype(torch.float32)
    assert off(tree.map(lambda t: t.view(torch.int32), tables), tree.map(lambda t: t.view(torch.int32), again)) == 0
    for table in tree.leaves(tables):
        assert table.dtype == torch.float32 and table.shape[:2] == positions.shape
        if table.ndim < 4:  # another order-sensitive tensor, such as a temperature
            continue
        unit = torch.view_as_complex(table[0].double()).sgn()
        near, far = unit[1 : 1 + len(rest)], unit[1 + len(rest) :]
        if unit.numel():
            # the rounding of a table's entry, 6e-8, grows a thousandfold: 6e-5
            assert float((far / (near * unit[0] ** 999)).angle().abs().max()) < 1e-3


@every_case
def test_low_precision_parameters_leave_the_tables_alone(case: Case) -> None:
    """B2: a forward in bf16 reads the same fp32 tables, and ends near the fp32 one, in bf16."""
    mixed, weights = batch_of(case.config, MIXED), generic_params(case.config)
    logits = mixed.forward(tree.map(lambda p: p.to(torch.bfloat16), weights))
    assert logits.dtype == torch.bfloat16
    wanted = mixed.forward(weights)[mixed.valid]
    assert float((logits[mixed.valid].float() - wanted).std()) < 0.2 * float(wanted.std())


@every_structure
def test_double_stays_double(case: Case) -> None:
    mixed = batch_of(case.config, MIXED)
    logits = mixed.forward(generic_params(case.config, torch.float64))
    assert logits.dtype == torch.float64
    assert off(logits[mixed.valid].float(), mixed.forward(generic_params(case.config))[mixed.valid]) < 1e-4


@every_case_and_kernel
def test_microbatches_equal_the_batch(case: Case, kernel: str) -> None:
    """B3: with masks and tables that differ per row, split by one rule."""
    mixed, weights = batch_of(case.config, MIXED), generic_params(case.config)
    prepared = mixed.prepared()
    whole = forward(weights, prepared, config=case.config, kernel=kernel)
    for n in (2, 4):
        parts = [forward(weights, part, config=case.config, kernel=kernel) for part in fnmodels.split(prepared, n)]
        assert off(torch.cat(parts), whole) < 1e-5


@every_case_and_kernel
def test_no_call_remembers_another(case: Case, kernel: str) -> None:
    """B4: f(x), f(longer), f(x) are the same bits, in lengths on both sides of every scaling's threshold."""
    weights = generic_params(case.config)

    def run(length: int) -> Tensor:
        prepared = fnmodels.prepare(case.config, tokens_of(case.config, 2, length))
        return forward(weights, prepared, config=case.config, kernel=kernel)

    short, _, again = run(9), run(40), run(9)
    assert torch.equal(short, again)


@every_case
def test_tables_depend_on_their_positions_only(case: Case) -> None:
    """B4: a position's entry is the same bits among others, alone, in another order, and in another row."""
    family = fnmodels.family_of(case.config)
    positions = torch.tensor([[3, 0, 17, 5, 900, 5], [5, 900, 1, 1, 0, 3]])
    whole = family.freqs_cis(case.config, positions, length=24)
    for b in range(2):
        for t in range(6):
            alone = family.freqs_cis(case.config, positions[b : b + 1, t : t + 1], length=24)
            assert off(tree.map(lambda x, b=b, t=t: x[b : b + 1, t : t + 1], whole), alone) == 0
    assert off(family.freqs_cis(case.config, positions, length=torch.tensor([24, 24])), whole) == 0


def orders(length: int, batch: int) -> list[Tensor]:
    """Head-tail (context parallelism's balance), one random order, one per row."""
    halves = torch.arange(length).view(4, -1)
    generator = torch.Generator().manual_seed(0)
    return [
        halves[[0, 3, 1, 2]].flatten(),
        torch.randperm(length, generator=generator),
        torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)]),
    ]


@every_case_and_kernel
def test_permuting_the_sequence_permutes_the_logits(case: Case, kernel: str) -> None:
    """B5: and a loss over permuted labels is the same."""
    mixed, weights = batch_of(case.config, MIXED), generic_params(case.config)
    prepared = mixed.prepared()
    straight = forward(weights, prepared, config=case.config, kernel=kernel)
    loss = summed_loss(straight, mixed.labels)
    for order in orders(*reversed(MIXED.shape)):
        *moved, labels, wanted = fnmodels.permute((*prepared, mixed.labels, straight), order)
        tokens, positions, segment_ids = fnmodels.permute((mixed.tokens, mixed.positions, mixed.segment_ids), order)
        assert off(Batch(case.config, tokens, positions, segment_ids, mixed.length).prepared(), tuple(moved)) == 0
        logits = forward(weights, moved, config=case.config, kernel=kernel)
        valid = moved[0]["valid"]
        assert off(logits[valid], wanted[valid]) < 1e-5
        assert off(summed_loss(logits, labels), loss) < 1e-5


@every_case_and_kernel
def test_padding_on_either_side_changes_nothing(case: Case, kernel: str) -> None:
    """B6: each row alone, padded left, padded right, in the middle of pads, next to longer rows."""
    weights, lengths = generic_params(case.config), (9, 4, 1)
    alone = [batch_of(case.config, segments((n,)), seed=n) for n in lengths]
    wanted = [row.forward(weights, kernel=kernel)[0] for row in alone]
    for left in (0, 3, None):
        forms = [(-(12 - n if left is None else left), n) for n in lengths]
        segment_ids = segments(*[(*form, -(12 - sum(map(abs, form)))) for form in forms])
        padded = batch_of(case.config, segment_ids)
        for b, row in enumerate(alone):
            padded.tokens[b, padded.valid[b]] = row.tokens[0]
        prepared = fnmodels.prepare(case.config, padded.tokens, segment_ids=segment_ids, length=24)
        logits = forward(weights, prepared, config=case.config, kernel=kernel)
        for b, one in enumerate(wanted):
            assert off(logits[b, padded.valid[b]], one) < 1e-5


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor made meanwhile holds. (tracemalloc does not see torch's memory.)"""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return out


@every_structure
def test_masks_cost_linear_memory(case: Case) -> None:
    """B7: at 131,072 tokens a dense mask would hold 1.7e10 numbers."""
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


@every_case_and_kernel
def test_inputs_are_not_written(case: Case, kernel: str) -> None:
    """B9: neither in place nor by replacing entries, forward and backward."""
    mixed, weights = batch_of(case.config, MIXED), trainable(generic_params(case.config))
    given = (weights, *mixed.prepared())
    leaves = tree.flatten(given)
    versions = {path: leaf._version for path, leaf in leaves.items()}
    values = copy.deepcopy({path: leaf.detach() for path, leaf in leaves.items()})
    logits = forward(given[0], given[1:], config=case.config, kernel=kernel)
    gradients(summed_loss(logits, mixed.labels), weights)
    after = tree.flatten(given)
    assert after.keys() == leaves.keys()
    for path, leaf in after.items():
        assert leaf is leaves[path] and leaf._version == versions[path], path
        assert torch.equal(leaf.detach(), values[path]), path
        assert leaf.grad is None, path


@every_structure
def test_threads_do_not_meet(case: Case) -> None:
    """B9: calls at once, of other lengths and other masks, give what they give alone."""
    weights = generic_params(case.config)
    batches = [batch_of(case.config, segments((n, 12 - n)), seed=n) for n in (1, 5, 9, 11)]
    alone = [b.forward(weights) for b in batches]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda b: b.forward(weights), batches * 3))
    assert all(torch.equal(x, y) for x, y in zip(together, alone * 3, strict=True))


@every_case_and_kernel
def test_gradients_flow_from_the_past_only(case: Case, kernel: str) -> None:
    """B10: d logits[t] / d embedding[u] is exactly 0 for a later u, another document and a pad, else it is not."""
    row = batch_of(case.config, segments((-1, 3, 5, -1)))
    positions, segment_ids = row.positions[0], row.segment_ids[0]
    weights, prepared = generic_params(case.config), row.prepared()
    x = fnmodels.family_of(case.config).embed(weights, prepared[0], config=case.config).requires_grad_()
    logits = forward(weights, (x, *prepared[1:]), config=case.config, kernel=kernel)
    same = (segment_ids[:, None] == segment_ids) & row.valid[0]
    may = same & (positions[:, None] >= positions) if causal(case) else same
    # which tokens reach which over all layers: the masks' own pattern, layer after layer, and the residual
    own = torch.eye(len(positions), dtype=torch.bool)
    reach = own
    for kind in fnmodels.family_of(case.config).kinds(case.config):
        dense = prepared[1][kind].dense()[0, 0]
        reach = ((dense | own).float() @ reach.float()) > 0
    assert not (reach & ~may & ~own).any()
    for t in row.valid[0].nonzero().flatten().tolist():
        (gradient,) = torch.autograd.grad(logits[0, t].sin().sum(), x, retain_graph=True)
        assert ((gradient[0] != 0).any(-1) == reach[t]).all(), t


@every_structure
def test_positions_segments_and_tokens_are_independent(case: Case) -> None:
    """P2: each tensor that `prepare` returns follows its own argument and no other."""
    mixed = batch_of(case.config, MIXED)
    inputs, masks, freqs_cis = mixed.prepared()
    other = Batch(case.config, mixed.tokens, mixed.positions, torch.ones_like(MIXED), 24).prepared()
    assert off(freqs_cis, other[2]) == 0
    assert off(inputs["tokens"], other[0]["tokens"]) == 0
    assert other[0]["valid"].all() and torch.equal(inputs["valid"], MIXED > 0)
    shifted = Batch(case.config, mixed.tokens, mixed.positions + 2, MIXED, 24).prepared()
    assert torch.equal(shifted[0]["valid"], inputs["valid"])
    for kind, mask in masks.items():
        assert torch.equal(mask.kv_segments, MIXED) and torch.equal(mask.kv_positions, mixed.positions)
        assert torch.equal(shifted[1][kind].kv_segments, MIXED)


@every_structure
def test_several_documents_need_their_positions(case: Case) -> None:
    with pytest.raises(ValueError, match="Row 1 holds several documents"):
        fnmodels.prepare(case.config, tokens_of(case.config, 2, 5), segment_ids=segments((5,), (2, 3)))


@every_case
def test_one_document_gets_positions_from_zero(case: Case) -> None:
    segment_ids = segments((-2, 3, -1), (6,), (-6,))
    inputs, _, _ = fnmodels.prepare(case.config, tokens_of(case.config, 3, 6), segment_ids=segment_ids)
    assert torch.equal(inputs["positions"][segment_ids > 0], positions_of(segment_ids)[segment_ids > 0])


@every_case_and_kernel
def test_a_row_of_tables_serves_all_rows_of_a_block(case: Case, kernel: str) -> None:
    """A single op takes tables and masks with batch 1; `prepare` returns them expanded."""
    family, weights = fnmodels.family_of(case.config), generic_params(case.config)
    tokens = tokens_of(case.config, 3, 8)
    inputs, masks, freqs_cis = fnmodels.prepare(case.config, tokens, length=24)
    _, one_mask, one_table = fnmodels.prepare(case.config, tokens[:1], length=24)
    assert all(t.shape[0] == 3 for t in tree.leaves((inputs, masks, freqs_cis)))
    x = family.embed(weights, inputs, config=case.config)
    for layer, kind in zip(weights["layers"], family.kinds(case.config), strict=True):
        options: dict[str, Any] = {"config": case.config, "kind": kind, "kernel": kernel}
        wanted, _ = family.block(layer, x, masks[kind], freqs_cis[kind], **options)
        got, _ = family.block(layer, x, one_mask[kind], one_table[kind], **options)
        assert torch.equal(got, wanted)
