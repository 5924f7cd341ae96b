"""Names and words of an answer: variables, what they are said to be, and text."""

import re

from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.expressions import FUNCTIONS, GREEK
from dapo_jax.extras.math.numerals import read_number

LONGEST_NAME = 200  # characters
REALS = r"\mathbbR"  # compact
_COMMANDS = "|".join((*GREEK, *"det Pr deg dim arg nabla".split()))
# Possessive throughout: a long run of names must not be read in exponentially many ways.
_RAISED = r"(?:\^ ?\{? ?(?:-1|T|\*|\\prime|\\top) ?\}?)?+"
_NAME = (
    rf"(?:m? ?\\(?:angle|triangle) ?[A-Z]{{1,3}}+|\\(?:{_COMMANDS})(?![A-Za-z])"
    r"|\\(?:max|min)(?! ?\([^()]*,)(?![A-Za-z])|(?<![\\A-Za-z])[A-Za-z]++"
    r"|\\(?:text|mathb[fb]|hat|bar|d?dot|tilde|overline|widehat) ?\{ ?\\?[^{}]*+\})"
    rf"(?:_ ?(?:\{{(?:[^{{}}]|\{{[^{{}}]*+\}})*+\}}|\w))?+{_RAISED}'*+"
)
_ARGUMENT = rf"-?(?:{_NAME}|\d++(?:[./]\d++)?|\\frac(?:\{{ ?\d+ ?\}}|\d){{2}})(?: ?\({_NAME}\))?"
_JOINED = r" ?(?:[,=|<>]|\\(?:mid|cup|cap|le|ge)(?![A-Za-z])) ?"
_DERIVED = r"(?:d|\\partial)"
_VARIABLE = re.compile(
    rf"{_NAME}(?: ?\\circ {_NAME}| {_NAME})*+"
    rf"(?: ?[(\[] ?{_ARGUMENT}(?:{_JOINED}{_ARGUMENT})*+ ?[)\]])?+(?: {_NAME})*+"
    r"|\\?\| ?(?:[A-Z]{1,3}|\\mathbf ?\{?[^{}|]{1,9}\}?) ?\\?\||\[ ?[A-Z]{3,6} ?\]"
    r"|# ?[A-Z]|\\sigma\^2|\\\| ?[a-z] ?\\\|"
    rf"|\\frac ?\{{ ?{_DERIVED} ?\}} ?\{{ ?{_DERIVED}[^{{}}]{{1,9}}\}}.{{1,60}}"
    rf"|\\frac ?\{{ ?{_DERIVED}[^{{}}]{{0,19}}\}} ?\{{ ?{_DERIVED}[^{{}}]{{1,19}}\}}"
    r"|d[a-zA-Z]/d[a-zA-Z]|\\int(?! ?_).{1,80}|\\lim ?_.{1,80}"
)
DENIALS = set(
    "not never no isn neither but except anything nothing unless without excluding than".split()
)
_NUMERIC_NAMES = {r"\pi", "e", "i", r"\infty"}
_WORD = re.compile(r"(?<![\\A-Za-z\d])[A-Za-z]{3,}")
_NO_WORDS = {*FUNCTIONS, *"infinity inf xyz abc abcd text".split()}
_SHORT_WORDS = {"no", "on", "is", "it", "if", "an", "at", "or", "of", "to", "up", "so"}
_WRITTEN = re.compile(r"(?=.*[aeiouyAEIOUY])(?:[A-Z]?[a-z]+|[A-Z]+)")  # a short word
_ARTICLE = re.compile(r"^(?:an?|the) (?=[a-z]{3})", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathbf) ?\{([^{}]*)\}")
# A hyphen is a minus before a number or a short product: 3-abx, but non-abelian.
_OPERATORS = re.compile(
    r"[\\^_=+*/<>|]|^ ?-|(?<![A-Za-z]{5})-(?= ?(?:\d|[A-Za-z](?![A-Za-z])))"
    r"|\d ?-(?= ?[A-Za-z]{1,4}\b)"
)
_SMALL = re.compile(r"(?<![\\^_])\{(\w)\}|(?<=[\^_])\{(\w)\}(?!\d)")  # in braces without need


def compact(text: str) -> str:
    """Remove blanks, except between digits, and braces around single characters."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    return _SMALL.sub(r"\1\2", text) if "{" in text else text


def words_of(text: str) -> str:
    """Return the words of a text, without commands and braces."""
    text = _TEXT.sub(r" \1 ", text)
    text = " ".join(re.sub(r"[{}\\$~]", " ", text).split()).strip(" .,;:!")
    return _ARTICLE.sub("", text)


def same_words(given: str, gold: str) -> bool:
    """Compare words; capitals don't count, except inside short tokens (a product of letters)."""
    if given.lower() != gold.lower():
        return False
    pairs = zip(given.split(), gold.split(), strict=True)
    is_written = _WRITTEN.fullmatch
    return all(a == b or len(a) > 3 or is_written(a) and is_written(b) for a, b in pairs)


def has_words(text: str) -> bool:
    """Test for text in words rather than symbols."""
    if any(re.search(r"[A-Za-z]{2}", inner) for inner in _TEXT.findall(text)):
        return True
    bare = _TEXT.sub(" ", text)
    if _OPERATORS.search(bare):
        return False
    if bare.strip(" {}").lower() in _SHORT_WORDS:
        return True
    return any(word.lower() not in _NO_WORDS for word in _WORD.findall(bare))


def is_variable(node: Node) -> bool:
    """Test for a name, or a tuple of names."""
    if node.kind == "tuple":
        return all(map(is_variable, node.items))
    if len(node.text) > LONGEST_NAME:
        return False
    if node.text in _NUMERIC_NAMES or DENIALS & set(words_of(node.text).lower().split()):
        return False
    return bool(_VARIABLE.fullmatch(node.text))


def assigned(node: Node) -> tuple[str, Node] | None:
    """Split `x = value`, `value = x` or a chain into (variable, value); None for others."""
    if set(node.marks) != {"="}:
        return None
    numbers = {read_number(item.text) for item in node.items} - {None}
    if len(numbers) > 1:  # it contradicts itself
        return None
    first, last = node.items[0], node.items[-1]
    if is_variable(first) or len(node.items) > 2 and not is_variable(last):
        return first.text, last
    return (last.text, first) if is_variable(last) and len(node.items) == 2 else None
