"""Errors of requests, and their form in OpenAI's API."""

import reprlib
from typing import Any

ERROR_TYPES = {429: "rate_limit_error", 500: "server_error"}


class RequestError(Exception):
    """Rejection or failure of a request: wrong field, HTTP status, OpenAI's error code."""

    def __init__(self, message: str, field: str = "", status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param = field.partition("[")[0] or None
        self.status = status
        self.code = code

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def queue_full() -> RequestError:
    """Return the error of requests beyond the queue's length; the client may retry."""
    message = "the queue of waiting responses is full; try again later"
    return RequestError(message, status=429, code="rate_limit_exceeded")


def need(fits: bool, field: str, value: Any, allowed: str, code: str | None = None) -> None:
    """Raise `RequestError` for a wrong value."""
    if not fits:
        message = f"{field} = {reprlib.repr(value)}: must be {allowed}"
        raise RequestError(message, field, code=code)
