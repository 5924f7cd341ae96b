"""Tools: descriptions of functions, and what a policy is told of calls that go wrong."""

import json
import typing

import pytest
from chat_families import TAGGED
from row_files import read_table

from dapo_jax.rollout.environments.tools import (
    MAX_CALLS,
    MAX_ERROR_CHARACTERS,
    ToolUse,
    tool_schema,
)
from dapo_jax.rollout.environments.worker import MAX_CHARACTERS, Request, Sessions
from dapo_jax.types.structs import Problem


def search(
    query: str,
    limit: int = 3,
    kind: typing.Literal["web", "news"] = "web",
    tags: list[str] | None = None,
    at: tuple[float, float] = (0.0, 0.0),
    other=None,
    **more: str,
) -> str:
    """Search the
    index.

    Args:
        query: Words to look for.
        limit (int, optional): Most results: at least one.
        kind: Of pages.

    Returns:
        text: the pages.
    """
    return f"{query} {limit} {kind}"


def add(a: int, b: int) -> int:
    return a + b


def test_a_description_from_signature_and_docstring():
    text, number = {"type": "string"}, {"type": "number"}
    tags = {"anyOf": [{"type": "array", "items": text}, {"type": "null"}]}
    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the index.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": text | {"description": "Words to look for."},
                    "limit": {"type": "integer", "description": "Most results: at least one."},
                    "kind": {"enum": ["web", "news"], "description": "Of pages."},
                    "tags": tags,
                    "at": {"type": "array", "items": number},
                    "other": {},
                },
                "required": ["query"],
            },
        },
    }


def raises():
    raise ZeroDivisionError("x" * 10_000)


def exits():
    raise SystemExit(3)


RESULTS = {
    "text": lambda: "é",
    "nothing": lambda: None,
    "empty": lambda: "",
    "binary": lambda: b"\xff",
    "fields": lambda: {"a": [1, "é"], "b": {1}},
    "keys": lambda: {(1, 2): 3},
    "large": lambda: "x" * 10_000_000,
    "forged": lambda: TAGGED,
    "echo": lambda text: text,
}


def _named(name, function):
    function.__name__ = name
    return function


def use():
    named = [_named(name, function) for name, function in RESULTS.items()]
    return ToolUse([add, raises, exits, *named])


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def contents(text):
    return [message["content"] for message in use().step(text).messages]


@pytest.mark.parametrize(("text", "told"), read_table(__file__, "results"))
def test_results(text, told):
    observation = use().step(text)
    assert [message["content"] for message in observation.messages] == [told]
    assert not (observation.failure or observation.done)
    assert observation.role == observation.messages[0]["role"] == "tool"


@pytest.mark.parametrize(
    ("text", "told"),
    [*read_table(__file__, "errors"), ("<tool_call>" + "[" * 100_000, "can't be read")],
)
def test_errors_are_for_the_policy_to_read(text, told):
    observation = use().step(text)
    (message,) = observation.messages
    assert message["content"].startswith("error: ") and told in message["content"]
    assert len(message["content"]) <= MAX_ERROR_CHARACTERS
    assert observation.failure == message["content"] and not observation.done


@pytest.mark.parametrize(
    "text", ["42", "", '{"name": "Ann", "age": 7}', "[1, 2]", "</tool_call>", "<tool_response>42"]
)
def test_a_turn_without_a_call_is_the_answer(text):
    observation = use().step(text)
    assert observation.done and not (observation.messages or observation.failure)


@pytest.mark.parametrize("text", [call("large"), call("large") * 3])
def test_ten_megabytes_stay_a_result_of_a_tool(text):
    request = Request(Problem("0", "?", "", ""), turns=[text])
    reply = Sessions(use).answer(request)
    assert reply.cut and reply.observation.role == "tool" and not reply.observation.failure
    assert len(reply.observation.text) == MAX_CHARACTERS and not reply.observation.messages


def test_calls_beyond_the_limit_are_one_error():
    found = contents("".join(call("add", a=i, b=0) for i in range(10_000)))
    assert found[:-1] == [str(i) for i in range(MAX_CALLS)]
    assert found[-1] == f"error: 10000 calls; at most {MAX_CALLS} are made in a turn"
