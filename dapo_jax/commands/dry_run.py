"""Dry run of an experiment: prompts, golds, rewards, lengths and memory; loads no weights.

The parts are the run's own, up to where it would load its policy and compile. Nothing is written.
"""

import collections
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.environments.sessions import Environments, Step
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.run import memory
from dapo_jax.run.components import (
    check_lengths,
    open_decoder,
    open_environments,
    open_prompts,
    open_tokenizer,
)
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.streams import BrokenPipeSafeStream
from dapo_jax.structs import Completion, Group, Problem, Prompt
from dapo_jax.verifier.gold_reading import in_form, read_gold
from dapo_jax.verifier.normalisation import normalise
from dapo_jax.verifier.numerals import read_number

SHOWN_PROMPTS = 3
MAX_LOOKED_AT, MAX_GENERATED = 10_000, 500  # problems whose golds and lengths are measured
SHOWN_CHARACTERS = 40  # of an answer, in a table


def dry_run(config: Config) -> int:
    """Prints what a run would see, and returns 0.

    Raises:
        ConfigError: the run would stop at its start, or a reward function fails on every answer.
    """
    decoder, mesh, sampling_mesh = open_decoder(config, training=True)
    tokenizer = open_tokenizer(config, decoder)
    with contextlib.ExitStack() as stack:
        environments = open_environments(config, tokenizer)
        if environments:
            stack.callback(environments.close)
        _show(config, decoder, (mesh, sampling_mesh), tokenizer, environments)
    return 0


def _show(
    config: Config,
    decoder: DecoderConfig,
    meshes: tuple[Any, Any],
    tokenizer: Tokenizer,
    environments: Environments | None,
) -> None:
    prompts = open_prompts(config, tokenizer, environments)
    _say(f"data: {prompts.describe()}")
    for complaint in prompts.warnings():
        _say(f"warning: {complaint}")
    shown = list(itertools.islice(prompts, SHOWN_PROMPTS))
    problems = [
        problem
        for source in prompts.sources
        for problem in source.sample(MAX_GENERATED if source.generated else MAX_LOOKED_AT)
    ]
    replies = [play(config, environments, prompt) for prompt in shown]
    groups = judge(config, tokenizer, shown, replies)
    for lines in (
        describe_passes(config, prompts),
        describe_prompts(config, tokenizer, shown),
        describe_golds(config, problems),
        describe_rewards(config, groups),
        describe_replies(config, shown[0], replies[0]),
        describe_lengths(config, tokenizer, prompts, problems),
        describe_memory(config, decoder, *meshes),
    ):
        for line in lines:
            _say(line)
    check_lengths(config, prompts.lengths)
    check_rewards(config, groups)
    _say("nothing was compiled or written; without --dry-run this trains")


def _say(text: str) -> None:
    print(printable(text), file=BrokenPipeSafeStream("stdout"), flush=True)


def _short(text: str, most: int = SHOWN_CHARACTERS) -> str:
    text = " ".join(text.split())
    return text[: most - 3] + "..." if len(text) > most else text


def describe_passes(config: Config, prompts: PromptStream) -> Iterator[str]:
    """Line about how often a run asks every problem, drops and further samples apart."""
    problems = sum(len(source.problems) for source in prompts.sources)
    step, steps = config.rollout.prompts_per_step, config.total_steps
    passes = step * steps / problems
    asked = f"every one of {problems:,} problems {passes:.1f} times"
    if passes < 1:
        asked = f"{passes:.0%} of {problems:,} problems"
    more = "; dynamic sampling asks for more" * config.algorithm.dynamic_sampling
    yield f"{steps:,} steps of {step:,} prompts ask for {asked}{more}"


