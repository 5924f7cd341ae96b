"""Audit of a run: its recorded verdicts beside those of another verifier, the reference."""

import collections
import dataclasses
import functools
import heapq
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import AuditConfig, Reward
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.page.recorded_run import RecordedRun, read_run, rollouts_files
from dapo_jax.reporting.scores import Estimate, rate
from dapo_jax.rewards.functions import TOKENS, arguments, column_names, find_functions
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.settings import ConfigError, leaves, require
from dapo_jax.runtime.storage.jsonl import read_object
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import replacing
from dapo_jax.structs import Completion, Prompt, Verdict
from dapo_jax.verifier.gold_reading import read_gold
from dapo_jax.verifier.verifier import VERIFIERS

# Fields of a recorded response, with their types.
FIELDS = {"index": int, "prompt": str, "response": str, "answer": str, "source": str}
FIELDS |= {"sample": int, "tokens": int, "correct": bool}
MAX_FAILURES = 0.05  # fraction of the responses on which the audit's verifier may fail
MAX_DISAGREEMENTS = 20  # in the record
SHOWN_CHARACTERS = 150
VERDICTS = ("incorrect", "correct")
TABLE_ROW = "{:<22}{:<11}{:<22}{:<22}{}"


class Cell(NamedTuple):
    """Responses that are counted together."""

    step: int
    problem: int  # its hash
    kind: str  # of the gold answer
    recorded: bool  # verdict of the run
    audited: bool


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of recorded verdicts, each None if there is no such response.

    Attributes:
        false_positives: fraction of the responses that the audit calls incorrect.
        false_negatives: fraction of the responses that the audit calls correct.
    """

    responses: int
    problems: int
    agreement: Estimate | None
    false_positives: Estimate | None
    false_negatives: Estimate | None

    def exceed(self, limit: float) -> bool:
        """Return True if an error rate is above the limit by more than chance."""
        rates = (self.false_positives, self.false_negatives)
        return any(r is not None and r.low is not None and r.low > limit for r in rates)


def _rates(cells: Any) -> Rates:
    names, problems = np.unique(cells.problem, return_inverse=True)
    is_equal, audited = cells.recorded == cells.audited, cells.audited

    def count(mask: np.ndarray) -> np.ndarray:
        return np.bincount(problems, cells.responses * mask)

    return Rates(
        responses=int(cells.responses.sum()),
        problems=len(names),
        agreement=rate(count(is_equal), count(np.ones_like(is_equal))),
        false_positives=rate(count(~is_equal & ~audited), count(~audited)),
        false_negatives=rate(count(~is_equal & audited), count(audited)),
    )


def compare(counts: Mapping[Cell, int]) -> dict[str, Rates]:
    """Return the rates of all responses, of each kind of answer, and of two thirds of the steps."""
    rows = [(*cell, responses) for cell, responses in counts.items()]
    cells = np.rec.fromrecords(rows, names=[*Cell._fields, "responses"])
    steps = np.unique(cells.step)
    third = -(-len(steps) // 3)
    parts = {str(kind): cells.kind == kind for kind in np.unique(cells.kind)}
    parts["first third of steps"] = cells.step <= steps[third - 1]
    parts["last third of steps"] = cells.step >= steps[-third]
    return {"all": _rates(cells)} | {name: _rates(cells[mask]) for name, mask in parts.items()}


# --- verdicts -------------------------------------------------------------------------------


def read_responses(path: Folder) -> list[dict[str, Any]]:
    """Return the responses of a rollouts file. Raises `ConfigError` if it is empty or damaged."""
    try:
        with path.open("rb") as file:
            rows = [read_object(line) or {} for line in file]
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    for number, row in enumerate(rows, 1):
        for name, kind in FIELDS.items():
            if type(row.get(name)) is not kind:
                missing = f"line {number} has no {name!r} of type {kind.__name__}"
                raise ConfigError(f"{path}: {missing}: must be a recorded response")
    if not rows:
        raise ConfigError(f"{path}: is empty: must have a line per response")
    return rows


def make_reward(config: AuditConfig, run: RecordedRun) -> Reward:
    """Return the run's reward settings with the audit's verifier. Raises `ConfigError`."""
    recorded = {name: run.settings.get(f"reward.{name}", x) for name, _, x in leaves(Reward())}
    reward = Reward(**recorded)
    allowed = "a run whose rewards are verdicts: its reward.correct is 'spread'"
    require(reward.correct != "spread", "run", config.run, allowed)
    reward.workers, reward.timeout_seconds = config.workers, config.timeout_seconds
    if config.verifier in VERIFIERS:
        reward.verifier, reward.parts = config.verifier, "rule=1"
        return reward
    allowed = f"{', '.join(VERIFIERS)} or module:function"
    require(":" in config.verifier, "verifier", config.verifier, allowed)
    (function,) = find_functions([config.verifier], "verifier").values()
    missing = sorted({TOKENS}.intersection(arguments(function)) | column_names(function).required)
    allowed = f"a function that does not take {', '.join(missing)}: rollouts/ lacks them"
    require(not missing, "verifier", config.verifier, allowed)
    reward.parts = f"{config.verifier}=1"
    return reward


def score(pool: RewardPool, rows: list[dict[str, Any]]) -> Iterator[tuple[dict, Verdict]]:
    """Yield the recorded responses of a step with new verdicts; a group is scored as a whole."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["index"], []).append(row)
    pending = []
    for index, group in groups.items():
        text, answer, source = (group[0][name] for name in ("prompt", "answer", "source"))
        prompt = Prompt(index, "", text, np.zeros(0, np.int32), answer, source)
        completions = [
            Completion(np.zeros(row["tokens"], np.int32), np.zeros(0), False, 0, row["response"])
            for row in group
        ]
        pending += zip(group, pool.submit_group(prompt, completions), strict=True)
    for row, verdict in pending:
        yield row, verdict.result()


