"""Labels before an answer, and conditions on its letters behind it."""

import re
from typing import NamedTuple

from dapo_jax.extras.math.names import DENIALS, compact
from dapo_jax.extras.math.problem import NO_PROBLEM, Problem
from dapo_jax.extras.math.units import CHANGING

LONGEST_TAIL, MAX_TAILS = 80, 4  # characters of a condition; places where it may begin
_LABEL = re.compile(r"\\text\{([A-Za-z' ]{2,40}?)(:| is| are| equals|) ?\} ?:? ?(?=(.))")
_CHANGING = CHANGING - set("maximum minimum least most remainder quotient ratio fraction".split())
_LABEL_WORDS = set("the a final answer value solution result so therefore thus hence".split())
_START = re.compile(
    r"[,;] ?|\((?=[^()]*\)$)|\\text\{ ?,? ?\(?(?=(?:where|for|with|if|double|constant)\b)"
    r"|(?<![A-Za-z])(?=(?:where|for)\b)|(?=\\forall)"
)
_WORDS = re.compile(
    r"\\forall|(?<![\\A-Za-z])(?:is an? |are )?(?:where|for|with|and|if|all|any|every|each|some|an?"
    r"|real|constants?|arbitrary|integers?|numbers?|values?|of|double|root)(?![A-Za-z])"
)
_RELATION = re.compile(
    r"(\\[A-Za-z]+|[A-Za-z](?:_\w)?)(?:\\in\{?(\\mathbb\{?[CNQRZ]\}?\S*)|(\\ne|\\ge|\\le|>|<)([^<>]+))?"
)
_SET = re.compile(r"[<>\[]|\\(?:le|ge|ne|in|cup|setminus)(?![A-Za-z])")
_ORDER = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")


class Conditioned(NamedTuple):
    """An answer without its condition on a letter: the set or the relation that it is in."""

    text: str
    letter: str = ""
    members: str = ""
    relation: str = ""


def split_condition(text: str) -> Conditioned:
    r"""Split `2x + c, c \in R`, `f(x) = 2x for all x`, `(x+1)/(x-1), x \ne 1`."""
    starts = _START.finditer(text, max(0, len(text) - LONGEST_TAIL))
    for match in list(starts)[:MAX_TAILS]:
        rest, tail = text[: match.start()].strip(" ,;"), text[match.end() :]
        plain, words = _WORDS.subn(" ", re.sub(r"\\text ?|[{}]", " ", tail))
        plain = compact(plain).strip("(), ;.")
        if not rest or (stated := _RELATION.fullmatch(plain)) is None and (plain or not words):
            continue
        letter, members, mark, bound = stated.groups() if stated else ("", None, None, None)
        if not (words or members or mark) or mark and _SET.search(rest):
            continue
        if _ORDER.search(rest) and "R" not in (members or ""):
            continue
        return Conditioned(rest, letter, members or "", f"{mark}{bound}" if mark else "")
    return Conditioned(text)


def letters_of(text: str) -> set[str]:
    """Return the letters of a text, save those of commands."""
    return set(filter(str.isalpha, _COMMAND.sub("", text)))


def rename(text: str, letter: str, new: str) -> str:
    """Return a text with another letter, save in commands."""
    pattern = re.compile(rf"(\\[A-Za-z]+)|{re.escape(letter)}")
    return pattern.sub(lambda match: match[1] or new, text)


def with_letter_of(given: Conditioned, gold: Conditioned) -> str:
    """Return an answer with gold's letter for its own, if that one is bound: k is as good as n."""
    ours, theirs = letters_of(given.text), letters_of(gold.text)
    free = theirs - ours
    if given.relation or given.letter not in ours - theirs or len(free) != 1:
        return given.text
    return rename(given.text, given.letter, min(free))


def is_harmless(condition: Conditioned, problem: Problem) -> bool:
    """Test for a condition that gold may leave out: the problem's, holes, counting from 0 or 1."""
    letter, relation = condition.letter, condition.relation
    if letter + relation in compact(problem.text) or not relation:
        return True
    if relation.startswith(r"\ne"):
        return any(bar in condition.text + problem.text for bar in ("/", "frac"))
    return letter in "ijkmnN" and re.fullmatch(r"(?:\\ge|>)[012]", relation) is not None


def without_label(text: str, problem: Problem = NO_PROBLEM) -> str:
    """Return an answer without words of the problem before it that name it, as `Area:`."""
    if (match := _LABEL.match(text)) is None or not (match[2] or match[3] in "(["):
        return text
    words = match[1].lower().split()
    is_name = all(word in _LABEL_WORDS or problem.names(word) for word in words)
    return text[match.end() :] if is_name and not {*words} & (DENIALS | _CHANGING) else text