def describe_prompts(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> Iterator[str]:
    """Lines of the first prompts as the policy sees them, special tokens written out."""
    for prompt in prompts:
        yield f"\nprompt {prompt.id}: {len(prompt.tokens)} tokens{', cut' * prompt.truncated}"
        seen = tokenizer.backend.decode(prompt.tokens.tolist(), skip_special_tokens=False)
        yield from (f"  | {line}" for line in seen.split("\n"))
        if not prompt.truncated and "".join(seen.split()) != "".join(prompt.text.split()):
            yield "warning: this is not what the template wrote: the tokenizer lacks some of it"
        if prompt.answer:
            yield f"  gold {_short(prompt.answer)!r}{_reader(config, prompt)}"


def _reader(config: Config, prompt: Prompt) -> str:
    """Who reads the gold of a prompt, and as what."""
    if not config.reward.needs_answer():
        return ", for the reward functions alone"
    if prompt.metadata:
        return ", which the task's own scorer reads"
    reading = read_gold(config.reward.verifier, prompt.answer)
    return f", which {config.reward.verifier} reads as {reading.kind}: {_short(reading.shown)}"


def describe_golds(config: Config, problems: Sequence[Problem]) -> Iterator[str]:
    """Lines about the readings of all golds, and examples of those that can't be read."""
    if not config.reward.needs_answer():
        return
    kinds: collections.Counter[str] = collections.Counter()
    bad: dict[str, Problem] = {}
    for problem in problems:
        kind = "scored by the task" if problem.metadata else ""
        kind = kind or read_gold(config.reward.verifier, problem.answer).kind
        kinds[kind] += 1
        bad.setdefault(kind, problem)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    yield f"\ngolds of {len(problems):,} problems, by {config.reward.verifier}: {counts}"
    for kind, meaning in (
        ("unreadable", "no response to them is ever right"),
        ("text", "only the same text is right"),
    ):
        if kind in kinds:
            first = f"{bad[kind].id} has {_short(bad[kind].answer)!r}"
            yield f"warning: {kinds[kind]:,} golds are {kind}, so {meaning}: {first}"


def model_free_answers(config: Config, prompt: Prompt) -> dict[str, str]:
    """Responses that no model wrote, by what they are."""
    verifier, gold = config.reward.verifier, prompt.answer
    number = read_number(normalise(gold))
    answers = {"gold in its form": in_form(verifier, gold), "gold alone": gold}
    answers |= {"a wrong number": in_form(verifier, str(-1 if number is None else number + 1))}
    if number is not None and number.denominator == 1:
        unfinished = in_form(verifier, f"{number + 1}-1")
        answers |= {"gold, not worked out": unfinished}
    answers |= {"the problem again": prompt.problem, "nothing": ""}
    return answers if gold else {"the problem again": prompt.problem, "nothing": ""}


def play(config: Config, environments: Environments | None, prompt: Prompt) -> list[Step]:
    """Replies of the environment to model-free answers as first turns; none without one."""
    if environments is None:
        return []
    answers = enumerate(model_free_answers(config, prompt).values())
    return environments.steps([environments.submit(prompt, i, [text], []) for i, text in answers])


def describe_replies(config: Config, prompt: Prompt, steps: Sequence[Step]) -> Iterator[str]:
    """Lines of a table: the environment's replies to model-free answers to a prompt."""
    if steps:
        yield "\nreplies of the environment to these as first turns, to the first prompt:"
    answers = model_free_answers(config, prompt) if steps else {}
    for (name, text), step in zip(answers.items(), steps, strict=True):
        reply = f"{len(step.tokens)} tokens: {_short(step.text, 200)}" if step.tokens else "the end"
        yield f"  {name:<22}{_short(text, 20):<22}{step.reward:>+7.2f}  {reply}"


def judge(
    config: Config,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    replies: Sequence[Sequence[Step]],
) -> list[Group]:
    """Groups of model-free answers, judged in workers as a run's responses are.

    Args:
        replies: of the environment, to every answer to every prompt; empty without one.
    """
    pool, groups = RewardPool(config.reward, tokenizer.split), []
    try:
        for prompt, steps in zip(prompts, replies, strict=True):
            texts = list(model_free_answers(config, prompt).values())
            tokens = [np.asarray(tokenizer.encode(text), np.int32) for text in texts]
            rewards = [(step.reward,) for step in steps] or [()] * len(texts)
            completions = tuple(
                Completion(ids, np.zeros(len(ids), np.float32), False, 0, text, rewards=given)
                for ids, text, given in zip(tokens, texts, rewards, strict=True)
            )
            futures = pool.submit_group(prompt, completions)
            verdicts = tuple(future.result() for future in futures)
            scores = np.zeros(len(texts)) if config.reward.model_folder else None
            groups.append(reward_group(config, prompt, completions, verdicts, scores))
            if all(verdict.broken for verdict in verdicts):  # one that hangs takes its time
                break
    finally:
        pool.close()
    return groups


def describe_rewards(config: Config, groups: Sequence[Group]) -> Iterator[str]:
    """Lines of a table: rewards of model-free answers to every prompt, and parts of the first."""
    answers = [model_free_answers(config, group.prompt) for group in groups]
    rewards = [dict(zip(a, g.rewards, strict=True)) for a, g in zip(answers, groups, strict=True)]
    yield "\nrewards of answers that no model wrote, to these prompts; parts of the first:"
    first = groups[0]
    for i, (name, text) in enumerate(answers[0].items()):
        parts = ", ".join(f"{part} {v[i] + 0.0:+.2f}" for part, v in first.reward_parts.items())
        right = "right" if first.correct[i] else f"wrong ({first.verdicts[i].decided})"
        columns = "".join(f"{each[name]:>+7.2f}" if name in each else " " * 7 for each in rewards)
        yield f"  {name:<22}{_short(text, 20):<22}{columns}  {right}: {parts}"
    broken = [verdict.broken for group in groups for verdict in group.verdicts if verdict.broken]
    if broken:
        yield f"warning: reward functions fail on {len(broken)} of these: {broken[0]}"
    if config.reward.model_folder:
        yield "the part model is 0 here: its weights are not loaded"


def check_rewards(config: Config, groups: Sequence[Group]) -> None:
    """Raises `ConfigError` where a reward function fails on every answer."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    if all(verdict.broken for verdict in verdicts):
        raise ConfigError(
            f"config.reward.parts = {config.reward.parts!r}: fails on all of {len(verdicts)} "
            f"answers: {verdicts[0].broken}",
            "reward.parts",
        )


def _quantiles(name: str, lengths: Sequence[int], limit: int, fate: str) -> str:
    low, middle, high, top = np.percentile(lengths, [0, 50, 95, 100], method="higher").astype(int)
    over = sum(length > limit for length in lengths)
    return (
        f"  {name:<24}{low:>8,}{middle:>8,}{high:>8,}{top:>8,}{limit:>8,}  "
        f"{over:,} of {len(lengths):,} are {fate}"
    )


def describe_lengths(
    config: Config, tokenizer: Tokenizer, prompts: PromptStream, problems: Sequence[Problem]
) -> Iterator[str]:
    """Lines of a table of lengths in tokens: prompts, and the data's own solutions or golds."""
    yield f"\n  {'tokens':<24}{'least':>8}{'median':>8}{'95 %':>8}{'most':>8}{'limit':>8}"
    dropped = config.data.overlong_prompts == "drop"
    asked = [prompts.count_tokens(problem) for problem in problems]
    fate = "dropped" if dropped else "cut at their beginning"
    yield _quantiles("prompts", asked, config.data.max_prompt_tokens, fate)
    worked = [problem.solution for problem in problems if problem.solution]
    verifier = config.reward.verifier
    texts = worked or [in_form(verifier, problem.answer) for problem in problems]
    lengths = [len(tokenizer.encode(text)) + 1 for text in texts]  # with the end token
    name = "worked solutions" if worked else "golds, nothing else"
    yield _quantiles(name, lengths, config.sampler.max_response_tokens, "longer than a response")


def describe_memory(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, sampling: jax.sharding.Mesh
) -> Iterator[str]:
    """Line about what sampling and an update take at least, on one device."""
    needs = memory.run_bytes(config, decoder, mesh, sampling, training=True)
    parts = [f"{what} takes {memory.describe(sum(n.values()))}" for what, n in needs.items()]
    there = memory.available_bytes(mesh)
    free = f" of {memory.describe(there)}" * math.isfinite(there)
    yield f"\nmemory: {' and '.join(parts)} at least{free} on each device ({mesh.size})"