@functools.cache
def answer_kind(gold: str) -> str:
    """Return the kind of a gold answer, such as integer, fraction, list, expression, words."""
    kind, shown = read_gold("math", gold)
    return ("integer" if shown.lstrip("-").isdigit() else "fraction") if kind == "number" else kind


class Tally:
    """Counts, failures and most rewarded disagreements of an audit.

    Args:
        function: name of the user's function; empty for a verifier.
        threshold: smallest value of the function for a correct response.
    """

    def __init__(self, function: str, threshold: float):
        self._function = function
        self._threshold = threshold
        self.counts: collections.Counter[Cell] = collections.Counter()
        self.failures: list[str] = []  # errors of the audit's verifier
        self.disagreements: list[dict[str, Any]] = []

    def add(self, step: int, row: dict[str, Any], verdict: Verdict) -> None:
        """Count a response, unless one of its verdicts failed."""
        if failure := verdict.broken if self._function else verdict.failure:
            self.failures.append(failure)
        elif not row.get("failure"):
            value = verdict.parts.get(self._function, 0.0)
            is_accepted = value >= self._threshold if self._function else verdict.correct
            audited = is_accepted and row["tokens"] > 0  # as in training
            problem = zlib.crc32(f"{row['prompt']}\0{row['answer']}".encode())
            kind = answer_kind(row["answer"])
            self.counts[Cell(step, problem, kind, row["correct"], audited)] += 1
            if row["correct"] != audited:
                names = (*FIELDS, "extracted", "reward")
                shown = {name: row.get(name) for name in names}
                self.disagreements.append(shown | {"step": step, "audited": audited})

    def keep_most_rewarded(self) -> None:
        """Drop the other disagreements; of equally rewarded ones keep the latest."""

        def rank(row: dict[str, Any]) -> tuple[float, int]:
            return -math.inf if row["reward"] is None else row["reward"], row["step"]

        self.disagreements = heapq.nlargest(MAX_DISAGREEMENTS, self.disagreements, rank)

    def check(self, config: AuditConfig) -> None:
        """Raise `ConfigError` if too many verdicts failed."""
        failed, counted = len(self.failures), self.counts.total()
        allowed = f"a verifier that works; it failed on {failed} of {failed + counted} responses"
        fits = failed <= MAX_FAILURES * (failed + counted)
        require(fits, "verifier", config.verifier, ": ".join([allowed, *self.failures[:1]]))
        require(counted > 0, "run", config.run, "a run with verdicts: all of its own failed")


def audit(config: AuditConfig) -> bool:
    """Score a run's responses again, print the result, and write it to audit.json.

    Returns True if an error rate is above the limit. Raises `ConfigError`.
    """
    run = read_run(config.run)
    reward = make_reward(config, run)
    files = rollouts_files(run, config.max_steps)
    require(bool(files), "run", config.run, "a run with recorded responses in rollouts/")
    tally = Tally("" if config.verifier in VERIFIERS else config.verifier, reward.threshold)
    pool = RewardPool(reward)
    try:
        with Progress().working(f"scoring the responses of {len(files)} steps", stays=False):
            for step, path in files.items():
                for row, verdict in score(pool, read_responses(path)):
                    tally.add(step, row, verdict)
                tally.keep_most_rewarded()
    finally:
        pool.close()
    tally.check(config)
    rates = compare(tally.counts)
    record = {
        "verifier": config.verifier,
        "recorded_verifier": run.settings.get("reward.verifier"),
        "failed": len(tally.failures),
        "rates": {name: dataclasses.asdict(own) for name, own in rates.items()},
        "disagreements": tally.disagreements,
    }
    with replacing(run.folder / "audit.json") as file:
        file.write(json.dumps(record, indent=1).encode())
    is_alarm = rates["all"].exceed(config.max_disagreement)
    print(printable(describe(rates, tally.disagreements)))
    bound = f"{'' if is_alarm else 'not '}above --max_disagreement = {config.max_disagreement}"
    print(f"error rates of the run's verdicts, with {config.verifier} as reference: {bound}")
    return is_alarm


# --- text -----------------------------------------------------------------------------------


def _spell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    bounds = "" if estimate.low is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{bounds}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"... {line[-SHOWN_CHARACTERS:]}"


def describe(rates: dict[str, Rates], disagreements: list[dict[str, Any]]) -> str:
    """Return the table of rates and the disagreements as text."""
    titles = ("", "responses", "agreement", "false positives", "false negatives")
    lines = [TABLE_ROW.format(*titles)]
    for name, own in rates.items():
        shown = map(_spell, (own.agreement, own.false_positives, own.false_negatives))
        lines.append(TABLE_ROW.format(name, own.responses, *shown))
    for row in disagreements:
        recorded, audited = VERDICTS[row["correct"]], VERDICTS[row["audited"]]
        lines += [
            f"\nstep {row['step']}, reward {row['reward']}: recorded {recorded}, audited {audited}",
            f"  problem:  {_shorten(row['prompt'])}",
            f"  gold:     {_shorten(row['answer'])}",
            f"  response: {_shorten(row['response'])}",
        ]
    return "\n".join(lines)
