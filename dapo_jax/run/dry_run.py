"""Dry run of an experiment: prompts, golds, rewards and lengths, without weights.

It uses the components of a run up to the point at which a run loads its policy and compiles. It
writes nothing.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.config.rates import choose_rates
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.trainable import parameter_count
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.verifying import open_verifier
from dapo_jax.rollout.environments.sessions import Environments, TokenizedReply
from dapo_jax.run import build
from dapo_jax.run.notices import check_lengths, setting_warnings
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.streams import BrokenPipeSafeStream
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Completion, Group, Problem, Prompt

SHOWN_PROMPTS = 3
MAX_MEASURED, MAX_GENERATED = 10_000, 500  # problems of a source that are measured
MAX_SHOWN_CHARACTERS = 40  # of an answer, in a table


class Trial(NamedTuple):
    """A prompt, answers to it that no model wrote, and an environment's replies to them."""

    prompt: Prompt
    answers: dict[str, str]  # by description
    replies: list[TokenizedReply]  # empty without an environment


def dry_run(config: Config) -> int:
    """Print what a run would see, and return 0.

    Raises:
        ConfigError: the run would stop at its start, or a reward function or the environment fails
            on every answer.
    """
    decoder, mesh, sampling_mesh = build.open_decoder(config, training=True)
    tokenizer = build.open_tokenizer(config, decoder)
    with contextlib.ExitStack() as stack:
        environments = build.open_environments(config, tokenizer)
        if environments:
            stack.callback(environments.close)
        prompts = build.open_prompts(config, tokenizer, environments)
        size = parameter_count(decoder)
        config, lines, warnings = choose_rates(config, size, config.total_steps)
        _print([f"data: {prompts.describe()}", *lines])
        warnings += [*prompts.warnings(), *setting_warnings(config, prompts.sources)]
        _print(f"warning: {complaint}" for complaint in warnings)
        first_prompts = list(itertools.islice(prompts, SHOWN_PROMPTS))
        problems = [
            problem
            for source in prompts.sources
            for problem in source.sample(MAX_GENERATED if source.generated else MAX_MEASURED)
        ]
        trials = [make_trial(config, environments, prompt) for prompt in first_prompts]
        groups = score(config, tokenizer, trials)
        _print(describe_passes(config, prompts))
        _print(describe_prompts(config, tokenizer, first_prompts))
        _print(describe_golds(config, problems))
        _print(describe_rewards(config, trials, groups))
        _print(describe_replies(trials[0]))
        _print(describe_lengths(config, tokenizer, prompts, problems))
        check_lengths(config, prompts.lengths)
        check_rewards(config, groups)
        check_replies(config, trials)
        _print(["nothing was compiled or written; without --dry-run this trains"])
    return 0


def _print(lines: Any) -> None:
    for line in lines:
        print(printable(line), file=BrokenPipeSafeStream("stdout"), flush=True)


