"""Verifiers that compare spellings: the integer behind `####`, and the scorer of DAPO's code."""

import re

from dapo_jax.types.contracts import VerifierResult

LONGEST_NUMBER = 400  # characters; longer "numbers" are not answers
INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+"
_SIGNED = re.compile(rf"(?:[-+] ?)?(?:{INTEGER})", re.ASCII)

# DAPO's released code: a label near the end, and Minerva's normalisation (arXiv 2206.14858, D.1).
CHARACTERS_READ = 300  # from the end of a response
_LABEL = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRITTEN = r"an ~|a ~|.$~$|\$~|\ ~| ~|mbox~text|,\text{and}~,|\text{and}~,|\text{m}~\text{}"
_REPLACED = [pair.split("~") for pair in _WRITTEN.split("|")]  # in this order
_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} "
    "\\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ "
    '^{\\circ} \\; ,\\! {,} " \\dots'
).split(" ")
_INNER = (
    (re.compile(r".*?\$(.*?)\$.*", re.DOTALL), r"$\1$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),  # greedy, unlike the others
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def digits_of(text: str) -> str | None:
    """Return sign and digits of an integer; None for anything else."""
    return re.sub("[+, ]", "", text) if _SIGNED.fullmatch(text) else None


def _read_integer(text: str) -> int | None:
    digits = digits_of(text) if len(text) <= LONGEST_NUMBER else None
    return None if digits is None else int(digits)


def final_number(response: str, gold: str, prompt: str) -> VerifierResult:
    """Compare exactly the integer behind the last `####` with the gold answer."""
    _, marker, after = response.rpartition("####")
    extracted = after.strip()
    if not marker or not extracted or len(after) > LONGEST_NUMBER:
        return VerifierResult(False, None, "no_marker")
    number = _read_integer(extracted)
    correct = number is not None and number == _read_integer(gold.strip())
    return VerifierResult(correct, extracted, "direct")


def spelling(answer: str) -> str:
    """Return the normalised spelling of an answer; equal spellings are equal answers."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    for pattern, new in _INNER:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def dapo(response: str, gold: str, prompt: str) -> VerifierResult:
    """Score as DAPO's released code: the last 'Answer:' near the end, and equal spellings."""
    answers = _LABEL.findall(response[-CHARACTERS_READ:])
    if not answers:
        return VerifierResult(False, None, "no_marker")
    correct = spelling(answers[-1]) == spelling(gold)
    return VerifierResult(correct, answers[-1], "direct")
