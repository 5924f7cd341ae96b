"""The settings that say how and where a policy is computed, and never what."""

from dapo_jax.runtime.settings import section, setting


@section
class Compute:
    """How the policy is computed."""

    dtype: str = setting("float32", "'float32' or 'bfloat16'; parameters stay float32.")
    remat: str = setting(
        "none",
        "What backward recomputes of a layer: 'none'; 'full'; all but 'dots' (matrix products) or "
        "'attention' (not plain); 'offload' is full, its layer inputs in the host's memory.",
    )
    scan_unroll: int = setting(
        1, "Layers per iteration of the training scan; more: faster on CPU, slower to compile."
    )
    attention: str = setting(
        "auto",
        "In training: 'plain' (short rows), 'blocked', 'splash' (TPU; row_tokens a multiple of "
        "128) or 'auto' (by platform and row_tokens).",
    )
    logprob_chunk_tokens: int = setting(
        2048, "Tokens, per device, whose logits exist at the same time."
    )


@section
class Packing:
    """Rows that responses are packed into, prompt included."""

    row_tokens: int = setting(
        256,
        "Length of a row; at least prompt + response budget. 'auto' (-1): that, or two to four "
        "times that, whichever a batch fills best; each length compiles once. Not for examples.",
    )
    rows_per_microbatch: int = setting(
        16,
        "Rows whose gradient is taken at once, all devices; fewer where 'auto' makes them longer.",
    )


@section
class OneMesh:
    """Device mesh. Batch is split over data x fsdp, weights over fsdp x tensor."""

    data: int = setting(1, "Replicas of the weights; -1 takes what is left.")
    fsdp: int = setting(-1, "Shards of weights and optimizer along embed; -1 takes what is left.")
    tensor: int = setting(1, "Shards along heads, mlp and vocabulary.")
    decode_tensor: int = setting(
        1, "More shards of that kind while decoding; in training the same devices join fsdp."
    )


@section
class Mesh(OneMesh):
    """Device mesh, or one to learn and one to sample. Batch is split over data x fsdp, weights over
    fsdp x tensor."""

    sampler_share: float = setting(
        0.0,
        "Of each process's devices the share that only samples, in a mesh of its own: as many "
        "tensor shards, the rest replicas. 0: the same devices sample and learn.",
    )
