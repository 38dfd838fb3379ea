"""Custom losses by hand: a graph runs in one pass, in its own session alone, and calls nothing but the allowed."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.served import Served, serving, write_checkpoint
from tests.train.server.tinker.test_messages import field
from tests.train.server.tinker.test_protocol import _model, _post, _result, _training_pass

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]


def _node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


NODES = [
    _node("placeholder", "logprobs", "logprobs"),
    _node("placeholder", "weights", "weights"),
    _node("call_function", "product", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"}),
    _node("call_method", "total", "sum", {"ref": "product"}),
    _node("call_function", "loss", "operator.neg", {"ref": "total"}),
    _node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {"custom/loss:sum": {"ref": "loss"}}}]}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(write_checkpoint(folder / "checkpoint"), saves=folder / "saves", context=64) as made:
        yield made


def _asked(session: str, **changes: Any) -> dict[str, Any]:
    graph = {"format": 1, "nodes": changes.pop("nodes", NODES)}
    body = {"session_id": session, "custom_loss_seq_id": 0, "name": "mine", "inputs": INPUTS, "graph": graph}
    return body | {"type": "create_custom_loss"} | changes


def _pass(model: str, seq_id: int, loss: str, **texts: str) -> bytes:
    named = _training_pass(model, seq_id, [72, 101, 108]).removesuffix(field(4, b"cross_entropy"))
    more = [field(7, field(1, name.encode()) + field(2, field(2, text.encode()))) for name, text in texts.items()]
    return named + field(4, loss.encode()) + b"".join(more)


def test_a_custom_loss_has_the_gradients_of_the_named_one(server: Served) -> None:
    model = _model(server)
    session = model.partition(":")[0]
    made = [_post(server, "create_custom_loss", _asked(session))["request_id"] for _ in range(2)]  # sent again
    loss_id = _result(server, made[1])["loss_id"]
    norms = []
    for seq_id, one in ((1, _training_pass(model, 1, [72, 101, 108])), (3, _pass(model, 3, "custom", loss_id=loss_id))):
        _post(server, "forward_backward", one)
        step = {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.0}}
        norms.append(_result(server, _post(server, "optim_step", step)["request_id"])["metrics"]["grad_norm"])
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": [_node("call_function", "x", "os.system", "true"), *NODES]}, "calls 'os.system'"),
        ({"nodes": [*NODES[:2], _node("call_method", "x", "__class__", {"ref": "logprobs"}), *NODES[2:]]}, "__class__"),
        ({"nodes": NODES[1:]}, "reads 'logprobs'"),
        ({"nodes": {}}, "graph.nodes is {}; it must be a list"),
        ({"nodes": ["text"]}, "graph.nodes.op is missing"),
        ({"inputs": [{"name": "logprobs", "rank": 2}]}, "have rank 2; here they are"),
        ({"inputs": [{"name": "logprobs"}]}, "of rank -1"),
        ({"graph": {"format": 2, "nodes": NODES}}, "graph.format is not supported"),
        ({"graph": None}, "graph is missing"),
        ({"nonsense": 1}, "nonsense is not supported"),
    ],
)
def test_a_graph_of_another_form_is_refused(server: Served, changes: dict[str, Any], words: str) -> None:
    session = _model(server).partition(":")[0]
    status, content, _ = server.send("/api/v1/create_custom_loss", _asked(session, **changes))
    assert status == 400 and words in content["error"]["message"], content


def test_a_custom_loss_belongs_to_its_session(server: Served) -> None:
    model, other = _model(server), _model(server)
    session = model.partition(":")[0]
    loss_id = _result(server, _post(server, "create_custom_loss", _asked(session))["request_id"])["loss_id"]
    for body, code, words in (
        (_pass(other, 1, "custom", loss_id=loss_id), 404, "There is no custom loss"),
        (_pass(model, 1, "custom"), 404, "There is no custom loss ''"),
        (_pass(model, 1, "custom", loss_id=loss_id) + field(6, 1), 400, "comes with gradients"),
        (_pass(model, 1, "ppo", beta="high"), 400, "has a text as 'beta'"),
    ):
        status, content, _ = server.send("/api/v1/forward_backward", body)
        assert status == code and words in content["error"]["message"], content


def _step(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_function", "name": "step", "target": target, "args": list(args), "kwargs": kwargs}


LOGP, STEP = {"ref": "logprobs"}, {"ref": "step"}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_step("torch.cat", [LOGP, LOGP], out={"ref": "weights"}), "calls 'torch.cat' with 'out'"),
        (_step("torch.nn.functional.relu", {"ref": "weights"}, inplace=True), "with 'inplace'"),
        (_step("torch.nn.functional.relu", {"ref": "weights"}, True), "with 'inplace'"),
        (_step("torch.exp", {"ref": []}), "reads [] at 'step'"),
        (_step("torch.exp", {"ref": {"a": 1}}), "reads {'a': 1} at 'step'"),
    ],
)
def test_a_step_that_could_change_a_datum_is_refused(server: Served, step: dict[str, Any], words: str) -> None:
    session = _model(server).partition(":")[0]
    asked = _asked(session, nodes=[*NODES[:2], step, *NODES[2:]])
    status, content, _ = server.send("/api/v1/create_custom_loss", asked)
    assert status == 400 and words in content["error"]["message"], content


OUTPUT = _node("output", "output", "output", {"tuple": [STEP, {"dict": {}}]})
LARGE = [_node("call_method", "zeros", "long", LOGP)]
for _number in range(6):  # each has 16 times as many elements
    LARGE.append(_node("call_function", f"large{_number}", "torch.stack", [{"ref": LARGE[-1]["name"]}] * 16))
LONG = [_node("call_function", f"sort{number}", "torch.sort", {"ref": "large4"}) for number in range(80)]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([_step("operator.mod", "%01500000000.0f", LOGP)], "str is neither a tensor nor a number."),
        ([*LARGE[:1], _step("operator.mul", [0], {"ref": "zeros"})], "list is neither a tensor nor a number."),
        ([*LARGE, _step("torch.sum", LOGP)], "would have 33,554,432 elements; 4,194,304 are allowed."),
        ([*LARGE[:6], *LONG, _step("torch.sum", LOGP)], "over the data of a call, which is all that they may have."),
        ([_step("torch.stack", [1, 2])], "a list of tensors is needed."),
        ([_node("call_method", "step", "to", LOGP, "meta")], "it stays on its device."),
        ([_step("torch.sum", LOGP), _node("call_method", "other", "to", STEP, 0)], "it stays on its device."),
        ([_step("operator.pow", 3, 41)], "an integer is beyond 64 bits."),
        ([_step("torch.zeros_like", LOGP)], "the loss must be a floating-point tensor without dimensions."),
        ([_node("call_method", "fixed", "detach", LOGP), _step("torch.sum", {"ref": "fixed"})], "does not depend on"),
    ],
)
def test_a_loss_that_fails_is_a_mistake_of_the_client(server: Served, nodes: list[Any], words: str) -> None:
    """Its sentence arrives as the client's error, and the server goes on."""
    model = _model(server)
    session = model.partition(":")[0]
    asked = _asked(session, nodes=[*NODES[:2], *nodes, OUTPUT])
    loss_id = _result(server, _post(server, "create_custom_loss", asked)["request_id"])["loss_id"]
    failed = _result(
        server, _post(server, "forward_backward", _pass(model, 1, "custom", loss_id=loss_id))["request_id"]
    )
    assert failed["category"] == "user" and failed["error"].startswith("The "), failed
    assert words in failed["error"] and "\n" not in failed["error"], failed
    _post(server, "forward_backward", _training_pass(model, 2, [72, 101, 108]))
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.0}}
    assert _result(server, _post(server, "optim_step", step)["request_id"])["metrics"]["grad_norm"] > 0
