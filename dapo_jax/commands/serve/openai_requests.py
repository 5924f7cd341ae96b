"""Parser and validator of request bodies of OpenAI's protocol.

A field that is not served is refused by name, unless its value asks for nothing.
"""

import dataclasses
import json
import reprlib
from typing import Any, NoReturn, TypeGuard

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.generator import Limits, ResponseRequest
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.rollout.sampling import SamplingRule
from dapo_jax.runtime.settings import ConfigError

MOST_STOPS = 4
TOO_LONG = "context_length_exceeded"
ROLES = ("system", "user", "assistant")
SERVED = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options n stop "
    "temperature top_p top_k seed user"
).split()
# Fields that are not served, with the values that ask for nothing (null always asks for nothing).
ASK_FOR_NOTHING = {
    "best_of": (),  # and the value of n
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


class BadRequest(Exception):
    """Refusal of a request.

    Attributes:
        param: name of the wrong field.
        status: status code of HTTP.
        code: OpenAI's name of the error, for programs.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Model that is served, with the limits of requests and the default sampling rule."""

    name: str
    tokenizer: Tokenizer
    limits: Limits
    rule: SamplingRule


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Validated request.

    Attributes:
        prompts: ids of the prompts; each gets `n` responses.
        budget: most tokens of a response.
        stop: strings that end a response and are left out of it.
        include_usage: adds a last chunk that counts tokens to the stream.
    """

    prompts: list[list[int]]
    n: int
    budget: int
    rule: SamplingRule
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool

    def responses(self) -> list[ResponseRequest]:
        """Requests for single responses: `n` to the first prompt, then `n` to the next."""
        repeated = [ids for ids in self.prompts for _ in range(self.n)]
        return [
            ResponseRequest(ids, self.budget, Draws(self.rule, self.seed, number))
            for number, ids in enumerate(repeated)
        ]


def _refuse(field: str, value: Any, allowed: str) -> NoReturn:
    raise BadRequest(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> TypeGuard[str]:
    """True for text without lone surrogates, which JSON can hold but no tokenizer can read."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def parse(body: bytes) -> dict[str, Any]:
    """Fields of a body that are not null. Raises `BadRequest` for a body that is no object."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _read_rule(fields: dict[str, Any], default: SamplingRule) -> SamplingRule:
    """Sampling rule of a request; the server's where the request has none."""
    temperature = fields.get("temperature", default.temperature)
    # Logits divided by less than 0.001 would leave float32.
    if not (_is_number(temperature) and (temperature == 0 or 1e-3 <= temperature <= 100)):
        _refuse("temperature", temperature, "0, or from 0.001 to 100")
    top_p = fields.get("top_p", default.top_p)
    if not (_is_number(top_p) and 0 < top_p <= 1):
        _refuse("top_p", top_p, "above 0 and at most 1")
    top_k = fields.get("top_k", default.top_k)
    if not (_is_whole(top_k) and 0 <= top_k < 2**31):
        _refuse("top_k", top_k, "from 0 (all) to 2147483647")
    return SamplingRule(temperature, top_p, top_k)


def read_request(body: bytes, model: ServedModel, *, chat: bool) -> CompletionRequest:
    """Request of a body. Raises `BadRequest` if it is wrong or not served."""
    fields = parse(body)
    _check_names(fields, chat)
    name = fields.get("model")
    if name is None:
        raise BadRequest(f"model is missing: must be {model.name!r}", "model")
    if name != model.name:
        message = f"model = {reprlib.repr(name)}: there is only {model.name!r}"
        raise BadRequest(message, "model", 404, "model_not_found")
    rule = _read_rule(fields, model.rule)
    seed = fields.get("seed")
    if seed is not None and not (_is_whole(seed) and -(2**63) <= seed < 2**63):
        _refuse("seed", seed, "of 64 bits")
    stream, n = fields.get("stream", False), fields.get("n", 1)
    if type(stream) is not bool:
        _refuse("stream", stream, "true or false")
    if not (_is_whole(n) and n > 0):
        _refuse("n", n, "a whole number above 0")
    prompts = _messages(fields, model) if chat else _prompts(fields, model)
    if n * len(prompts) > model.limits.waiting:
        count = f"n = {n} responses to {len(prompts)} prompts"
        most = f"at most {model.limits.waiting} responses are drawn for one request"
        raise BadRequest(f"{count}: {most}", "n" if n > 1 else "prompt")
    return CompletionRequest(
        prompts=prompts,
        n=n,
        budget=_budget(fields, model.limits),
        rule=rule,
        seed=None if seed is None else seed % 2**64,
        stop=_stops(fields.get("stop", [])),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
    )


def _check_names(fields: dict[str, Any], chat: bool) -> None:
    """Raises `BadRequest` for a field that is unknown, or not served and asks for something."""
    other = "prompt" if chat else "messages"
    for name, value in fields.items():
        if name in ASK_FOR_NOTHING:
            nothing = (fields.get("n", 1),) if name == "best_of" else ASK_FOR_NOTHING[name]
            # `logprobs` of 0 asks for something, but equals False.
            same_kind = [no for no in nothing if isinstance(no, bool) == isinstance(value, bool)]
            if value not in same_kind:
                raise BadRequest(f"{name} = {reprlib.repr(value)}: is not served", name)
        elif name == other or name not in SERVED:
            raise BadRequest(f"{reprlib.repr(name)}: there is no such field here", name)


def _budget(fields: dict[str, Any], limits: Limits) -> int:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if not names:
        return limits.response_tokens
    if len(names) > 1:
        raise BadRequest(f"{' and '.join(names)}: must be one of them", names[1])
    budget = fields[names[0]]
    if not _is_whole(budget):
        _refuse(names[0], budget, f"a whole number from 1 to {limits.response_tokens}")
    if problem := limits.budget_problem(names[0], budget):
        raise BadRequest(problem, names[0])
    return budget


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(map(_is_text, stops)):
        _refuse("stop", value, f"a text or a list of up to {MOST_STOPS} texts")
    if "" in stops:
        _refuse("stop", value, "of texts that are not empty")
    return stops


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    include = options.get("include_usage", False) if isinstance(options, dict) else None
    if type(include) is not bool or set(options) - {"include_usage"}:
        _refuse("stream_options", options, "of include_usage, true or false")
    if not stream:
        _refuse("stream_options", options, "left out where stream is not true")
    return include


def _prompts(fields: dict[str, Any], model: ServedModel) -> list[list[int]]:
    """Ids of all prompts, from a text, texts, ids, or lists of ids."""
    value = fields.get("prompt")
    if value is None:
        raise BadRequest("prompt is missing", "prompt")
    single = isinstance(value, str) or (isinstance(value, list) and all(map(_is_whole, value)))
    prompts = [value] if single else value
    if not isinstance(prompts, list):
        _refuse("prompt", value, "a text, a list of texts, ids, or a list of lists of ids")
    if len(prompts) > model.limits.waiting:
        message = f"prompt has {len(prompts)} prompts: at most {model.limits.waiting} at once"
        raise BadRequest(message, "prompt")
    return [
        _ids("prompt" if single else f"prompt[{index}]", "prompt", prompt, model)
        for index, prompt in enumerate(prompts)
    ]


def _ids(name: str, field: str, prompt: Any, model: ServedModel) -> list[int]:
    """Ids of one prompt. Raises `BadRequest` that calls it `name`."""
    if isinstance(prompt, list) and all(map(_is_whole, prompt)):
        ids = prompt
    elif _is_text(prompt):
        if problem := model.limits.text_problem(name, prompt):
            raise BadRequest(problem, field, code=TOO_LONG)
        ids = model.tokenizer.encode_prompt(prompt)
    else:
        message = f"{name} = {reprlib.repr(prompt)}: must be text (valid Unicode) or a list of ids"
        raise BadRequest(message, field)
    if problem := model.limits.ids_problem(name, ids):
        long = len(ids) > model.limits.prompt_tokens
        raise BadRequest(problem, field, code=TOO_LONG if long else None)
    return ids


def _messages(fields: dict[str, Any], model: ServedModel) -> list[list[int]]:
    """Ids of the prompt that the model's chat template makes of the messages."""
    messages, chat = fields.get("messages"), model.tokenizer.chat
    if chat is None:
        missing = "the model's folder has no chat template; /v1/completions is served"
        raise BadRequest(f"messages: {missing}", "messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", messages, "a list of one or more messages")
    try:
        checked = [_message(f"messages[{index}]", item) for index, item in enumerate(messages)]
        text = chat.render(checked, "messages")
    except ConfigError as error:
        raise BadRequest(str(error), "messages") from None
    return [_ids("messages", "messages", text, model)]


def _message(name: str, value: Any) -> dict[str, str]:
    """Role and text of a message. Raises `BadRequest` that calls it `name`."""
    if not isinstance(value, dict):
        _refuse(name, value, "an object")
    message = {key: item for key, item in value.items() if item is not None}
    for key in message:
        if key not in ("role", "content"):
            raise BadRequest(f"{name}: {reprlib.repr(key)}: is not served", name)
    if message.get("role") not in ROLES:
        _refuse(f"{name}.role", message.get("role"), "one of " + ", ".join(ROLES))
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(_is_text(part.get("text")) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not _is_text(content):
        _refuse(f"{name}.content", content, "text, or a list of parts of type 'text'")
    return {"role": message["role"], "content": content}
