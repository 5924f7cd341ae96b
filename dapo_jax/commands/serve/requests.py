"""Parsing and validation of requests to OpenAI's API.

A field that is not served is rejected by name, unless its value asks for nothing.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

from dapo_jax.commands.serve.access import RequestError
from dapo_jax.commands.serve.engine import ResponseSampling
from dapo_jax.commands.serve.generator import ResponseRequest
from dapo_jax.commands.serve.logprobs import MAX_LIKELIEST
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.tool_calls import tools_problem
from dapo_jax.structs import SamplingRule

MAX_STOPS = 4
TOO_LONG = "context_length_exceeded"
SERVED = set(
    "model max_tokens max_completion_tokens stream stream_options n stop temperature top_p top_k "
    "seed user logprobs return_token_ids".split()
)
SERVED_COMPLETION = SERVED | {"prompt", "echo"}
SERVED_CHAT = SERVED | {"messages", "tools", "top_logprobs"}
# Fields that are not served, with the values that ask for nothing (null always asks for nothing).
NEUTRAL_VALUES = {
    "best_of": (),  # and the value of n
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = {
    "assistant": ("role", "content", "tool_calls", "refusal"),
    "tool": ("role", "content", "tool_call_id", "name"),
}


def _reject(field: str, value: Any, allowed: str) -> NoReturn:
    raise RequestError(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)


def _is_whole(value: Any) -> bool:
    return type(value) is int  # bool is a subclass of int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> TypeGuard[str]:
    """Return True for text without lone surrogates: JSON can hold them, tokenizers can't."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


class FieldRule(NamedTuple):
    """Rule for the value of a field: a predicate, and its description for the error."""

    accepts: Callable[[Any], bool]
    allowed: str


