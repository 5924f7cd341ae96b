"""Settings of the reward part `judge`: `config.extras.judge`."""

from typing import ClassVar

from dapo_jax.config.settings import Section, setting
from dapo_jax.types.rules import Count, CountOr0, Positive, PositiveOr0, Temperature, Url


class JudgeSettings(Section):
    """A language model behind OpenAI's chat endpoint that grades responses (part `judge`).

    The key is read from the environment variable OPENAI_API_KEY."""

    combinations: ClassVar = """
        reward.parts~judge -> extras.judge.model!=: the judge's name at extras.judge.url
        reward.parts!~judge -> extras.judge.
    """
    url: Url = setting("http://127.0.0.1:8000/v1", "Address of the endpoint, up to /v1.")
    model: str = setting("", "Name of the judge at the endpoint.")
    rubric: str = setting(
        "Does the response solve the problem?",
        "What the score measures, if the row has no column `rubric`.",
    )
    highest: Count = setting(10, "Highest score, which is a reward of 1; the lowest is 0.")
    structured: bool = setting(True, "Ask for JSON by a schema; false for `dapo-jax serve`.")
    temperature: Temperature = setting(0.0, "Softmax temperature of the judge.")
    max_tokens: Count = setting(1024, "Limit of a reply.")
    retries: CountOr0 = setting(3, "Further tries without a reply or score.", may_change=True)
    request_seconds: Positive = setting(120.0, "Limit of a request.", may_change=True)
    concurrency: Count = setting(16, "Requests at a time.", may_change=True)
    cache: str = setting("runs/judge_cache", "Folder of replies; empty: none.", may_change=True)
    input_price: PositiveOr0 = setting(0.0, "Price of 10^6 prompt tokens.", may_change=True)
    output_price: PositiveOr0 = setting(0.0, "Price of 10^6 reply tokens.", may_change=True)
