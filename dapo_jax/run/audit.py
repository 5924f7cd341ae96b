"""Audit of a run: its recorded verdicts beside those of another verifier, the reference."""

import contextlib
import functools
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import AuditConfig, Reward
from dapo_jax.reporting.page.recorded_run import RecordedRun, read_run, rollouts_files
from dapo_jax.reporting.scores import Estimate, rate
from dapo_jax.rewards.functions import TOKENS, arguments, column_names, find_functions
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.settings import ConfigError, leaves, require
from dapo_jax.runtime.storage.jsonl import read_object
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import replacing
from dapo_jax.structs import Completion, Prompt, Verdict, reaches
from dapo_jax.verifier.gold_reading import read_gold
from dapo_jax.verifier.verifier import VERIFIERS

# Fields of a recorded response, with their types.
FIELDS = {"index": int, "sample": int, "prompt": str, "response": str, "answer": str}
FIELDS |= {"tokens": int, "correct": bool}
MAX_FAILURES = 0.05  # fraction of the responses on which the audit's verifier may fail
MAX_DISAGREEMENTS = 20  # in the record
SHOWN_CHARACTERS = 150  # of the end of a text
VERDICTS = ("incorrect", "correct")
RATES = ("agreement", "false_positives", "false_negatives")
TABLE_ROW = "{:<22}{:<11}{:<22}{:<22}{}"


class Verdicts(NamedTuple):
    """Both verdicts on a response."""

    step: int
    problem: int  # its hash
    kind: str  # of the gold answer
    recorded: bool
    audited: bool


