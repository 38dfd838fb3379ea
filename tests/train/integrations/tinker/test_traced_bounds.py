"""Traced losses that come from anybody: no step is large, slow or of another kind, and none changes its inputs."""

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train.integrations.tinker import traced
from train.integrations.tinker.losses import of_each_datum
from train.integrations.tinker.traced import Node, TracedLoss, trace, traced_loss
from train.integrations.tinker.traced_calls import Budget

LOGP, FOUND = {"ref": "logprobs"}, {"ref": "found"}
ALL = {"slice": [None, None, None]}
ROW, COLUMN = {"tuple": [None, ALL]}, {"tuple": [ALL, None]}


def _node(target: str, *args: Any, name: str = "found", **kwargs: Any) -> Node:
    return Node("call_function" if "." in target or target == "getattr" else "call_method", name, target, args, kwargs)


def _graph(*calls: Node, result: str = "found") -> TracedLoss:
    output = Node("output", "output", "output", ({"tuple": [{"ref": result}, {"dict": {}}]},), {})
    first = Node("placeholder", "logprobs", "logprobs", (), {})
    return traced_loss("mine", [("logprobs", 1)], (first, *calls, output))


def _batch(lengths: tuple[int, ...], **entries: Tensor) -> dict[str, Tensor]:
    segments = torch.cat([torch.full((length,), number + 1) for number, length in enumerate(lengths)])[None]
    return {"segment_ids": segments, "labels": torch.ones_like(segments), **entries}


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([_node("operator.mod", "%09.0f", LOGP)], "str is neither a tensor nor a number"),
        ([_node("long", LOGP, name="zeros"), _node("operator.mul", [0], {"ref": "zeros"})], "list is neither"),
        ([_node("operator.mul", {"tuple": [1]}, LOGP)], "tuple is neither a tensor nor a number"),
        (
            [_node("operator.getitem", [LOGP, LOGP], {"slice": [None, None, None]})],
            "an index needs a tensor or a tuple",
        ),
        ([_node("operator.getitem", {"tuple": [1] * 65}, ALL)], "a tuple has 65 parts; 64 are allowed"),
        ([_node("operator.getitem", {"tuple": [{"tuple": [1]}]}, ALL)], "a tuple is no value of a step"),
        ([_node("operator.getitem", LOGP, {"tuple": [[LOGP]]})], "a list within an index has numbers alone"),
    ],
)
def test_a_step_that_would_make_a_text_or_a_list_is_refused(calls: list[Node], words: str) -> None:
    with pytest.raises(ValueError, match=rf"fails at found \(operator.*\): .*{words}"):
        _graph(*calls)(torch.zeros(3))


@pytest.mark.parametrize(
    "last",
    [
        _node("masked_fill", {"ref": "row"}, {"ref": "far"}, 0),
        _node("torch.masked_fill", {"ref": "row"}, {"ref": "far"}, 0),
        _node("torch.index_select", {"ref": "row"}, 0, {"ref": "zeros"}),
        _node("index_select", {"ref": "row"}, dim=0, index={"ref": "zeros"}),
        _node("operator.getitem", {"ref": "row"}, {"ref": "zeros"}),
        _node("operator.getitem", {"ref": "row"}, {"tuple": [{"ref": "zeros"}, None]}),
        _node("torch.where", {"ref": "far"}, {"ref": "row"}, 0.0),
    ],
)
def test_a_large_value_is_refused_before_it_is_made(last: Node) -> None:
    """Each would have 16 terabytes, for which the allocator's own sentence differs."""
    loss = _graph(
        _node("operator.getitem", LOGP, ROW, name="row"),
        _node("operator.getitem", LOGP, COLUMN, name="column"),
        _node("operator.gt", {"ref": "column"}, 0, name="far"),
        _node("long", LOGP, name="zeros"),
        last,
    )
    with pytest.raises(ValueError, match="would have 4,398,046,511,104 elements; 4,194,304 are allowed"):
        loss(torch.zeros(1 << 21))


def _chain(steps: int, target: str, *more: Any) -> list[Node]:
    names = ["logprobs", *(f"step{number}" for number in range(steps - 1)), "found"]
    return [_node(target, {"ref": old}, *more, name=new) for old, new in pairwise(names)]


@pytest.mark.parametrize(
    ("calls", "size"),
    [
        (_chain(140, "torch.neg"), 1 << 21),
        ([_node("torch.sort", LOGP, name=f"sort{number}") for number in range(80)], 1 << 18),
        ([_node("torch.topk", LOGP, 1, name=f"top{number}") for number in range(80)], 1 << 18),
    ],
)
def test_the_steps_of_a_loss_have_a_budget_of_elements(calls: list[Node], size: int) -> None:
    with pytest.raises(ValueError, match="have more than 268,435,456 elements over the data of a call"):
        _graph(*calls, _node("sum", LOGP, name="total"), result="total")(torch.zeros(size))


