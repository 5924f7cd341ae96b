"""Requests to OpenAI's API: their fields, and the prompts and budgets that they ask for."""

import itertools
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from dapo_jax.extras.serve.fields import Fields, RequestError, must, need, read_fields
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

Temperature = Annotated[float, must(get_args(rules.Temperature)[1])]
TopP = Annotated[float, must(get_args(rules.Share)[1])]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**64)]
Likeliest = Annotated[int, Field(ge=0, le=MAX_LIKELIEST)]


def _is_tool(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    name, schema = function.get("name"), function.get("parameters", {})
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and isinstance(schema, dict)


def _is_prompt(value: Any) -> bool:
    has_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return isinstance(value, str) or bool(has_ids)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) and not _is_prompt(value) else [value]


class StreamOptions(Fields):
    """OpenAI's options of a stream."""

    include_usage: bool = False


class CommonFields(Fields):
    """Fields of both kinds of completions."""

    neutral: ClassVar = {  # of fields that are not served
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        **dict.fromkeys(("logit_bias", "metadata"), ({},)),
        "best_of": (1,),
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
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class Completion(CommonFields):
    """Fields of `/v1/completions`."""

    prompt: Annotated[
        list[Annotated[Any, must(_is_prompt, "text or token ids")]],
        Field(min_length=1),
        BeforeValidator(_as_list),
    ]
    echo: bool = False
    likeliest: Likeliest | None = Field(None, validation_alias="logprobs")
    offered: ClassVar = []

    def encode(self, model: ServedModel) -> list[list[int]]:
        """Return the ids of all prompts. Raise `RequestError`."""
        return [model.prompt_ids(f"prompt[{i}]", prompt) for i, prompt in enumerate(self.prompt)]


class Chat(CommonFields):
    """Fields of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Annotated[
        list[Annotated[dict[str, Any], must(_is_tool, TOOL)]], Field(max_length=MAX_TOOLS)
    ] = []
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    echo: ClassVar = False

    @property
    def offered(self) -> list[dict[str, Any]]:
        return self.tools if self.tool_choice == "auto" else []

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def encode(self, model: ServedModel) -> list[list[int]]:
        """Return the ids of the prompt that the chat template renders. Raise `RequestError`."""
        chat, read, field = model.tokenizer.chat, [], "messages"
        if chat is None:
            missing = "the model's folder has no chat template; use /v1/completions"
            raise RequestError(f"{field}: {missing}", field)
        try:
            for index, sent in enumerate(self.messages):
                field = f"messages[{index}]"
                message = read_message(sent)
                message.pop("refusal", None)  # as in this server's answers
                need(ROLES(message["role"]), f"{field}.role", message["role"], str(ROLES))
                for key, value in message.items():
                    fits = key in MESSAGE_FIELDS or chat.reads(key)
                    need(fits, f"{field}.{key}", value, "left out: the template ignores it")
                read.append(message)
            text = chat.render(read, "messages", tools=self.offered)
        except ConfigError as error:
            raise RequestError(str(error), error.field or "messages") from None
        except ValueError as error:
            raise RequestError(f"{field}: {error}", field) from None
        return [model.prompt_ids("messages", text)]


class CompletionRequest(NamedTuple):
    """Validated request."""

    fields: Completion | Chat
    prompts: list[tuple[list[int], int]]  # each with its responses' budget; 0: its echo alone
    rule: SamplingRule

    @property
    def choices(self) -> int:
        return self.fields.n * len(self.prompts)


def read_request(
    kind: type[Completion] | type[Chat], body: bytes, model: ServedModel
) -> CompletionRequest:
    """Return the request of a body. Raise `RequestError` if it is wrong or not served."""
    config, fields = model.config, read_fields(kind, body)
    model.check_name(fields.model)
    options, n = fields.stream_options, fields.n
    need(not options or fields.stream, "stream_options", options, "omitted unless stream is true")
    if isinstance(fields, Chat):
        fits = fields.logprobs or not fields.top_logprobs
        need(fits, "top_logprobs", fields.top_logprobs, "omitted unless logprobs is true")
    encoded = fields.encode(model)
    if n * len(encoded) > config.waiting:
        count = f"n = {n} responses to {len(encoded)} prompts"
        allowed = f"at most {config.waiting} responses per request"
        raise RequestError(f"{count}: {allowed}", "n" if n > 1 else "prompt")
    budget, default = fields.max_tokens, config.default_max_tokens
    budgets = (model.budget("max_tokens", budget, len(ids), default) for ids in encoded)
    if fields.echo and budget == 0:
        budgets = itertools.repeat(0)
    sent = {name: getattr(fields, name) for name in SamplingRule._fields}
    rule = [getattr(config, name) if value is None else value for name, value in sent.items()]
    return CompletionRequest(fields, list(zip(encoded, budgets, strict=False)), SamplingRule(*rule))
