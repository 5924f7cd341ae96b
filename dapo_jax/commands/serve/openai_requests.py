"""Parser and validator of request bodies of OpenAI's protocol.

A field that is not served is refused by name, unless its value asks for nothing.
"""

import dataclasses
import reprlib
from typing import Any

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.generator import Limits, ResponseRequest
from dapo_jax.commands.serve.openai_messages import read_messages
from dapo_jax.commands.serve.request_checks import (
    BadRequest,
    is_number,
    is_text,
    is_whole,
    parse,
    refuse,
)
from dapo_jax.commands.serve.scoring import MAX_LIKELIEST
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.tool_calls import tools_problem
from dapo_jax.structs import SamplingRule

MAX_STOPS = 4
TOO_LONG = "context_length_exceeded"
SERVED = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options n stop "
    "temperature top_p top_k seed user logprobs return_token_ids"
).split()
SERVED_IN_ONE = {"echo": False, "tools": True, "top_logprobs": True}  # True: in chat
# Fields that are not served, with the values that ask for nothing (null always asks for nothing).
ASK_FOR_NOTHING = {
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
        budgets: most tokens of a response to each prompt; 0: only `echo` is asked for.
        stop: strings that end a response and are left out of it.
        include_usage: adds a last chunk that counts tokens to the stream.
        likeliest: number of likeliest tokens beside each log-prob; None: no log-probs.
        echo: the prompt stands before its response.
        return_token_ids: ids of prompts and responses stand beside the text.
        tools: that the model may call.
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
        """Requests for single responses: `n` to the first prompt, then `n` to the next."""
        if not any(self.budgets):
            return []
        repeated = [
            both for both in zip(self.prompts, self.budgets, strict=True) for _ in range(self.n)
        ]
        return [
            ResponseRequest(ids, budget, Draws(self.rule, self.seed, number))
            for number, (ids, budget) in enumerate(repeated)
        ]


def _read_rule(fields: dict[str, Any], default: SamplingRule) -> SamplingRule:
    """Sampling rule of a request; the server's where the request has none."""
    temperature = fields.get("temperature", default.temperature)
    # Logits divided by less than 0.001 would leave float32.
    if not (is_number(temperature) and (temperature == 0 or 1e-3 <= temperature <= 100)):
        refuse("temperature", temperature, "0, or from 0.001 to 100")
    top_p = fields.get("top_p", default.top_p)
    if not (is_number(top_p) and 0 < top_p <= 1):
        refuse("top_p", top_p, "above 0 and at most 1")
    top_k = fields.get("top_k", default.top_k)
    if not (is_whole(top_k) and 0 <= top_k < 2**31):
        refuse("top_k", top_k, "from 0 (all) to 2147483647")
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
    if seed is not None and not (is_whole(seed) and -(2**63) <= seed < 2**63):
        refuse("seed", seed, "of 64 bits")
    stream, n = _flag(fields, "stream"), fields.get("n", 1)
    if not (is_whole(n) and n > 0):
        refuse("n", n, "a whole number above 0")
    tools, likeliest, echo = _tools(fields, model), _likeliest(fields, chat), _flag(fields, "echo")
    prompts = _messages(fields, model, tools) if chat else _prompts(fields, model)
    if n * len(prompts) > model.limits.waiting:
        count = f"n = {n} responses to {len(prompts)} prompts"
        most = f"at most {model.limits.waiting} responses are drawn for one request"
        raise BadRequest(f"{count}: {most}", "n" if n > 1 else "prompt")
    return CompletionRequest(
        prompts=prompts,
        n=n,
        budgets=[_budget(fields, model.limits, ids, echo) for ids in prompts],
        rule=rule,
        seed=None if seed is None else seed % 2**64,
        stop=_stops(fields.get("stop", [])),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        likeliest=likeliest,
        echo=echo,
        return_token_ids=_flag(fields, "return_token_ids"),
        tools=tools,
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
        elif name == other or name not in SERVED and SERVED_IN_ONE.get(name) is not chat:
            raise BadRequest(f"{reprlib.repr(name)}: there is no such field here", name)


def _budget(fields: dict[str, Any], limits: Limits, prompt: list[int], echo: bool) -> int:
    """Most tokens of a response to a prompt; 0 only for `echo`."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if not names:
        return limits.most_response_tokens(len(prompt))
    if len(names) > 1:
        raise BadRequest(f"{' and '.join(names)}: must be one of them", names[1])
    budget = fields[names[0]]
    if not is_whole(budget):
        refuse(names[0], budget, f"a whole number from 1 to {limits.response_tokens}")
    if budget == 0 and echo:
        return 0
    if problem := limits.budget_problem(names[0], budget):
        raise BadRequest(problem, names[0])
    if problem := limits.context_problem(names[0], budget, prompt):
        raise BadRequest(problem, names[0], code=TOO_LONG)
    return budget


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(map(is_text, stops)):
        refuse("stop", value, f"a text or a list of up to {MAX_STOPS} texts")
    if "" in stops:
        refuse("stop", value, "of texts that are not empty")
    return stops


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    include = options.get("include_usage", False) if isinstance(options, dict) else None
    if type(include) is not bool or set(options) - {"include_usage"}:
        refuse("stream_options", options, "of include_usage, true or false")
    if not stream:
        refuse("stream_options", options, "left out where stream is not true")
    return include


def _prompts(fields: dict[str, Any], model: ServedModel) -> list[list[int]]:
    """Ids of all prompts, from a text, texts, ids, or lists of ids."""
    value = fields.get("prompt")
    if value is None:
        raise BadRequest("prompt is missing", "prompt")
    single = isinstance(value, str) or (isinstance(value, list) and all(map(is_whole, value)))
    prompts = [value] if single else value
    if not isinstance(prompts, list):
        refuse("prompt", value, "a text, a list of texts, ids, or a list of lists of ids")
    if len(prompts) > model.limits.waiting:
        message = f"prompt has {len(prompts)} prompts: at most {model.limits.waiting} at once"
        raise BadRequest(message, "prompt")
    return [
        _ids("prompt" if single else f"prompt[{index}]", "prompt", prompt, model)
        for index, prompt in enumerate(prompts)
    ]


def _ids(name: str, field: str, prompt: Any, model: ServedModel) -> list[int]:
    """Ids of one prompt. Raises `BadRequest` that calls it `name`."""
    if isinstance(prompt, list) and all(map(is_whole, prompt)):
        ids = prompt
    elif is_text(prompt):
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


def _messages(fields: dict[str, Any], model: ServedModel, tools: list) -> list[list[int]]:
    """Ids of the prompt that the model's chat template makes of the messages and tools."""
    chat = model.tokenizer.chat
    if chat is None:
        missing = "the model's folder has no chat template; /v1/completions is served"
        raise BadRequest(f"messages: {missing}", "messages")
    messages = read_messages(fields.get("messages"))
    try:
        text = chat.render(messages, "messages", tools=tools)
    except ConfigError as error:
        raise BadRequest(str(error), "messages") from None
    return [_ids("messages", "messages", text, model)]


def _tools(fields: dict[str, Any], model: ServedModel) -> list[dict[str, Any]]:
    """Tools that the model may call; none for `tool_choice` 'none'."""
    tools = fields.get("tools", [])
    if problem := tools_problem(tools):
        refuse("tools", tools, problem.removeprefix("must be "))
    chat = model.tokenizer.chat
    if tools and chat is not None and not chat.writes_tools:
        raise BadRequest("tools: the model's chat template writes none", "tools")
    return [] if fields.get("tool_choice") == "none" else tools


def _likeliest(fields: dict[str, Any], chat: bool) -> int | None:
    """Number of likeliest tokens beside each log-prob; None: no log-probs are asked for."""
    logprobs, field = fields.get("logprobs"), "top_logprobs" if chat else "logprobs"
    if chat:
        if type(fields.get("logprobs", False)) is not bool:
            refuse("logprobs", logprobs, "true or false")
        if not logprobs:
            if fields.get(field):
                refuse(field, fields[field], "left out where logprobs is not true")
            return None
    elif logprobs is None or logprobs is False:
        return None
    count = fields.get(field, 0)
    if not (is_whole(count) and 0 <= count <= MAX_LIKELIEST):
        refuse(field, count, f"a whole number from 0 to {MAX_LIKELIEST}")
    return count


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if type(value) is not bool:
        refuse(name, value, "true or false")
    return value
