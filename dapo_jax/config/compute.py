"""Settings of how and where a policy is computed; none decides what is computed."""

from typing import Annotated, Literal

from dapo_jax.runtime.rules import Below1, Count, Dtype, Range
from dapo_jax.runtime.settings import section, setting

SizeOrRest = Annotated[int, Range(above=0, also=-1)]  # -1: what the other sizes leave


@section
class Compute:
    """Numerics of the policy."""

    dtype: Dtype = setting("float32", "'float32' or 'bfloat16'; parameters stay float32.")
    remat: Literal["none", "full", "dots", "attention", "offload"] = setting(
        "none",
        "What backward recomputes of a layer: 'none'; 'full'; all but 'attention' (not plain) or "
        "'dots', which keeps other products too; 'offload' is full, its layer inputs on the host.",
        may_change=True,
    )
    scan_unroll: Count = setting(
        1,
        "Layers per iteration of the training scan; more: faster on CPU, slower to compile.",
        may_change=True,
    )
    attention: Literal["auto", "plain", "blocked", "splash", "triton"] = setting(
        "auto",
        "In training: 'plain' (short rows), 'blocked', 'splash' (TPU; row_tokens a multiple of "
        "128), 'triton' (GPU; the same) or 'auto' (by platform and row_tokens).",
        may_change=True,
    )
    logprob_chunk_tokens: Count = setting(
        2048, "Tokens, per device, whose logits exist at the same time.", may_change=True
    )


@section
class Packing:
    """Rows that responses are packed into, prompt included."""

    row_tokens: int = setting(
        256,
        "Length of a row; at least prompt + response budget. 'auto' (-1): that, or two to four "
        "times that, whichever a batch fills best; each length compiles once. Not for examples.",
        auto=-1,
    )
    rows_per_microbatch: Count = setting(
        16,
        "Rows whose gradient is taken at once, all devices; fewer where 'auto' makes them longer.",
    )


@section
class OneMesh:
    """Device mesh. Batch is split over data x fsdp x expert, weights over fsdp x expert x context x
    tensor."""

    data: SizeOrRest = setting(1, "Replicas of the weights; -1 takes what is left.")
    fsdp: SizeOrRest = setting(
        -1, "Shards of weights and optimizer along embed; -1 takes what is left."
    )
    tensor: Count = setting(1, "Shards along heads, mlp and vocabulary.")
    expert: Count = setting(
        1, "Shards along the experts of a mixture; elsewhere the same devices join fsdp."
    )
    context: Count = setting(
        1,
        "Shards of a row's length in training, for rows that one device can't hold; row_tokens is "
        "a multiple of twice that. While decoding the same devices join fsdp.",
    )
    decode_tensor: Count = setting(
        1, "More shards of that kind while decoding; in training the same devices join fsdp."
    )


@section
class Mesh(OneMesh):
    """Device mesh, or one to learn and one to sample. Batch is split over data x fsdp, weights over
    fsdp x tensor."""

    sampler_share: Below1 = setting(
        0.0,
        "Of each process's devices the share that only samples, in a mesh of its own: as many "
        "tensor shards, the rest replicas. 0: the same devices sample and learn.",
    )
