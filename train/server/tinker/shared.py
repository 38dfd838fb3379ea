"""What the routes of models and of samplers share: their form, and fields that have no meaning here."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fnmodels.errors import UserError
from train.engine import NoGradientsError

from ..body import Body

Answer = Callable[[HttpRequest], Awaitable[Response]]
# Fields that Tinker's package sends and that have no meaning here: notes about the client and its checkpoints are not
# kept, saves never expire, there are no accounts, and results are never shortened.
_NO_MEANING = """
    tags user_metadata sdk_version project_id display_name ttl_seconds weights_access_token allow_metadata_only
"""
NO_MEANING = frozenset(_NO_MEANING.split())
MISTAKES = (UserError, ValueError, FileNotFoundError, NoGradientsError)  # of clients, with a sentence as message


def post(path: str, answer: Answer) -> Route:
    return Route(f"/api/v1/{path}", answer, methods=["POST"])


def finish(body: Body, kind: str, *more: tuple[str, Any]) -> None:
    """ApiError for a field that was not read. kind: the name of the request, which its field `type` repeats."""
    body.finish((("type", kind), *more), NO_MEANING)


def future(request_id: str, **more: Any) -> Response:
    return JSONResponse({"request_id": request_id, **more})
