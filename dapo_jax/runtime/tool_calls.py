"""Calls of tools: definitions for the chat template, and calls read from a response.

A model writes its calls as its template taught it. Two ways are read: Hermes' and Qwen's
`<tool_call>{"name", "arguments"}</tool_call>`, whose tags are no special tokens and stay in a
decoded text; and a response that is nothing but JSON, Llama's object `{"name", "parameters"}` or
Mistral's list of `{"name", "arguments"}`, before which decoding leaves out the special token.
"""

import json
import re
import uuid
from typing import Any

OPEN_CALL = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"  # where a tokenizer takes it for plain text
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 128


def tools_problem(tools: Any) -> str:
    """Mistake in a request's `tools`; empty if there is none."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        return f"must be a list of up to {MAX_TOOLS} tools"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            return "must be of objects with type 'function' and an object function"
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return "must have names of 1 to 64 letters, digits, '_', '-' or '.'"
        if not isinstance(function.get("parameters", {}), dict):
            return f"must have a JSON schema as parameters of {name!r}"
    return ""


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(call: Any, names: set[str], *fields: str) -> dict[str, Any] | None:
    """OpenAI's object of a call, its arguments in one of `fields`; None for anything else."""
    if not isinstance(call, dict):
        return None
    name = call.get("name")
    arguments = next((call[field] for field in fields if field in call), {})
    if not (isinstance(name, str) and name in names and isinstance(arguments, dict)):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    written = written.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8
    function = {"name": name, "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def read_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Text of a response without calls of these tools, and the calls.

    What only looks like a call (broken JSON, a name that is none of the tools') stays text.
    """
    names = {tool["function"]["name"] for tool in tools}
    if OPEN_CALL not in text:
        whole = _load(text.strip().removeprefix(PYTHON_TAG))
        several = whole if isinstance(whole, list) else [whole]
        found = [_call(one, names, "parameters", "arguments") for one in several]
        read = [call for call in found if call]
        return ("", read) if read and len(read) == len(found) else (text, [])
    calls: list[dict[str, Any]] = []

    def take(found: re.Match) -> str:
        call = _call(_load(found[1].strip()), names, "arguments")
        if call:
            calls.append(call)
        return "" if call else found[0]

    rest = CALL.sub(take, text)
    return (rest.strip() if calls else text), calls
