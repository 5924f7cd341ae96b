"""Prompts of a teacher that reads more than the policy: an answer, a sibling's response, feedback.

The policy is its own teacher in self-distillation (SDFT, arXiv 2601.19897; OPSD, 2601.18734; SDPO,
2601.20802; RLSD, 2604.03128): what the teacher reads is all that it knows more.
"""

import json
import string
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.learner.packing import Segment
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Problem

FIELD = "extras.teacher.prompt"
OF_RESPONSES = {"sibling", "feedback"}
OF_PROBLEMS = {"problem", "answer", "solution"}


def _names_in(text: str) -> set[str]:
    """Return the names of a template. Raises ValueError for a bad one, or other than names."""
    parts = string.Formatter().parse(text)
    parsed = [(name, form or change) for _, name, form, change in parts if name is not None]
    if not all(name.isidentifier() and not changed for name, changed in parsed):
        raise ValueError("plain names")
    return {name for name, _ in parsed}


def columns_of(config: Config) -> frozenset[str]:
    """Return the columns of a row that the prompt names. Raises `ConfigError` for a bad template.

    >>> config = dapo_jax.Config()
    >>> config.extras.teacher.prompt = "{problem} The proof: {proof}"
    >>> sorted(columns_of(config))
    ['proof']
    """
    text, names = config.extras.teacher.prompt, set()
    allowed = "text that tells more than {problem}, by {NAME} of fields, and {{ }} for braces"
    try:
        names = _names_in(text)
    except ValueError as error:
        allowed += f": {error}"
    require(not text or bool(names - {"problem"}), FIELD, text, allowed)
    return frozenset(names) - OF_RESPONSES - OF_PROBLEMS


def told_segments(
    config: Config, prompts: PromptStream
) -> Callable[[Sequence[Segment]], list[Segment]] | None:
    """Return the function from responses to the same ones behind the teacher's prompts, or None.

    {sibling} is the text of the group's first correct response other than the own one, {feedback}
    what the environment said in the response, {answer}, {solution} and other names are the row's.
    A response is left out if all that its prompt would tell beside {problem} is empty.
    """
    text = config.extras.teacher.prompt
    if not text:
        return None
    names = _names_in(text)

    def values_of(segment: Segment, problem: Problem, right: Sequence[Segment]) -> dict[str, str]:
        columns = json.loads(problem.columns or "{}")
        values = {name: str(columns.get(name) or "") for name in names - OF_PROBLEMS}
        values |= {"answer": problem.answer, "solution": problem.solution}
        others = (other.completion.text for other in right if other.index != segment.index)
        values["sibling"] = next(others, "")
        said = (turn.text for turn in segment.completion.turns if not turn.drawn)
        return values | {"feedback": "\n".join(said), "problem": problem.text}

    def tell(segments: Sequence[Segment]) -> list[Segment]:
        told, right = [], {}
        for segment in segments:
            if segment.correct:
                right.setdefault(segment.prompt.index, []).append(segment)
        for segment in segments:
            index = segment.prompt.index
            problem = prompts.problem(index)
            values = values_of(segment, problem, right.get(index, []))
            if any(values[name] for name in names - {"problem"}):
                tokens = np.asarray(prompts.encode(problem, text.format(**values)), np.int32)
                told.append(segment.behind(tokens))
        return told

    return tell