def test_the_data_of_a_call_share_the_budget_in_one_row_and_in_several() -> None:
    loss = _graph(*_chain(80, "torch.neg"), _node("sum", FOUND, name="total"), result="total")
    length = 1 << 21
    row = torch.zeros(1, length), torch.zeros(1, length), _batch((length,))
    of_each_datum(loss, Budget())(*row)
    with pytest.raises(ValueError, match="over the data of a call"):
        of_each_datum(loss, Budget())(torch.zeros(1, 2 * length), torch.zeros(1), _batch((length, length)))
    of_call = of_each_datum(loss, Budget())
    of_call(*row)
    with pytest.raises(ValueError, match="over the data of a call"):
        of_call(*row)


@pytest.mark.parametrize("lengths", [(65536,), (100,) * 655])
def test_two_hundred_steps_over_a_long_row_are_within_the_budget(lengths: tuple[int, ...]) -> None:
    loss = _graph(*_chain(200, "torch.neg"), _node("sum", FOUND, name="total"), result="total")
    logp = torch.randn(1, sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total, count, _ = of_each_datum(loss, Budget())(logp, logp, _batch(lengths))
    assert float(total) == pytest.approx(float(logp.sum())) and int(count) == sum(lengths)


def test_a_value_is_dropped_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive = list[Any](), list[int]()

    def counted(given: Tensor) -> Tensor:
        found = given.neg()
        made.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in made))
        return found

    monkeypatch.setitem(traced.CALLS, "torch.neg", counted)
    loss = _graph(*_chain(50, "torch.neg"), _node("sum", FOUND, name="total"), result="total")
    assert float(loss(torch.ones(3))[0]) == 3.0
    assert len(alive) == 50 and max(alive) <= 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_node("torch.cat", [LOGP, LOGP], out=LOGP), "with 'out'"),
        (_node("torch.exp", LOGP, out=LOGP), "with 'out'"),
        (_node("torch.nn.functional.relu", LOGP, inplace=True), "with 'inplace'"),
        (_node("torch.nn.functional.relu", LOGP, inplace=1), "with 'inplace'"),
        (_node("torch.nn.functional.relu", LOGP, True), "with 'inplace'"),
        (_node("torch.nn.functional.silu", LOGP, LOGP), "with 'inplace'"),
        (_node("torch.nn.functional.elu", LOGP, 1.0, True), "with 'inplace'"),
        (_node("torch.nn.functional.hardtanh", LOGP, -1.0, 1.0, True), "with 'inplace'"),
        (_node("torch.nn.functional.leaky_relu", LOGP, 0.1, True), "with 'inplace'"),
        (_node("torch.zeros_like", LOGP, device="meta"), "with 'device'"),
        (_node("torch.zeros_like", LOGP, layout="x"), "with 'layout'"),
        (_node("clone", LOGP, memory_format="x"), "with 'memory_format'"),
    ],
)
def test_a_call_that_writes_into_its_input_or_makes_a_tensor_elsewhere_is_refused(call: Node, words: str) -> None:
    with pytest.raises(ValueError, match=f"calls '{call.target}' {words}, which it may not pass here"):
        _graph(call)


def test_a_step_cannot_change_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traced.CALLS, "torch.neg", torch.Tensor.neg_)  # as if an allowed call wrote into its input

    def loss(logprobs: Tensor, advantages: Tensor, scale: Tensor) -> Any:
        return (logprobs * torch.neg(advantages) * torch.neg(scale)).sum(), {}

    made = trace(loss, {"logprobs": 1, "advantages": 1, "scale": 0})
    row, logp = torch.arange(5.0)[None], torch.ones(1, 5)
    batch = _batch((2, 3), input_advantages=row.clone(), input_scale=torch.full((1, 5), 2.0))
    total, _, _ = of_each_datum(made, Budget())(logp, logp, batch)
    assert torch.equal(batch["input_advantages"], row) and torch.equal(batch["input_scale"], torch.full((1, 5), 2.0))
    assert float(total) == 20.0


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([_node("torch.stack", [1, 2])], "a list of tensors is needed"),
        ([_node("torch.stack", LOGP)], "a list of tensors is needed"),
        ([_node("torch.stack")], "a list of tensors is needed"),
        ([_node("to", LOGP, "meta")], "a tensor is converted to a dtype alone"),
        ([_node("to", LOGP, 0)], "a tensor is converted to a dtype alone"),
        ([_node("to", LOGP, {"dtype": "float64"}, True)], "a tensor is converted to a dtype alone"),
        ([_node("long", LOGP)], "the loss must be a floating-point tensor"),
        ([_node("getattr", LOGP)], "getattr needs a tensor and a name"),
        ([_node("getattr", {"dict": {}}, "values")], "'values' may not be read"),
        ([_node("operator.pow", -8.0, 0.5)], "a complex is no value of a step"),
        ([_node("operator.pow", 3, 41)], "an integer is beyond 64 bits"),
        ([_node("math.exp", 1000)], "math range error"),
    ],
)
def test_a_failing_step_ends_in_a_sentence(calls: list[Node], words: str) -> None:
    with pytest.raises(ValueError, match=f"The custom loss 'mine' fails at .*{words}"):
        _graph(*calls)(torch.zeros(3))