FLAG = FieldRule(_is_flag, "true or false")
FIELD_RULES = {
    # Dividing logits by less than 0.001 can overflow float32.
    "temperature": FieldRule(
        lambda x: _is_number(x) and (x == 0 or 1e-3 <= x <= 100), "0, or from 0.001 to 100"
    ),
    "top_p": FieldRule(lambda x: _is_number(x) and 0 < x <= 1, "above 0 and at most 1"),
    "top_k": FieldRule(lambda x: _is_whole(x) and 0 <= x < 2**31, "from 0 (all) to 2147483647"),
    "seed": FieldRule(lambda x: _is_whole(x) and -(2**63) <= x < 2**63, "a 64-bit integer"),
    "n": FieldRule(lambda x: _is_whole(x) and x > 0, "a whole number above 0"),
    "stream": FLAG,
    "echo": FLAG,
    "return_token_ids": FLAG,
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests. The checks raise `RequestError` with field, value and what is allowed.

    Attributes:
        prompt_bytes: maximum bytes of a prompt's text; a longer text is not tokenized.
        context: maximum tokens of a prompt and its response together.
        vocab: vocabulary size; ids are below it.
        waiting: maximum number of responses that wait for a slot.
    """

    prompt_tokens: int
    prompt_bytes: int
    response_tokens: int
    context: int
    vocab: int
    waiting: int

    def max_response_tokens(self, prompt: int) -> int:
        """Return the maximum tokens of a response to a prompt with this many tokens."""
        return min(self.response_tokens, self.context - prompt)

    def check_budget(self, field: str, budget: int, prompt: int) -> None:
        """Check the token budget of a response to a prompt with this many tokens."""
        if not 0 < budget <= self.response_tokens:
            message = f"{field} = {budget}: must be from 1 to {self.response_tokens}"
            raise RequestError(message, field)
        if budget > (largest := self.max_response_tokens(prompt)):
            allowed = f"at most {largest} after a prompt of {prompt} tokens"
            raise RequestError(f"{field} = {budget}: must be {allowed}", field, code=TOO_LONG)

    def check_text(self, field: str, text: str) -> None:
        """Check a prompt's text before it is tokenized."""
        size = len(text.encode())
        if size > self.prompt_bytes:
            allowed = f"at most {self.prompt_bytes}, the most that {self.prompt_tokens} tokens hold"
            message = f"{field} has {size} bytes: must have {allowed}"
            raise RequestError(message, field.partition("[")[0], code=TOO_LONG)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Check a prompt's token ids."""
        param = field.partition("[")[0]
        if not 0 < len(ids) <= self.prompt_tokens:
            message = f"{field} has {len(ids)} tokens: must have from 1 to {self.prompt_tokens}"
            raise RequestError(message, param, code=TOO_LONG if ids else None)
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab:
                message = f"{field}[{index}] = {token}: must be from 0 to {self.vocab - 1}"
                raise RequestError(message, param)


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Served model, with the limits of requests and the default sampling rule."""

    name: str
    tokenizer: Tokenizer
    limits: Limits
    rule: SamplingRule

    def prompt_ids(self, field: str, text: str) -> list[int]:
        """Return the token ids of a prompt's text; raise `RequestError` if it is too long."""
        self.limits.check_text(field, text)
        ids = self.tokenizer.encode_prompt(text)
        self.limits.check_ids(field, ids)
        return ids


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Validated request.

    Attributes:
        prompts: ids of the prompts; each gets `n` responses.
        budgets: maximum tokens of a response to each prompt; 0: only `echo` is requested.
        stop: strings that end a response; the response does not include them.
        include_usage: add a last chunk with token counts to the stream.
        likeliest: number of likeliest tokens next to each log-prob; None: no log-probs.
        echo: put the prompt before its response.
        return_token_ids: add the ids of prompts and responses to the text.
        tools: tools that the model may call.
    """

    prompts: list[list[int]]
    n: int
    budgets: list[int]
    rule: SamplingRule
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    likeliest: int | None
    echo: bool
    return_token_ids: bool
    tools: list[dict[str, Any]]

    def responses(self) -> list[ResponseRequest]:
        """Return the requests for single responses: `n` to each prompt in order."""
        if not any(self.budgets):
            return []
        return [
            ResponseRequest(
                ids, budget, ResponseSampling(self.rule, self.seed, prompt * self.n + i)
            )
            for prompt, (ids, budget) in enumerate(zip(self.prompts, self.budgets, strict=True))
            for i in range(self.n)
        ]


def read_request(body: bytes, model: ServedModel, *, chat: bool) -> CompletionRequest:
    """Return the request of a body. Raise `RequestError` if it is wrong or not served."""
    fields = _parse(body)
    _check_names(fields, chat)
    for name, rule in FIELD_RULES.items():
        if name in fields and not rule.accepts(fields[name]):
            _reject(name, fields[name], rule.allowed)
    _check_model(fields.get("model"), model.name)
    n = fields.get("n", 1)
    seed = fields.get("seed")
    stream = fields.get("stream", False)
    echo = fields.get("echo", False)
    tools = _tools(fields, model)
    likeliest = _likeliest(fields, chat)
    prompts = _chat_prompt(fields, model, tools) if chat else _prompts(fields, model)
    if n * len(prompts) > model.limits.waiting:
        count = f"n = {n} responses to {len(prompts)} prompts"
        allowed = f"at most {model.limits.waiting} responses per request"
        raise RequestError(f"{count}: {allowed}", "n" if n > 1 else "prompt")
    return CompletionRequest(
        prompts=prompts,
        n=n,
        budgets=[_budget(fields, model.limits, len(ids), echo) for ids in prompts],
        rule=SamplingRule(
            fields.get("temperature", model.rule.temperature),
            fields.get("top_p", model.rule.top_p),
            fields.get("top_k", model.rule.top_k),
        ),
        seed=None if seed is None else seed % 2**64,
        stop=_stops(fields.get("stop", [])),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        likeliest=likeliest,
        echo=echo,
        return_token_ids=fields.get("return_token_ids", False),
        tools=tools,
    )


def _parse(body: bytes) -> dict[str, Any]:
    """Return the non-null fields of a body. Raise `RequestError` unless it is an object."""

    def reject_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        fields = json.loads(body, parse_constant=reject_constant)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _check_names(fields: dict[str, Any], chat: bool) -> None:
    """Raise `RequestError` for an unknown field, and for an unserved one with an effect."""
    for name, value in fields.items():
        if name in NEUTRAL_VALUES:
            neutral = (fields.get("n", 1),) if name == "best_of" else NEUTRAL_VALUES[name]
            # JSON's 0 and false are equal in Python.
            if value not in [x for x in neutral if _is_flag(x) == _is_flag(value)]:
                raise RequestError(f"{name} = {reprlib.repr(value)}: is not served", name)
        elif name not in (SERVED_CHAT if chat else SERVED_COMPLETION):
            raise RequestError(f"{reprlib.repr(name)}: there is no such field here", name)


def _check_model(name: Any, served: str) -> None:
    if name is None:
        raise RequestError(f"model is missing: must be {served!r}", "model")
    if name != served:
        message = f"model = {reprlib.repr(name)}: there is only {served!r}"
        raise RequestError(message, "model", 404, "model_not_found")


def _budget(fields: dict[str, Any], limits: Limits, prompt: int, echo: bool) -> int:
    """Return the maximum tokens of a response to a prompt; 0 only with `echo`."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if not names:
        return limits.max_response_tokens(prompt)
    if len(names) > 1:
        raise RequestError(f"{' and '.join(names)}: only one of them is allowed", names[1])
    budget = fields[names[0]]
    if not _is_whole(budget):
        _reject(names[0], budget, f"a whole number from 1 to {limits.response_tokens}")
    if budget or not echo:
        limits.check_budget(names[0], budget, prompt)
    return budget


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(map(_is_text, stops)):
        _reject("stop", value, f"a text or a list of up to {MAX_STOPS} texts")
    if "" in stops:
        _reject("stop", value, "one or more texts that are not empty")
    return stops


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    include = options.get("include_usage", False) if isinstance(options, dict) else None
    if not _is_flag(include) or set(options) - {"include_usage"}:
        _reject("stream_options", options, "an object with include_usage, true or false")
    if not stream:
        _reject("stream_options", options, "omitted unless stream is true")
    return bool(include)


def _likeliest(fields: dict[str, Any], chat: bool) -> int | None:
    """Return the number of likeliest tokens next to each log-prob; None: no log-probs."""
    logprobs = fields.get("logprobs", False)
    field = "top_logprobs" if chat else "logprobs"
    if chat and not _is_flag(logprobs):
        _reject("logprobs", logprobs, "true or false")
    if logprobs is False:
        if chat and fields.get(field):
            _reject(field, fields[field], "omitted unless logprobs is true")
        return None
    count = fields.get(field, 0)
    if not (_is_whole(count) and 0 <= count <= MAX_LIKELIEST):
        _reject(field, count, f"a whole number from 0 to {MAX_LIKELIEST}")
    return count


def _prompts(fields: dict[str, Any], model: ServedModel) -> list[list[int]]:
    """Return the ids of all prompts, from a text, texts, ids, or lists of ids."""
    value = fields.get("prompt")
    if value is None:
        raise RequestError("prompt is missing", "prompt")
    is_single = isinstance(value, str) or (isinstance(value, list) and all(map(_is_whole, value)))
    prompts = [value] if is_single else value
    if not isinstance(prompts, list):
        _reject("prompt", value, "a text, a list of texts, ids, or a list of lists of ids")
    if len(prompts) > model.limits.waiting:
        message = f"prompt has {len(prompts)} prompts: at most {model.limits.waiting} at once"
        raise RequestError(message, "prompt")
    return [
        _prompt_ids("prompt" if is_single else f"prompt[{index}]", prompt, model)
        for index, prompt in enumerate(prompts)
    ]


def _prompt_ids(field: str, prompt: Any, model: ServedModel) -> list[int]:
    if _is_text(prompt):
        return model.prompt_ids(field, prompt)
    if not isinstance(prompt, list) or not all(map(_is_whole, prompt)):
        allowed = "text (valid Unicode) or a list of ids"
        raise RequestError(f"{field} = {reprlib.repr(prompt)}: must be {allowed}", "prompt")
    model.limits.check_ids(field, prompt)
    return prompt


# --- chats ----------------------------------------------------------------------------------------


def _chat_prompt(fields: dict[str, Any], model: ServedModel, tools: list) -> list[list[int]]:
    """Return the ids of the prompt that the chat template renders from messages and tools."""
    chat = model.tokenizer.chat
    if chat is None:
        message = "messages: the model's folder has no chat template; use /v1/completions"
        raise RequestError(message, "messages")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        _reject("messages", messages, "a list of one or more messages")
    checked = [_message(f"messages[{index}]", item) for index, item in enumerate(messages)]
    try:
        text = chat.render(checked, "messages", tools=tools)
    except ConfigError as error:
        raise RequestError(str(error), "messages") from None
    return [model.prompt_ids("messages", text)]


def _tools(fields: dict[str, Any], model: ServedModel) -> list[dict[str, Any]]:
    """Return the tools that the model may call; none if `tool_choice` is 'none'."""
    tools = fields.get("tools", [])
    if problem := tools_problem(tools):
        _reject("tools", tools, problem.removeprefix("must be "))
    chat = model.tokenizer.chat
    if tools and chat is not None and not chat.writes_tools:
        raise RequestError("tools: the model's chat template does not use tools", "tools")
    return [] if fields.get("tool_choice") == "none" else tools


def _message(field: str, value: Any) -> dict[str, Any]:
    """Return the role, text and tool calls of a message. Raise `RequestError` naming `field`."""
    if not isinstance(value, dict):
        _reject(field, value, "an object")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        _reject(f"{field}.role", role, "one of " + ", ".join(ROLES))
    for key in message:
        if key not in MESSAGE_FIELDS.get(role, ("role", "content")):
            raise RequestError(f"{field}: {reprlib.repr(key)}: is not served", field)
    calls = _tool_calls(f"{field}.tool_calls", message.get("tool_calls", []))
    content = message.get("content", "" if calls else None)
    rendered = {"role": role, "content": _content(f"{field}.content", content)}
    for key in ("tool_call_id", "name"):
        if key in message:
            if not _is_text(message[key]):
                _reject(f"{field}.{key}", message[key], "text")
            rendered[key] = message[key]
    return rendered | ({"tool_calls": calls} if calls else {})


def _content(field: str, content: Any) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(_is_text(part.get("text")) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not _is_text(content):
        _reject(field, content, "text, or a list of parts of type 'text'")
    return content


def _tool_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer, with their arguments parsed, for the template."""
    if not isinstance(calls, list):
        _reject(field, calls, "a list of calls")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_text(function.get("name")):
            _reject(field, calls, "a list of objects with a function and its name")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            _reject(field, calls, "a list of functions with a JSON object of arguments")
        function = {"name": function["name"], "arguments": arguments}
        parsed.append({"type": "function", "function": function})
    return parsed
