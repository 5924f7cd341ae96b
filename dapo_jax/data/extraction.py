"""Extraction of a response's answer: markers read from the end, in linear time.

The last box counts, then the last answer tag, `####`, or labelled line. A box that is never closed
is no answer, and nothing earlier replaces it: the response was cut off.
"""

import re
from typing import NamedTuple

LONGEST_ANSWER = 10_000  # characters; what is longer is not an answer
LONGEST_SHORT_LINE = 400  # a response without a marker is an answer up to here

MAX_MARKERS = 1_000  # looked at, from the end, before a response is given up

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]{0,8}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOXED = re.compile(r"[-+]?(?:\\[A-Za-z]++|[\w.,/%]++)(?=[\s$).;:]|$)")
_POLITE = re.compile(r"\.?(?<!\s)\s*+I hope it is correct\.?$")
_LABEL_END = re.compile(rb"\**\s{0,4}(?::|is\b(?:\s{0,4}:)?|(?<=[ *])[-=](?= ))\**")
_HEADING_END = re.compile(rb"\**:? ?\n")
# Words and signs that begin what follows and are no part of it.
_OPENING = re.compile(r"(?:therefore|thus|hence|simply|just)\b:?\s*|(?:\$\$|\\\[)[ \t]*\n\s*")
_FINAL_END = re.compile(rb"\**\s{0,4}(?::|is\b(?:\s{0,4}:)?|(?<=[ *])[-=](?= ))?\**")
# What stands for an answer that is not given: ?, ..., ___
_NOTHING = re.compile(r"(?:[\s?.!,…_$~{}]|\\(?:[cl]?dots|square|text|quad|[,;: ])(?![A-Za-z]))*+")
# A sentence with one amount of money and no other number.
_AMOUNT = re.compile(
    r"[A-Za-z][A-Za-z' ]* (?:is|was|pa(?:ys?|id)|spen[dt]s?|earns?|costs?) \$(\d[\d,]*(?:\.\d+)?)"
    r"(?: in total| per [a-z]+)?\.?"
)
_NO_AMOUNT = re.compile(r"\b(?:not|no|never|more|less|than|or|and|if|each|least|most)\b|n't")


class Extraction(NamedTuple):
    """Answer and the marker before it; `text` is None if there is none."""

    text: str | None
    how: str  # box, tag, hash, label, line; or why not: truncated_box, too_long, no_marker
    end: int = 0  # of the marker of a label


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the group with content at `start`, or -1."""
    depth = 1
    for match in _BRACE.finditer(text, start, start + LONGEST_ANSWER):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if not depth:
                return match.start()
    return -1


def _last_box(text: str) -> Extraction | None:
    """Return the last box that holds something, or the one around it; None without any."""
    starts = [match.end() for match in _BOX.finditer(text)][-MAX_MARKERS:]
    for place, start in reversed([*enumerate(starts)]):
        if text[start : start + 1] != "{":
            if (bare := _BARE_BOXED.match(text, start, start + LONGEST_ANSWER)) is not None:
                return Extraction(bare[0], "box")
            continue
        if (close := closing_brace(text, start + 1)) < 0:
            cut_off = len(text) <= start + 1 + LONGEST_ANSWER
            return Extraction(None, "truncated_box" if cut_off else "too_long")
        if text[start + 1 : close].strip():
            outer = starts[place - 1] if place else start
            around = closing_brace(text, outer + 1) if text[outer] == "{" else -1
            first, end = (outer, around) if around > close else (start, close)
            return Extraction(text[first + 1 : end], "box")
    return Extraction(None, "no_marker") if starts else None


def _last_tag(text: str) -> Extraction | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return Extraction(text[start + len("<answer>") : end], "tag") if start >= 0 else None


def _rest_of_line(text: str, start: int) -> str:
    """Return the rest of the line, or the next line that holds anything."""
    rest = text[start : start + 2 * LONGEST_ANSWER].lstrip(" \t:\r\n")
    while (opening := _OPENING.match(rest)) is not None:
        rest = rest[opening.end() :]
    rest = _POLITE.sub("", rest.split("\n", 1)[0].strip())
    if rest.count("**") % 2:  # emphasis that began before the label
        rest = rest.removesuffix("**") if rest.endswith("**") else rest.removeprefix("**")
    return rest


def _last_hash(text: str) -> Extraction | None:
    start = text.rfind("####")
    if start < 0:
        return None
    line = text[start + 4 : start + 4 + LONGEST_ANSWER].lstrip("#").split("\n", 1)[0]
    return Extraction(line, "hash") if line.strip() else None


def _last_label(text: str) -> Extraction | None:
    """Return the answer behind the last 'answer:', 'answer is' or 'final answer'."""
    # One byte a character: places stay.
    plain = text.replace("–", "-").encode("ascii", "replace").lower()
    end = len(plain)
    for _ in range(MAX_MARKERS):
        start = plain.rfind(b"answer", 0, end)
        if start < 0:
            break
        before = plain[max(0, start - 16) : start].rpartition(b"\n")[2].split()
        final = bool(before) and before[-1].strip(b"*#") == b"final"
        label = (_FINAL_END if final else _LABEL_END).match(plain, start + len(b"answer"))
        if label is None and not b"".join(before).strip(b"*#"):
            label = _HEADING_END.match(plain, start + len(b"answer"))
        if label is not None:
            rest = _rest_of_line(text, label.end())
            return Extraction(rest, "label", label.end()) if rest.strip() else None
        end = start
    return None


def extract(response: str, require: str = "any") -> Extraction:
    """Return the answer of a response.

    Args:
        require: which markers count: 'box', 'label' (tags, `####` and labelled lines), or 'any' of
            them, where a single short line is also an answer by itself.
    """
    text = response.rpartition("</think>")[2]
    if "<think>" in text:  # the response ends inside a thought
        return Extraction(None, "no_marker")
    extraction = None
    if require != "label":
        extraction = _last_box(text)
    if extraction is None and require != "box":
        extraction = _last_tag(text) or _last_hash(text) or _last_label(text)
    if extraction is None and require == "any":
        line = text[: LONGEST_SHORT_LINE * 4].strip()
        if "\n" not in line and len(line) <= LONGEST_SHORT_LINE and len(text.strip()) == len(line):
            amount = None if _NO_AMOUNT.search(line) else _AMOUNT.fullmatch(line)
            extraction = Extraction(amount[1] if amount else line, "line")
    if extraction is None or extraction.text is None:
        return extraction or Extraction(None, "no_marker")
    if len(extraction.text) > LONGEST_ANSWER:
        return Extraction(None, "too_long")
    return Extraction(None, "no_marker") if _NOTHING.fullmatch(extraction.text) else extraction
