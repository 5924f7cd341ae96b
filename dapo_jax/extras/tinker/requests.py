"""Parsing and validation of requests to Tinker's API."""

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from scipy.sparse import csr_array  # a dependency of jax

from dapo_jax.extras.serve.errors import RequestError, need
from dapo_jax.extras.serve.requests import FLAG, LIKELIEST, RULES, parse_json, rule, whole
from dapo_jax.extras.tinker.losses import CLIP_HIGH, CLIP_LOW, CROSS_ENTROPY, OPTIONS
from dapo_jax.extras.tinker.messages import FLOAT32, INT64, MESSAGES

MAX_COLUMNS = 1024  # targets of a position
MAX_TARGETS = 1 << 24  # of a request
MAX_STOPS = 16
ATTENTION, MLP = ("query", "key", "value", "out"), ("gate", "up", "down")
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}

Rules = Mapping[str, Callable[[Any], str]]  # what a field must be; empty text: it is


def _numbers(low: float, high: float) -> Callable[[Any], str]:
    allowed = f"a number from {low:g} to {high:g}"
    return rule(lambda x: type(x) in (int, float) and low <= x <= high, allowed)


def _is_stop(stop: Any) -> bool:
    stops = stop if isinstance(stop, list) else [stop]
    is_part = (type(x) is int or isinstance(x, str) and 0 < len(x) <= 200 for x in stops)
    return len(stops) <= MAX_STOPS and all(is_part)


# Identifiers are also names of files.
_is_name = re.compile(r"\w[\w.:-]{0,199}", re.ASCII).fullmatch
TEXT = rule(lambda x: isinstance(x, str) and len(x) <= 1000, "a text of up to 1000 characters")
NAME = rule(lambda x: isinstance(x, str) and bool(_is_name(x)), "letters, digits, _, -, . or :")
OBJECT = rule(lambda x: isinstance(x, dict), "an object")
COUNT = whole(f"a whole number from 0 to {2**53}", 0, 2**53)
POSITIVE = whole(f"a whole number from 1 to {2**31}", 1, 2**31)
TOKENS = rule(
    lambda x: isinstance(x, list) and all(type(i) is int and abs(i) < 2**31 for i in x),
    "a list of token ids",
)
UNSERVED = rule(lambda x: not x, "left out: this server does not support it")
# Fields of all requests; fields that have no effect here are ignored.
FIELDS: Rules = {
    **dict.fromkeys(("sdk_version", "base_model", "model_path", "tinker_path", "path"), TEXT),
    **dict.fromkeys(("session_id", "model_id", "sampling_session_id", "request_id"), NAME),
    **dict.fromkeys(("seq_id", "model_seq_id", "sampling_session_seq_id"), COUNT),
    **dict.fromkeys(("lora_config", "user_metadata", "adam_params"), OBJECT),
    **dict.fromkeys(("prompt", "sampling_params"), OBJECT),
    **dict.fromkeys(("optimizer", "overwrite", "prompt_logprobs"), FLAG),
    **dict.fromkeys(("ttl_seconds", "prompt_logprobs_last_n"), POSITIVE),
    "num_samples": whole("from 1 to 1024", 1, 1024),
    "topk_prompt_logprobs": LIKELIEST,
    "optimizer_config": rule(lambda x: x == {"type": "adamw"}, "of type 'adamw'"),
    **dict.fromkeys(
        (
            "age_encryption_recipients",
            "optimizer_params",
            "prompt_alt_tokens_k",
            "record_stability_info",
            "target_prompt_logprobs",
            "topk_sample_logprobs",
        ),
        UNSERVED,
    ),
}
LORA: Rules = {
    "rank": whole("a whole number from 0 to 1024", 0, 1024),
    "seed": RULES["seed"],
    "train_attn": FLAG,
    "train_mlp": FLAG,
}
ADAM: Rules = {
    "learning_rate": _numbers(0, 1e6),
    "beta1": _numbers(0, math.nextafter(1, 0)),
    "beta2": _numbers(0, math.nextafter(1, 0)),
    "eps": _numbers(0, 1),
    "weight_decay": _numbers(0, 1e6),
    "grad_clip_norm": _numbers(-1e15, 1e15),
}
SAMPLING: Rules = {
    **{name: RULES[name] for name in ("seed", "temperature", "top_p")},
    "top_k": whole("-1 (all), or up to 2147483647", -1, 2**31 - 1),
    "max_tokens": POSITIVE,
    "stop": rule(_is_stop, f"up to {MAX_STOPS} texts of 1 to 200 characters, or tokens"),
}
CHUNK: Rules = {
    "type": rule(lambda x: x == "encoded_text", "'encoded_text': this server reads text only"),
    "tokens": TOKENS,
}
CHUNKS: Rules = {"chunks": rule(lambda x: isinstance(x, list), "a list")}


def read(values: Any, *required: str, rules: Rules = FIELDS, prefix: str = "") -> dict[str, Any]:
    """Return the fields with rules that a JSON object, or a body, has; null counts as missing."""
    values = parse_json(values) if isinstance(values, bytes) else values
    need(isinstance(values, dict), prefix.rstrip(".") or "the body", values, "a JSON object")
    fields = {name: values[name] for name in rules if values.get(name) is not None}
    for name, value in fields.items():
        if problem := rules[name](value):
            raise RequestError(f"{prefix}{name} = {reprlib.repr(value)}: {problem}", name)
    for name in required:
        if name not in fields:
            raise RequestError(f"{prefix}{name} is missing", name)
    return fields


# --- models ---------------------------------------------------------------------------------------


class ModelShape(NamedTuple):
    """Trained parameters of a model: adapters of a rank, or all parameters (rank 0)."""

    rank: int
    targets: tuple[str, ...]


