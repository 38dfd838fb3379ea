"""Every family passes the public property checks (`fnmodels.testing`), with every kernel that supports them."""

from collections.abc import Callable

import pytest

from fnmodels import testing
from tests.support.cases import (
    Case,
    layer_structures,
    representatives,
    richest,
    short,
    subject_of,
    tables_of,
    with_kernels,
)

every_table = pytest.mark.parametrize("case", [short(case) for case in richest(tables_of)], ids=str)
# Each runs the model many times. Other files try the last three for every structure, so here they take turns.
SLOW_CHECKS = (
    testing.check_threads,  # B9
    testing.check_microbatches,  # B3; for every structure in test_kernels.py, row by row
    testing.check_empty_rows,  # P4; for every structure in test_packing.py
    testing.check_causality,  # B10; for every structure in test_inputs.py, by gradients
)
CHECKS_OF_PARTS = (  # of operations
    testing.check_inputs_unchanged,  # B9
    testing.check_permutation,  # B5
)


@with_kernels(layer_structures())
def test_padding(case: Case, kernel: str) -> None:
    """B6: of masks and positions, which each family makes."""
    testing.check_padding(subject_of(case, kernel))


@with_kernels(layer_structures())
@pytest.mark.parametrize("check", CHECKS_OF_PARTS, ids=lambda check: check.__name__)
def test_check_of_parts(case: Case, kernel: str, check: Callable[[testing.Subject], None]) -> None:
    check(subject_of(case, kernel))


@with_kernels(representatives(), in_turn=True)
def test_slow_checks(case: Case, kernel: str) -> None:
    threads, *others = SLOW_CHECKS
    for check in (threads, others[representatives().index(case) % len(others)]):
        check(subject_of(case, kernel))


@with_kernels(tuple(map(short, richest(tables_of))), in_turn=True)
def test_history_independence(case: Case, kernel: str) -> None:
    """B4: with lengths on both sides of each rope scaling's threshold."""
    testing.check_history_independence(subject_of(case, kernel, length=None))


@every_table
def test_rotary_tables(case: Case) -> None:
    """B2."""
    testing.check_rotary_tables(subject_of(case))


def test_every_public_check_is_run() -> None:
    """Packing is checked in test_packing.py, vmap(grad) in test_transforms.py, the others here."""
    others = {
        testing.check_history_independence,
        testing.check_padding,
        testing.check_rotary_tables,
        testing.check_packing,
        testing.check_packing_of_a_cut_document,
        testing.check_per_sample_gradients,
    }
    assert {*CHECKS_OF_PARTS, *SLOW_CHECKS} | others == set(testing.CHECKS)
