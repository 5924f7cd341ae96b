"""Requests to OpenAI's API: their fields, and the prompts and budgets that they ask for."""

import reprlib
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from dapo_jax.extras.serve.fields import (
    Fields,
    RequestError,
    as_setting,
    must,
    need,
    read_fields,
)
from dapo_jax.extras.serve.logprobs import MAX_LIKELIEST
from dapo_jax.extras.serve.policy import ServedModel
from dapo_jax.runtime.tool_calls import NAME, read_message
from dapo_jax.types import rules
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SamplingRule

MAX_STOPS = 4
MAX_TOOLS = 128
ROLES = rules.Choices(("system", "user", "assistant", "tool"))
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")  # and what the template reads
TOOL = "{'type': 'function', 'function': {'name': NAME, 'parameters': SCHEMA}}, or without a schema"

Temperature = Annotated[float, as_setting(rules.Temperature)]
TopP = Annotated[float, as_setting(rules.Share)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**64)]
Likeliest = Annotated[int, Field(ge=0, le=MAX_LIKELIEST)]


def _is_tool(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    name, schema = function.get("name"), function.get("parameters", {})
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and isinstance(schema, dict)


class StreamOptions(Fields):
    """OpenAI's options of a stream."""

    include_usage: bool = False


class CommonFields(Fields):
    """Fields of both kinds of completions."""

    neutral: ClassVar = {  # of fields that are not served
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        **dict.fromkeys(("logit_bias", "metadata"), ({},)),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
    }
    model: Any = None
    user: Any = None
    max_tokens: int | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1)] = 1
    best_of: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class Completion(CommonFields):
    """Fields of `/v1/completions`."""

    prompt: Any
    echo: bool = False
    logprobs: Likeliest | None = None


class Chat(CommonFields):
    """Fields of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Annotated[
        list[Annotated[dict[str, Any], must(_is_tool, TOOL)]], Field(max_length=MAX_TOOLS)
    ] = []
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Likeliest = 0


class CompletionRequest(NamedTuple):
    """Validated request."""

    fields: CommonFields
    prompts: list[list[int]]
    budgets: list[int]  # maximum tokens of a response to each prompt; 0: only its echo is requested
    rule: SamplingRule
    likeliest: int | None  # tokens next to each log-prob; None: no log-probs
    tools: list[dict[str, Any]]
    echo: bool

    @property
    def choices(self) -> int:
        return self.fields.n * len(self.prompts)


def read_request(
    kind: type[Completion] | type[Chat], body: bytes, model: ServedModel
) -> CompletionRequest:
    """Return the request of a body. Raise `RequestError` if it is wrong or not served."""
    config, fields = model.config, read_fields(kind, body)
    if fields.model != config.served_name:
        message = f"model = {reprlib.repr(fields.model)}: there is only {config.served_name!r}"
        raise RequestError(message, "model", 404, "model_not_found")
    options, n = fields.stream_options, fields.n
    need(not options or fields.stream, "stream_options", options, "omitted unless stream is true")
    need(fields.best_of in (None, n), "best_of", fields.best_of, f"n, {n}")
    if isinstance(fields, Chat):
        tools, echo = fields.tools if fields.tool_choice == "auto" else [], False
        likeliest = fields.top_logprobs if fields.logprobs else None
        fits = fields.logprobs or not fields.top_logprobs
        need(fits, "top_logprobs", fields.top_logprobs, "omitted unless logprobs is true")
        prompts = [_chat_prompt(fields.messages, model, tools)]
    else:
        tools, echo, likeliest = [], fields.echo, fields.logprobs
        prompts = _prompts(fields.prompt, model)
    if n * len(prompts) > config.waiting:
        count = f"n = {n} responses to {len(prompts)} prompts"
        allowed = f"at most {config.waiting} responses per request"
        raise RequestError(f"{count}: {allowed}", "n" if n > 1 else "prompt")
    budget, default = fields.max_tokens, config.default_max_tokens
    only_echo = echo and budget == 0
    budgets = [
        0 if only_echo else model.budget("max_tokens", budget, len(ids), default) for ids in prompts
    ]
    own = {name: getattr(fields, name) for name in SamplingRule._fields}
    rule = [getattr(config, name) if value is None else value for name, value in own.items()]
    return CompletionRequest(fields, prompts, budgets, SamplingRule(*rule), likeliest, tools, echo)


def _prompts(value: Any, model: ServedModel) -> list[list[int]]:
    """Return the ids of all prompts, from a text, texts, ids, or lists of ids."""

    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int for item in value)  # no bool

    is_single = is_ids(value) or not isinstance(value, list)
    prompts = []
    for index, prompt in enumerate([value] if is_single else value):
        field = "prompt" if is_single else f"prompt[{index}]"
        fits = isinstance(prompt, str) or is_ids(prompt)
        need(fits, field, prompt, "text, ids, or a list of these")
        prompts.append(model.prompt_ids(field, prompt))
    return prompts


def _chat_prompt(messages: list[dict[str, Any]], model: ServedModel, tools: list) -> list[int]:
    """Return the ids of the prompt that the chat template renders from messages and tools."""
    chat, read = model.tokenizer.chat, []
    if chat is None:
        message = "messages: the model's folder has no chat template; use /v1/completions"
        raise RequestError(message, "messages")
    try:
        for index, message in enumerate(messages):
            field = f"messages[{index}]"
            message = read_message(message)
            message.pop("refusal", None)  # as in this server's answers
            need(ROLES(message["role"]), f"{field}.role", message["role"], str(ROLES))
            for key, value in message.items():
                fits = key in MESSAGE_FIELDS or chat.reads(key)
                need(fits, f"{field}.{key}", value, "left out: the template ignores it")
            read.append(message)
        text = chat.render(read, "messages", tools=tools)
    except ConfigError as error:
        raise RequestError(str(error), error.field or "messages") from None
    except ValueError as error:
        raise RequestError(f"{field}: {error}", field) from None
    return model.prompt_ids("messages", text)
