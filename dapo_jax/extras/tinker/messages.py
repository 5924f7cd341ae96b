"""Binary messages of Tinker's API: the protobuf fields that this server reads and writes.

A map is declared as its repeated entries, and an enum as a whole number: both have the same bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "dapo_jax.tinker"
CONTENT_TYPE = "application/x-protobuf"
FLOAT32, INT64 = 1, 2  # of tensors
STOPPED, TRUNCATED = 0, 1  # why a response ended
MASKED_LOGPROB = -99_999.0  # with token 0: no likeliest token at this position
# Message: number, name and type of each field; * is a list.
FIELDS = {
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": (
        "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs"
    ),
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "NamedTensor": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields NamedTensor*, 3 num_datums int64",
    "Metric": "1 key string, 2 value double",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics Metric*"
    ),
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "LossInput": "1 key string, 2 value Tensor",
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs LossInput*",
    "LossValue": "1 number double, 2 text string",
    "LossOption": "1 key string, 2 value LossValue",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 6 forward_only bool, "
        "7 loss_fn_config_v2 LossOption*"
    ),
}


def _declare() -> dict[str, Any]:
    """Return the message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="dapo_jax/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, field, kind = text.split()
            label = "LABEL_REPEATED" if kind.endswith("*") else "LABEL_OPTIONAL"
            declared: Any = message.field.add(name=field, number=int(number), label=label)
            kind = kind.removesuffix("*")
            if kind in FIELDS:
                declared.type_name = f".{PACKAGE}.{kind}"
            else:
                declared.type = f"TYPE_{kind.upper()}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in FIELDS}


MESSAGES = _declare()


def forward_backward_output(
    logprobs: Sequence[np.ndarray], shapes: Sequence[Sequence[int]], metrics: Mapping[str, float]
) -> bytes:
    """Return the response to `forward_backward`: log-probs of each datum's targets, metrics."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for values, shape in zip(logprobs, shapes, strict=True):
        data = np.asarray(values, np.float32).tobytes()
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        tensor = record.fields.add(key="logprobs").value
        tensor.data, tensor.dtype = data, FLOAT32
        tensor.offsets = np.array([0, len(data)], np.int64).tobytes()
        tensor.trailing_shape.extend(shape[1:])
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    return output.SerializeToString()


def topk_logprobs(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> Any:
    """Return the likeliest tokens at each position; an empty row is masked."""
    tokens = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), MASKED_LOGPROB, np.float32)
    for at, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            tokens[at, column], logprobs[at, column] = token, logprob
    arrays = {"token_ids": tokens.tobytes(), "logprobs": logprobs.tobytes()}
    return MESSAGES["TopkLogprobs"](**arrays, k=k, length=len(rows))
