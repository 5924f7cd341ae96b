"""Sampled accuracy on held-out problems, while training and as a command of its own."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dapo_jax.checkpoints import Checkpoints
from dapo_jax.config import Config
from dapo_jax.data.pipeline import heldout_prompts
from dapo_jax.filtering import Interrupted
from dapo_jax.metrics import mean_or_zero
from dapo_jax.parts import Parts, build
from dapo_jax.sampler.sampling import SAMPLE_FOR_EVALUATION, SamplingRule
from dapo_jax.structs import Group, Prompt


def sample_groups(
    params: Any,
    prompts: list[Prompt],
    parts: Parts,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Group]:
    """k judged responses to each prompt, in the order of the prompts.

    Draws are keyed by the prompt alone, so two policies are compared on the same random numbers.
    Raises `Interrupted` where `interrupted()` says so between two bursts.
    """
    sampler, judge, settings = parts.sampler, parts.judge, parts.config.evaluation
    rule = SamplingRule(settings.temperature, settings.top_p)
    sampler.begin(params, purpose=SAMPLE_FOR_EVALUATION, step=0, rule=rule)
    for prompt in prompts:
        sampler.submit(prompt, settings.samples_per_problem)
    pending = []
    while not sampler.idle:
        if interrupted():
            raise Interrupted
        pending += [judge.submit(*finished) for finished in sampler.decode_burst()]
    sampler.release()
    return judge.groups(sorted(pending, key=lambda one: one.prompt.index))


def heldout_metrics(groups: list[Group]) -> dict[str, float]:
    """avg@k and what the responses look like."""
    completions = [completion for group in groups for completion in group.completions]
    return {
        "heldout_accuracy": mean_or_zero([group.correct.mean() for group in groups]),
        "heldout_truncated_fraction": mean_or_zero([c.truncated for c in completions]),
        "heldout_response_tokens": mean_or_zero([len(c) for c in completions]),
        "heldout_entropy": -mean_or_zero(
            np.concatenate([c.sampler_logprobs for c in completions] or [[]])
        ),
    }


def evaluate_newest(config: Config) -> dict[str, Any]:
    """Held-out metrics of the newest checkpoint in run_dir, or of the model folder without one."""
    step = None
    with contextlib.ExitStack() as stack:
        parts = build(config, training=False)
        stack.callback(parts.close)
        if Checkpoints.exist(config.run_dir):
            checkpoints = Checkpoints(config.run_dir, config.checkpoint)
            stack.callback(checkpoints.close)
            step = checkpoints.latest_step()
        if step is None:
            params = parts.folder_params()
        else:
            params = checkpoints.state(parts.learner.abstract_state).params
        prompts = heldout_prompts(config.data, config.seed, parts.tokenizer)
        groups = sample_groups(params, prompts, parts)
    return {
        "policy": config.model.folder if step is None else f"{config.run_dir} step {step}",
        "problems": len(groups),
        "samples_per_problem": config.evaluation.samples_per_problem,
    } | heldout_metrics(groups)
