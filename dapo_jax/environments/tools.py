"""Tools: functions that a policy may call, in the form that its chat template teaches."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.environments.interface import Observation
from dapo_jax.runtime.tool_calls import OPEN_CALL, read_calls

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
TYPES |= {dict: "object", tuple: "array", type(None): "null"}
MAX_CALLS = 8  # of one turn; those beyond are not made
SHOWN_OF_ERROR = 500  # characters
_ARGUMENT = re.compile(r"^\s*(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(\S.*)$", re.MULTILINE)
# JSON that was meant as a call, by a template that has no tag for it.
_MEANT = re.compile(r'(?:<\|python_tag\|>)?\s*\[?\s*\{\s*"name"\s*:')


def _schema(annotation: Any) -> dict[str, Any]:
    """JSON schema of a parameter's annotation; without one, anything."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {"enum": list(typing.get_args(annotation))}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(one) for one in typing.get_args(annotation)]}
    if origin in (list, tuple) and typing.get_args(annotation):
        return {"type": "array", "items": _schema(typing.get_args(annotation)[0])}
    name = TYPES.get(origin or annotation)
    return {"type": name} if name else {}


def describe_tool(function: Callable) -> dict[str, Any]:
    """Description of a function as OpenAI's protocol has it, from its signature and docstring.

    The docstring's first paragraph describes the tool, lines `name: text` its parameters.
    """
    documented = inspect.getdoc(function) or ""
    about = dict(_ARGUMENT.findall(documented))
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # of a type that was imported for the checker alone
        hints = {}
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _schema(hints.get(name)) | (
            {"description": about[name].strip()} if name in about else {}
        )
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = " ".join(documented.split("\n\n")[0].split())
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": described,
            "parameters": parameters,
        },
    }


def _is_meant(text: str) -> bool:
    return OPEN_CALL in text or bool(
        _MEANT.match(text.lstrip()) and re.search('"(?:parameters|arguments)"', text)
    )


class ToolUse:
    """Environment of functions: a turn without a call is the answer, and ends the trajectory.

    Args:
        functions: by name.
    """

    def __init__(self, functions: Sequence[Callable]):
        self._functions = {function.__name__: function for function in functions}
        self._described = [describe_tool(function) for function in functions]

    def step(self, text: str) -> Observation:
        """Results of the calls in a turn, a message of the role `tool` each."""
        rest, calls = read_calls(text, self._described)
        if not (calls or _is_meant(text)):
            return Observation(done=True)
        # Numbered: the ids of calls are drawn, and a step must say the same when it is repeated.
        messages = [
            {
                "role": "tool",
                "name": call["function"]["name"],
                "tool_call_id": f"{number:09}",
                "content": self._call(**call["function"]),
            }
            for number, call in enumerate(calls[:MAX_CALLS])
        ]
        if _is_meant(rest):
            names = ", ".join(self._functions)
            error = f"error: a call that can't be read; the tools are {names}"
            messages.append({"role": "tool", "content": error})
        if len(calls) > MAX_CALLS:
            error = f"error: {len(calls)} calls; at most {MAX_CALLS} are made in a turn"
            messages.append({"role": "tool", "content": error})
        contents = [message["content"] for message in messages]
        failure = next((text for text in contents if text.startswith("error: ")), "")
        return Observation(messages=messages, role="tool", failure=failure[:SHOWN_OF_ERROR])

    def _call(self, name: str, arguments: str) -> str:
        try:
            result = self._functions[name](**json.loads(arguments))
            if result is None or isinstance(result, bytes):
                kind = "nothing" if result is None else "bytes"
                return f"error: the tool returned {kind}, not text"
            if not isinstance(result, str):
                return json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # whatever a tool may raise is for the policy to read
            return f"error: {type(error).__name__}: {error}"[:SHOWN_OF_ERROR]
        return result or "error: the tool returned nothing"
