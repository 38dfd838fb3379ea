"""The public property checks: each passes on the toy of docs/testing.md and finds what is planted there for it."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import testing, tree
from fnmodels.testing import Subject
from tests.project.test_docs import blocks_of, run

TOY: dict[str, Any] = {}
run("testing.md", blocks_of("testing.md")[0][0], TOY)
params, prepare, forward = TOY["params"], TOY["prepare"], TOY["forward"]
table_of, mask_of, rotary = TOY["table_of"], TOY["mask_of"], TOY["rotary"]
RIGHT = Subject(params, prepare, forward, vocab_size=TOY["V"], rotary=rotary)

Bug = Callable[[], Subject]
BUGS: dict[Bug, Callable[[Subject], None]] = {}


def found_by(check: Callable[[Subject], None]) -> Callable[[Bug], Bug]:
    def note(bug: Bug) -> Bug:
        BUGS[bug] = check
        return bug

    return note


def with_prepare(change: Callable[..., Any]) -> Subject:
    """`change(tokens, positions, segment_ids) -> entries of the batch` beside or instead of the right ones."""
    return dataclasses.replace(RIGHT, prepare=lambda *given: prepare(*given) | change(*given))


def with_forward(change: Callable[..., Tensor]) -> Subject:
    return dataclasses.replace(RIGHT, forward=change)


@found_by(testing.check_history_independence)
def a_table_that_stays_stretched() -> Subject:
    longest = [0]

    def table(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        longest[0] = max(longest[0], tokens.shape[1])
        return {"table": table_of(positions * min(1, 16 / longest[0]))}

    return with_prepare(table)


@found_by(testing.check_inputs_unchanged)
def a_weight_written_to() -> Subject:
    return with_forward(lambda p, batch: forward({**p, "q": p["q"].detach().mul_(1.0)}, batch))


@found_by(testing.check_inputs_unchanged)
def an_entry_that_is_added() -> Subject:
    def adding(p: Any, batch: Any) -> Tensor:
        batch["last"] = batch["table"]
        return forward(p, batch)

    return with_forward(adding)


@found_by(testing.check_inputs_unchanged)
def a_backward_that_writes() -> Subject:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, positions: Tensor) -> Tensor:
            ctx.positions = positions
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            ctx.positions.zero_()
            return grad, None

    with_positions = with_prepare(lambda t, positions, s: {"positions": positions})
    return dataclasses.replace(
        with_positions, forward=lambda p, batch: Writes.apply(forward(p, batch), batch["positions"])
    )


@found_by(testing.check_threads)
def a_workspace_that_calls_share() -> Subject:
    workspace: list[Any] = []

    def sharing(p: Any, batch: Any) -> Tensor:
        workspace[:] = [batch["table"], batch["tokens"]]
        time.sleep(0.01)
        table, tokens = workspace
        return forward(p, batch | {"table": table, "tokens": tokens})

    return with_forward(sharing)


@found_by(testing.check_rotary_tables)
def tables_in_the_default_dtype() -> Subject:
    return with_prepare(lambda t, positions, s: {"table": table_of(positions).to(torch.get_default_dtype())})


@found_by(testing.check_rotary_tables)
def angles_in_fp32() -> Subject:
    def table(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        angles = positions[..., None] * TOY["FREQUENCIES"].float()
        return {"table": torch.stack((angles.cos(), angles.sin()), dim=-1).float()}

    return with_prepare(table)


@found_by(testing.check_rotary_tables)
def angles_in_the_dtype_of_the_weights() -> Subject:
    def own(p: Any, batch: Any) -> Tensor:
        return forward(p, batch | {"table": table_of(batch["positions"].to(p["q"].dtype))})

    return dataclasses.replace(with_prepare(lambda t, positions, s: {"positions": positions}), forward=own)


@found_by(testing.check_microbatches)
def rows_that_see_each_other() -> Subject:
    return with_forward(lambda p, batch: forward(p, batch) - 0.01 * forward(p, batch).mean(0, keepdim=True))


@found_by(testing.check_microbatches)
def the_mask_of_the_first_row_for_all() -> Subject:
    return with_forward(lambda p, batch: forward(p, batch | {"mask": batch["mask"][:1]}))


@found_by(testing.check_permutation)
def a_mask_by_index() -> Subject:
    def columns(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        return {"mask": mask_of(torch.arange(tokens.shape[1]).expand(tokens.shape), segment_ids)}

    return with_prepare(columns)


@found_by(testing.check_padding)
def padding_that_is_seen() -> Subject:
    return with_prepare(lambda tokens, positions, s: {"mask": mask_of(positions, torch.ones_like(s))})


@found_by(testing.check_packing)
def documents_found_by_end_token() -> Subject:
    def ends(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Any:
        end = (tokens == 0).long()
        return prepare(tokens, positions, (end.cumsum(1) - end + 1) * (segment_ids > 0))

    return dataclasses.replace(RIGHT, prepare=ends)


@found_by(testing.check_packing)
def packed_rows_that_teach_less() -> Subject:
    def half(p: Any, batch: Any) -> Tensor:
        logits, several = forward(p, batch), not batch["mask"][0, 0, -1].all()
        return logits - several * 0.5 * (logits - logits.detach())

    return with_forward(half)


@found_by(testing.check_packing_of_a_cut_document)
def positions_that_default_to_arange() -> Subject:
    def columns(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Any:
        return prepare(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape), segment_ids)

    return dataclasses.replace(RIGHT, prepare=columns)


@found_by(testing.check_packing_of_a_cut_document)
def positions_counted_anew() -> Subject:
    """Left and right of every comparison between two calls, so that only what was cut out elsewhere can tell."""

    def anew(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Any:
        return prepare(tokens, _counted(segment_ids), segment_ids)

    return dataclasses.replace(RIGHT, prepare=anew)


def _counted(segment_ids: Tensor) -> Tensor:
    rows = [[n for _, run in itertools.groupby(row) for n in range(len(list(run)))] for row in segment_ids.tolist()]
    return torch.tensor(rows)


@found_by(testing.check_packing_of_a_cut_document)
def an_entry_that_only_whole_documents_have() -> Subject:
    return with_prepare(lambda tokens, positions, s: {} if positions[0, 0] else {"starts": tokens})


@found_by(testing.check_empty_rows)
def a_softmax_over_nothing() -> Subject:
    def spoiled(p: Any, batch: Any) -> Tensor:
        x = F.embedding(batch["tokens"], p["embed"])
        weights = torch.zeros_like(batch["mask"][:, 0], dtype=x.dtype).masked_fill(~batch["mask"][:, 0], -torch.inf)
        return F.linear(x + weights.softmax(-1) @ F.linear(x, p["v"]), p["embed"])

    return with_forward(spoiled)


@found_by(testing.check_causality)
def a_look_at_the_next_token() -> Subject:
    return with_prepare(
        lambda t, positions, segment_ids: {"mask": mask_of(positions, segment_ids) | _next(segment_ids)}
    )


def _next(segment_ids: Tensor) -> Tensor:
    size = segment_ids.shape[1]
    return (torch.ones(size, size).triu() * torch.ones(size, size).tril(1)).bool().expand(len(segment_ids), 1, -1, -1)


@found_by(testing.check_causality)
def a_window_that_is_not_said() -> Subject:
    def window(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        near = positions[:, :, None] - positions[:, None] < 4
        return {"mask": mask_of(positions, segment_ids) & near[:, None]}

    return with_prepare(window)


@found_by(testing.check_per_sample_gradients)
def a_batch_that_is_normalized() -> Subject:
    return with_forward(lambda p, batch: forward(p, batch) - 0.01 * forward(p, batch).mean((0, 1), keepdim=True))


@found_by(testing.check_per_sample_gradients)
def a_vmap_rule_that_mixes_rows() -> Subject:
    class Mixes(torch.autograd.Function):
        @staticmethod
        def forward(logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

        @staticmethod
        def vmap(info: Any, in_dims: Any, logits: Tensor) -> tuple[Tensor, int]:
            return logits.roll(1, in_dims[0]), in_dims[0]

    return with_forward(lambda p, batch: Mixes.apply(forward(p, batch)))


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_a_right_model_passes(check: Callable[[Subject], None]) -> None:
    check(RIGHT)
    check(dataclasses.replace(RIGHT, params=tree.map(Tensor.double, params), tolerance=1e-10))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with pytest.raises(AssertionError):
        BUGS[bug](bug())


def test_every_check_finds_something() -> None:
    assert set(BUGS.values()) == set(testing.CHECKS)


def test_an_encoder_says_what_it_sees() -> None:
    encoder = with_prepare(lambda t, p, segment_ids: {"mask": mask_of(torch.zeros_like(p), segment_ids)})
    with pytest.raises(AssertionError, match="moves the logits at 0, which do not see it"):
        testing.check_causality(encoder)
    testing.check_causality(dataclasses.replace(encoder, sees=lambda t, u: True))
