"""Messages of a chat completion, checked, as the chat template takes them."""

import json
import reprlib
from typing import Any

from dapo_jax.commands.serve.request_checks import BadRequest, is_text, refuse

ROLES = ("system", "user", "assistant", "tool")
FIELDS = {
    "assistant": ("role", "content", "tool_calls", "refusal"),
    "tool": ("role", "content", "tool_call_id", "name"),
}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of a request. Raises `BadRequest`."""
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "a list of one or more messages")
    return [_message(f"messages[{index}]", item) for index, item in enumerate(messages)]


def _message(name: str, value: Any) -> dict[str, Any]:
    """Role, text and calls of a message. Raises `BadRequest` that calls it `name`."""
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        refuse(f"{name}.role", role, "one of " + ", ".join(ROLES))
    for key in message:
        if key not in FIELDS.get(role, ("role", "content")):
            raise BadRequest(f"{name}: {reprlib.repr(key)}: is not served", name)
    calls = _calls(f"{name}.tool_calls", message.get("tool_calls", []))
    content = _content(f"{name}.content", message.get("content", "" if calls else None))
    kept = {key: message[key] for key in ("tool_call_id", "name") if key in message}
    for key, text in kept.items():
        if not is_text(text):
            refuse(f"{name}.{key}", text, "text")
    return {"role": role, "content": content, **kept} | ({"tool_calls": calls} if calls else {})


def _content(name: str, content: Any) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(is_text(part.get("text")) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not is_text(content):
        refuse(name, content, "text, or a list of parts of type 'text'")
    return content


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier answer, their arguments as the object that templates write."""
    if not isinstance(calls, list):
        refuse(name, calls, "a list of calls")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not is_text(function.get("name")):
            refuse(name, calls, "of objects with a function and its name")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            refuse(name, calls, "of functions whose arguments are an object, as JSON")
        function = {"name": function["name"], "arguments": arguments}
        read.append({"type": "function", "function": function})
    return read
