"""Parsing and validation of requests to Tinker's API."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BeforeValidator, ConfigDict, Field
from scipy.sparse import csr_array  # a dependency of jax

from dapo_jax.extras.serve.fields import Fields, RequestError, must, need, read_fields
from dapo_jax.extras.serve.policy import ServedModel
from dapo_jax.extras.serve.requests import Likeliest, Seed, Temperature, TopP
from dapo_jax.extras.tinker.losses import CLIP_HIGH, CLIP_LOW, CROSS_ENTROPY, OPTIONS
from dapo_jax.extras.tinker.messages import pb

MAX_COLUMNS = 1024  # targets of a position
MAX_TARGETS = 1 << 24  # of a request
MAX_STOPS = 16
ATTENTION, MLP = ("query", "key", "value", "out"), ("gate", "up", "down")
INT64 = np.dtype("<i8")
DTYPES = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: INT64}

# Identifiers are also names of files.
is_name = re.compile(r"\w[\w.:-]{0,199}", re.ASCII).fullmatch
Name = Annotated[str, must(is_name, "letters, digits, _, -, . or :")]
Text = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
Magnitude = Annotated[float, Field(ge=0, le=1e6)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Unserved = Annotated[Any, must(lambda value: not value, "left out: it is not supported here")]


class OpenFields(Fields):
    """A JSON object; fields without effect here are ignored."""

    model_config = ConfigDict(extra="ignore")


class Head(OpenFields):
    """Fields of all requests in JSON that are read when they arrive."""

    sdk_version: Text = ""
    base_model: Text = ""
    model_path: Text = ""
    tinker_path: Text = ""
    path: Text = ""
    session_id: Name = ""
    model_id: Name = ""
    sampling_session_id: Name = ""
    request_id: Name = ""
    seq_id: Count = 0
    model_seq_id: Count = 0
    sampling_session_seq_id: Count = 0
    lora_config: Any = None
    adam_params: Any = None
    prompt: Any = None
    sampling_params: Any = None
    optimizer_config: Annotated[Any, must({"type": "adamw"}.__eq__, "of type 'adamw'")] = None
    user_metadata: dict[str, Any] | None = None
    optimizer: bool = False
    overwrite: bool = False
    prompt_logprobs: bool = False
    ttl_seconds: Positive | None = None
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    topk_prompt_logprobs: Likeliest = 0
    prompt_logprobs_last_n: Positive | None = None
    age_encryption_recipients: Unserved = None
    optimizer_params: Unserved = None
    prompt_alt_tokens_k: Unserved = None
    record_stability_info: Unserved = None
    target_prompt_logprobs: Unserved = None
    topk_sample_logprobs: Unserved = None


# --- objects in requests --------------------------------------------------------------------------


class ModelShape(NamedTuple):
    """Trained parameters of a model: adapters of a rank, or all parameters (rank 0)."""

    rank: int
    targets: tuple[str, ...]


class LoraConfig(OpenFields):
    """Parameters to train: adapters, or all (rank 0)."""

    rank: Annotated[int, Field(ge=0, le=1024)]
    seed: Seed | None = None
    train_attn: bool = True
    train_mlp: bool = True

    def shape(self) -> ModelShape:
        """Return the trained parameters. Raise `RequestError` if there are none."""
        targets = ATTENTION * self.train_attn + MLP * self.train_mlp
        allowed = "true, or train_attn: the head has no adapter"
        need(not self.rank or bool(targets), "lora_config.train_mlp", False, allowed)
        return ModelShape(self.rank, targets if self.rank else ())


class AdamParams(OpenFields):
    """Adam's parameters of a step, with the defaults of the service."""

    learning_rate: Magnitude = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-12
    weight_decay: Magnitude = 0.0
    grad_clip_norm: Annotated[float, Field(ge=-1e15, le=1e15)] = 0.0  # 0 or less: not clipped


def _is_stop(stop: Any) -> bool:
    return type(stop) is int or isinstance(stop, str) and 0 < len(stop) <= 200


class SamplingParams(OpenFields):
    """How responses are sampled, and where they end; with an empty `stop` nothing ends them."""

    max_tokens: Positive | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1  # as 0: all
    seed: Seed | None = None
    stop: (
        Annotated[
            list[Annotated[Any, must(_is_stop, "a text of 1 to 200 characters, or a token")]],
            Field(max_length=MAX_STOPS),
            BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
        ]
        | None
    ) = None


class Chunk(OpenFields):
    """Part of a prompt; this server reads text only."""

    type: Literal["encoded_text"]
    tokens: list[Annotated[int, Field(gt=-(2**31), lt=2**31)]]


class ModelInput(OpenFields):
    """Tokens of a prompt, in chunks."""

    chunks: list[Chunk]


class Body(Head):
    """Fields of all requests in JSON, with the objects that are read when a request runs."""

    lora_config: LoraConfig = LoraConfig(rank=0)  # all parameters
    adam_params: AdamParams = AdamParams()
    prompt: ModelInput = ModelInput(chunks=[])
    sampling_params: SamplingParams = SamplingParams()


