"""Documents of a cache's row that go on: each as alone, or refused where layers keep a state of the last one only."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.cache import prepare
from fnmodels.cache.order import last_documents
from tests.contract.test_cache import FAMILIES, WIDE
from tests.support.cases import Case, generic_params

HELD, LENGTH = 5, 8  # tokens of each document in the cache, and in all


class Row:
    """A cache whose row holds the beginnings of two documents, 1 and 2."""

    def __init__(self, case: Case) -> None:
        self.config, self.params = case.config, generic_params(case.config, WIDE)
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, case.config.vocab_size, (2, LENGTH), generator=draw)
        prepared = fnmodels.prepare(self.config, self.tokens, length=32)
        self.alone = fnmodels.forward(self.params, *prepared, config=self.config, kernel="math")
        how: Any = {"batch": 1, "capacity": 32, "rings": False, "dtype": WIDE, "length": 32}
        begun = self.tokens[:, :HELD].reshape(1, -1)
        segment_ids = torch.tensor([[1] * HELD + [2] * HELD])
        _, self.cache = self._prefill(fnmodels.init_cache(self.config, **how), begun, segment_ids)
        self.keeps = last_documents(self.cache, next(iter(self.cache.slots.values()), None)) is not None

    def _prefill(self, cache: Any, tokens: Tensor, segment_ids: Tensor) -> tuple[Tensor, Any]:
        step = fnmodels.prepare_step(self.config, tokens, cache, segment_ids=segment_ids)
        return fnmodels.prefill(self.params, *step, cache, config=self.config, at="all", kernel="math")

    def off(self, *new: tuple[int, int, int]) -> float:
        """How far logits of new tokens, (segment id, document, place) each, are from those of documents alone."""
        tokens = torch.tensor([[int(self.tokens[document, place]) for _, document, place in new]])
        got, _ = self._prefill(self.cache, tokens, torch.tensor([[segment for segment, _, _ in new]]))
        wanted = torch.stack([self.alone[document, place] for _, document, place in new])
        return float((got[0] - wanted).abs().max())


BOTH = ((1, 0, HELD), (2, 1, HELD))
REFUSED = "Row 0 goes on with document 1 behind another one"


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_each_document_goes_on_as_alone_or_is_refused(case: Case) -> None:
    row = Row(case)
    assert row.off((2, 1, HELD), (2, 1, HELD + 1), (3, 0, 0), (3, 0, 1)) < 1e-12
    for new in (BOTH, BOTH[::-1], BOTH[:1]):
        if not row.keeps:
            assert row.off(*new) < 1e-12
            continue
        with pytest.raises(ValueError, match=REFUSED):
            row.off(*new)


@pytest.mark.parametrize("name", ["deepseek_v4", "lfm2", "mamba2"])
def test_without_the_check_results_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(next(case for case in FAMILIES if case.family == name))
    assert row.keeps
    monkeypatch.setattr(prepare, "check_order", lambda *_: None)
    assert row.off(*BOTH) > 1e-3


def test_a_row_without_slots_goes_on_with_its_last_document() -> None:
    row = Row(next(case for case in FAMILIES if case.family == "mamba2"))
    step = fnmodels.prepare_step(row.config, row.tokens[1:, HELD : HELD + 1], row.cache)
    got, _ = fnmodels.decode(row.params, *step, row.cache, config=row.config, kernel="math")
    assert (got[0] - row.alone[1, HELD]).abs().max() < 1e-12
