"""How responses are sampled: the section `sampler` of an experiment."""

import dataclasses

from dapo_jax.experiment.settings import setting


@dataclasses.dataclass
class Sampler:
    """The decoding engine."""

    slots: int = setting(128, "Responses decoded side by side.")
    burst_tokens: int = setting(8, "Tokens decoded per call, between two looks from the host.")
    first_window_tokens: int = setting(
        64, "Cache length to begin with; it doubles as responses outgrow it."
    )
    max_response_tokens: int = setting(96, "Budget of a response; beyond it, it is truncated.")
    temperature: float = setting(1.0, "Softmax temperature while training.")
    top_p: float = setting(1.0, "Nucleus share; below 1 the importance ratio is biased.")
    top_k: int = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")
    cache: str = setting(
        "auto",
        "Of keys and values: 'slots' (of one length), 'paged' (pages as responses grow, a prompt's "
        "shared by its responses) or 'auto': paged on TPU, slots elsewhere, where they are faster.",
    )
    page_tokens: int = setting(128, "Tokens in a page of the paged cache; a multiple of 8 on TPU.")
    pages: int = setting(
        0,
        "Pages of all devices; where they run out the youngest response is drawn again later. 0: "
        "as many as the slots need at full length.",
    )
    prefill_prompts: int = setting(
        8, "Prompts prefilled by one call; rounded up to a multiple of data x fsdp."
    )
    prefill_chunk_tokens: int = setting(
        2048, "Longer prompts are prefilled in pieces of so many tokens; 0: never."
    )
    cache_dtype: str = setting(
        "auto",
        "Of keys and values: 'auto' (compute.dtype) or 'int8' with a scale per token and head: the "
        "mismatch shows in kl_sampler_trainer, and algorithm.importance_cap corrects it.",
    )
