"""Steps that take several chunks, as on CUDA: the results and gradients of torch's operations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.ops.cpu import blocks
from fnmodels.ops.cpu.recurrent import chunks, delta_per_head, ssd_chunk
from tests.fnmodels.ops.recurrent.references import ROWS, VALID
from tests.fnmodels.ops.recurrent.test_ops import OPS, Op, call, close, weighted

FORMS = ("delta", "delta_negative", "ssd")  # a decay per channel has one chunk in each step
AT_ONCE = (2, 3, 100)
every_form = pytest.mark.parametrize("op", [OPS[name] for name in FORMS], ids=FORMS)
every_number = pytest.mark.parametrize("number", AT_ONCE)


@pytest.fixture(autouse=True)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of chunks that a step took."""
    taken: list[int] = []
    number = request.node.callspec.params["number"]
    monkeypatch.setattr(chunks, "chunks_at_once", lambda state, chunk: number)
    right = chunks._steps

    def counted(*given: Any) -> Any:
        taken.extend((found := right(*given)).counts)
        return found

    monkeypatch.setattr(chunks, "_steps", counted)
    return taken


def check(op: Op, chunk: int, rows: int = len(ROWS)) -> None:
    """Values without and with gradients, and gradients, of rows that begin and of rows that go on."""
    along, constants, state = op.arguments(rows, ROWS.shape[1])
    ids, valid = ROWS[:rows], VALID[:rows]
    for before in ((), (state, torch.tensor([1, 1, 9, 2])[:rows])):
        leaves = [t.requires_grad_() for t in (*along, *constants, *before[:1])]
        found = []
        for kernel in ("auto", "math"):
            outputs = call(op, along, constants, ids, *before, chunk=chunk, kernel=kernel)
            found.append((*outputs, *torch.autograd.grad(weighted(outputs, valid), leaves)))
        with torch.no_grad():
            found.append(call(op, along, constants, ids, *before, chunk=chunk, kernel="auto"))
        for got in (found[0], found[2]):
            close((got[0][valid], *got[1:]), (found[1][0][valid], *found[1][1 : len(got)]))


@every_form
@every_number
@pytest.mark.parametrize("chunk", [4, 9, 10])  # rows of 27 tokens: with a rest of 3, none, and 7
@pytest.mark.parametrize("rows", [1, 4])
def test_steps_of_several_chunks(op: Op, number: int, chunk: int, rows: int, steps: list[int]) -> None:
    check(op, chunk, rows)
    whole, rest = divmod(ROWS.shape[1], chunk)
    assert max(steps) == min(number, whole) and (1 in steps) == (rest > 0 or whole % number == 1)


@every_form
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dims", [(0, 1), (2, 3)])
def test_states_and_gradients_that_lie_transposed(op: Op, number: int, dims: tuple[int, int]) -> None:
    """Values with and without gradients, and gradients, are those of contiguous ones."""
    along, constants, state = op.arguments(*ROWS.shape)
    lies = state.transpose(*dims).contiguous().transpose(*dims)
    grad = torch.randn_like(state)
    found = []
    for given, of_last in ((state, grad), (lies, grad.transpose(*dims).contiguous().transpose(*dims))):
        leaves = [t.requires_grad_() for t in (*along, given)]
        outputs = call(op, along, constants, ROWS, given, torch.tensor([1, 1, 9, 2]), chunk=4, kernel="auto")
        grads = torch.autograd.grad(outputs, leaves, (torch.ones_like(outputs[0]), of_last))
        with torch.no_grad():
            plain = call(op, along, constants, ROWS, given, torch.tensor([1, 1, 9, 2]), chunk=4, kernel="auto")
        found.append((outputs[1], outputs[0][VALID], *grads, plain[1], plain[0][VALID]))
    close(found[1], found[0])


def first_states(c: Any, states: Tensor, *rest: Any) -> Any:
    return delta_outputs(c, states[:1].expand_as(states), *rest)


def only_the_last(new: Tensor, n: int, *rest: Any) -> Tensor:
    found = of_states(new, n, *rest)
    return found[-1:].expand_as(found)


delta_outputs, of_states = delta_per_head._write_output, ssd_chunk._gradients_of_states
BUGS = {
    "outputs read the first state": ("delta", delta_per_head, "_write_output", first_states),
    "the gradient of a state is not that of its chunk": ("ssd", ssd_chunk, "_gradients_of_states", only_the_last),
    "the gradient of the state stays what it was": ("delta", delta_per_head, "_to_state_before", lambda *_: None),
}


@pytest.mark.parametrize("number", [3])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, function, wrong = BUGS[bug]
    check(OPS[name], 4)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(AssertionError):
        check(OPS[name], 4)


@every_form
@pytest.mark.parametrize("number", [1])
def test_one_chunk_after_the_other_has_the_memory_of_one(op: Op, number: int) -> None:
    """A second chunk writes where the first did."""
    held: dict[int, set[int]] = {}
    along, constants, _ = op.arguments(*ROWS.shape)

    class Watched(blocks.Space):
        def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
            found = super().__call__(name, *shape, dtype=dtype)
            held.setdefault(hash((name, shape)), set()).add(found.data_ptr())
            return found

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(chunks, "Space", Watched)
        call(op, along, constants, ROWS, chunk=9, kernel="auto")
    assert held and all(len(places) == 1 for places in held.values())
