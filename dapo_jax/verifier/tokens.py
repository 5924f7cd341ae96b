"""The words of an expression: numbers, commands, letters and signs."""

import re

from dapo_jax.verifier.expression_tree import Refused

MAX_TOKENS, LONGEST_PRODUCT = 400, 4  # letters of a product that nothing parts
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|(\\[A-Za-z]+)|([A-Za-z]+)|(\\.|.))", re.S
)
DEGREE = "°"
_DEGREE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))")
GREEK = set(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell hbar".split()
)
INVERTED = "sin cos tan cot sec csc sinh cosh tanh".split()
FUNCTIONS = (
    {name: name for name in (*INVERTED, "exp", "log", "abs", "sqrt", "lg")}
    | {f"{arc}{name}": f"a{name}" for name in INVERTED for arc in ("a", "ar", "arc")}
    | {"ln": "log"}
)
_WORDS = set(FUNCTIONS) | {"pi", "infinity", "inf"}


def tokens_of(text: str) -> list[str]:
    """Return at most `MAX_TOKENS`. Raises `Refused` for words that are no function's."""
    tokens = []
    for match in _TOKEN.finditer(_DEGREE.sub(DEGREE, text.rstrip())):
        number, command, word, other = match.groups()
        if (
            word
            and word.lower() in _WORDS
            and (len(word) > 2 or word.lower() in ("pi", "ln", "lg"))
        ):
            tokens.append("\\" + word.lower())
        elif word and len(word) > LONGEST_PRODUCT:
            raise Refused(f"a word: {word}")
        elif word:
            tokens.extend(word)
        else:
            tokens.append(number or command or other)
        if len(tokens) > MAX_TOKENS:
            raise Refused("too long")
    return tokens
