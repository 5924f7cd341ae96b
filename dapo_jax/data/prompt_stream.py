"""Stream of prompts: an endless, shuffled, seekable order of problems, equal on every process.

The order (by grain) is a function of the seed alone, so that a checkpoint holds one integer, the
position in it.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from dapo_jax.config.experiment import Data
from dapo_jax.data.prompts.templates import Beside, Template, check_chat, open_template
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.sources import Source, every_problem, heldout_sources, training_sources
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem, Prompt, present

LOOKED_AT = 500  # problems of a file whose prompts are measured at the start
LOOKED_AT_GENERATED = 32  # the same of generated ones, some of which take long to make
TRIED_EXAMPLES = 200  # problems among which worked solutions are looked for
REMEMBERED_PROMPTS = 4096  # as they were written

Opening = Callable[[Problem], Problem]


def _fingerprints(sources: Sequence[Source]) -> set[str]:
    return {problem.fingerprint for problem in every_problem(sources)}


def choose_examples(
    sources: Sequence[Source], heldout: set[str], count: int, seed: int
) -> tuple[Problem, ...]:
    """Few-shot examples: `count` different training problems, worked ones first, keyed by the seed.

    Raises:
        ConfigError: there are too few.
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
    examples = (worked + others)[:count]
    allowed = f"below the {len(examples)} training problems that were found as examples"
    require(len(examples) == count, "data.few_shot", count - 1, allowed)
    return tuple(examples)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of a source's prompts, in tokens, by a sample.

    Attributes:
        looked_at: prompts in the sample.
        over: prompts that are longer than `data.max_prompt_tokens`.
        longest: tokens of the longest prompt.
    """

    name: str
    looked_at: int
    over: int
    longest: int

    def describe(self) -> str:
        """Line about the prompts that are too long."""
        over = f"{self.over:,} of {self.looked_at:,} looked at"
        return f"{self.name}: {over}, the longest of {self.longest:,} tokens"


class _Writer:
    """Writer of problems as prompts: template, tokens, limit of length."""

    def __init__(
        self,
        data: Data,
        seed: int,
        tokenizer: Tokenizer,
        sources: Sequence[Source],
        heldout: set[str],
        opening: Opening,
        tools: list[dict[str, Any]] | None,
    ):
        self._data, self._tokenizer, self._opening, examples = data, tokenizer, opening, ()
        self.template = open_template(data.template)
        if data.template == "few_shot":
            examples = choose_examples(sources, heldout, data.few_shot + 1, seed)
        check_chat(data.template, tokenizer.chat)
        self._beside = Beside(tokenizer.chat, data.system_prompt, examples, data.few_shot, tools)

    def _encode(self, problem: Problem) -> tuple[str, list[int]]:
        text = self.template.write(self._opening(problem), self._beside)
        tokens = self._tokenizer.encode_prompt(text)
        if not tokens:
            raise ConfigError(
                f"config.data.template = {self._data.template!r}: no token is left of the prompt "
                f"of {problem.id}, {text!r}"
            )
        return text, tokens

    def count_tokens(self, problem: Problem) -> int:
        """Tokens of a problem's prompt."""
        return len(self._encode(problem)[1])

    def measure(self, source: Source) -> Lengths:
        """Lengths of a sample of a source's prompts."""
        most = LOOKED_AT_GENERATED if source.generated else LOOKED_AT
        lengths = [self.count_tokens(problem) for problem in source.sample(most)]
        over = sum(length > self._data.max_prompt_tokens for length in lengths)
        return Lengths(source.name, len(lengths), over, max(lengths, default=0))

    def write(self, problem: Problem, index: int, skipped: int = 0) -> Prompt | None:
        """Prompt of a problem; None where it is too long and `data.overlong_prompts` is 'drop'."""
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
    """Order of all problems: each source shuffled anew every pass, several mixed by weight."""
    orders = [
        grain.MapDataset.source(source.problems).seed(seed).shuffle().repeat() for source in sources
    ]
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [source.weight for source in sources])


