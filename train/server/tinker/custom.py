"""Custom losses of Tinker's clients: graphs that run here in one pass, see `train.integrations.tinker.traced`."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from train.integrations.tinker.traced import Node, TracedLoss, traced_loss

from ..body import Body
from ..errors import ApiError
from .trainer import Trainer
from .wire import TrainingPass

CUSTOM = "custom"  # the name of the loss in a training pass whose numbers name a loss_id
LOSSES = 256  # of a session at most


def custom_routes(trainer: Trainer) -> list[Route]:
    """The route that takes a client's loss."""

    async def create(request: HttpRequest) -> Response:
        body = await trainer.service.body(request)
        session, number = body.needed("session_id"), body.needed_integer("custom_loss_seq_id")
        name, inputs, graph = body.needed("name"), body.take("inputs"), body.object("graph")
        body.finish((("type", "create_custom_loss"),))
        trainer.keep(session)
        if graph is None:
            raise body.missing("graph", "an object with nodes")
        loss_id = f"{session}:loss:{number}"
        request_id = f"{loss_id}:create"
        if request_id not in trainer.futures:
            loss = await trainer.service.in_thread(_loss, name, body, inputs, graph)
            if len([one for one in trainer.losses if one.startswith(f"{session}:")]) >= LOSSES:
                raise ApiError(400, f"The session has {LOSSES} custom losses, which is all that it may have.")
            trainer.make_room(trainer.losses, trainer.bounds.losses, "custom losses")
            trainer.futures.begin(request_id)
            trainer.losses[loss_id] = loss
            trainer.futures.end(request_id, {"type": "create_custom_loss", "loss_id": loss_id})
        return JSONResponse({"request_id": request_id})

    return [Route("/api/v1/create_custom_loss", create, methods=["POST"])]


def _loss(name: str, body: Body, inputs: Any, graph: Body) -> TracedLoss:
    nodes = graph.take("nodes")
    if not isinstance(inputs, list):
        raise body.wrong("inputs", "a list")
    if not isinstance(nodes, list):
        raise graph.wrong("nodes", "a list")
    graph.finish((("format", 1),))
    try:
        return traced_loss(name, [_input(one) for one in inputs], [_node(one) for one in nodes])
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _input(given: Any) -> tuple[str, int]:
    body = Body(given if isinstance(given, dict) else {}, "inputs.")
    found = body.needed("name"), body.integer("rank", -1, high=2)
    body.finish()
    return found


def _node(given: Any) -> Node:
    body = Body(given if isinstance(given, dict) else {}, "graph.nodes.")
    op, name, target = (body.needed(field) for field in ("op", "name", "target"))
    args, kwargs = body.take("args", []), body.take("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise body.wrong("args", "a list, and kwargs an object")
    body.finish()
    return Node(op, name, target, tuple(args), kwargs)


def custom_loss(trainer: Trainer, asked: TrainingPass) -> TracedLoss | None:
    """The loss of a pass that names one of its session; None for a pass of a loss by name.

    ApiError for one that is not there, and ValueError for a text among the numbers of another loss.
    """
    if asked.loss_fn != CUSTOM:
        if asked.texts:
            name = min(asked.texts)
            raise ValueError(f"loss_fn_config has a text as {name!r}; its values are numbers here.")
        return None
    loss_id = asked.texts.get("loss_id", "")
    session = trainer.model(asked.model_id).session
    if loss_id not in trainer.losses or not loss_id.startswith(f"{session}:"):
        raise ApiError(404, f"There is no custom loss {loss_id!r} in this session: create_custom_loss makes one.")
    if asked.forward_only:
        raise ApiError(400, "A custom loss comes with gradients; forward takes losses by name.")
    return trainer.losses[loss_id]