@pytest.mark.parametrize("error", [MemoryError(), AttributeError("none"), AssertionError()])
def test_any_error_of_a_step_is_a_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(given: Tensor) -> Tensor:
        raise error

    monkeypatch.setitem(traced.CALLS, "torch.exp", failing)
    with pytest.raises(ValueError, match=r"fails at found \(torch.exp\): (none|MemoryError|AssertionError)"):
        _graph(_node("torch.exp", LOGP))(torch.zeros(3))


def test_a_loss_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traced.CALLS, "torch.exp", lambda given: given.sum().to("meta"))
    with pytest.raises(ValueError, match="must be float32 or float64 on cpu, as the inputs are"):
        _graph(_node("torch.exp", LOGP))(torch.zeros(3))


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([_node("torch.exp", {"ref": []})], r"reads \[\] at 'found'"),
        ([_node("torch.exp", {"ref": {}})], r"reads \{\} at 'found'"),
        ([_node("torch.add", LOGP, 1 << 63)], "an integer beyond 64 bits at 'found'"),
        ([_node("torch.exp", LOGP), _node("torch.exp", LOGP)], "two steps that are named 'found'"),
    ],
)
def test_an_argument_that_no_graph_can_hold_is_refused(calls: list[Node], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _graph(*calls)


@pytest.mark.parametrize(
    "function",
    [
        lambda logprobs: (torch.stack(tensors=[logprobs, logprobs]).sum(), {}),
        lambda logprobs: (torch.cat(tensors=[logprobs, logprobs], dim=0).sum(), {}),
        lambda logprobs: (logprobs.reshape(logprobs.shape[0] ** 1, 2**0).sum(), {}),
        lambda logprobs: (logprobs[: logprobs.shape[0] ** 2].to(torch.float64).sum(), {}),
        lambda logprobs: (logprobs.to(dtype=torch.float64).sum() * 2.0**-logprobs.ndim, {}),
        lambda logprobs: (logprobs[logprobs > 0].sum() + logprobs[torch.argmax(logprobs)], {}),
        lambda logprobs: (logprobs.sort(dim=0, descending=True).values[:2].sum() + logprobs.max(dim=0)[0], {}),
        lambda logprobs: (logprobs.index_select(0, (logprobs > 0).long())[[0, 1]].sum(), {}),
        lambda logprobs: (logprobs[torch.where(logprobs > 0)[0]].sum() + logprobs[: (logprobs > 0).sum()].sum(), {}),
        lambda logprobs: ((F.relu(logprobs) + F.silu(logprobs) + F.elu(logprobs)).sum(), {}),
        lambda logprobs: ((F.hardtanh(logprobs) + F.leaky_relu(logprobs) + F.gelu(logprobs)).sum(), {}),
        lambda logprobs: (F.softmax(logprobs, dim=-1).max() + F.log_softmax(logprobs, -1).min(), {}),
        lambda logprobs: (F.mse_loss(logprobs, logprobs + 1) + F.huber_loss(logprobs, logprobs - 2), {}),
        lambda logprobs: (F.kl_div(logprobs, logprobs.exp(), reduction="sum") + F.l1_loss(logprobs, -logprobs), {}),
        lambda logprobs: (F.binary_cross_entropy_with_logits(logprobs, logprobs.sigmoid()), {}),
    ],
)
def test_an_honest_loss_is_the_function(function: Callable[[Tensor], Any]) -> None:
    logprobs = torch.tensor([0.5, -1.0, 2.0, -0.25, 1.5])
    found, wanted = trace(function, {"logprobs": 1})(logprobs)[0], function(logprobs)[0]
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype
