"""Which answer a response gives, and whether it is the right one. Standard library only.

This runs in worker processes on text that a model wrote: it never evaluates that text.
"""

import re

MARKER, LABEL = "####", "Answer:"
LONGEST_NUMBER = 400  # characters; longer "numbers" are not answers
_INTEGER = re.compile(r"([+-]?)(\d+)\Z", re.ASCII)


def _integer(text: str) -> tuple[bool, str] | None:
    """(is negative, digits without leading zeros), of any size; None where it is no integer."""
    match = _INTEGER.match(text)
    if match is None:
        return None
    digits = match[2].lstrip("0") or "0"
    return match[1] == "-" and digits != "0", digits


def final_number(text: str, answer: str) -> tuple[bool, str | None]:
    """Compares the integer behind the last `####` with the gold answer, exactly.

    Returns:
        (correct, extracted): extracted is None where the marker or anything behind it is missing.
    """
    before, marker, after = text.rpartition(MARKER)
    if not marker or not after.strip() or len(after) > LONGEST_NUMBER:
        return False, None
    extracted = after.strip()
    found = _integer(extracted)
    return found is not None and found == _integer(answer.strip()), extracted


def answer_line(text: str, answer: str) -> tuple[bool, str | None]:
    """Compares what follows the last `Answer:` at the start of a line, as DAPO's prompt asks for.

    Integers are compared exactly, anything else as text without surrounding dollar signs.
    """
    lines = [line for line in text.splitlines() if line.startswith(LABEL)]
    extracted = lines[-1].removeprefix(LABEL).strip().strip("$").strip() if lines else ""
    if not extracted or len(extracted) > LONGEST_NUMBER:
        return False, None
    found, gold = _integer(extracted), _integer(answer.strip())
    return (extracted == answer.strip() if found is None else found == gold), extracted


# name: function (response text, gold answer) -> (correct, extracted answer or None)
VERIFIERS = {"final_number": final_number, "answer_line": answer_line}
