"""From the body of an HTTP request to what is asked of the policy; what is wrong is refused.

The fields are those of OpenAI's protocol. One that is not served is refused by its name, unless its
value asks for nothing.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.generator import Asked, Limits
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
# Fields that are not served, with the values by which they ask for nothing (null always does).
ASK_FOR_NOTHING = {
    "best_of": (),  # and n
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
    """A request that is refused.

    Attributes:
        param: the field that is wrong.
        status: of HTTP.
        code: what programs know the error by.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True)
class Served:
    """What requests may ask for.

    Attributes:
        name: of the model.
        rule: how responses are drawn where a request does not say.
    """

    name: str
    tokenizer: Tokenizer
    limits: Limits
    rule: SamplingRule


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that can be answered.

    Attributes:
        prompts: their ids; each gets `n` responses.
        stop: strings that end a response and are left out of it.
        include_usage: a last chunk of the stream counts tokens.
    """

    prompts: list[list[int]]
    n: int
    budget: int
    rule: SamplingRule
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool

    def asked(self) -> list[Asked]:
        """Prompt by prompt, its `n` responses one after the other."""
        every = [ids for ids in self.prompts for _ in range(self.n)]
        return [
            Asked(ids, self.budget, Draws(self.rule, self.seed, number))
            for number, ids in enumerate(every)
        ]


def _refuse(field: str, value: Any, allowed: str) -> NoReturn:
    raise BadRequest(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> TypeGuard[str]:
    """Half a surrogate pair is what JSON can say and no tokenizer can read."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def parse(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null. Raises `BadRequest` for one that is no object."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        found = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def read_request(body: bytes, served: Served, *, chat: bool) -> Request:
    """What a body asks for. Raises `BadRequest` for what can't be answered."""
    fields = parse(body)
    _check_names(fields, chat)
    model = fields.get("model")
    if model is None:
        raise BadRequest(f"model is missing: must be {served.name!r}", "model")
    if model != served.name:
        message = f"model = {reprlib.repr(model)}: there is only {served.name!r}"
        raise BadRequest(message, "model", 404, "model_not_found")

    def take(name: str, default: Any, right: Callable[[Any], bool], allowed: str) -> Any:
        value = fields.get(name, default)
        return value if name not in fields or right(value) else _refuse(name, value, allowed)

    rule = SamplingRule(
        # Logits divided by less would leave float32.
        take(
            "temperature",
            served.rule.temperature,
            lambda x: _is_number(x) and (x == 0 or 1e-3 <= x <= 100),
            "0, or from 0.001 to 100",
        ),
        take(
            "top_p",
            served.rule.top_p,
            lambda x: _is_number(x) and 0 < x <= 1,
            "above 0 and at most 1",
        ),
        take(
            "top_k",
            served.rule.top_k,
            lambda x: _is_whole(x) and 0 <= x < 2**31,
            "from 0 (all) to 2147483647",
        ),
    )
    seed = take("seed", None, lambda x: _is_whole(x) and -(2**63) <= x < 2**63, "of 64 bits")
    stream = take("stream", False, lambda x: type(x) is bool, "true or false")
    n = take("n", 1, lambda x: _is_whole(x) and x > 0, "a whole number above 0")
    prompts = _messages(fields, served) if chat else _prompts(fields, served)
    if n * len(prompts) > served.limits.waiting:
        what = f"n = {n} responses to {len(prompts)} prompts"
        most = f"at most {served.limits.waiting} responses are drawn for one request"
        raise BadRequest(f"{what}: {most}", "n" if n > 1 else "prompt")
    return Request(
        prompts=prompts,
        n=n,
        budget=_budget(fields, served.limits),
        rule=rule,
        seed=None if seed is None else seed % 2**64,
        stop=_stops(fields.get("stop", [])),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
    )


