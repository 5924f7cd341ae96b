"""Verifier of DAPO's released code: a label near the end, a fixed spelling, equal strings.

The substitutions are those of Minerva's evaluation (arXiv 2206.14858, appendix D.1).
"""

import re

CHARACTERS_READ = 300  # from the end of a response
LABEL = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRITTEN = r"an ~|a ~|.$~$|\$~|\ ~| ~|mbox~text|,\text{and}~,|\text{and}~,|\text{m}~\text{}"
_REPLACED = [pair.split("~") for pair in _WRITTEN.split("|")]  # in this order
_REMOVED = (
    *(
        "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes "
        "digits cents degrees cm gm pounds meters meals edges students childrentickets multiples "
        "\\text{s} \\text{.}"
    ).split(),
    "\\text{\ns}",
    *"\\text{}^2 \\text{}^3".split(),
    "\\text{\n}",
    *'\\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'.split(),
)
_INNER = (
    (re.compile(r".*?\$(.*?)\$.*", re.DOTALL), r"$\1$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),  # greedy, unlike the others
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


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