class PromptStream:
    """Endless stream of training prompts, and the prompts of the evaluation.

    Attributes:
        position: place in the order of the next prompt; may be set.
        sources: sources of the training prompts.
        heldout: sources of the evaluation, whose problems are never trained on.
        template: template of the prompts; its file is read once.

    Args:
        needs_answer: leaves out rows of files without an answer.
        training: without it there are only the prompts of the evaluation.
        opening: an environment's change of a problem's text and messages.
        tools: that the policy may call, for the chat template.

    Raises:
        ConfigError: the data or the template do not fit the settings.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        tokenizer: Tokenizer,
        *,
        needs_answer: bool = True,
        training: bool = True,
        opening: Opening = lambda problem: problem,
        tools: list[dict[str, Any]] | None = None,
    ):
        self.position, self._data = 0, data
        self.heldout = heldout_sources(data, seed, needs_answer)
        self._heldout = _fingerprints(self.heldout)
        sources = []
        if training or data.template == "few_shot":
            sources = training_sources(data, seed, self._heldout, needs_answer)
        shown = opening, tools
        self._writer = _Writer(data, seed, tokenizer, sources, self._heldout, *shown)
        self.sources = sources if training else []
        if training:
            self._order = _endless_order(self.sources, seed)
            total = sum(source.weight for source in self.sources)
            passes = (len(source.problems) * total / source.weight for source in self.sources)
            self._pass = math.ceil(max(passes))
            self._check_fields()
        self._check_turns()
        # A prompt that one step dropped, the next one often asks for again.
        self._written = functools.lru_cache(REMEMBERED_PROMPTS)(self._prompt)

    @property
    def template(self) -> Template:
        return self._writer.template

    def count_tokens(self, problem: Problem) -> int:
        """Tokens of a problem's prompt, before any limit."""
        return self._writer.count_tokens(problem)

    def _check_fields(self) -> None:
        """Refuses names of fields that no file has, where all files fit another format."""
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
            ids = [] if source.generated else [p.id for p in every_problem([source]) if p.turns]
            require(
                not ids,
                "data.template",
                self._data.template,
                f"chat, or jinja that reads messages: {len(ids)} rows of {source.name} are "
                f"conversations of several turns, as {''.join(ids[:1])}",
            )

    def __iter__(self) -> "PromptStream":
        return self

    def _prompt(self, index: int, skipped: int = 0) -> Prompt | None:
        problem = present(self._order[index], "problem")
        if problem.fingerprint in self._heldout:
            return None
        return self._writer.write(problem, index, skipped)

    def __next__(self) -> Prompt:
        """Next prompt that is short enough and not held out.

        Raises:
            ConfigError: a whole pass has none.
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
        """Prompts of the evaluation, each once, in a fixed order; overlong ones as configured."""
        problems = every_problem(self.heldout)
        prompts = (self._writer.write(problem, index) for index, problem in enumerate(problems))
        return [prompt for prompt in prompts if prompt is not None]

    @functools.cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """Digests of the problems of each source, by name and use."""
        uses = {f"the training data of {source.name}": source for source in self.sources}
        uses |= {f"what is held out of {source.name}": source for source in self.heldout}
        return {use: source.digests() for use, source in uses.items()}

    @functools.cached_property
    def lengths(self) -> list[Lengths]:
        """Lengths of the prompts of each source, training before evaluation."""
        return [self._writer.measure(source) for source in [*self.sources, *self.heldout]]

    def complaints(self) -> Iterator[str]:
        """Complaints about rows of the files, and about messages that no prompt shows."""
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
        """Line about the problems to train on and to evaluate, and about rows left out."""
        described, fate = [], "dropped" if self._data.overlong_prompts == "drop" else "cut"
        for source, lengths in zip([*self.sources, *self.heldout], self.lengths, strict=True):
            over = f", over max_prompt_tokens and {fate}: {lengths.over} of {lengths.looked_at}"
            described.append(source.describe() + f"{over} looked at" * bool(lengths.over))
        count = len(self.sources)
        heldout = "Held out: " + ("; ".join(described[count:]) or "nothing")
        if count > 1:
            described = [f"{described[i]}, weight {self.sources[i].weight:g}" for i in range(count)]
        return ". ".join(["; ".join(described[:count])] * bool(count) + [heldout])