def _check_names(fields: dict[str, Any], chat: bool) -> None:
    other = "prompt" if chat else "messages"
    for name, value in fields.items():
        if name in ASK_FOR_NOTHING:
            nothing = (fields.get("n", 1),) if name == "best_of" else ASK_FOR_NOTHING[name]
            # `logprobs` of 0 asks for something, and is equal to False.
            alike = [one for one in nothing if isinstance(one, bool) == isinstance(value, bool)]
            if value not in alike:
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


def _stops(found: Any) -> list[str]:
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(map(_is_text, stops)):
        _refuse("stop", found, f"a text or a list of up to {MOST_STOPS} texts")
    if "" in stops:
        _refuse("stop", found, "of texts that are not empty")
    return stops


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    wanted = options.get("include_usage", False) if isinstance(options, dict) else None
    if type(wanted) is not bool or set(options) - {"include_usage"}:
        _refuse("stream_options", options, "of include_usage, true or false")
    if not stream:
        _refuse("stream_options", options, "left out where stream is not true")
    return wanted


def _prompts(fields: dict[str, Any], served: Served) -> list[list[int]]:
    """Ids of every prompt: a text, texts, ids, or lists of ids."""
    found = fields.get("prompt")
    if found is None:
        raise BadRequest("prompt is missing", "prompt")
    one = isinstance(found, str) or (isinstance(found, list) and all(map(_is_whole, found)))
    prompts = [found] if one else found
    if not isinstance(prompts, list):
        _refuse("prompt", found, "a text, a list of texts, ids, or a list of lists of ids")
    if len(prompts) > served.limits.waiting:
        message = f"prompt has {len(prompts)} prompts: at most {served.limits.waiting} at once"
        raise BadRequest(message, "prompt")
    return [
        _ids("prompt" if one else f"prompt[{place}]", "prompt", prompt, served)
        for place, prompt in enumerate(prompts)
    ]


def _ids(name: str, field: str, prompt: Any, served: Served) -> list[int]:
    if isinstance(prompt, list) and all(map(_is_whole, prompt)):
        ids = prompt
    elif _is_text(prompt):
        if problem := served.limits.text_problem(name, prompt):
            raise BadRequest(problem, field, code=TOO_LONG)
        ids = served.tokenizer.encode_prompt(prompt)
    else:
        message = f"{name} = {reprlib.repr(prompt)}: must be text (valid Unicode) or a list of ids"
        raise BadRequest(message, field)
    if problem := served.limits.ids_problem(name, ids):
        long = len(ids) > served.limits.prompt_tokens
        raise BadRequest(problem, field, code=TOO_LONG if long else None)
    return ids


def _messages(fields: dict[str, Any], served: Served) -> list[list[int]]:
    """Ids of the one prompt that the model's chat template makes of the messages."""
    found = fields.get("messages")
    if served.tokenizer.chat is None:
        raise BadRequest(
            "messages: the model's folder has no chat template; /v1/completions is served",
            "messages",
        )
    if not isinstance(found, list) or not found:
        _refuse("messages", found, "a list of one or more messages")
    messages = [_message(f"messages[{place}]", one) for place, one in enumerate(found)]
    try:
        text = served.tokenizer.chat.render(messages, "messages")
    except ConfigError as error:
        raise BadRequest(str(error), "messages") from None
    return [_ids("messages", "messages", text, served)]


def _message(name: str, found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        _refuse(name, found, "an object")
    found = {key: value for key, value in found.items() if value is not None}
    for key in found:
        if key not in ("role", "content"):
            raise BadRequest(f"{name}: {reprlib.repr(key)}: is not served", name)
    if found.get("role") not in ROLES:
        _refuse(f"{name}.role", found.get("role"), "one of " + ", ".join(ROLES))
    content = found.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(_is_text(part.get("text")) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not _is_text(content):
        _refuse(f"{name}.content", content, "text, or a list of parts of type 'text'")
    return {"role": found["role"], "content": content}
