"""Problems to prompts with grain: an endless, shuffled, seekable order, the same on every process.

The order is a function of the seed alone, so the position in it, one integer, is all that a
checkpoint has to hold.
"""

import math
import zlib
from collections.abc import Sequence

import grain
import numpy as np

from dapo_jax.data.sources import Source, every_problem, heldout_sources, training_sources
from dapo_jax.experiment.config import Data
from dapo_jax.experiment.settings import ConfigError, require
from dapo_jax.prompts.templates import TEMPLATES, Beside
from dapo_jax.prompts.tokenizer import Tokenizer
from dapo_jax.structs import Problem, Prompt

LOOKED_AT = 500  # problems of a file whose prompts' length is looked at, at the start
TRIED_EXAMPLES = 200  # problems that are asked for a worked solution


def _fingerprints(sources: Sequence[Source]) -> set[str]:
    return {problem.fingerprint for problem in every_problem(sources)}


def choose_examples(
    sources: Sequence[Source], heldout: set[str], count: int, seed: int
) -> tuple[Problem, ...]:
    """`count` different training problems, keyed by the seed; worked ones where there are any.

    Raises `ConfigError` where there are too few.
    """
    rng = np.random.default_rng([seed, zlib.crc32(b"few_shot")])
    ends = np.cumsum([len(source.problems) for source in sources])
    worked, others, seen = [], [], set(heldout)
    for place in rng.choice(ends[-1], min(TRIED_EXAMPLES, ends[-1]), replace=False):
        which = int(np.searchsorted(ends, place, side="right"))
        within = int(place - ends[which]) + len(sources[which].problems)
        problem = sources[which].problems[within]
        if problem.fingerprint not in seen:
            seen.add(problem.fingerprint)
            (worked if problem.solution else others).append(problem)
        if len(worked) == count:
            break
    found = (worked + others)[:count]
    allowed = f"below the {len(found)} training problems that were found as examples"
    require(len(found) == count, "data.few_shot", count - 1, allowed)
    return tuple(found)


class _Writer:
    """Problems to prompts: the template, the tokens, the limit."""

    def __init__(
        self,
        data: Data,
        seed: int,
        tokenizer: Tokenizer,
        sources: Sequence[Source],
        heldout: set[str],
    ):
        self._data, self._tokenizer, examples = data, tokenizer, ()
        if data.template == "few_shot":
            examples = choose_examples(sources, heldout, data.few_shot + 1, seed)
        if data.template == "chat" and tokenizer.chat is None:
            raise ConfigError(
                "config.data.template = 'chat': the model folder has no chat template, neither in "
                "tokenizer_config.json nor as chat_template.jinja"
            )
        self._beside = Beside(tokenizer.chat, data.system_prompt, examples, data.few_shot)

    def write(self, problem: Problem, index: int, skipped: int = 0) -> Prompt | None:
        """None for a prompt over the limit where the config says to drop those."""
        text = TEMPLATES[self._data.template](problem, self._beside)
        tokens, limit = self._tokenizer.encode_prompt(text), self._data.max_prompt_tokens
        truncated = len(tokens) > limit
        if truncated:
            if self._data.overlong_prompts == "drop":
                return None
            begin = self._tokenizer.begin_ids[:limit]
            tokens = begin + tokens[len(tokens) - limit + len(begin) :]
            text = self._tokenizer.decode(tokens)
        return Prompt(
            index=index,
            id=problem.id,
            text=text,
            tokens=np.asarray(tokens, np.int32),
            answer=problem.answer,
            source=problem.source,
            subject=problem.subject,
            level=problem.level,
            problem=problem.text,
            metadata=problem.metadata,
            truncated=truncated,
            skipped=skipped,
        )


def _endless_order(sources: Sequence[Source], seed: int) -> grain.MapDataset:
    """Each source shuffled anew every pass; several in exact proportion to their weights."""
    orders = [
        grain.MapDataset.source(source.problems).seed(seed).shuffle().repeat() for source in sources
    ]
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [source.weight for source in sources])


class PromptStream:
    """The endless order of training prompts. Raises `ConfigError` where it is built.

    Attributes:
        position: place from which to read on; may be set.
        sources: where the prompts come from.
        heldout: sources whose problems are never among them.
    """

    def __init__(self, data: Data, seed: int, tokenizer: Tokenizer):
        self.position, self._data = 0, data
        self.heldout = heldout_sources(data, seed)
        self._heldout = _fingerprints(self.heldout)
        self.sources = training_sources(data, seed, self._heldout)
        self._order = _endless_order(self.sources, seed)
        self._writer = _Writer(data, seed, tokenizer, self.sources, self._heldout)
        total = sum(source.weight for source in self.sources)
        passes = (len(source.problems) * total / source.weight for source in self.sources)
        self._pass = math.ceil(max(passes))

    def __iter__(self) -> "PromptStream":
        return self

    def _prompt(self, index: int, skipped: int = 0) -> Prompt | None:
        problem = self._order[index]
        if problem.fingerprint in self._heldout:
            return None
        return self._writer.write(problem, index, skipped)

    def __next__(self) -> Prompt:
        """The next prompt that is short enough, and not held out.

        Raises:
            ConfigError: a whole pass held none.
        """
        for skipped in range(self._pass):
            index, self.position = self.position, self.position + 1
            prompt = self._prompt(index, skipped)
            if prompt is not None:
                return prompt
        limit = self._data.max_prompt_tokens
        raise ConfigError(
            f"config.data.max_prompt_tokens = {limit}: every prompt is longer, or held out"
        )

    def _overlong(self, problems: Sequence[Problem]) -> str:
        """How many of these prompts are over the limit, from a sample of them."""
        sample = problems[:: math.ceil(len(problems) / LOOKED_AT)]
        prompts = [self._writer.write(problem, 0) for problem in sample]
        longer = sum(prompt is None or prompt.truncated for prompt in prompts)
        fate = "dropped" if self._data.overlong_prompts == "drop" else "cut"
        text = f", over max_prompt_tokens and {fate}: {longer} of {len(prompts)} looked at"
        return text if longer else ""

    def describe(self) -> str:
        """What there is to train on and to evaluate, and what of the files was left out."""
        parts = []
        for source in self.sources:
            weight = f", weight {source.weight:g}" if len(self.sources) > 1 else ""
            overlong = self._overlong(source.problems) if source.counts else ""
            parts.append(source.describe() + overlong + weight)
        held_out = [source.describe() for source in self.heldout]
        return "; ".join(parts) + ". Held out: " + ("; ".join(held_out) or "nothing")


def heldout_prompts(data: Data, seed: int, tokenizer: Tokenizer) -> list[Prompt]:
    """The evaluation prompts, each once, in a fixed order; overlong ones as configured."""
    held, sources = heldout_sources(data, seed), []
    if data.template == "few_shot":
        sources = training_sources(data, seed, _fingerprints(held))
    writer = _Writer(data, seed, tokenizer, sources, _fingerprints(held))
    prompts = (writer.write(problem, index) for index, problem in enumerate(every_problem(held)))
    return [prompt for prompt in prompts if prompt is not None]
