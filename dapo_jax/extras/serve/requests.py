"""Parsing and validation of requests to OpenAI's API."""

import dataclasses
import json
import reprlib
from collections.abc import Callable
from typing import Any, TypeGuard

from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.budgets import AUTO
from dapo_jax.extras.serve.errors import RequestError, need
from dapo_jax.extras.serve.logprobs import MAX_LIKELIEST
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.runtime.tool_calls import NAME, read_message
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SamplingRule, Stop

MAX_STOPS = 4
MAX_TOOLS = 128
TOO_LONG = "context_length_exceeded"
ROLES = {  # and the fields of their messages besides role and content
    "system": (),
    "user": (),
    "assistant": ("tool_calls",),
    "tool": ("tool_call_id", "name"),
}
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


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    name, schema = function.get("name"), function.get("parameters", {})
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and isinstance(schema, dict)


def _is_text(value: Any) -> TypeGuard[str]:
    """Return True for text without lone surrogates: JSON can hold them, tokenizers can't."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # no bool


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    is_short = isinstance(stops, list) and len(stops) <= MAX_STOPS
    return is_short and all(_is_text(stop) and stop for stop in stops)


def _are_stream_options(value: Any) -> bool:
    return value == {} or (
        isinstance(value, dict)
        and list(value) == ["include_usage"]
        and type(value["include_usage"]) is bool
    )


def rule(accepts: Callable[[Any], bool], allowed: str) -> Callable[[Any], str]:
    """Return a function that says what a value must be, or returns an empty text if it is."""
    return lambda value: "" if accepts(value) else f"must be {allowed}"


def whole(allowed: str, low: int, high: int) -> Callable[[Any], str]:
    """Return the rule of whole numbers in a range."""
    return rule(lambda x: type(x) is int and low <= x <= high, allowed)


ANY = rule(lambda _: True, "")
FLAG = rule(lambda x: type(x) is bool, "true or false")
WHOLE = rule(lambda x: type(x) is int, "a whole number")
LIKELIEST = whole(f"a whole number from 0 to {MAX_LIKELIEST}", 0, MAX_LIKELIEST)
RULES = {
    "model": ANY,
    "user": ANY,
    "max_tokens": WHOLE,
    "max_completion_tokens": WHOLE,
    # Dividing logits by less than 0.001 can overflow float32.
    "temperature": rule(
        lambda x: type(x) in (int, float) and (x == 0 or 1e-3 <= x <= 100),
        "0, or from 0.001 to 100",
    ),
    "top_p": rule(lambda x: type(x) in (int, float) and 0 < x <= 1, "above 0 and at most 1"),
    "top_k": whole("from 0 (all) to 2147483647", 0, 2**31 - 1),
    "seed": whole("a 64-bit integer", -(2**63), 2**63 - 1),
    "n": whole("a whole number above 0", 1, 2**63),
    "stop": rule(_are_stops, f"a text or a list of up to {MAX_STOPS} texts, none of them empty"),
    "stream": FLAG,
    "stream_options": rule(_are_stream_options, "an object with include_usage, true or false"),
    "return_token_ids": FLAG,
}
COMPLETION_RULES = RULES | {
    "prompt": rule(
        lambda x: isinstance(x, str | list), "a text, a list of texts, ids, or a list of ids' lists"
    ),
    "echo": FLAG,
    "logprobs": LIKELIEST,
}
CHAT_RULES = RULES | {
    "messages": rule(lambda x: isinstance(x, list) and x != [], "a list of one or more messages"),
    "tools": rule(
        lambda x: isinstance(x, list) and len(x) <= MAX_TOOLS and all(map(_is_tool, x)),
        f"a list of up to {MAX_TOOLS} objects with type 'function' and an object function: a name "
        "of 1 to 64 letters, digits, '_', '-' or '.', and perhaps a JSON schema as parameters",
    ),
    "logprobs": FLAG,
    "top_logprobs": LIKELIEST,
}


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Served model, with the limits of requests."""

    name: str
    config: ServeConfig
    limits: Any  # longest_prompt, max_response_tokens and context, such as of an engine
    tokenizer: Tokenizer
    rule: SamplingRule

    def budget(self, field: str, budget: int | None, prompt: int) -> int:
        """Return the maximum tokens of a response; raise `RequestError` for a wrong `budget`."""
        limit = self.limits.max_response_tokens
        largest = min(limit, self.limits.context - prompt)
        if budget is None:
            default = self.config.default_max_tokens
            return largest if default == AUTO else min(default, largest)
        need(0 < budget <= limit, field, budget, f"from 1 to {limit}")
        if budget > largest:
            allowed = f"at most {largest} after a prompt of {prompt} tokens"
            raise RequestError(f"{field} = {budget}: must be {allowed}", field, code=TOO_LONG)
        return budget

    def prompt_ids(self, field: str, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raise `RequestError` if it is too long or wrong."""
        param = field.partition("[")[0]
        limit = self.limits.longest_prompt
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode_prompt(prompt)
            except ConfigError as error:
                raise RequestError(f"{field}: {error}", param) from None
        if not 0 < len(prompt) <= limit:
            message = f"{field} has {len(prompt)} tokens: must have from 1 to {limit}"
            raise RequestError(message, param, code=TOO_LONG if prompt else None)
        vocab = min(self.tokenizer.backend.get_vocab_size(), self.tokenizer.rows)
        for index, token in enumerate(prompt):
            if not 0 <= token < vocab:
                message = f"{field}[{index}] = {token}: must be from 0 to {vocab - 1}"
                raise RequestError(message, param)
        return prompt


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Validated request."""

    prompts: list[list[int]]
    budgets: list[int]  # maximum tokens of a response to each prompt; 0: only echo is requested
    rule: SamplingRule
    likeliest: int | None  # number of likeliest tokens next to each log-prob; None: no log-probs
    stop: Stop
    tools: list[dict[str, Any]]
    include_usage: bool
    n: int = 1
    seed: int | None = None
    stream: bool = False
    echo: bool = False
    return_token_ids: bool = False

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


def read_request(body: bytes, model: ServedModel, *, chat: bool) -> CompletionRequest:
    """Return the request of a body. Raise `RequestError` if it is wrong or not served."""
    fields = _read_fields(body, CHAT_RULES if chat else COMPLETION_RULES)
    if fields.get("model") != model.name:
        message = f"model = {reprlib.repr(fields.get('model'))}: there is only {model.name!r}"
        raise RequestError(message, "model", 404, "model_not_found")
    stop = fields.get("stop", [])
    options = fields.get("stream_options")
    is_streamed = fields.get("stream", False)
    need(options is None or is_streamed, "stream_options", options, "omitted unless stream is true")
    tools = [] if fields.get("tool_choice") == "none" else fields.get("tools", [])
    prompts = _chat_prompt(fields, model, tools) if chat else _prompts(fields, model)
    n = fields.get("n", 1)
    if n * len(prompts) > model.config.waiting:
        count = f"n = {n} responses to {len(prompts)} prompts"
        allowed = f"at most {model.config.waiting} responses per request"
        raise RequestError(f"{count}: {allowed}", "n" if n > 1 else "prompt")
    rule = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
    if "seed" in fields:
        fields["seed"] %= 2**64  # the scheduler takes no negative ones
    same = ("n", "seed", "stream", "echo", "return_token_ids")
    return CompletionRequest(
        prompts=prompts,
        budgets=_budgets(fields, model, prompts),
        rule=model.rule._replace(**rule),
        likeliest=_likeliest(fields, chat),
        stop=Stop((stop,) if isinstance(stop, str) else tuple(stop)),
        tools=tools,
        include_usage=bool(options and options["include_usage"]),
        **{name: fields[name] for name in same if name in fields},
    )


def parse_json(body: bytes) -> Any:
    """Return the value of a body. Raise `RequestError` if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _read_fields(body: bytes, rules: dict[str, Callable[[Any], str]]) -> dict[str, Any]:
    """Return the non-null fields of a body. Raise `RequestError` for a wrong or unserved one."""
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if name in NEUTRAL_VALUES:
            neutral = (fields.get("n", 1),) if name == "best_of" else NEUTRAL_VALUES[name]
            # JSON's 0 and false are equal in Python.
            if value not in [x for x in neutral if (type(x) is bool) == (type(value) is bool)]:
                raise RequestError(f"{name} = {reprlib.repr(value)}: is not served", name)
        elif name not in rules:
            raise RequestError(f"{reprlib.repr(name)}: there is no such field here", name)
        elif problem := rules[name](value):
            raise RequestError(f"{name} = {reprlib.repr(value)}: {problem}", name)
    return fields


def _budgets(fields: dict[str, Any], model: ServedModel, prompts: list[list[int]]) -> list[int]:
    """Return the maximum tokens of a response to each prompt; 0 only with `echo`."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if len(names) > 1:
        raise RequestError(f"{' and '.join(names)}: only one of them is allowed", names[1])
    field = names[0] if names else ""
    budget = fields.get(field)
    if budget == 0 and fields.get("echo"):
        return [0] * len(prompts)
    return [model.budget(field, budget, len(ids)) for ids in prompts]


def _likeliest(fields: dict[str, Any], chat: bool) -> int | None:
    """Return the number of likeliest tokens next to each log-prob; None: no log-probs."""
    if not chat:
        return fields.get("logprobs")
    count = fields.get("top_logprobs", 0)
    has_logprobs = fields.get("logprobs", False)
    need(has_logprobs or not count, "top_logprobs", count, "omitted unless logprobs is true")
    return count if has_logprobs else None


def _prompts(fields: dict[str, Any], model: ServedModel) -> list[list[int]]:
    """Return the ids of all prompts, from a text, texts, ids, or lists of ids."""
    if "prompt" not in fields:
        raise RequestError("prompt is missing", "prompt")
    value = fields["prompt"]
    is_single = isinstance(value, str) or _is_ids(value)
    checked = []
    for index, prompt in enumerate([value] if is_single else value):
        field = "prompt" if is_single else f"prompt[{index}]"
        if not (_is_text(prompt) or _is_ids(prompt)):
            message = f"{field} = {reprlib.repr(prompt)}: must be text (valid Unicode) or ids"
            raise RequestError(message, "prompt")
        checked.append(model.prompt_ids(field, prompt))
    return checked


# --- chats ----------------------------------------------------------------------------------------


def _chat_prompt(fields: dict[str, Any], model: ServedModel, tools: list) -> list[list[int]]:
    """Return the ids of the prompt that the chat template renders from messages and tools."""
    chat = model.tokenizer.chat
    if chat is None:
        message = "messages: the model's folder has no chat template; use /v1/completions"
        raise RequestError(message, "messages")
    if "messages" not in fields:
        raise RequestError("messages is missing", "messages")
    messages = [_message(f"messages[{i}]", m, chat) for i, m in enumerate(fields["messages"])]
    try:
        text = chat.render(messages, "messages", tools=tools)
    except ConfigError as error:
        raise RequestError(str(error), error.field or "messages") from None
    return [model.prompt_ids("messages", text)]


def _message(field: str, value: Any, chat: ChatTemplate) -> dict[str, Any]:
    """Return a message for the chat template. Raise `RequestError` naming `field`."""
    role: Any = value.get("role") if isinstance(value, dict) else None
    need(role in list(ROLES), f"{field}.role", role, "one of " + ", ".join(ROLES))
    message = {key: item for key, item in value.items() if item is not None and key != "refusal"}
    for key in message:
        if key not in ("role", "content", *ROLES[role]) and not chat.reads(key):
            raise RequestError(f"{field}: {reprlib.repr(key)}: is not served", field)
    try:
        return read_message(message)
    except ValueError as error:
        raise RequestError(f"{field}: {error}", field) from None
