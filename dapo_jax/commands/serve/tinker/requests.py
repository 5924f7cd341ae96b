"""Parsing and validation of requests to Tinker's API."""

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from dapo_jax.commands.serve.errors import RequestError
from dapo_jax.commands.serve.logprobs import MAX_LIKELIEST
from dapo_jax.commands.serve.tinker.losses import CLIP_HIGH, CLIP_LOW, CROSS_ENTROPY, OPTIONS
from dapo_jax.commands.serve.tinker.messages import FLOAT32, INT64, MESSAGES
from dapo_jax.structs import SamplingRule

REQUIRED: Any = object()
MAX_NUMBER = 2**53
MAX_COLUMNS = 1024  # targets of a position
MAX_TARGETS = 1 << 24  # of a request
MAX_SAMPLES = 1024
MAX_STOPS = 16
ATTENTION, MLP = ("query", "key", "value", "out"), ("gate", "up", "down")
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
PER_POSITION = {CLIP_LOW, CLIP_HIGH}  # options that may also be sent for each position


class Rule(NamedTuple):
    """Values that a field may have; null counts as missing."""

    accepts: Callable[[Any], bool]
    allowed: str
    default: Any = REQUIRED


def whole(low: int, high: int, default: Any = REQUIRED) -> Rule:
    allowed = f"a whole number from {low} to {high}"
    return Rule(lambda x: type(x) is int and low <= x <= high, allowed, default)


def number(low: float, high: float, default: Any = REQUIRED) -> Rule:
    allowed = f"a number from {low:g} to {high:g}"
    return Rule(lambda x: type(x) in (int, float) and low <= x <= high, allowed, default)


def flag(default: bool) -> Rule:
    return Rule(lambda x: type(x) is bool, "true or false", default)


def only(value: Any, allowed: str = "left out: this server does not support it") -> Rule:
    return Rule(lambda x: x == value, allowed, value)


def optional(rule: Rule, default: Any = None) -> Rule:
    return rule._replace(default=default)


TEXT = Rule(lambda x: isinstance(x, str) and len(x) <= 1000, "a text of up to 1000 characters")
OBJECT = Rule(lambda x: isinstance(x, dict), "an object")
# Identifiers are also names of files.
_IS_NAME = re.compile(r"\w[\w.:-]{0,199}", re.ASCII).fullmatch
NAME = Rule(lambda x: isinstance(x, str) and _IS_NAME(x) is not None, "letters, digits, _, - or .:")
IDS = Rule(lambda x: isinstance(x, list) and all(type(i) is int for i in x), "a list of token ids")
NUMBER = whole(1, MAX_NUMBER)
LIKELIEST = whole(0, MAX_LIKELIEST, 0)
BELOW_1 = math.nextafter(1, 0)
OPTIMIZER = only({"type": "adamw"}, "of type 'adamw'")
# Fields of the requests and their parts; others are ignored.
OF_MODEL = {"model_id": NAME, "seq_id": NUMBER}
CREATE = {
    "session_id": NAME,
    "model_seq_id": whole(0, MAX_NUMBER),
    "base_model": TEXT,
    "lora_config": optional(OBJECT),
    "user_metadata": optional(OBJECT),
    "optimizer_config": OPTIMIZER,
}
LORA = {
    "rank": whole(0, 1024),
    "seed": whole(0, 2**63 - 1, None),
    "train_attn": flag(True),
    "train_mlp": flag(True),
}
LOAD = {
    "model_id": optional(NAME),
    "seq_id": optional(NUMBER),
    "session_id": optional(NAME),
    "model_seq_id": whole(0, MAX_NUMBER, None),
    "base_model": optional(TEXT),
    "path": TEXT,
    "optimizer": flag(False),
    "user_metadata": optional(OBJECT),
    "optimizer_config": OPTIMIZER,
}
SAVE = {
    "path": optional(NAME),
    "sampling_session_seq_id": whole(0, MAX_NUMBER, None),
    "ttl_seconds": whole(1, 2**31, None),
    "overwrite": flag(False),
    "user_metadata": optional(OBJECT),
    "age_encryption_recipients": only(None),
}
STEP = {"adam_params": OBJECT, "optimizer_params": only(None)}
ADAM = {
    "learning_rate": number(0, 1e6, 1e-4),
    "beta1": number(0, BELOW_1, 0.9),
    "beta2": number(0, BELOW_1, 0.95),
    "eps": number(0, 1, 1e-12),
    "weight_decay": number(0, 1e6, 0.0),
    "grad_clip_norm": number(-1e15, 1e15, 0.0),
}
SAMPLE = {
    "num_samples": whole(1, MAX_SAMPLES, 1),
    "prompt": OBJECT,
    "sampling_params": OBJECT,
    "prompt_logprobs": flag(False),
    "topk_prompt_logprobs": LIKELIEST,
    "topk_sample_logprobs": LIKELIEST,
    "prompt_logprobs_last_n": whole(1, MAX_NUMBER, None),
    "target_prompt_logprobs": only(None),
    "prompt_alt_tokens_k": only(0),
    "record_stability_info": only(False),
}
SAMPLING = {
    "seed": whole(-(2**63), 2**63 - 1, None),
    "temperature": Rule(
        lambda x: type(x) in (int, float) and (x == 0 or 1e-3 <= x <= 100),
        "0, or from 0.001 to 100",
        1.0,
    ),
    "top_k": whole(-1, 2**31 - 1, -1),
    "top_p": number(1e-9, 1, 1.0),
    "stop": Rule(lambda x: isinstance(x, str | list), "a text, or a list of texts or tokens", None),
}


