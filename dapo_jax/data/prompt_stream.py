"""Stream of prompts: an endless, shuffled order of problems, equal on every process.

The order (by grain) is a function of the seed alone, so a checkpoint holds only the position.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from dapo_jax.config.experiment import Data
from dapo_jax.data.prompts.templates import Beside, check_chat, open_template, open_text
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.row_formats import NO_COLUMNS
from dapo_jax.data.sources import Source, Sources, every_problem
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Problem, Prompt, WantedColumns, present

MEASURED_PROBLEMS = 500  # of a file, to report the lengths of prompts
MEASURED_GENERATED = 32  # of a generated source; some are slow to make
EXAMPLE_CANDIDATES = 200  # problems that are searched for worked solutions
CACHED_PROMPTS = 4096

Opening = Callable[[Problem], Problem]


def choose_examples(
    sources: Sequence[Source], heldout: set[str], count: int, seed: int
) -> tuple[Problem, ...]:
    """Return `count` few-shot examples, worked ones first; raise `ConfigError` for too few."""
    rng = np.random.default_rng([seed, zlib.crc32(b"few_shot")])
    parts = [grain.MapDataset.source(source.problems) for source in sources]
    problems = grain.MapDataset.concatenate(parts)
    worked, others = [], []
    seen = set(heldout)
    for place in rng.choice(len(problems), min(EXAMPLE_CANDIDATES, len(problems)), replace=False):
        problem = present(problems[int(place)], "problem")
        if (problem.answer or problem.solution) and problem.fingerprint not in seen:
            seen.add(problem.fingerprint)
            (worked if problem.solution else others).append(problem)
        if len(worked) == count:
            break
    examples = (worked + others)[:count]
    allowed = f"below the {len(examples)} training problems that were found as examples"
    require(len(examples) == count, "data.few_shot", count - 1, allowed)
    return tuple(examples)


class Lengths(NamedTuple):
    """Lengths of a source's prompts, in tokens, estimated from a sample."""

    name: str
    looked_at: int  # prompts in the sample
    over: int  # prompts that are longer than `data.max_prompt_tokens`
    longest: int

    def describe(self) -> str:
        """Return a line about the prompts that are too long."""
        over = f"{self.over:,} of {self.looked_at:,} looked at"
        return f"{self.name}: {over}, the longest of {self.longest:,} tokens"


def _endless_order(sources: Sequence[Source], seed: int) -> grain.MapDataset:
    """Return the order of all problems: a new shuffle every pass, sources mixed by weight."""
    orders = [grain.MapDataset.source(s.problems).seed(seed).shuffle().repeat() for s in sources]
    weights = [source.weight for source in sources]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


