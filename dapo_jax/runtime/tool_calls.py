"""Messages with calls of tools: checks of definitions and messages, calls parsed from a response.

Two formats are supported: `<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen), and a
response that is nothing but JSON, either an object `{"name", "parameters"}` (Llama) or a list of
`{"name", "arguments"}` (Mistral). Decoding drops the special token before such JSON.
"""

import json
import re
import uuid
from typing import Any

OPEN_CALL = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"  # plain text for some tokenizers
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_message(message: Any) -> dict[str, Any]:
    """Return a message as templates take it: parts of text joined, arguments of calls parsed.

    Fields that are null are left out, as by transformers; all others stay. Raises ValueError.
    """
    try:
        fields = {key: value for key, value in message.items() if value is not None}
        calls = [_with_arguments(call) for call in fields.get("tool_calls", [])]
        content = fields.get("content", "" if calls else None)
        if isinstance(content, list | tuple):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"content = {content!r:.40}: must be text, or parts of type 'text'")
        if not isinstance(fields["role"], str):
            raise TypeError
    except (AttributeError, KeyError, RecursionError, TypeError):
        calls = "tool_calls of functions with a name and an object of arguments"
        problem = f"is no message with role and content, or {calls}"
        raise ValueError(f"{message!r:.80} {problem}") from None
    read = {"content": content, "tool_calls": calls}
    return fields | {key: value for key, value in read.items() if key in fields}


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call, with or without `function`, with arguments as an object."""
    if "function" in call:
        call = call | {"function": _with_arguments(call["function"])}
        return call if "type" in call else call | {"type": "function"}
    arguments = call.get("arguments") or {}
    arguments = _load(arguments) if isinstance(arguments, str) else arguments
    if not (isinstance(call["name"], str) and isinstance(arguments, dict)):
        raise TypeError
    return call | {"arguments": arguments}


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(call: Any, names: set[str], *fields: str) -> dict[str, Any] | None:
    """Return OpenAI's object of a call with arguments in one of `fields`; None if it is no call."""
    if not isinstance(call, dict):
        return None
    name = call.get("name")
    arguments = next((call[field] for field in fields if field in call), {})
    if not (isinstance(name, str) and name in names and isinstance(arguments, dict)):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no UTF-8
    function = {"name": name, "arguments": text}
    # Mistral's templates demand an id of nine letters and digits.
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def read_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a response without calls of these tools, and the calls.

    Broken JSON and calls of unknown tools remain text.
    """
    names = {tool["function"]["name"] for tool in tools}
    if OPEN_CALL not in text:
        whole = _load(text.strip().removeprefix(PYTHON_TAG))
        items = whole if isinstance(whole, list) else [whole]
        parsed = [_call(item, names, "parameters", "arguments") for item in items]
        valid = [call for call in parsed if call]
        return ("", valid) if valid and len(valid) == len(parsed) else (text, [])
    calls: list[dict[str, Any]] = []

    def take(match: re.Match) -> str:
        call = _call(_load(match[1].strip()), names, "arguments")
        if call:
            calls.append(call)
        return "" if call else match[0]

    rest = CALL.sub(take, text)
    return (rest.strip() if calls else text), calls
