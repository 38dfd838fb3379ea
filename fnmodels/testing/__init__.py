"""Property checks for functional models: `Subject`, `check_all` and one function per property.

    from fnmodels.testing import Subject, check_all

    subject = Subject(params, prepare, forward, vocab_size=64)
    check_all(subject)                       # raises AssertionError with a message at the first property that fails

A model is any pure `forward(params, batch) -> logits [B, S, V]` with a `prepare(tokens, positions, segment_ids) ->
batch` that converts [B, S] integers to a tree of batch-leading tensors (masks, tables, ...). Each check builds small
batches and compares two computations that must agree, without a reference model. The contract tests run the checks over
every family; `docs/testing.md` applies them to a model of 30 lines, with five bugs that they detect.
"""

from collections.abc import Callable

from .calls import check_history_independence, check_inputs_unchanged, check_threads
from .packing import check_packing, check_packing_of_a_cut_document
from .positions import check_causality, check_permutation, check_rotary_tables
from .rows import check_empty_rows, check_microbatches, check_padding, check_per_sample_gradients
from .subject import Subject

__all__ = ["Subject", "CHECKS", "check_all", "check_history_independence", "check_inputs_unchanged", "check_threads"]
__all__ += ["check_rotary_tables", "check_microbatches", "check_permutation", "check_padding", "check_packing"]
__all__ += ["check_packing_of_a_cut_document", "check_empty_rows", "check_causality", "check_per_sample_gradients"]


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_history_independence,
    check_inputs_unchanged,
    check_threads,
    check_rotary_tables,
    check_microbatches,
    check_permutation,
    check_padding,
    check_packing,
    check_packing_of_a_cut_document,
    check_empty_rows,
    check_causality,
    check_per_sample_gradients,
)


def check_all(subject: Subject) -> None:
    """Runs every check in order.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: By the first check that fails; it says what the model depends on.
    """
    for check in CHECKS:
        check(subject)
