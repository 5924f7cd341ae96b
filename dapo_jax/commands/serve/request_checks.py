"""Refusal of a request of OpenAI's protocol, and checks of single values."""

import json
import reprlib
from typing import Any, NoReturn, TypeGuard


class BadRequest(Exception):
    """Refusal of a request.

    Attributes:
        param: name of the wrong field.
        status: status code of HTTP.
        code: OpenAI's name of the error, for programs.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    """Raises `BadRequest` with field, value and what is allowed."""
    raise BadRequest(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)


def is_whole(value: Any) -> bool:
    """True for a whole number, which true and false are not."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """True for a number, which true and false are not."""
    return type(value) in (int, float)


def is_text(value: Any) -> TypeGuard[str]:
    """True for text without lone surrogates, which JSON can hold but no tokenizer can read."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def parse(body: bytes) -> dict[str, Any]:
    """Fields of a body that are not null. Raises `BadRequest` for a body that is no object."""

    def refuse_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        fields = json.loads(body, parse_constant=refuse_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}