def read_shape(config: dict[str, Any] | None) -> tuple[ModelShape, int | None]:
    """Return the parameters that a `lora_config` asks for (None: all), and their seed."""
    lora = read(config or {"rank": 0}, "rank", rules=LORA, prefix="lora_config.")
    targets = ATTENTION * lora.get("train_attn", True) + MLP * lora.get("train_mlp", True)
    allowed = "true, or train_attn: the head has no adapter"
    need(not lora["rank"] or bool(targets), "lora_config.train_mlp", False, allowed)
    return ModelShape(lora["rank"], targets if lora["rank"] else ()), lora.get("seed")


class Limits(NamedTuple):
    """Vocabulary, end tokens, and maximum tokens of a prompt, a response, and both together."""

    vocab: int
    end_ids: tuple[int, ...]
    longest_prompt: int
    max_response_tokens: int
    context: int
    stable_reinforce: str = ""  # the loss that is computed for it


class AdamParams(NamedTuple):
    """Adam's parameters of a step, with the defaults of the service."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 or less: not clipped


def read_adam(fields: dict[str, Any]) -> AdamParams:
    """Return the parameters of an `optim_step`."""
    return AdamParams(**read(fields["adam_params"], rules=ADAM, prefix="adam_params."))


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Datum:
    """A sequence with K targets at each position, and all inputs of its loss by name."""

    tokens: np.ndarray  # [n] int32
    inputs: Mapping[str, np.ndarray]  # [n, K]; options included
    shape: tuple[int, ...]  # of the targets that the client sent


class LossRequest(NamedTuple):
    """A `forward` or `forward_backward`."""

    data: list[Datum]
    loss: str
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
    if loss == "stable_reinforce":
        loss = limits.stable_reinforce or loss
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
    reader = DataReader(loss, options, limits)
    data = [reader.read(item, f"data[{index}]") for index, item in enumerate(message.data)]
    widest = max(datum.inputs["weights"].shape[1] for datum in data)
    size = sum(len(datum.tokens) for datum in data) * widest
    allowed = f"at most {MAX_TARGETS}: targets of all positions, the widest one counts"
    need(size <= MAX_TARGETS, "data", size, allowed)
    return LossRequest(data, loss, message.forward_only)


class DataReader(NamedTuple):
    """Reader of the data of a loss function."""

    loss: str
    options: dict[str, float]
    limits: Limits

    def read(self, message: Any, name: str) -> Datum:
        """Return a validated datum."""
        tokens = self._read_tokens(message.model_input, f"{name}.model_input")
        needed, optional = ("target_tokens",), ("weights",)
        if self.loss != CROSS_ENTROPY:
            needed = ("target_tokens", "logprobs", "advantages")
            needed += ("sequence_ratio_mask",) * (self.loss == "gspo")
            optional = tuple(name for name in self.options if name in (CLIP_LOW, CLIP_HIGH))
        sent, name = (
            {item.key: item.value for item in message.loss_fn_inputs},
            f"{name}.loss_fn_inputs",
        )
        for key in sent:
            allowed = f"left out: {self.loss} takes {', '.join(needed + optional)}"
            need(key in needed + optional, f"{name}.{key}", "...", allowed)
        for key in needed:
            if key not in sent:
                raise RequestError(f"{name}.{key} is missing", key)
        arrays = {key: _read_tensor(sent[key], f"{name}.{key}", len(tokens)) for key in sent}
        targets = arrays["target_tokens"]
        self._check_targets(targets, f"{name}.target_tokens")
        for key, array in arrays.items():
            allowed = f"of the shape of target_tokens, {targets.shape}"
            need(array.shape == targets.shape, f"{name}.{key}", array.shape, allowed)
            need(bool(np.isfinite(array).all()), f"{name}.{key}", "...", "finite numbers")
        defaults = {"weights": 1.0} | self.options
        filled = {key: np.full(targets.shape, value) for key, value in defaults.items()} | arrays
        dtypes = {"target_tokens": np.int32}
        columns = {
            key: array.astype(dtypes.get(key, np.float32)).reshape(len(tokens), -1)
            for key, array in filled.items()
        }
        return Datum(tokens, columns, targets.shape)

    def _read_tokens(self, chunks: Any, field: str) -> np.ndarray:
        """Return the tokens of a model input."""
        parts = [np.zeros(0, np.int32)]
        for chunk in chunks:
            kind = "an image" if chunk.image else "another chunk"
            need(chunk.HasField("encoded_text"), field, kind, "tokens: this server reads text only")
            parts.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), field))
        return check_tokens(np.concatenate(parts), field, self.limits.vocab, self.limits.context)

    def _check_targets(self, targets: np.ndarray, field: str) -> None:
        vocab = self.limits.vocab
        fits = targets.dtype.kind == "i" and not _outside(targets, vocab)
        need(fits, field, "...", f"whole numbers from 0 to {vocab - 1}")
        fits = targets.ndim == 1 or self.loss == CROSS_ENTROPY
        need(fits, field, targets.shape, f"of shape ({len(targets)},) with {self.loss}")


def _outside(tokens: np.ndarray, vocab: int) -> bool:
    return tokens.size > 0 and bool(tokens.min() < 0 or tokens.max() >= vocab)


def check_tokens(tokens: np.ndarray, field: str, vocab: int, max_tokens: int) -> np.ndarray:
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
    columns = _array(csr.col_indices, DTYPES[INT64], field)
    starts = _array(csr.crow_indices, DTYPES[INT64], field)
    try:
        matrix = csr_array((values, columns, starts), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise RequestError(f"{field}.sparse_csr: {error}", field) from None
    return matrix.toarray()
