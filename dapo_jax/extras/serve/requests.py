"""Requests to OpenAI's API: their fields, and the prompts and budgets that they ask for."""

import dataclasses
import reprlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.errors import RequestError, need
from dapo_jax.extras.serve.fields import Fields, as_setting, must, read_fields
from dapo_jax.extras.serve.logprobs import MAX_LIKELIEST
from dapo_jax.extras.serve.settings import AUTO, ServeConfig
from dapo_jax.runtime.tool_calls import NAME, read_message
from dapo_jax.types import rules
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SamplingRule

MAX_STOPS = 4
MAX_TOOLS = 128
TOO_LONG = "context_length_exceeded"
ROLES = ("system", "user", "assistant", "tool")
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


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What requests are read for; `limits` are those of `policy.Limits`."""

    config: ServeConfig
    limits: Any
    tokenizer: Tokenizer

    def budget(self, budget: int | None, prompt: int) -> int:
        """Return the maximum tokens of a response; raise `RequestError` for a wrong `budget`."""
        limit = self.limits.max_response_tokens
        largest = min(limit, self.limits.context - prompt)
        if budget is None:
            default = self.config.default_max_tokens
            return largest if default == AUTO else min(default, largest)
        need(0 < budget <= limit, "max_tokens", budget, f"from 1 to {limit}")
        allowed = f"at most {largest} after a prompt of {prompt} tokens"
        need(budget <= largest, "max_tokens", budget, allowed, TOO_LONG)
        return budget

    def prompt_ids(self, field: str, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raise `RequestError` if it is too long or wrong."""
        limit = self.limits.longest_prompt
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode_prompt(prompt)
            except ConfigError as error:
                raise RequestError(f"{field}: {error}", field) from None
        if not 0 < len(prompt) <= limit:
            message = f"{field} has {len(prompt)} tokens: must have from 1 to {limit}"
            raise RequestError(message, field, code=TOO_LONG if prompt else None)
        vocab = min(self.tokenizer.backend.get_vocab_size(), self.tokenizer.rows)
        for index, token in enumerate(prompt):
            need(0 <= token < vocab, f"{field}[{index}]", token, f"from 0 to {vocab - 1}")
        return prompt


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Validated request.

    Attributes:
        budgets: maximum tokens of a response to each prompt; 0: only its echo is requested.
        likeliest: number of likeliest tokens next to each log-prob; None: no log-probs.
    """

    fields: CommonFields
    prompts: list[list[int]]
    budgets: list[int]
    rule: SamplingRule
    likeliest: int | None
    tools: list[dict[str, Any]]
    echo: bool

    @property
    def choices(self) -> int:
        return self.fields.n * len(self.prompts)


def read_request(body: bytes, model: ServedModel, *, chat: bool) -> CompletionRequest:
    """Return the request of a body. Raise `RequestError` if it is wrong or not served."""
    config, fields = model.config, read_fields(Chat if chat else Completion, body)
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
    budget = fields.max_tokens
    only_echo = echo and budget == 0
    budgets = [0 if only_echo else model.budget(budget, len(ids)) for ids in prompts]
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
    chat = model.tokenizer.chat
    if chat is None:
        message = "messages: the model's folder has no chat template; use /v1/completions"
        raise RequestError(message, "messages")
    read = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        role = message.get("role")
        need(role in ROLES, f"{field}.role", role, f"one of {', '.join(ROLES)}")
        sent = {key: value for key, value in message.items() if value is not None}
        sent.pop("refusal", None)  # as in this server's answers
        for key, value in sent.items():
            fits = key in MESSAGE_FIELDS or chat.reads(key)
            need(fits, f"{field}.{key}", value, "left out: the template ignores it")
        try:
            read.append(read_message(sent))
        except ValueError as error:
            raise RequestError(f"{field}: {error}", field) from None
    try:
        text = chat.render(read, "messages", tools=tools)
    except ConfigError as error:
        raise RequestError(str(error), error.field or "messages") from None
    return model.prompt_ids("messages", text)