def read_head(content: bytes, *required: str) -> Head:
    """Return the fields of a request that arrives. Raise `RequestError` if one is missing."""
    head = read_fields(Head, content)
    for name in required:
        if name not in head.model_fields_set:
            raise RequestError(f"{name} is missing", name)
    return head


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Datum:
    """A sequence with K targets at each position, and all inputs of its loss by name."""

    tokens: np.ndarray  # [n] int32
    inputs: Mapping[str, np.ndarray]  # [n, K]; options included
    shape: tuple[int, ...]  # of the targets that the client sent

    @property
    def columns(self) -> int:
        return self.inputs["weights"].shape[1]


class LossRequest(NamedTuple):
    """A `forward` or `forward_backward`."""

    data: list[Datum]
    loss: str
    forward_only: bool


def parse_loss_message(body: bytes) -> Any:
    """Return the binary message of a `forward_backward`."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None


def read_loss_request(body: bytes, model: ServedModel) -> LossRequest:
    """Return a validated request."""
    message = parse_loss_message(body)
    loss = message.loss_fn
    if loss == "stable_reinforce":
        loss = model.config.tinker_stable_reinforce or loss
    need(loss in OPTIONS, "loss_fn", loss, f"one of {', '.join(OPTIONS)}")
    options = dict(OPTIONS[loss])
    for name, sent in message.loss_fn_config_v2.items():
        field, value = f"loss_fn_config.{name}", sent.text or sent.number
        allowed = f"left out: {loss} takes {', '.join(options) or 'nothing'}"
        need(name in options, field, value, allowed)
        fits = isinstance(value, float) and 0 <= value < math.inf
        need(fits, field, value, "a number from 0")
        options[name] = value
    need(len(message.data) > 0, "data", [], "one or more data")
    data = [
        _read_datum(datum, f"data[{index}]", loss, options, model)
        for index, datum in enumerate(message.data)
    ]
    size = sum(len(datum.tokens) for datum in data) * max(datum.columns for datum in data)
    allowed = f"at most {MAX_TARGETS}: targets of all positions, the widest one counts"
    need(size <= MAX_TARGETS, "data", size, allowed)
    return LossRequest(data, loss, message.forward_only)


def _read_datum(
    message: Any, name: str, loss: str, options: dict[str, float], model: ServedModel
) -> Datum:
    """Return a validated datum, with the defaults of inputs that were not sent."""
    field = f"{name}.model_input"
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        need(kind == "encoded_text", field, kind, "encoded_text: this server reads text only")
    sent = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    tokens = _array(sent, np.dtype("<i4"), field)
    model.check_tokens(field, tokens.tolist(), model.context)
    needed, optional = ("target_tokens",), ("weights",)
    if loss != CROSS_ENTROPY:
        needed += ("logprobs", "advantages", *["sequence_ratio_mask"] * (loss == "gspo"))
        optional = tuple(name for name in options if name in (CLIP_LOW, CLIP_HIGH))
    name = f"{name}.loss_fn_inputs"
    arrays = {}
    for key, tensor in message.loss_fn_inputs.items():
        allowed = f"left out: {loss} takes {', '.join(needed + optional)}"
        need(key in needed + optional, f"{name}.{key}", "...", allowed)
        arrays[key] = _read_tensor(tensor, f"{name}.{key}", len(tokens))
    for key in needed:
        if key not in arrays:
            raise RequestError(f"{name}.{key} is missing", key)
    targets, field, vocab = arrays["target_tokens"], f"{name}.target_tokens", model.decoder.vocab
    fits = targets.dtype.kind == "i" and bool(((targets >= 0) & (targets < vocab)).all())
    need(fits, field, "...", f"whole numbers from 0 to {vocab - 1}")
    fits = targets.ndim == 1 or loss == CROSS_ENTROPY
    need(fits, field, targets.shape, f"of shape ({len(targets)},) with {loss}")
    for key, array in arrays.items():
        allowed = f"of the shape of target_tokens, {targets.shape}"
        need(array.shape == targets.shape, f"{name}.{key}", array.shape, allowed)
        need(bool(np.isfinite(array).all()), f"{name}.{key}", "...", "finite numbers")
    inputs = {
        key: np.broadcast_to(np.float32(value), targets.shape).reshape(len(tokens), -1)
        for key, value in ({"weights": 1.0} | options | arrays).items()
    }
    ids = targets.astype(np.int32).reshape(len(tokens), -1)
    return Datum(tokens, inputs | {"target_tokens": ids}, targets.shape)


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
    columns, starts = (_array(x, INT64, field) for x in (csr.col_indices, csr.crow_indices))
    try:
        matrix = csr_array((values, columns, starts), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise RequestError(f"{field}.sparse_csr: {error}", field) from None
    return matrix.toarray()
