"""Problems to prompts with grain: an endless, shuffled, seekable order, the same on every process.

The order is a function of the seed alone, so the position in it, one integer, is all that a
checkpoint has to hold.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from dapo_jax.config.experiment import Data
from dapo_jax.data.prompts.templates import Beside, Template, open_template
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.sources import Source, every_problem, heldout_sources, training_sources
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem, Prompt

LOOKED_AT = 500  # problems of a file whose prompts' length is looked at, at the start
LOOKED_AT_GENERATED = 32  # the same of generated ones, some of which take long to make
TRIED_EXAMPLES = 200  # problems that are asked for a worked solution
REMEMBERED_PROMPTS = 4096  # as they were written


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
        shown = problem.answer or problem.solution
        if shown and problem.fingerprint not in seen:
            seen.add(problem.fingerprint)
            (worked if problem.solution else others).append(problem)
        if len(worked) == count:
            break
    found = (worked + others)[:count]
    allowed = f"below the {len(found)} training problems that were found as examples"
    require(len(found) == count, "data.few_shot", count - 1, allowed)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Of a source's prompts, as far as they were looked at: how long, in tokens.

    Attributes:
        over: how many are longer than `data.max_prompt_tokens`.
    """

    name: str
    looked_at: int
    over: int
    longest: int

    def describe(self) -> str:
        """What of them does not fit."""
        over = f"{self.over:,} of {self.looked_at:,} looked at"
        return f"{self.name}: {over}, the longest of {self.longest:,} tokens"


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
        self.template = open_template(data.template)
        if data.template == "few_shot":
            examples = choose_examples(sources, heldout, data.few_shot + 1, seed)
        if data.template == "chat" and tokenizer.chat is None:
            raise ConfigError(
                "config.data.template = 'chat': the model folder has no chat template, neither in "
                "tokenizer_config.json nor as chat_template.jinja"
            )
        self._beside = Beside(tokenizer.chat, data.system_prompt, examples, data.few_shot)

    def _encode(self, problem: Problem) -> tuple[str, list[int]]:
        text = self.template.write(problem, self._beside)
        tokens = self._tokenizer.encode_prompt(text)
        if not tokens:
            raise ConfigError(
                f"config.data.template = {self._data.template!r}: no token is left of the prompt "
                f"of {problem.id}, {text!r}"
            )
        return text, tokens

    def measure(self, source: Source) -> Lengths:
        """The lengths of a sample of its prompts."""
        most = LOOKED_AT_GENERATED if source.generated else LOOKED_AT
        places = range(0, len(source.problems), max(1, math.ceil(len(source.problems) / most)))
        lengths = [len(self._encode(source.problems[i])[1]) for i in places]
        over = sum(length > self._data.max_prompt_tokens for length in lengths)
        return Lengths(source.name, len(lengths), over, max(lengths, default=0))

    def write(self, problem: Problem, index: int, skipped: int = 0) -> Prompt | None:
        """None for a prompt over the limit where the config says to drop those."""
        text, tokens = self._encode(problem)
        limit = self._data.max_prompt_tokens
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
    """The endless order of training prompts, and those of the evaluation.

    Attributes:
        position: place from which to read on; may be set.
        sources: where the prompts come from.
        heldout: sources whose problems are never among them.
        template: how they are written; its file has been read once.

    Args:
        needs_answer: whether a row of a file without an answer is no problem.
        training: without it there are only the prompts of the evaluation.

    Raises:
        ConfigError: the data or the template are not what the settings say.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        tokenizer: Tokenizer,
        *,
        needs_answer: bool = True,
        training: bool = True,
    ):
        self.position, self._data = 0, data
        self.heldout = heldout_sources(data, seed, needs_answer)
        self._heldout = _fingerprints(self.heldout)
        sources = []
        if training or data.template == "few_shot":
            sources = training_sources(data, seed, self._heldout, needs_answer)
        self._writer = _Writer(data, seed, tokenizer, sources, self._heldout)
        self.sources = sources if training else []
        if training:
            self._order = _endless_order(self.sources, seed)
            total = sum(source.weight for source in self.sources)
            passes = (len(source.problems) * total / source.weight for source in self.sources)
            self._pass = math.ceil(max(passes))
            self._check_fields()
        self._check_turns()
        # What a step asked in vain, the next one asks again.
        self._written = functools.lru_cache(REMEMBERED_PROMPTS)(self._prompt)

    @property
    def template(self) -> Template:
        return self._writer.template

    def _check_fields(self) -> None:
        """A name that no file has would go unnoticed where all files fit another format."""
        files = {s.name: s for s in [*self.sources, *self.heldout] if not s.generated}
        require(
            not self._data.fields or any(source.named for source in files.values()),
            "data.fields",
            self._data.fields,
            f"names that the first rows of a file have, all of them; {', '.join(files)} has others",
        )

    def _check_turns(self) -> None:
        if "messages" in self.template.reads:
            return
        for source in [*self.sources, *self.heldout]:
            found = [] if source.generated else [p.id for p in every_problem([source]) if p.turns]
            require(
                not found,
                "data.template",
                self._data.template,
                f"chat, or jinja that reads messages: {len(found)} rows of {source.name} are "
                f"conversations of several turns, as {''.join(found[:1])}",
            )

    def __iter__(self) -> "PromptStream":
        return self

    def _prompt(self, index: int, skipped: int = 0) -> Prompt | None:
        problem = self._order[index]
        assert problem is not None  # nothing filters that data set
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
            prompt = self._written(index, skipped)
            if prompt is not None:
                return prompt
        limit = self._data.max_prompt_tokens
        raise ConfigError(
            f"config.data.max_prompt_tokens = {limit}: every prompt is longer, or held out"
        )

    def heldout_prompts(self) -> list[Prompt]:
        """Those of the evaluation, each once, in a fixed order; overlong ones as configured."""
        problems = every_problem(self.heldout)
        prompts = (self._writer.write(problem, index) for index, problem in enumerate(problems))
        return [prompt for prompt in prompts if prompt is not None]

    @functools.cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """What tells the problems of each source from others, by its name and use."""
        named = {f"the training data of {one.name}": one for one in self.sources}
        named |= {f"what is held out of {one.name}": one for one in self.heldout}
        return {name: source.digests() for name, source in named.items()}

    @functools.cached_property
    def lengths(self) -> list[Lengths]:
        """Of each source, training before evaluation."""
        return [self._writer.measure(source) for source in [*self.sources, *self.heldout]]

    def complaints(self) -> Iterator[str]:
        """What is wrong with rows of the files, and what of them no prompt shows."""
        hidden = 0
        for source in [*self.sources, *self.heldout]:
            yield from source.complaints
            if not source.generated:
                hidden += sum(bool(problem.system) for problem in every_problem([source]))
        if hidden and not self.template.shows_system:
            yield (
                f"{hidden:,} problems have a system message, which data.template = "
                f"{self._data.template!r} does not show"
            )

    def describe(self) -> str:
        """What there is to train on and to evaluate, and what of the files was left out."""
        described, fate = [], "dropped" if self._data.overlong_prompts == "drop" else "cut"
        for source, lengths in zip([*self.sources, *self.heldout], self.lengths, strict=True):
            over = f", over max_prompt_tokens and {fate}: {lengths.over} of {lengths.looked_at}"
            described.append(source.describe() + f"{over} looked at" * bool(lengths.over))
        count = len(self.sources)
        heldout = "Held out: " + ("; ".join(described[count:]) or "nothing")
        if count > 1:
            described = [f"{described[i]}, weight {self.sources[i].weight:g}" for i in range(count)]
        return ". ".join(["; ".join(described[:count])] * bool(count) + [heldout])
