"""Errors of requests, and their form in OpenAI's API."""

import reprlib
from typing import Any

ERROR_TYPES = {429: "rate_limit_error", 500: "server_error"}


class RequestError(Exception):
    """Rejection or failure of a request: wrong field, HTTP status, OpenAI's error code."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


class QueueFull(RequestError):
    """Rejection of responses that exceed the queue's length; the client may retry."""

    def __init__(self):
        message = "the queue of waiting responses is full; try again later"
        super().__init__(message, status=429, code="rate_limit_exceeded")


def need(fits: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `RequestError` for a wrong value."""
    if not fits:
        raise RequestError(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)
