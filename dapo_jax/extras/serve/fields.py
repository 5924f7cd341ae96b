"""JSON objects of requests as pydantic models, and errors that name the first wrong field."""

import re
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from dapo_jax.extras.serve.errors import RequestError

Model = TypeVar("Model", bound="Fields")


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


def must(accepts: Callable[[Any], Any], allowed: str) -> AfterValidator:
    """Return the annotation of a field whose values `accepts`; its errors say what is allowed."""

    def check(value: Any) -> Any:
        if not accepts(value):
            raise ValueError(f"value should be {allowed}")
        return value

    return AfterValidator(check)


def as_setting(kind: Any) -> AfterValidator:
    """Return the annotation of a field with the values of a setting's type in `types.rules`."""
    rule = get_args(kind)[1]
    return must(rule, str(rule))


def read_fields(kind: type[Model], body: bytes | dict[str, Any], prefix: str = "") -> Model:
    """Return the fields of a body, or of an object in one. Raise `RequestError`."""
    try:
        return kind.model_validate(from_json(body) if isinstance(body, bytes) else body)
    except ValidationError as error:
        wrong = error.errors()[0]
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    places = [f"[{at}]" if isinstance(at, int) else f".{at}" for at in wrong["loc"]]
    name = prefix + "".join(places)[1:]
    problem = re.sub(r"^.*? should ", "must ", wrong["msg"])
    message = f"{name or 'the body'} = {reprlib.repr(wrong['input'])}: {problem}"
    if wrong["type"] == "missing":
        message = f"{name} is missing"
    elif wrong["type"] == "extra_forbidden":
        message = f"{name} = {reprlib.repr(wrong['input'])}: is not served"
    raise RequestError(message, name)
