"""Errors that a client gets, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: The status of HTTP.
        message: A sentence.
        param: The field of the request that is wrong; None: no single one.
        retry_after: Seconds after which the client may try again; None: trying again does not help.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @property
    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def stopped() -> ApiError:
    """That of a request which a server that stops leaves unanswered."""
    return ApiError(503, "The server is stopping, and the request has no answer: ask another one.", retry_after=10)


def sentence(message: str) -> str:
    """The message of a `UserError` as a sentence of its own."""
    return f"{message[:1].upper()}{message[1:].rstrip('.')}."
