"""Notices about data and settings before training, and about the end of a run."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import Lengths, PromptStream
from dapo_jax.data.sources import Source
from dapo_jax.run.console import Progress
from dapo_jax.run.scores import (
    HELDOUT,
    Response,
    reads_answers,
    reward_leads,
    settings_of,
)
from dapo_jax.types.errors import require

MANY_WITHOUT_ANSWER = 0.5
MAX_CUT = 0.5  # fraction of prompts that may be truncated; beyond it a run learns little
LIMIT_MULTIPLE = 64  # advised limits are multiples of this many tokens
SHOWN_CHARACTERS = 200
MAX_LOOKED_AT = 1000  # problems of a source


def fitting(config: Config, lengths: Sequence[Lengths]) -> str:
    """Return the advised `data.max_prompt_tokens`, and `packing.row_tokens` if it must grow."""
    limit = -(-max(length.longest for length in lengths) // LIMIT_MULTIPLE) * LIMIT_MULTIPLE
    row = limit + config.sampler.max_response_tokens
    needs_rows = config.rows().row_tokens < row
    return f"{limit}{f' with packing.row_tokens of at least {row}' * needs_rows}"


def check_lengths(config: Config, lengths: Sequence[Lengths]) -> None:
    """Raise `ConfigError` if too many prompts would be truncated."""
    if config.data.overlong_prompts != "truncate_left":
        return
    for source in lengths:
        allowed = (
            f"larger, such as {fitting(config, lengths)}: too many prompts would lose their "
            f"beginning ({source.describe()}); data.overlong_prompts = 'drop' skips them instead"
        )
        fits = source.over <= MAX_CUT * source.looked_at
        require(fits, "data.max_prompt_tokens", config.data.max_prompt_tokens, allowed)


def setting_warnings(config: Config, sources: Sequence[Source]) -> Iterator[str]:
    """Yield warnings about settings that are allowed but probably mistakes."""
    warmup, steps = config.optimizer.warmup_steps, config.total_steps
    if warmup > steps:
        yield (
            f"optimizer.warmup_steps = {warmup} is longer than the run: the learning rate reaches "
            f"only {steps / warmup:.0%} of its peak (total_steps = {steps})"
        )
    is_corrected = config.algorithm.importance_cap or config.algorithm.old_logprobs != "recompute"
    for field in () if is_corrected else ("cache_dtype", "weights_dtype"):
        if (dtype := getattr(config.sampler, field)) != "auto":
            yield (
                f"sampler.{field} = {dtype!r} samples from a slightly different policy than the "
                "trained one, and algorithm.importance_cap = 0 does not correct for it; see "
                "kl_sampler_trainer"
            )
    converses = config.environment.name or config.environment.tools
    if config.algorithm.observation_nll_coefficient and not converses:
        yield (
            "algorithm.observation_nll_coefficient has no effect without environment.name or "
            "environment.tools: nothing is observed"
        )
    files = [source for source in sources if not source.generated]
    functions = [name for name in config.reward.weights() if ":" in name]
    problems = [problem for source in files for problem in source.sample(MAX_LOOKED_AT)]
    if files and functions and not any(problem.answer for problem in problems):
        yield (
            f"no problem of {', '.join(source.name for source in files)} has an answer: "
            f"{', '.join(functions)} receives answer = '' (config.data.fields names the field)"
        )


def announce_data(config: Config, prompts: PromptStream, progress: Progress) -> None:
    """Print the training and held-out data, bad rows, and prompts over the limit."""
    progress.say(escape(f"data: {prompts.describe()}"))
    for complaint in prompts.warnings():
        progress.warn(escape(complaint))
    problems = sum(len(source.problems) for source in prompts.sources)
    if problems and config.rollout.prompts_per_step > problems:
        progress.warn(
            f"config.rollout.prompts_per_step = {config.rollout.prompts_per_step} is larger than "
            f"the number of problems, {problems:,}: a step repeats some of them"
        )
    lengths = [length for length in prompts.lengths if length.over]
    truncates = config.data.overlong_prompts == "truncate_left"
    is_many = any(length.over > MAX_CUT * length.looked_at for length in lengths)
    if lengths and truncates or is_many:
        limit = config.data.max_prompt_tokens
        effect = "lose their beginning" if truncates else "are dropped"
        progress.alarm(
            f"prompts of more than {limit} tokens {effect}",
            "; ".join(length.describe() for length in lengths)
            + f". config.data.max_prompt_tokens = {limit} is the limit; all prompts that were "
            f"checked fit under {fitting(config, lengths)}.",
        )


def describe_scores(scores: dict[str, Any], reward_leads: bool) -> str:
    """Return held-out scores as a text; empty without any.

    Args:
        scores: metrics of an evaluation, or a summary with scores before and after a run.
        reward_leads: True if no response counts as correct, so that accuracy is left out.
    """
    texts = []
    for name in HELDOUT[reward_leads:]:
        keys = [f"heldout_{name}{when}" for when in ("", "_before", "_after")]
        values = [scores[key] for key in keys if key in scores]
        if values and None not in values:
            change = " -> ".join(f"{value:.3f}" for value in values)
            texts.append(f"{name.replace('_', ' ')} {change}")
    return f"held-out {', '.join(texts)}" if texts else ""


def announce_end(config: Config, summary: dict[str, Any], longer: bool, progress: Progress) -> None:
    """Print that a run is finished, with the commands that can follow.

    Args:
        summary: content of summary.json.
        longer: True if the run can resume with a larger `total_steps`.
    """
    steps = summary["steps"]
    change = describe_scores(summary, reward_leads(settings_of(config)))
    scores = f", {change}" if change else ""
    resume = [f"  resume      --config.total_steps={2 * steps}"] if longer else []
    for line in (
        f"{config.run_dir} is already finished: {steps} steps{scores}",
        *resume,
        "  start over  --config.run_dir=FOLDER",
        "  evaluate    dapo-jax evaluate, with the same arguments",
        f"  export      dapo-jax export {config.run_dir} --out=FOLDER",
    ):
        progress.say(escape(line))


def warn_about_answers(responses: list[Response], config: Config, progress: Progress) -> None:
    """Warn before training if the verifier finds no answer in most responses."""
    responses = [response for response in responses if response.failure is None]
    without = [response for response in responses if response.extracted is None]
    if not reads_answers(settings_of(config)) or len(without) <= MANY_WITHOUT_ANSWER * len(
        responses
    ):
        return
    causes = (
        f"config.data.template = {config.data.template!r} asks for one form of answer and "
        f"config.reward.verifier = {config.reward.verifier!r} reads another"
    )
    if truncated := sum(response.truncated for response in without):
        causes += (
            f", or responses end too early: {truncated / len(without):.0%} of these were cut off "
            f"by config.sampler.max_response_tokens = {config.sampler.max_response_tokens}"
        )
    progress.alarm(
        f"no answer was found in {len(without) / len(responses):.0%} of {len(responses)} responses",
        f"{causes}. Nothing is learned from such responses. One ends in:"
        f"\n\n{without[0].response[-SHOWN_CHARACTERS:]!r}",
    )
