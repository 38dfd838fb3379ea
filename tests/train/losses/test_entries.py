"""Entries of a batch with another shape or dtype are sentences: torch's own words, or a silent broadcast, are none."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from tests.support.cases import generic_params
from tests.train.parallel.test_agreement import kinds

READ = {  # the entries that are read as tensors [B, S] or [B, S, C]
    "none": ("tokens", "segment_ids", "positions", "labels", "roles"),
    "classification": ("tokens", "segment_ids", "positions", "labels"),
    "answers": ("tokens", "segment_ids", "positions", "labels"),
    "labels": ("tokens", "segment_ids", "positions", "labels", "targets"),
    "flow": ("latents", "noise", "segment_ids", "positions", "time"),
}
LATER = ("positions", "tokens")  # one row of them stands for all


def forms(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "columns", x[:, :-1]
    yield "a dimension more", x[..., None]
    yield "flat", x.flatten()
    yield "complex", x.to(torch.complex64)
    if name not in LATER:
        yield "one row", x[:1]
    if not x.is_floating_point():
        yield "floats", x.float()


@pytest.mark.parametrize("kind", READ)
def test_an_entry_of_another_form_is_a_sentence(kind: str) -> None:
    config, loss, batch = kinds()[kind]()
    params, evaluate = generic_params(config), train.make_eval_step(loss)
    evaluate(params, batch)
    for name in READ[kind]:
        for what, wrong in forms(name, batch[name]):
            said = refusal(evaluate, params, {**batch, name: wrong})
            assert said.endswith("."), (name, what, said)


def refusal(evaluate: Callable[..., Any], params: Any, batch: dict[str, Tensor]) -> str:
    """The words of a ValueError; "" where the batch was taken."""
    try:
        evaluate(params, batch)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["images", "siglip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_numbers_of_pairs_that_are_no_integers_are_refused(kind: str, dtype: torch.dtype) -> None:
    config, loss, batch = kinds()[kind]()
    with pytest.raises(ValueError, match=r"labels must be int64, not (float32|complex64)\."):
        loss(generic_params(config), batch | {"labels": batch["labels"].to(dtype)})


def test_positions_of_documents_have_the_shape_of_their_segment_ids() -> None:
    ids = torch.tensor([[1, 1, 2], [1, 2, 2]])
    assert len(fnmodels.documents(ids, torch.arange(3)[None])) == 4
    for positions in (torch.zeros(3, 3, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long), torch.arange(3)):
        with pytest.raises(ValueError, match=r"positions must be \[2, 3\] like the segment_ids, not \["):
            fnmodels.documents(ids, positions)
