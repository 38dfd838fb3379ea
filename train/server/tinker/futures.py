"""`Futures`: results that clients fetch by the id of their request, when they are there."""

import asyncio
import time
from collections import OrderedDict
from typing import Any

from ..errors import ApiError

KEPT = 4096  # results that were fetched and may be fetched again; the oldest are forgotten
UNFINISHED = 4096  # requests whose result is to come, at most
ABANDONED = 300.0  # seconds after which a result that nobody fetches may be forgotten; clients ask all the time
SMALL = 4096  # bytes that a result is counted as at least, for it is held by objects


class _Future:
    def __init__(self, size: int) -> None:
        self.ready, self.value, self.size, self.since = asyncio.Event(), None, max(size, SMALL), 0.0


class Futures:
    """Results by the ids of requests; all methods are called in the server's thread.

    Results that were fetched are forgotten first, then those that nobody has fetched for `ABANDONED` seconds. Where
    that is not enough, new requests have to wait.

    Args:
        limit: Bytes of all results at most; one that is to come counts as what it may have.
    """

    def __init__(self, limit: int) -> None:
        self._open: OrderedDict[str, _Future] = OrderedDict()  # under way, or not fetched
        self._fetched: OrderedDict[str, _Future] = OrderedDict()  # in the order in which they were
        self._limit, self._size, self._unfinished = limit, 0, 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or request_id in self._fetched

    @property
    def size(self) -> int:
        """Bytes of the results that are there, and of those under way what they may have."""
        return self._size

    def begin(self, request_id: str, size: int = SMALL, *, awaited: bool = False) -> None:
        """A request whose result is to come. ApiError 429 where there is no room for it, and 400 where there never is.

        size: bytes of the result at most. awaited: whether others wait for it, so that it must not wait for them.
        """
        if size > self._limit:
            raise ApiError(
                400,
                f"The result may have {size:,} bytes, and this server keeps {self._limit:,} bytes of results: ask for "
                "fewer answers, tokens or likeliest tokens in a request.",
            )
        made = _Future(size)
        self._make_room(made.size)
        if not awaited and self._unfinished >= UNFINISHED:
            raise ApiError(429, f"{self._unfinished} requests are under way: try again later.", retry_after=1)
        if not awaited and self._size + made.size > self._limit:
            raise ApiError(
                429,
                f"Results that are under way or not fetched may have {self._size:,} bytes, and {made.size:,} more "
                f"would be above the limit of {self._limit:,}: try again later.",
                retry_after=1,
            )
        self.forget(request_id)
        self._open[request_id] = made
        self._size += made.size
        self._unfinished += 1

    def _make_room(self, size: int) -> None:
        while self._fetched and (self._size + size > self._limit or len(self._fetched) > KEPT):
            self._size -= self._fetched.popitem(last=False)[1].size
        if self._size + size > self._limit:
            before = time.monotonic() - ABANDONED
            for name in [name for name, one in self._open.items() if one.ready.is_set() and one.since < before]:
                self.forget(name)

    def end(self, request_id: str, value: Any) -> None:
        """Its result, bytes or a JSON object, or the exception that it ended with."""
        future = self._open.get(request_id)
        if future is not None and not future.ready.is_set():
            size = max(SMALL, len(value)) if isinstance(value, bytes) else SMALL
            self._unfinished -= 1
            self._size += size - future.size
            future.value, future.size, future.since = value, size, time.monotonic()
            future.ready.set()

    def forget(self, request_id: str) -> None:
        """As if the request had not come."""
        future = self._open.pop(request_id, None) or self._fetched.pop(request_id, None)
        if future is not None:
            self._size -= future.size
            self._unfinished -= not future.ready.is_set()

    async def value(self, request_id: str, seconds: float) -> Any:
        """The result. ApiError 408 where it is not there after so long, and 410 for an unknown request."""
        future = self._open.get(request_id) or self._fetched.get(request_id)
        if future is None:
            raise ApiError(410, f"There is no result of the request {request_id!r}: it is unknown, or was forgotten.")
        try:
            async with asyncio.timeout(seconds):
                await future.ready.wait()
        except TimeoutError as error:
            raise ApiError(408, "The request is under way; ask again.") from error
        if self._open.get(request_id) is future:
            self._fetched[request_id] = self._open.pop(request_id)
        return future.value
