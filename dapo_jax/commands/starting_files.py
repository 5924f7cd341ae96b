"""Files that `dapo-jax init` writes: a config, a template, and a reward function where needed."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import Problem

MODEL = "models/Qwen2.5-0.5B-Instruct"
CHARACTERS_PER_TOKEN = 2.5  # of numbers and formulas; prose has four
UNIT_TOKENS, RESPONSE_TOKENS, LONGEST_RESPONSE = 64, 512, 2048
LONGEST_PROMPT = 8192  # a few longer ones are dropped

TEMPLATE = """\
{problem}

Think step by step. The last line of your response must have the form
Answer: YOUR ANSWER
"""
REWARD = '''\
"""The reward of a response. It runs in a worker process, which may raise, hang or crash."""


def score(prompt: str, response: str, answer: str) -> float:
    """1 where the last line behind "Answer:" is the gold answer, without case and blanks."""
    found = response.rpartition("Answer:")[2]
    return float(bool(answer) and found.casefold().split() == answer.casefold().split())
'''
REWARD_WITHOUT_ANSWERS = '''\
"""The reward of a response. It runs in a worker process, which may raise, hang or crash."""


def score(prompt: str, response: str, answer: str) -> float:
    """1 for a response of 20 to 200 words: put your own judgement here."""
    return float(20 <= len(response.split()) <= 200)
'''
CONFIG = '''\
"""Reinforcement learning on problems of my own."""

from dapo_jax import Config, Data, Model, Optimizer, Packing, Reward, Rollout, Sampler


def get_config() -> Config:
    return Config(
        run_dir={run_dir},
        total_steps=100,
        model=Model(folder={model}),
        data=Data(
{data}
            max_prompt_tokens={prompt},
        ),
        rollout=Rollout(prompts_per_step={prompts}, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(max_response_tokens={response}),
        reward=Reward({reward}),
        packing=Packing(row_tokens={row}),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=5),
    )
'''


class Found(NamedTuple):
    """Problems of a file, by the fields that were chosen.

    Attributes:
        fields: for `data.fields`; empty where the rows have the usual names.
    """

    problems: list[Problem]
    fields: dict[str, str]
    rows: int
    has_answers: bool


def check_flag(fits: bool, name: str, value: str, allowed: str) -> None:
    """Raises `ConfigError` about a flag of this command."""
    if not fits:
        raise ConfigError(f"--{name} = {value!r}: must be {allowed}")


class _Ruler:
    """Measure of texts in tokens of the model, or by their characters where it is not here yet."""

    def __init__(self, model: str):
        from dapo_jax.data.prompts.tokenizer import Tokenizer

        absent = model == MODEL and not pathlib.Path(MODEL).exists()
        self._tokenizer = None if absent else Tokenizer.from_folder(model, "model")

    def limit(self, texts: list[str]) -> tuple[int, bool]:
        """Round limit in tokens that all but one text in a hundred fit under, and if all do."""
        lengths = sorted(map(self._count, texts))
        fits = lengths[-1 - len(lengths) // 100]
        limit = min(-(-fits // UNIT_TOKENS) * UNIT_TOKENS, LONGEST_PROMPT)
        return limit, lengths[-1] <= limit

    def _count(self, text: str) -> int:
        if self._tokenizer is None:
            return int(len(text) / CHARACTERS_PER_TOKEN)
        return len(self._tokenizer.encode_prompt(text))


def _quote(text: str) -> str:
    """Python literal of a text, in the double quotes that formatters write."""
    return json.dumps(text, ensure_ascii=False)


def make_files(flags: Any, found: Found, folder: pathlib.Path, by_rule: bool) -> dict[str, str]:
    """Contents of the files by name."""
    template = TEMPLATE if found.has_answers else "{problem}\n"
    ruler = _Ruler(flags.model)
    prompt, all_fit = ruler.limit([template.replace("{problem}", p.text) for p in found.problems])
    worked, _ = ruler.limit([problem.solution for problem in found.problems])
    response = min(max(RESPONSE_TOKENS, 2 * worked), LONGEST_RESPONSE)
    parts = f"{'.'.join(folder.parts)}.reward:score=1"
    own = f'parts={_quote(parts)}, correct="threshold"'
    data = {"source": flags.data, "template": str(folder / "template.txt")}
    if found.fields:
        data["fields"] = ",".join(f"{key}={field}" for key, field in found.fields.items())
    if not all_fit:
        data["overlong_prompts"] = "drop"
    config = CONFIG.format(
        run_dir=_quote(f"runs/{folder.absolute().name}"),
        model=_quote(flags.model),
        data="\n".join(f"{' ' * 12}{name}={_quote(value)}," for name, value in data.items()),
        prompt=prompt,
        response=response,
        row=prompt + response,
        prompts=min(32, max(2, len(found.problems) // 2 * 2)),
        reward='verifier="math_label"' if by_rule else own,
    )
    files = {"config.py": config, "template.txt": template}
    if not by_rule:
        files["reward.py"] = REWARD if found.has_answers else REWARD_WITHOUT_ANSWERS
    return files


def write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    """Writes new files, all or none. Raises `ConfigError` where one is there already."""
    there = [str(folder / name) for name in files if os.path.lexists(folder / name)]
    allowed = f"a folder without {' and '.join(there)}, which would be lost"
    check_flag(not there, "out", str(folder), allowed)
    made: list[pathlib.Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                made.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in made:
            path.unlink()
        raise ConfigError(f"--out = {str(folder)!r}: can't be written: {error}") from None