class PromptStream:
    """Endless stream of training prompts, and the prompts of the evaluation.

    `position`, the index of the next prompt in the order, may be set.

    Args:
        needs_answer: leave out rows of files without an answer.
        columns: columns of the rows that reward functions take.
        training: if False, there are only the prompts of the evaluation.
        opening: an environment's change of a problem's text and messages.
        tools: functions that the policy may call, for the chat template.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        tokenizer: Tokenizer,
        *,
        needs_answer: bool = True,
        columns: WantedColumns = NO_COLUMNS,
        training: bool = True,
        opening: Opening = lambda problem: problem,
        tools: list[dict[str, Any]] | None = None,
    ):
        self.position = 0
        self._data = data
        self._tokenizer = tokenizer
        self._opening = opening
        sources = Sources(data, seed, needs_answer, columns)
        self.heldout = sources.heldout()
        self._heldout_fingerprints = {p.fingerprint for p in every_problem(self.heldout)}
        needs_examples = data.template == "few_shot"
        trained = sources.training(self._heldout_fingerprints) if training or needs_examples else []
        self.sources = trained if training else []
        self.template = open_template(data.template)
        check_chat(data.template, tokenizer.chat)
        examples = ()
        if needs_examples:
            examples = choose_examples(trained, self._heldout_fingerprints, data.few_shot + 1, seed)
        user = open_text(data.user_template, "data.user_template") if data.user_template else None
        self._beside = Beside(
            chat=tokenizer.chat,
            system_prompt=data.system_prompt,
            examples=examples,
            shots=data.few_shot,
            tools=tools,
            write_user=user.write if user else None,
        )
        if training:
            self._order = _endless_order(self.sources, seed)
            total = sum(source.weight for source in self.sources)
            passes = (len(source.problems) * total / source.weight for source in self.sources)
            self._pass = math.ceil(max(passes))
        self._check_files(training)
        # The next step often starts with prompts that this step did not use.
        self._cached_prompt = functools.lru_cache(CACHED_PROMPTS)(self._make_prompt)

    def _check_files(self, training: bool) -> None:
        """Raise `ConfigError` if data.fields or the template does not fit the files."""
        files = [s for s in [*self.sources, *self.heldout] if not s.generated]
        data = self._data
        is_named = not data.fields or any(file.named for file in files)
        names = ", ".join(dict.fromkeys(file.name for file in files))
        fields = ", ".join(dict.fromkeys(name for file in files for name in file.fields))
        allowed = f"names that the first rows of a file have; {names} has others: {fields}"
        require(is_named or not training, "data.fields", data.fields, allowed)
        for file in files:
            ids = [p.id for p in every_problem([file]) if not self.template.shows(p)]
            allowed = f"chat, or jinja that reads messages and tools: {len(ids)} rows of "
            allowed += f"{file.name} have several turns or tools, such as {''.join(ids[:1])}"
            require(not ids, "data.template", data.template, allowed)

    def problem(self, index: int) -> Problem:
        """Return the training problem at an index of the order, as environments open it."""
        return self._opening(present(self._order[index], "problem"))

    def encode(self, problem: Problem, text: str) -> list[int]:
        """Return the tokens of a prompt with `text` in place of an opened problem's; no limit."""
        changed = dataclasses.replace(problem, text=text)
        return self._tokenizer.encode_prompt(self.template.write(changed, self._beside))

    def _encode(self, problem: Problem) -> tuple[str, list[int]]:
        text = self.template.write(self._opening(problem), self._beside)
        tokens = self._tokenizer.encode_prompt(text)
        if not tokens:
            raise ConfigError(
                f"config.data.template = {self._data.template!r}: the prompt of {problem.id} has "
                f"no token: {text!r}"
            )
        return text, tokens

    def count_tokens(self, problem: Problem) -> int:
        """Return the number of tokens of a problem's prompt, before any limit."""
        return len(self._encode(problem)[1])

    def _write(self, problem: Problem, index: int, skipped: int = 0) -> Prompt | None:
        """Return the prompt of a problem; None if it is dropped because it is too long."""
        text, tokens = self._encode(problem)
        limit = self._data.max_prompt_tokens
        truncated = len(tokens) > limit
        if truncated and self._data.overlong_prompts == "drop":
            return None
        if truncated:
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
            columns=problem.columns,
            digest=problem.digest,
            truncated=truncated,
            skipped=skipped,
        )

    def _make_prompt(self, index: int, skipped: int = 0) -> Prompt | None:
        problem = present(self._order[index], "problem")
        if problem.fingerprint in self._heldout_fingerprints:
            return None
        return self._write(problem, index, skipped)

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompt:
        """Return the next prompt; raise `ConfigError` if a whole pass has none."""
        for skipped in range(self._pass):
            prompt = self._cached_prompt(self.position, skipped)
            self.position += 1
            if prompt is not None:
                return prompt
        limit = self._data.max_prompt_tokens
        raise ConfigError(
            f"config.data.max_prompt_tokens = {limit}: every prompt is longer, or held out"
        )

    def heldout_prompts(self) -> list[Prompt]:
        """Return the prompts of the evaluation in a fixed order; overlong ones as configured."""
        problems = every_problem(self.heldout)
        prompts = (self._write(problem, index) for index, problem in enumerate(problems))
        return [prompt for prompt in prompts if prompt is not None]

    @functools.cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """Digests of the problems of each source, by name and use."""
        training = {f"the training data of {s.name}": s.digests() for s in self.sources}
        return training | {f"what is held out of {s.name}": s.digests() for s in self.heldout}

    @functools.cached_property
    def lengths(self) -> list[Lengths]:
        """Lengths of the prompts of each source, training before evaluation."""
        measured = []
        for source in [*self.sources, *self.heldout]:
            sample = source.sample(MEASURED_GENERATED if source.generated else MEASURED_PROBLEMS)
            lengths = [self.count_tokens(problem) for problem in sample]
            over = sum(length > self._data.max_prompt_tokens for length in lengths)
            measured.append(Lengths(source.name, len(lengths), over, max(lengths, default=0)))
        return measured

    def warnings(self) -> Iterator[str]:
        """Yield warnings about rows of the files, and about messages that no prompt shows."""
        for source in {source.name: source for source in [*self.heldout, *self.sources]}.values():
            texts = [self._encode(problem)[0] for problem in source.sample(1)]
            if missing := self._tokenizer.unspelled("".join(texts)):
                yield (
                    f"the model's vocabulary lacks {missing!r}, which prompts of {source.name} "
                    f"with data.template = {self._data.template!r} contain"
                )
        hidden = 0
        for source in [*self.sources, *self.heldout]:
            yield from source.messages
            if not source.generated:
                hidden += sum(bool(problem.system) for problem in every_problem([source]))
        if hidden and not self.template.shows_system:
            yield (
                f"{hidden:,} problems have a system message, which data.template = "
                f"{self._data.template!r} does not show"
            )

    def describe(self) -> str:
        """Return a line about the problems to train on and to evaluate, and rows left out."""
        described = []
        verb = "dropped" if self._data.overlong_prompts == "drop" else "cut"
        for source, lengths in zip([*self.sources, *self.heldout], self.lengths, strict=True):
            over = f", over max_prompt_tokens and {verb}: {lengths.over} of {lengths.looked_at}"
            described.append(source.describe() + f"{over} looked at" * bool(lengths.over))
        count = len(self.sources)
        heldout = "Held out: " + ("; ".join(described[count:]) or "nothing")
        if count > 1:
            described = [f"{described[i]}, weight {self.sources[i].weight:g}" for i in range(count)]
        return ". ".join(["; ".join(described[:count])] * bool(count) + [heldout])
