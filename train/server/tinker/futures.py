"""`Futures`: results that clients fetch by the id of their request, when they are there."""

import asyncio
from collections import OrderedDict
from typing import Any

from ..errors import ApiError

KEPT = 4096  # results that were not fetched, or that may be fetched again; the oldest are forgotten
UNFINISHED = 4096  # requests whose result is to come, at most


class _Future:
    def __init__(self) -> None:
        self.ready, self.value = asyncio.Event(), None


class Futures:
    """Results by the ids of requests; all methods are called in the server's thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Future] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def begin(self, request_id: str) -> None:
        """A request whose result is to come. ApiError 429 where as many as there may be are under way."""
        done = [name for name, future in self._known.items() if future.ready.is_set()]
        unfinished = len(self._known) - len(done)
        if unfinished >= UNFINISHED:
            raise ApiError(429, f"{unfinished} requests are under way: try again later.", retry_after=1)
        self._known[request_id] = _Future()
        for old in done[: max(0, len(done) - KEPT)]:
            del self._known[old]

    def end(self, request_id: str, value: Any) -> None:
        """Its result, bytes or a JSON object, or the exception that it ended with."""
        future = self._known.get(request_id)
        if future is not None and not future.ready.is_set():
            future.value = value
            future.ready.set()

    def forget(self, request_id: str) -> None:
        """As if the request had not come."""
        self._known.pop(request_id, None)

    async def value(self, request_id: str, seconds: float) -> Any:
        """The result. ApiError 408 where it is not there after so long, and 410 for an unknown request."""
        future = self._known.get(request_id)
        if future is None:
            raise ApiError(410, f"There is no result of the request {request_id!r}: it is unknown, or was forgotten.")
        try:
            async with asyncio.timeout(seconds):
                await future.ready.wait()
        except TimeoutError as error:
            raise ApiError(408, "The request is under way; ask again.") from error
        return future.value