def _short(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    text = " ".join(text.split())
    return text[: limit - 3] + "..." if len(text) > limit else text


def describe_passes(config: Config, prompts: PromptStream) -> Iterator[str]:
    """Yield a line about the number of passes over the problems, without resampling."""
    problems = sum(len(source.problems) for source in prompts.sources)
    step, steps = config.rollout.prompts_per_step, config.total_steps
    passes = step * steps / problems
    coverage = f"every one of {problems:,} problems {passes:.1f} times"
    if passes < 1:
        coverage = f"{passes:.0%} of {problems:,} problems"
    more = "; dynamic sampling asks for more" if config.algorithm.dynamic_sampling else ""
    yield f"{steps:,} steps of {step:,} prompts ask for {coverage}{more}"


def describe_prompts(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> Iterator[str]:
    """Yield the first prompts as the policy sees them, including special tokens."""
    for prompt in prompts:
        cut = ", cut" if prompt.truncated else ""
        yield f"\nprompt {prompt.id}: {len(prompt.tokens)} tokens{cut}"
        text = tokenizer.backend.decode(prompt.tokens.tolist(), skip_special_tokens=False)
        yield from (f"  | {line}" for line in text.split("\n"))
        if prompt.answer:
            yield f"  gold {_short(prompt.answer)!r}{_describe_reader(config, prompt)}"
    special = tokenizer.backend.get_added_tokens_decoder()
    special = {token: added.content for token, added in special.items() if added.special}
    first = dict.fromkeys(special[id] for id in prompts[0].tokens.tolist() if id in special)
    ends = [tokenizer.backend.decode([id], skip_special_tokens=False) for id in tokenizer.end_ids]
    yield (
        f"\nspecial tokens of the first prompt: {' '.join(first) or 'none'}; "
        f"a response ends at {' or '.join(ends)}"
    )
    if tokenizer.chat and config.data.template != "chat":
        yield "the model folder has a chat template, which data.template=chat would use"


def _describe_reader(config: Config, prompt: Prompt) -> str:
    if not config.reward.needs_answer():
        return ", for the reward functions alone"
    if prompt.metadata:
        return ", which the task's own scorer reads"
    reading = open_verifier(config.reward).read_gold(prompt.answer)
    return f", which {config.reward.verifier} reads as {reading.kind}: {_short(reading.shown)}"


def describe_golds(config: Config, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the number of golds by their reading, and examples of those that can't be read."""
    if not config.reward.needs_answer():
        return
    verifier, kinds = open_verifier(config.reward), collections.Counter[str]()
    examples: dict[str, Problem] = {}
    for problem in problems:
        kind = "scored by the task"
        if not problem.metadata:
            kind = verifier.read_gold(problem.answer).kind
        kinds[kind] += 1
        examples.setdefault(kind, problem)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    yield f"\ngolds of {len(problems):,} problems, by {config.reward.verifier}: {counts}"
    for kind, meaning in (
        ("unreadable", "no response to them is ever right"),
        ("text", "only the same text is right"),
    ):
        if kind in kinds:
            example = f"{examples[kind].id} has {_short(examples[kind].answer)!r}"
            yield f"warning: {kinds[kind]:,} golds are {kind}, so {meaning}: {example}"


def make_trial(config: Config, environments: Environments | None, prompt: Prompt) -> Trial:
    """Return answers to a prompt, and the environment's replies to them as first turns."""
    gold = prompt.answer
    answers = dict(open_verifier(config.reward).responses_to(gold)) if gold else {}
    answers |= {"the problem again": prompt.problem, "nothing": ""}
    if environments is None:
        return Trial(prompt, answers, [])
    turns = [environments.submit(prompt, i, [text], []) for i, text in enumerate(answers.values())]
    return Trial(prompt, answers, environments.steps(turns))


def describe_replies(trial: Trial) -> Iterator[str]:
    """Yield a table of the environment's replies to the answers, if there is an environment."""
    if not trial.replies:
        return
    yield "\nreplies of the environment to these as first turns, to the first prompt:"
    for (name, text), step in zip(trial.answers.items(), trial.replies, strict=True):
        reply = f"{len(step.tokens)} tokens: {_short(step.text, 200)}" if step.tokens else "the end"
        if step.lost:
            reply = f"failed, so there is no reward: {step.failure}"
        yield f"  {name:<22}{_short(text, 20):<22}{step.reward:>+7.2f}  {reply}"


def score(config: Config, tokenizer: Tokenizer, trials: Sequence[Trial]) -> list[Group]:
    """Return the answers of each trial as a group, scored in workers as a run's responses are."""
    groups = []
    with contextlib.closing(RewardPool(config.reward, tokenizer.split, config.extras)) as pool:
        for trial in trials:
            completions = []
            for i, text in enumerate(trial.answers.values()):
                ids = np.asarray(tokenizer.encode(text), np.int32)
                rewards = (trial.replies[i].reward,) if trial.replies else ()
                logprobs = np.zeros(len(ids), np.float32)
                done = Completion(ids, logprobs, False, 0, text, sample=i, rewards=rewards)
                completions.append(done)
            verdicts = tuple(pool.submit_group(trial.prompt, completions).result())
            scores = np.zeros(len(completions)) if config.reward.model_folder else None
            group = reward_group(config, trial.prompt, tuple(completions), verdicts, scores)
            groups.append(group)
            if all(verdict.failure for verdict in verdicts):  # do not wait for each timeout
                break
    return groups


def describe_rewards(
    config: Config, trials: Sequence[Trial], groups: Sequence[Group]
) -> Iterator[str]:
    """Yield a table: rewards of the answers to every prompt, and reward parts for the first."""
    # Groups end at a broken one.
    rewards = [
        {done.sample: reward for done, reward in zip(group.completions, group.rewards, strict=True)}
        for group in groups
    ]
    yield "\nrewards of made-up answers to these prompts; reward parts of the first one:"
    first = groups[0]
    places = {done.sample: place for place, done in enumerate(first.completions)}
    for sample, (name, text) in enumerate(trials[0].answers.items()):
        result = "no reward"
        if (i := places.get(sample)) is not None:
            parts = ", ".join(f"{part} {v[i] + 0.0:+.2f}" for part, v in first.reward_parts.items())
            verdict = "right" if first.correct[i] else f"wrong ({first.verdicts[i].decided})"
            result = f"{verdict}: {parts}"
        columns = "".join(f"{row[sample]:>+7.2f}" if sample in row else " " * 7 for row in rewards)
        yield f"  {name:<22}{_short(text, 20):<22}{columns}  {result}"
    failed = [response.failure for group in groups for response in group.failed]
    if failed:
        yield f"warning: rewards fail on {len(failed)} of these: {failed[0].text}"
    if config.reward.model_folder:
        yield "the part model is 0 here: its weights are not loaded"


def check_rewards(config: Config, groups: Sequence[Group]) -> None:
    """Raise `ConfigError` if a reward function fails on every answer."""
    failed = [response.failure for group in groups for response in group.failed]
    if failed and not any(group.completions for group in groups):
        raise ConfigError(
            f"config.reward.parts = {config.reward.parts!r}: fails on all of {len(failed)} "
            f"answers: {failed[0].text}",
            "reward.parts",
        )


def check_replies(config: Config, trials: Sequence[Trial]) -> None:
    """Raise `ConfigError` if the environment fails on every answer."""
    replies = [reply for trial in trials for reply in trial.replies]
    if replies and all(reply.lost for reply in replies):
        raise ConfigError(
            f"config.environment.name = {config.environment.name!r}: fails on all of "
            f"{len(replies)} answers: {replies[0].failure}",
            "environment.name",
        )


def _quantiles(name: str, lengths: Sequence[int], limit: int, consequence: str) -> str:
    quantiles = np.percentile(lengths, [0, 50, 95, 100], method="higher").astype(int)
    columns = "".join(f"{tokens:>8,}" for tokens in (*quantiles, limit))
    over = sum(length > limit for length in lengths)
    return f"  {name:<24}{columns}  {over:,} of {len(lengths):,} are {consequence}"


def describe_lengths(
    config: Config, tokenizer: Tokenizer, prompts: PromptStream, problems: Sequence[Problem]
) -> Iterator[str]:
    """Yield a table of lengths in tokens: prompts, and the data's solutions or golds."""
    yield f"\n  {'tokens':<24}{'least':>8}{'median':>8}{'95 %':>8}{'most':>8}{'limit':>8}"
    dropped = config.data.overlong_prompts == "drop"
    prompt_lengths = [prompts.count_tokens(problem) for problem in problems]
    consequence = "dropped" if dropped else "cut at their beginning"
    yield _quantiles("prompts", prompt_lengths, config.data.max_prompt_tokens, consequence)
    name = "worked solutions"
    texts = [problem.solution for problem in problems if problem.solution]
    if not texts:
        name = "golds, nothing else"
        verifier = open_verifier(config.reward)
        texts = [next(iter(verifier.responses_to(p.answer).values())) for p in problems]
    lengths = [len(tokenizer.encode(text)) + 1 for text in texts]  # with the end token
    yield _quantiles(name, lengths, config.sampler.max_response_tokens, "longer than a response")
