"""Planted bugs in operations of few variants: each is found on the variants that the test of its property runs on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels import testing
from fnmodels.models.common import context
from fnmodels.models.decoder import phimoe
from fnmodels.ops.attention.alibi import places_of, with_alibi
from fnmodels.ops.moe.router import choose, softmax
from tests.contract import test_public_checks, test_transforms
from tests.support.cases import Case, batch_of, generic_params, parts_of, segments

Patch = Callable[[pytest.MonkeyPatch], None]


def places_read_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Which vmap refuses."""

    def wrong(q: Tensor, k: Tensor, slopes: Tensor, places: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        assert bool(places.max() < 256)
        return with_alibi(q, k, slopes, places, scale=scale)

    patch.setattr(context, "with_alibi", wrong)


def experts_taken_in_place(patch: pytest.MonkeyPatch) -> None:
    """Writes into a tensor that is no row's, which vmap refuses."""

    def wrong(logits: Tensor, indices: Tensor | None = None, *, jitter: float) -> tuple[Tensor, Tensor]:
        indices = choose(logits, 2) if indices is None else indices
        experts, weights, fixed = torch.arange(logits.shape[-1]), [], logits.detach()
        taken = torch.zeros(logits.shape, dtype=torch.bool)
        for chosen in indices.split(1, -1):
            top = fixed.gather(-1, chosen)
            far = (top - fixed) / fixed.abs().maximum(top) > 2 * jitter
            weights.append(softmax(logits.masked_fill(far | taken, -torch.inf)).gather(-1, chosen))
            taken |= experts == chosen
        return torch.cat(weights, -1), indices

    patch.setattr(phimoe, "sparse_mixer", wrong)


def places_by_index(patch: pytest.MonkeyPatch) -> None:
    """In a row in order, each document's places differ by one number, which a softmax does not see."""

    def wrong(positions: Tensor, dtype: torch.dtype) -> Tensor:
        return places_of(torch.arange(positions.shape[-1]).expand(positions.shape).float(), dtype)

    patch.setattr(context, "places_of", wrong)


def permutation(case: Case) -> None:
    test_public_checks.test_check_of_parts(case, "math", testing.check_permutation)


def run_on(test: Any) -> list[Case]:
    """The variants that a test is run on."""
    marks = [mark.args for mark in test.pytestmark if mark.name == "parametrize" and "case" in mark.args[0]]
    assert len(marks) == 1
    return list(dict.fromkeys(value if isinstance(value, Case) else value[0] for value in marks[0][1]))


ROWS, CHECKS = test_transforms.test_vmap_over_rows, test_public_checks.test_check_of_parts
ALIBI, MIXER = "ops/attention/alibi.py with_alibi", "ops/moe/router.py sparse_mixer"
PLANTED = {
    places_read_on_the_host: (ALIBI, run_on(ROWS), ROWS, RuntimeError, "vmap"),
    experts_taken_in_place: (MIXER, run_on(ROWS), ROWS, RuntimeError, "broadcast shape"),
    places_by_index: (ALIBI, run_on(CHECKS), permutation, AssertionError, "index of a token"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_bug_in_an_operation_of_few_variants_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a batch in order do not show it."""
    function, variants, test, error, words = PLANTED[plant]
    able = [case for case in variants if function in parts_of(case)]
    assert able
    for case in able:
        batch, weights = batch_of(case.config, segments((-2, 3, 2), (7,))), generic_params(case.config)
        want = batch.forward(weights)[batch.valid]
        with monkeypatch.context() as patch:
            plant(patch)
            torch.testing.assert_close(batch.forward(weights)[batch.valid], want)
            with pytest.raises(error, match=words):
                test(case)