def need(fits: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `RequestError` for a wrong value."""
    if not fits:
        raise RequestError(f"{field} = {reprlib.repr(value)}: must be {allowed}", field)


def read(values: Any, rules: Mapping[str, Rule], prefix: str = "") -> SimpleNamespace:
    """Return the fields of a JSON object, or of a body, by their rules."""
    if isinstance(values, bytes):
        try:
            values = json.loads(values or b"{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from None
    need(isinstance(values, dict), prefix.rstrip(".") or "the body", values, "a JSON object")
    fields = {}
    for name, rule in rules.items():
        value = values.get(name)
        if value is None and rule.default is REQUIRED:
            raise RequestError(f"{prefix}{name} is missing", name)
        need(value is None or rule.accepts(value), f"{prefix}{name}", value, rule.allowed)
        fields[name] = rule.default if value is None else value
    return SimpleNamespace(**fields)


# --- models ---------------------------------------------------------------------------------------


class ModelShape(NamedTuple):
    """Trained parameters of a model: adapters of a rank, or all parameters (rank 0)."""

    rank: int
    targets: tuple[str, ...]


def read_shape(config: dict[str, Any] | None) -> tuple[ModelShape, int | None]:
    """Return the parameters that a `lora_config` asks for (None: all), and their seed."""
    lora = read(config or {"rank": 0}, LORA, "lora_config.")
    targets = ATTENTION * lora.train_attn + MLP * lora.train_mlp
    allowed = "true, or train_attn: the head has no adapter"
    need(not lora.rank or bool(targets), "lora_config.train_mlp", False, allowed)
    return ModelShape(lora.rank, targets if lora.rank else ()), lora.seed


class Limits(NamedTuple):
    """Vocabulary, and maximum tokens of a prompt, a response, and both together."""

    vocab: int
    prompt: int
    response: int
    context: int


class AdamParams(NamedTuple):
    """Adam's parameters of a step, without the learning rate."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0 or less: not clipped


def read_adam(body: bytes) -> tuple[float, AdamParams]:
    """Return the learning rate and the other parameters of an `optim_step`."""
    fields = vars(read(read(body, STEP).adam_params, ADAM, "adam_params."))
    return fields.pop("learning_rate"), AdamParams(**fields)


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Datum:
    """A sequence with K targets at each position, and the other inputs of its loss, [n] each."""

    tokens: np.ndarray  # [n] int32
    targets: np.ndarray  # [n, K] int32
    weights: np.ndarray  # [n, K] float32
    inputs: Mapping[str, np.ndarray]
    shape: tuple[int, ...]  # of the targets that the client sent


class LossRequest(NamedTuple):
    """A `forward` or `forward_backward`."""

    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


def parse_loss_message(body: bytes) -> Any:
    """Return the binary message of a `forward_backward`."""
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None


def read_loss_request(body: bytes, limits: Limits) -> LossRequest:
    """Return a validated request."""
    message = parse_loss_message(body)
    loss = message.loss_fn
    need(loss in OPTIONS, "loss_fn", loss, f"one of {', '.join(OPTIONS)}")
    options = dict(OPTIONS[loss])
    for option in message.loss_fn_config_v2:
        field, value = f"loss_fn_config.{option.key}", option.value.text or option.value.number
        allowed = f"left out: {loss} takes {', '.join(options) or 'nothing'}"
        need(option.key in options, field, value, allowed)
        fits = isinstance(value, float) and 0 <= value < math.inf
        need(fits, field, value, "a number from 0")
        options[option.key] = value
    need(len(message.data) > 0, "data", [], "one or more data")
    data: list[Datum] = []
    rows = columns = 0
    for index, item in enumerate(message.data):
        data.append(_read_datum(item, f"data[{index}]", loss, limits))
        rows, width = rows + len(data[-1].tokens), data[-1].targets.shape[1]
        columns = max(columns, width)
        allowed = f"at most {MAX_TARGETS}: targets of all positions, the widest one counts"
        need(rows * columns <= MAX_TARGETS, "data", rows * columns, allowed)
    return LossRequest(data, loss, options, message.forward_only)


def _read_datum(message: Any, name: str, loss: str, limits: Limits) -> Datum:
    """Return a validated datum."""
    tokens = _read_tokens(message.model_input, f"{name}.model_input", limits)
    inputs, arrays = _loss_inputs(loss), {}
    for item in message.loss_fn_inputs:
        field = f"{name}.loss_fn_inputs.{item.key}"
        need(item.key in inputs, field, "...", f"left out: {loss} takes {', '.join(inputs)}")
        arrays[item.key] = _read_tensor(item.value, field, len(tokens))
    name += ".loss_fn_inputs"
    for key in (key for key, is_needed in inputs.items() if is_needed and key not in arrays):
        raise RequestError(f"{name}.{key} is missing", key)
    targets = arrays.pop("target_tokens")
    shape, field = targets.shape, f"{name}.target_tokens"
    fits = targets.dtype.kind == "i" and not _outside(targets, limits.vocab)
    need(fits, field, "...", f"whole numbers from 0 to {limits.vocab - 1}")
    fits = targets.ndim == 1 or loss == CROSS_ENTROPY
    need(fits, field, shape, f"of shape ({len(tokens)},) with {loss}")
    arrays.setdefault("weights", np.ones(shape, np.float32))
    for key, array in arrays.items():
        allowed = f"of the shape of target_tokens, {shape}"
        need(array.shape == shape, f"{name}.{key}", array.shape, allowed)
        need(bool(np.isfinite(array).all()), f"{name}.{key}", "...", "finite numbers")
    arrays = {key: array.astype(np.float32) for key, array in arrays.items()}
    columns = (len(tokens), -1)
    weights = arrays.pop("weights").reshape(columns)
    return Datum(tokens, targets.reshape(columns).astype(np.int32), weights, arrays, shape)


def _loss_inputs(loss: str) -> dict[str, bool]:
    """Return the inputs of a loss function, each with True if it must be sent."""
    if loss == CROSS_ENTROPY:
        return {"target_tokens": True, "weights": False}
    inputs = {"target_tokens": True, "logprobs": True, "advantages": True}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = True
    return inputs | dict.fromkeys(PER_POSITION & {*OPTIONS[loss]}, False)


def _outside(tokens: np.ndarray, vocab: int) -> bool:
    return tokens.size > 0 and bool(tokens.min() < 0 or tokens.max() >= vocab)


def _read_tokens(chunks: Any, field: str, limits: Limits) -> np.ndarray:
    """Return the tokens of a model input of a message; other chunks than text are rejected."""
    parts = [np.zeros(0, np.int32)]
    for chunk in chunks:
        kind = "an image" if chunk.image else "another chunk"
        need(chunk.HasField("encoded_text"), field, kind, "tokens: this server reads text only")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), field))
    return _check_tokens(np.concatenate(parts), field, limits.vocab, limits.context)


