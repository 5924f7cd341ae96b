"""Teacher of a run: its shape, its parameters on the learner's mesh, and the prompts it reads.

The policy is its own teacher in self-distillation (SDFT, arXiv 2601.19897; OPSD, 2601.18734; SDPO,
2601.20802; RLSD, 2604.03128): what the teacher reads is all that it knows more.
"""

import collections
import dataclasses
import functools
import json
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.learner.packing import Segment
from dapo_jax.learner.update import Model
from dapo_jax.model import load_huggingface
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.run.build import check_divisible, numerics
from dapo_jax.runtime import sharding
from dapo_jax.types.errors import require

OF_ALL = {"problem", "answer", "solution", "sibling", "feedback"}
FIELD = "extras.teacher.folder"
READ = functools.partial(load_huggingface.read_config, field=FIELD)


def read_shape(
    config: Config, policy: DecoderConfig, mesh: jax.sharding.Mesh, read: Any = READ
) -> DecoderConfig:
    """Return the shape of the folder. Raises `ConfigError` if it does not fit policy or mesh."""
    folder, dtype = config.extras.teacher.folder, config.extras.teacher.dtype
    if not folder:
        return policy
    numbers = numerics(config.compute, mesh, config.rows().row_tokens) | {"remat": "none"}
    numbers |= {} if dtype == "auto" else {"dtype": jnp.dtype(dtype)}
    decoder = read(folder, **numbers)
    allowed = f"a folder of at least the policy's {policy.vocab} tokens, padding included: it has "
    allowed += f"{decoder.vocab}, and what it lacks would have no probability"
    require(decoder.vocab >= policy.vocab, FIELD, folder, allowed)
    capped = policy.logit_cap or decoder.logit_cap
    fits = config.algorithm.distillation != "jsd" or capped is None
    allowed = "'reverse' if logits of the policy or the teacher are capped (Gemma 4)"
    require(fits, "algorithm.distillation", config.algorithm.distillation, allowed)
    check_divisible(decoder, mesh)
    return decoder


def load_teacher(config: Config, policy: DecoderConfig, mesh: jax.sharding.Mesh) -> Model:
    """Return the teacher, sharded like the policy.

    Rows of its vocabulary beyond the policy's are padding and are dropped. Raises `ConfigError`.
    """
    folder, whole = config.extras.teacher.folder, read_shape(config, policy, mesh)
    params = load_huggingface.load_params(folder, whole, mesh, field=FIELD, cast=True)
    decoder = dataclasses.replace(whole, vocab=policy.vocab)
    boxed = abstract_params(decoder)

    def cut(array: jax.Array, target: Any, place: Any) -> jax.Array:
        part = tuple(map(slice, target.shape))
        is_whole = array.shape == target.shape
        return array if is_whole else jax.jit(lambda x: x[part], out_shardings=place)(array)

    places = sharding.tree_shardings(mesh, boxed)
    return Model(decoder, jax.tree.map(cut, params, sharding.unbox(boxed), places))


def _names_of(config: Config) -> set[str]:
    """Return the names in the prompt other than `problem`. Raises `ConfigError`."""
    text = config.extras.teacher.prompt
    fields: Any = []
    allowed = "text that tells more than {problem}, by {NAME} of fields, and {{ }} for braces"
    try:
        fields = [field for _, *field in string.Formatter().parse(text) if field[0] is not None]
    except ValueError as error:
        allowed += f": {error}"
    names = {name for name, *_ in fields} - {"problem"}
    plain = all(name.isidentifier() and not (form or change) for name, form, change in fields)
    require(bool(names) and plain, "extras.teacher.prompt", text, allowed)
    return names


def columns_of(config: Config) -> set[str]:
    """Return the columns of a row that the prompt names. Raises `ConfigError` for a bad one."""
    return _names_of(config) - OF_ALL


def told_segments(
    config: Config, prompts: PromptStream
) -> Callable[[Sequence[Segment]], list[Segment]]:
    """Return the function from responses to the same ones behind the teacher's prompts.

    {sibling} is the text of the group's first correct response other than the own one, {feedback}
    what the environment said in the response, {answer}, {solution} and other names are the row's.
    A response is left out if all that its prompt would tell beside {problem} is empty.
    """
    text, names = config.extras.teacher.prompt, _names_of(config)

    def values_of(segment: Segment, problem: Any, right: Sequence[Segment]) -> dict[str, str]:
        columns = json.loads(problem.columns or "{}").items()
        values = collections.defaultdict(str, {name: str(value or "") for name, value in columns})
        row = {"problem": problem.text, "answer": problem.answer, "solution": problem.solution}
        texts = (other.completion.text for other in right if other.index != segment.index)
        replies = (turn.text for turn in segment.completion.turns if not turn.is_sampled)
        return values | row | {"sibling": next(texts, ""), "feedback": "\n".join(replies)}

    def tell(segments: Sequence[Segment]) -> list[Segment]:
        told, right = [], collections.defaultdict(list)
        for segment in segments:
            right[segment.prompt.index] += [segment] if segment.correct else []
        for segment in segments:
            problem = prompts.problem(segment.prompt.index)
            values = values_of(segment, problem, right[segment.prompt.index])
            if any(values[name] for name in names):
                tokens = prompts.encode(problem, text.format_map(values))
                told.append(segment.behind(np.asarray(tokens, np.int32)))
        return told

    return tell
