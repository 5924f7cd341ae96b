"""JSON objects of requests as pydantic models, and errors of requests in OpenAI's form."""

import re
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

ERROR_TYPES = {429: "rate_limit_error", 500: "server_error"}
Model = TypeVar("Model", bound="Fields")


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


def need(fits: bool, field: str, value: Any, allowed: str, code: str | None = None) -> None:
    """Raise `RequestError` for a wrong value."""
    if not fits:
        message = f"{field} = {reprlib.repr(value)}: must be {allowed}"
        raise RequestError(message, field, code=code)


def need_room(has_room: bool) -> None:
    """Raise `RequestError` for a request beyond the queue's length; the client may retry."""
    if not has_room:
        message = "the queue of waiting responses is full; try again later"
        raise RequestError(message, status=429, code="rate_limit_exceeded")


class Fields(BaseModel):
    """A JSON object: values of exactly the declared types; null counts as left out."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}  # values that count as left out

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {name: value for name, value in values.items() if value is not None}
        return {k: value for k, value in kept.items() if value not in cls.neutral.get(k, ())}


def must(accepts: Callable[[Any], Any], allowed: str = "") -> AfterValidator:
    """Return the annotation of a field that takes what `accepts`; errors say what is allowed."""

    def check(value: Any) -> Any:
        if not accepts(value):
            raise ValueError(f"value should be {allowed or accepts}")
        return value

    return AfterValidator(check)


def read_fields(kind: type[Model], body: bytes) -> Model:
    """Return the fields of a body. Raise `RequestError`."""
    try:
        return kind.model_validate(from_json(body))
    except ValidationError as error:
        wrong = error.errors()[0]
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    places = [f"[{at}]" if isinstance(at, int) else f".{at}" for at in wrong["loc"]]
    name, value = "".join(places)[1:], reprlib.repr(wrong["input"])
    messages = {"missing": f"{name} is missing"}
    messages["extra_forbidden"] = f"{name} = {value}: is not served"
    problem = re.sub(r"^.*? should ", "must ", wrong["msg"])
    message = messages.get(wrong["type"], f"{name or 'the body'} = {value}: {problem}")
    raise RequestError(message, name)
