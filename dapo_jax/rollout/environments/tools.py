"""Tools: Python functions that a policy may call in the format of its chat template."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.runtime.tool_calls import OPEN_CALL, read_calls
from dapo_jax.types.structs import Observation, Problem

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
TYPES |= {dict: "object", tuple: "array", type(None): "null"}
MAX_CALLS = 8  # of one turn; more are not made
MAX_ERROR_CHARACTERS = 500
_ARGUMENT = re.compile(r"^\s*(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(\S.*)$", re.MULTILINE)
# JSON of an intended call, in templates without a tag for calls.
_INTENDED_CALL = re.compile(r'(?:<\|python_tag\|>)?\s*\[?\s*\{\s*"name"\s*:')


def _schema(annotation: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; without an annotation, a schema for anything."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {"enum": list(typing.get_args(annotation))}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(kind) for kind in typing.get_args(annotation)]}
    if origin in (list, tuple) and typing.get_args(annotation):
        return {"type": "array", "items": _schema(typing.get_args(annotation)[0])}
    name = TYPES.get(origin or annotation)
    return {"type": name} if name else {}


def tool_schema(function: Callable) -> dict[str, Any]:
    """Return a function's schema in OpenAI's protocol, from its signature and docstring.

    The docstring's first paragraph describes the tool, lines `name: text` its parameters.
    """
    docstring = inspect.getdoc(function) or ""
    descriptions = dict(_ARGUMENT.findall(docstring))
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a type that only the type checker imports
        hints = {}
    properties = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _schema(hints.get(name))
        if name in descriptions:
            properties[name]["description"] = descriptions[name].strip()
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(docstring.split("\n\n")[0].split())
    described = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def _has_intended_call(text: str) -> bool:
    return OPEN_CALL in text or bool(
        _INTENDED_CALL.match(text.lstrip()) and re.search('"(?:parameters|arguments)"', text)
    )


class ToolUse:
    """Environment that calls functions; a turn without a call ends the trajectory."""

    def __init__(self, functions: Sequence[Callable]):
        self._functions = {function.__name__: function for function in functions}
        self._schemas = [tool_schema(function) for function in functions]

    def reset(self, problem: Problem) -> None:
        """Keep the problem's own prompt."""

    def step(self, text: str) -> Observation:
        """Return the result of each call in a turn as a message of the role `tool`."""
        rest, calls = read_calls(text, self._schemas)
        if not (calls or _has_intended_call(text)):
            return Observation(done=True)
        # Calls are numbered, since their ids are random and a repeated step must reply the same.
        messages = [
            {
                "role": "tool",
                "name": call["function"]["name"],
                "tool_call_id": f"{number:09}",
                "content": self._call(**call["function"]),
            }
            for number, call in enumerate(calls[:MAX_CALLS])
        ]
        errors = []
        if _has_intended_call(rest):
            errors.append(f"a call that can't be read; the tools are {', '.join(self._functions)}")
        if len(calls) > MAX_CALLS:
            errors.append(f"{len(calls)} calls; at most {MAX_CALLS} are made in a turn")
        messages += [{"role": "tool", "content": f"error: {error}"} for error in errors]
        contents = [message["content"] for message in messages]
        failure = next((text for text in contents if text.startswith("error: ")), "")
        return Observation(messages=messages, role="tool", failure=failure[:MAX_ERROR_CHARACTERS])

    def _call(self, name: str, arguments: str) -> str:
        try:
            result = self._functions[name](**json.loads(arguments))
            if result is None or isinstance(result, bytes):
                kind = "nothing" if result is None else "bytes"
                return f"error: the tool returned {kind}, not text"
            if not isinstance(result, str):
                return json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the policy reads the errors of tools
            return f"error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        return result or "error: the tool returned nothing"
