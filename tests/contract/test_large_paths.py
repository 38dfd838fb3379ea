"""Paths that only large tensors take, in every kind of layer: with low bounds on sizes tiny models take them too."""

from typing import Any

import pytest
import torch

from fnmodels.ops.cpu import product_table
from tests.support.cases import (
    Case,
    batch_of,
    generic_params,
    gradients,
    off,
    representatives,
    segments,
    summed_loss,
    tap_names,
    trainable,
)

# A bound of elements, or of multiplications, and one that every tensor of a tiny model is above.
BOUNDS = {
    "fnmodels.ops.cpu.blocks.ELEMENTS": 64,
    "fnmodels.ops.cpu.norm._MIN_ELEMENTS": 1,
    "fnmodels.ops.cpu.linear._MIN_MULTIPLICATIONS": 1,
    "fnmodels.ops.cpu.onednn._WIDENED": 64,
    "fnmodels.ops.cpu.recurrent.conv._ELEMENTS": 64,
    "fnmodels.ops.indexer._MOST": 64,
}
ROWS = segments((9, 7), (-2, 13, 1))


def results(case: Case, *, taps: bool) -> list[Any]:
    """Logits with and without gradients, and the gradients of all leaves; or every tap."""
    batch, params = batch_of(case.config, ROWS), generic_params(case.config)
    if taps:
        with torch.no_grad():
            logits, tapped = batch.forward(params, kernel="math", taps=tuple(tap_names(case.config)))
        return [logits[batch.valid], *(t.nan_to_num() for t in tapped.values())]  # scores of hidden keys are -inf
    with torch.no_grad():
        plain = batch.forward(params, kernel="auto")
    weights = trainable(params)
    logits = batch.forward(weights, kernel="auto")
    found = gradients(summed_loss(logits, batch.labels), weights)
    return [plain[batch.valid], logits.detach()[batch.valid], found]


# Gradients of every other one, taps of the others, and both of the first.
RUNS = {
    f"{case}-{'taps' if taps else 'gradients'}": (case, taps)
    for index, case in enumerate(representatives())
    for taps in (False, True)
    if index == 0 or taps == bool(index % 2)
}


@pytest.mark.parametrize(("case", "taps"), list(RUNS.values()), ids=list(RUNS))
def test_results_are_those_of_the_paths_of_small_tensors(
    case: Case, taps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(case, taps=taps)
    for name, bound in BOUNDS.items():
        monkeypatch.setattr(name, bound)
    monkeypatch.setattr("fnmodels.ops.cpu.linear._gains", lambda x, weight, biased: True)  # whatever is faster here
    monkeypatch.setattr("fnmodels.ops.cpu.product_table.ONEDNN", frozenset(product_table.FORMS))
    found = results(case, taps=taps)
    assert off({str(i): part for i, part in enumerate(found)}, {str(i): part for i, part in enumerate(wanted)}) < 5e-5
