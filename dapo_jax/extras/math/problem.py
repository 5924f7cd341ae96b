"""Problems as far as they decide an answer: nouns, choices, letters for whole numbers."""

import dataclasses
import functools
import re

FORMULA = re.compile(r"(?<!\$)\$+([^$]+)\$|\\[(\[](.+?)\\[)\]]", re.DOTALL)
_LETTERS = r"([A-Za-z](?: ?, ?[A-Za-z]){0,5})"
_OF_WHOLE = re.compile(r"\b(?:integer|natural number|whole number|prime)s?\b", re.IGNORECASE)
_REAL = re.compile(r"\b(?:real|complex)\b", re.IGNORECASE)
_NAMED = re.compile(
    rf"{_LETTERS} ?(?:$|[<>=,]|\\(?:g|l)e(?:q|qslant)?(?![a-z])|\\ne|\\in(?![a-z]))"
)
_MEMBER = re.compile(rf"{_LETTERS} ?\\in ?\\mathbb ?\{{? ?[NZ]")
_CHOICES = re.compile(r"(?<![A-Za-z(\\])\(?([A-E])[).:](?![A-Za-z])|\{ ?\(?([A-E])[).]? ?\}")
_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE = re.compile(r"(?<=[.?!;])\s")
_ENGLISH = re.compile(r"\b(?:the|is|are|how|what|which|find|in)\b", re.IGNORECASE)
# How many of what: in another language, a word elsewhere may be a dozen or a million.
_ASKED = re.compile(
    r"(?:wie ?viele?|combien|cu[aá]nt[oa]s?|quant[aeio]s?|сколько|скільки|hoeveel|ile|kolik"
    r"|hur många|hvor mange|多少|几|幾|いくつ|何|몇)[^.?!;。？！]{0,60}",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Facts that a problem states about its answer, read when a rule asks for one."""

    text: str = ""

    @functools.cached_property
    def whole(self) -> frozenset[str]:
        """Letters that stand for integers."""
        text = self.text
        whole = {letter for match in _MEMBER.finditer(text) for letter in match[1].split(",")}
        real: set[str] = set()
        for sentence in _SENTENCE.split(text):
            formulas = (max(pair).strip() for pair in FORMULA.findall(sentence))
            named = {name for f in formulas if (m := _NAMED.match(f)) for name in m[1].split(",")}
            if _REAL.search(sentence):
                real |= named
            elif _OF_WHOLE.search(sentence):
                whole |= named
        return frozenset(name.strip() for name in whole - real)

    @functools.cached_property
    def choices(self) -> set[str]:
        """Letters that answer it, if it is a choice."""
        letters = {max(pair) for pair in _CHOICES.findall(self.text)}
        return letters if {"A", "B"} <= letters else set()

    _words = functools.cached_property(
        lambda self: set(map(stem, _WORD.findall(FORMULA.sub(" ", self.text))))
    )

    def names(self, word: str) -> bool:
        """Test for a word of an English problem, of others for one that it asks for."""
        if _ENGLISH.search(self.text):
            return stem(word) in self._words
        asked = (match[0] for match in _ASKED.finditer(self.text))
        return any(word.lower() in clause.lower() for clause in asked)


NO_PROBLEM = Problem()
read_problem = functools.lru_cache(maxsize=64)(Problem)  # once for all responses to it


def stem(word: str) -> str:
    """Return a word without capitals and endings of a plural."""
    lower = word.lower()
    for end, new in (("ies", "y"), ("es", ""), ("s", ""), ("en", ""), ("e", "")):
        if lower.endswith(end) and len(lower) > len(end) + 2:
            return lower.removesuffix(end) + new
    return lower
