"""What a person is told of a run besides its numbers: what it works on, and what goes badly."""

from typing import Any

from rich.markup import escape

from dapo_jax.data.pipeline import PromptStream
from dapo_jax.evaluation.scores import Response
from dapo_jax.experiment.config import Config
from dapo_jax.reporting.progress import Progress
from dapo_jax.structs import Prompt

MANY_WITHOUT_ANSWER = 0.5
SHOWN_CHARACTERS = 200


def announce_data(prompts: PromptStream, heldout: list[Prompt], progress: Progress) -> None:
    """What there is to train on and to evaluate, and which rows of the files are bad."""
    cut = sum(prompt.truncated for prompt in heldout)
    dropped = sum(len(source.problems) for source in prompts.heldout) - len(heldout)
    fates = ((cut, "cut"), (dropped, "dropped"))
    overlong = "".join(f", {fate}: {count:,}" for count, fate in fates if count)
    progress.say(escape(f"data: {prompts.describe()}{overlong}"))
    for source in [*prompts.sources, *prompts.heldout]:
        for complaint in source.complaints:
            progress.warn(escape(complaint))


def warn_about_rounding(config: Config, progress: Progress) -> None:
    """Says where the sampler's policy differs from the trained one and nothing corrects for it."""
    corrected = config.algorithm.importance_cap or config.algorithm.old_logprobs == "sampler"
    for field in ("cache_dtype", "weights_dtype"):
        if getattr(config.sampler, field) == "int8" and not corrected:
            progress.warn(
                f"sampler.{field} = 'int8' samples from a policy that is not quite the trained "
                "one, and algorithm.importance_cap = 0 does not correct it; see kl_sampler_trainer"
            )


def announce_end(config: Config, summary: dict[str, Any], longer: bool, progress: Progress) -> None:
    """That nothing is left to do, and what can be done with what is there.

    Args:
        longer: whether the run goes on with a larger `total_steps`.
    """
    folder, steps = config.run_dir, summary["steps"]
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    scores = "" if before is None or after is None else f", held-out {before:.3f} -> {after:.3f}"
    choices = {
        "go on": f"--config.total_steps={2 * steps}",
        "train anew": "--config.run_dir=FOLDER",
        "evaluate": f"python -m dapo_jax.evaluate --config=... --config.run_dir={folder}",
        "export": f"python -m dapo_jax.export --run={folder} --out=FOLDER",
    }
    if not longer:  # its learning rate has come to its end
        del choices["go on"]
    progress.say(escape(f"{folder} is already finished: {steps} steps{scores}"))
    for name, command in choices.items():
        progress.say(escape(f"  {name:<10}  {command}"))


def warn_about(step: int, values: dict[str, float], progress: Progress) -> None:
    """Says what a person would want to know of a step that went badly."""
    if values["starved"]:
        broken = f", {values['broken_groups']:.0f} were broken" if values["broken_groups"] else ""
        progress.warn(
            f"step {step}: only {values['trained_groups']:.0f} groups carried signal{broken}"
        )
    if values.get("empty_updates"):
        progress.warn(
            f"step {step}: {values['empty_updates']:.0f} updates had no trained token and were "
            "not taken (every response filtered, weighed 0, or none right?)"
        )
    if values.get("skipped_updates") or values.get("value_skipped_updates"):
        progress.warn(f"step {step}: an update was skipped: its gradient was not finite")


def warn_about_answers(responses: list[Response], config: Config, progress: Progress) -> None:
    """Says loudly, before anything is trained, that what is asked for is not what is read."""
    reward = config.reward
    judged_by_answer = reward.correct == "verifier" or "rule" in reward.weights()
    without = [one for one in responses if one.extracted is None]
    if not judged_by_answer or len(without) <= MANY_WITHOUT_ANSWER * len(responses):
        return
    cut = sum(one.truncated for one in without) / len(without)
    progress.alarm(
        f"no answer was found in {len(without) / len(responses):.0%} of {len(responses)} responses",
        f"config.data.template = {config.data.template!r} asks for one form of answer and "
        f"config.reward.verifier = {reward.verifier!r} reads another, or responses end too "
        f"early: {cut:.0%} of these were cut off by config.sampler.max_response_tokens = "
        f"{config.sampler.max_response_tokens}. Such a run learns nothing. One response ends in:"
        f"\n\n{without[0].response[-SHOWN_CHARACTERS:]!r}",
    )