def compare(verdicts: list[Verdicts]) -> dict[str, dict[str, Any]]:
    """Return the rates of all responses, of each kind of answer, and of two thirds of the steps.

    False positives are a fraction of the responses that the audit calls incorrect, and false
    negatives of those that it calls correct.
    """
    step, problem, kind, recorded, audited = map(np.array, zip(*verdicts, strict=True))
    steps = np.unique(step)
    third = -(-len(steps) // 3)
    parts = {"all": step >= steps[0]}
    parts |= {str(name): kind == name for name in np.unique(kind)}
    parts["first third of steps"] = step <= steps[third - 1]
    parts["last third of steps"] = step >= steps[-third]
    return {name: make_rates(problem[m], recorded[m], audited[m]) for name, m in parts.items()}


def make_rates(problem: np.ndarray, recorded: np.ndarray, audited: np.ndarray) -> dict[str, Any]:
    """Return counts and rates of the responses with these problems and verdicts."""
    names, numbers = np.unique(problem, return_inverse=True)

    def fraction(hits: np.ndarray, among: np.ndarray) -> Estimate | None:
        hit_counts, sizes = (np.bincount(numbers, mask) for mask in (hits & among, among))
        return rate(hit_counts, sizes)

    is_equal = recorded == audited
    return {
        "responses": len(problem),
        "problems": len(names),
        "agreement": fraction(is_equal, np.ones_like(is_equal)),
        "false_positives": fraction(~is_equal, ~audited),
        "false_negatives": fraction(~is_equal, audited),
    }


def exceeds(rates: dict[str, Any], limit: float) -> bool:
    """Return True if the lower end of an error rate's interval is above the limit."""
    errors = filter(None, (rates["false_positives"], rates["false_negatives"]))
    return any(error.low is not None and error.low > limit for error in errors)


def read_responses(path: Folder) -> list[dict[str, Any]]:
    """Return the responses of a rollouts file. Raises `ConfigError` if it is empty or damaged."""
    try:
        with path.open("rb") as file:
            rows = [read_object(line) or {} for line in file]
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: is empty: must have a line per response")
    for number, row in enumerate(rows, 1):
        for name, kind in FIELDS.items():
            if type(row.get(name)) is not kind:
                missing = f"line {number} has no {name!r} of type {kind.__name__}"
                raise ConfigError(f"{path}: {missing}: must be a recorded response")
    return rows


def make_reward(config: AuditConfig, run: RecordedRun) -> Reward:
    """Return the run's reward settings with the audit's verifier. Raises `ConfigError`."""
    defaults = {name: value for name, _, value in leaves(Reward()) if "." not in name}
    settings = {name: run.settings.get(f"reward.{name}", defaults[name]) for name in defaults}
    allowed = "a run whose rewards are verdicts: its reward.correct is 'spread'"
    require(settings["correct"] != "spread", "run", config.run, allowed)
    settings |= {"workers": config.workers, "timeout_seconds": config.timeout_seconds}
    if config.verifier in VERIFIERS:
        settings |= {"verifier": config.verifier, "parts": "rule=1"}
        return Reward(**settings)
    allowed = f"{', '.join(VERIFIERS)} or module:function"
    require(":" in config.verifier, "verifier", config.verifier, allowed)
    (function,) = find_functions([config.verifier], "verifier").values()
    missing = sorted({TOKENS}.intersection(arguments(function)) | column_names(function).required)
    allowed = f"a function that does not take {', '.join(missing)}: rollouts/ lacks them"
    require(not missing, "verifier", config.verifier, allowed)
    settings["parts"] = f"{config.verifier}=1"
    return Reward(**settings)


def submit(pool: RewardPool, path: Folder) -> Iterator[tuple[dict[str, Any], Future[Verdict]]]:
    """Yield the responses of a rollouts file with future verdicts; groups stay together."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in read_responses(path):
        groups.setdefault(row["index"], []).append(row)
    for index, group in groups.items():
        text, answer = group[0]["prompt"], group[0]["answer"]
        prompt = Prompt(index, "", text, np.zeros(0, np.int32), answer, source="")
        completions = [
            Completion(np.zeros(row["tokens"], np.int32), np.zeros(0), False, 0, row["response"])
            for row in group
        ]
        yield from zip(group, pool.submit_group(prompt, completions), strict=True)


def score(config: AuditConfig, run: RecordedRun) -> Iterator[tuple[dict[str, Any], bool | str]]:
    """Yield the responses of a run, each with the audit's verdict, or the error if it failed."""
    reward = make_reward(config, run)
    function = "" if config.verifier in VERIFIERS else config.verifier
    files = rollouts_files(run, config.max_steps)
    require(bool(files), "run", config.run, "a run with recorded responses in rollouts/")
    with contextlib.closing(RewardPool(reward)) as pool:
        for step, path in files.items():
            for row, future in [*submit(pool, path)]:
                verdict = future.result()
                if failure := verdict.failure:
                    yield row, failure.text
                    continue
                is_correct = verdict.correct
                if function:
                    value = verdict.parts[function]
                    is_correct = bool(reaches(value, reward.threshold, abs(value)))
                yield row | {"step": step}, is_correct and row["tokens"] > 0  # as in training


@functools.cache
def answer_kind(gold: str) -> str:
    """Return the kind of a gold answer, such as integer, fraction, list, expression, words."""
    kind, shown = read_gold("math", gold)
    return ("integer" if shown.lstrip("-").isdigit() else "fraction") if kind == "number" else kind


def audit(config: AuditConfig) -> bool:
    """Score a run's responses again, print the result, and write it to audit.json.

    Returns True if an error rate is above the limit. Raises `ConfigError`.
    """
    run = read_run(config.run)
    verdicts: list[Verdicts] = []
    failures: list[str] = []
    disagreements: list[dict[str, Any]] = []
    for row, audited in score(config, run):
        if isinstance(audited, str):
            failures.append(audited)
        elif not row.get("failure"):
            problem = zlib.crc32(f"{row['prompt']}\0{row['answer']}".encode())
            kind, recorded = answer_kind(row["answer"]), row["correct"]
            verdicts.append(Verdicts(row["step"], problem, kind, recorded, audited))
            if recorded != audited:
                shown = {name: row.get(name) for name in (*FIELDS, "step", "extracted", "reward")}
                texts = row["prompt"], row["response"]
                others = [d for d in disagreements if (d["prompt"], d["response"]) != texts]
                others.append(shown | {"audited": audited})
                others.sort(key=lambda d: (d["reward"] or 0.0, d["step"]), reverse=True)
                disagreements = others[:MAX_DISAGREEMENTS]
    allowed = f"a verifier that works; it failed on {len(failures)} responses"
    fits = len(failures) <= MAX_FAILURES * len(verdicts)
    require(fits, "verifier", config.verifier, ": ".join([allowed, *failures[:1]]))
    require(bool(verdicts), "run", config.run, "a run with verdicts; all of its own failed")
    rates = compare(verdicts)
    is_alarm = exceeds(rates["all"], config.max_disagreement)
    record = {
        "verifier": config.verifier,
        "recorded_verifier": run.settings.get("reward.verifier"),
        "failed": len(failures),
        "rates": rates,
        "disagreements": disagreements,
    }
    with replacing(run.folder / "audit.json") as file:
        file.write(json.dumps(record, indent=1, default=vars).encode())
    print(printable(describe(rates, disagreements)))
    bound = f"{'' if is_alarm else 'not '}above --max_disagreement = {config.max_disagreement}"
    print(f"error rates of the recorded verdicts, {config.verifier} as reference: {bound}")
    return is_alarm


def describe(rates: dict[str, dict[str, Any]], disagreements: list[dict[str, Any]]) -> str:
    """Return the table of rates and the disagreements as text."""

    def spell(estimate: Estimate | None) -> str:
        if estimate is None or estimate.low is None:
            return "-" if estimate is None else f"{estimate.value:.3f}"
        return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"

    def end(text: str) -> str:
        return " ".join(text.split())[-SHOWN_CHARACTERS:]

    lines = [TABLE_ROW.format("", "responses", *(name.replace("_", " ") for name in RATES))]
    for name, own in rates.items():
        lines.append(TABLE_ROW.format(name, own["responses"], *(spell(own[r]) for r in RATES)))
    for row in disagreements:
        outcome = f"recorded {VERDICTS[row['correct']]}, audited {VERDICTS[row['audited']]}"
        lines.append(f"\nstep {row['step']}, reward {row['reward']}: {outcome}")
        lines += [f"  {name}: {end(row[name])}" for name in ("prompt", "answer", "response")]
    return "\n".join(lines)
