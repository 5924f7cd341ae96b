"""Notices before and after training: the data, settings and answers that fit badly, the end."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import Lengths, PromptStream
from dapo_jax.reporting.alerts import READS_ANSWERS, does_apply, settings_of
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.scores import Response

MANY_WITHOUT_ANSWER = 0.5
MAX_CUT = 0.5  # share of prompts that may be cut; beyond it a run learns beside the question
LIMIT_MULTIPLE = 64  # advised limits are a multiple of it, in tokens
SHOWN_CHARACTERS = 200
SPOT_SECONDS = 30.0  # of notice before a spot machine goes, at most
WRITE_RATE = 0.5e9  # bytes a second of a host to a bucket; assumed, nothing was measured


def fitting(config: Config, lengths: Sequence[Lengths]) -> str:
    """Advised `data.max_prompt_tokens`, and `packing.row_tokens` where it has to be raised too."""
    limit = -(-max(length.longest for length in lengths) // LIMIT_MULTIPLE) * LIMIT_MULTIPLE
    row = limit + config.sampler.max_response_tokens
    beside = f" with packing.row_tokens of at least {row}" * (config.rows().row_tokens < row)
    return f"{limit}{beside}"


def announce_data(config: Config, prompts: PromptStream, progress: Progress) -> None:
    """Prints the training and held-out data, their bad rows, and prompts over the limit."""
    progress.say(escape(f"data: {prompts.describe()}"))
    for complaint in prompts.warnings():
        progress.warn(escape(complaint))
    problems = sum(len(source.problems) for source in prompts.sources)
    if problems and config.rollout.prompts_per_step > problems:
        progress.warn(
            f"config.rollout.prompts_per_step = {config.rollout.prompts_per_step} is more than the "
            f"{problems:,} problems there are: a step asks some of them again"
        )
    lengths = [length for length in prompts.lengths if length.over]
    cut = config.data.overlong_prompts == "truncate_left"
    many = any(length.over > MAX_CUT * length.looked_at for length in lengths)
    if not (lengths and cut or many):
        return
    fate = "lose their beginning" if cut else "are dropped"
    progress.alarm(
        f"prompts of more than {config.data.max_prompt_tokens} tokens {fate}",
        "; ".join(length.describe() for length in lengths)
        + f". config.data.max_prompt_tokens = {config.data.max_prompt_tokens} is the limit; "
        f"all that were looked at fit under {fitting(config, lengths)}.",
    )


def saving_seconds(size: float, hosts: int) -> float:
    """Assumed seconds in which all hosts write a checkpoint of `size` bytes to a bucket."""
    return size / hosts / WRITE_RATE


def describe_saving(size: float, hosts: int, every_steps: int, step_seconds: float = 0.0) -> str:
    """Sentence about a checkpoint's time beside a spot machine's notice, and the newest one's age.

    Args:
        size: of a checkpoint, in bytes.
        every_steps: steps between two checkpoints; 0: one at the end.
        step_seconds: of a step, 0 where nobody knows.
    """
    seconds = saving_seconds(size, hosts)
    late = "more" if seconds > SPOT_SECONDS else "less"
    writers = f"{hosts} hosts write" if hosts > 1 else "one host writes"
    text = (
        f"a checkpoint is {size / 1e9:,.1f} GB, which {writers} in "
        f"about {seconds:,.1f} s (assumed: {WRITE_RATE / 1e9:g} GB/s each): {late} than the "
        f"{SPOT_SECONDS:g} s that a spot machine may have left. "
    )
    if not every_steps:
        return text + "Without checkpoint.every_steps such an end may cost the whole run"
    age = f", {every_steps * step_seconds / 60:,.0f} minutes" if step_seconds else ""
    return text + f"Its newest checkpoint may be {every_steps} steps old{age}"


def warn_about_rounding(config: Config, progress: Progress) -> None:
    """Warns of an int8 sampler whose policy differs from the trained one without a correction."""
    corrected = config.algorithm.importance_cap or config.algorithm.old_logprobs == "sampler"
    for field in ("cache_dtype", "weights_dtype"):
        dtype = getattr(config.sampler, field)
        if dtype != "auto" and not corrected:
            progress.warn(
                f"sampler.{field} = {dtype!r} samples from a policy that is not quite the trained "
                "one, and algorithm.importance_cap = 0 does not correct it; see kl_sampler_trainer"
            )


def warn_about_warmup(config: Config, progress: Progress) -> None:
    """Warns of a run that ends before its learning rate has come to the peak."""
    warmup, steps = config.optimizer.warmup_steps, config.total_steps
    if warmup > steps:
        progress.warn(
            f"optimizer.warmup_steps = {warmup} is longer than the run: of the learning rate it "
            f"reaches {steps / warmup:.0%} (total_steps = {steps})"
        )


def announce_end(config: Config, summary: dict[str, Any], longer: bool, progress: Progress) -> None:
    """Prints that a run is finished, and commands for what comes after it.

    Args:
        summary: content of summary.json.
        longer: whether the run may go on with a larger `total_steps`.
    """
    folder, steps = config.run_dir, summary["steps"]
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    scores = "" if before is None or after is None else f", held-out {before:.3f} -> {after:.3f}"
    # Without `longer` the learning rate has come to its end.
    choices = {"go on": f"--config.total_steps={2 * steps}"} if longer else {}
    choices |= {
        "train anew": "--config.run_dir=FOLDER",
        "evaluate": "dapo-jax evaluate, with the same arguments",
        "export": f"dapo-jax export --run={folder} --out=FOLDER",
    }
    progress.say(escape(f"{folder} is already finished: {steps} steps{scores}"))
    for name, command in choices.items():
        progress.say(escape(f"  {name:<10}  {command}"))


def warn_about_answers(responses: list[Response], config: Config, progress: Progress) -> None:
    """Alarms before training where most responses hold no answer that the verifier reads."""
    reads_answers = does_apply(READS_ANSWERS, settings_of(config))
    without = [response for response in responses if response.extracted is None]
    if not reads_answers or len(without) <= MANY_WITHOUT_ANSWER * len(responses):
        return
    cut, budget = sum(response.truncated for response in without), config.sampler
    ends = (
        f", or responses end too early: {cut / len(without):.0%} of these were cut off by "
        f"config.sampler.max_response_tokens = {budget.max_response_tokens}"
    )
    progress.alarm(
        f"no answer was found in {len(without) / len(responses):.0%} of {len(responses)} responses",
        f"config.data.template = {config.data.template!r} asks for one form of answer and "
        f"config.reward.verifier = {config.reward.verifier!r} reads another{ends * bool(cut)}. "
        f"Nothing is learned from such responses. One ends in:"
        f"\n\n{without[0].response[-SHOWN_CHARACTERS:]!r}",
    )