def _check_tokens(tokens: np.ndarray, field: str, vocab: int, max_tokens: int) -> np.ndarray:
    """Return tokens of the vocabulary. Raise `RequestError` for others, too many, or none."""
    if not 0 < len(tokens) <= max_tokens:
        raise RequestError(f"{field} has {len(tokens)} tokens: must have 1 to {max_tokens}", field)
    if _outside(tokens, vocab):
        wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
        raise RequestError(f"{field} has token {wrong}: must be from 0 to {vocab - 1}", field)
    return tokens


def _array(data: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    allowed = f"a multiple of {dtype.itemsize} bytes"
    need(len(data) % dtype.itemsize == 0, field, f"{len(data)} bytes", allowed)
    return np.frombuffer(data, dtype)


def _read_tensor(message: Any, field: str, rows: int) -> np.ndarray:
    """Return a tensor [rows] or [rows, K]; a sparse one is filled up with 0."""
    need(message.dtype in DTYPES, f"{field}.dtype", message.dtype, "float32 or int64")
    dtype = DTYPES[message.dtype]
    csr = message.sparse_csr if message.HasField("sparse_csr") else None
    values = _array(message.dense if csr is None else csr.values, dtype, field)
    shape = tuple(message.shape) or (len(values),)
    fits = len(shape) in (1, 2) and shape[0] == rows
    fits = fits and (len(shape) == 1 or 0 < shape[-1] <= MAX_COLUMNS)
    allowed = f"({rows},) or ({rows}, K), K from 1 to {MAX_COLUMNS}"
    need(fits, f"{field}.shape", shape, allowed)
    if csr is None:
        allowed = f"as many as its shape {shape} has"
        need(len(values) == math.prod(shape), field, f"{len(values)} numbers", allowed)
        return values.reshape(shape)
    starts = _array(csr.crow_indices, DTYPES[INT64], field)
    columns = _array(csr.col_indices, DTYPES[INT64], field)
    fits = len(shape) == 2 and len(starts) == rows + 1 and len(columns) == len(values)
    fits = (
        fits and starts[0] == 0 and starts[-1] == len(values) and bool((np.diff(starts) >= 0).all())
    )
    fits = fits and not _outside(columns, shape[-1])
    need(fits, f"{field}.sparse_csr", "...", f"row starts and columns of a matrix {shape}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), columns] = values
    return dense


# --- sampling -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """Validated `asample`."""

    prompt: np.ndarray  # [n] int32
    samples: int
    budget: int  # maximum tokens of a response
    rule: SamplingRule
    seed: int | None
    stop_texts: tuple[str, ...]
    stop_ids: frozenset[int] | None  # besides the model's; None: nothing ends a response
    likeliest: int  # per sampled token
    prompt_logprobs: int | None  # likeliest per prompt token; None: no log-probs of the prompt
    scored: int  # number of last prompt tokens that have log-probs


def read_sample_request(body: bytes, limits: Limits) -> SampleRequest:
    """Return a validated request."""
    fields = read(body, SAMPLE)
    prompt = _read_prompt(fields.prompt, limits)
    longest = min(limits.response, limits.context - len(prompt))
    rules = SAMPLING | {"max_tokens": whole(1, longest, longest)}
    params = read(fields.sampling_params, rules, "sampling_params.")
    texts, ids = _read_stop(params.stop)
    top = fields.topk_prompt_logprobs
    return SampleRequest(
        prompt,
        fields.num_samples,
        params.max_tokens,
        SamplingRule(float(params.temperature), float(params.top_p), max(0, params.top_k)),
        params.seed,
        texts,
        ids,
        fields.topk_sample_logprobs,
        top if fields.prompt_logprobs or top else None,
        fields.prompt_logprobs_last_n or len(prompt),
    )


def _read_prompt(prompt: Any, limits: Limits) -> np.ndarray:
    chunks = read(prompt, {"chunks": Rule(lambda x: isinstance(x, list), "a list")}, "prompt.")
    tokens: list[int] = []
    for index, chunk in enumerate(chunks.chunks):
        prefix = f"prompt.chunks[{index}]."
        read(chunk, {"type": only("encoded_text", "encoded_text: tokens only")}, prefix)
        tokens += read(chunk, {"tokens": IDS}, prefix).tokens
    clipped = np.array([min(max(token, -1), limits.vocab) for token in tokens], np.int32)
    return _check_tokens(clipped, "prompt", limits.vocab, limits.prompt)


def _read_stop(stop: Any) -> tuple[tuple[str, ...], frozenset[Any] | None]:
    """Return texts that end a response, and tokens that do besides those of the model."""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return (), frozenset()
    if stops == []:
        return (), None
    if len(stops) <= MAX_STOPS and IDS.accepts(stops):
        return (), frozenset(stops)
    are_texts = all(isinstance(item, str) and 0 < len(item) <= 200 for item in stops)
    fits = len(stops) <= MAX_STOPS and are_texts
    need(fits, "sampling_params.stop", stop, f"up to {MAX_STOPS} texts or tokens")
    return tuple(stops), frozenset()
