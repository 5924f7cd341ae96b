"""Plain numerals, exactly: integers of any size, decimals, fractions, mixed numbers, percent.

What both sides of a comparison read as numerals is decided here, once and for all.
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple

from flint import fmpz

from dapo_jax.extras.math.units import VALUES
from dapo_jax.rewards.spelling import INTEGER, digits_of

LONGEST_NUMERAL = 1_000  # characters; longer ones are compared as text
LARGEST_EXPONENT = 1_000  # of ten
BASES = range(2, 37)

_DECIMAL = rf"(?:(?:{INTEGER})(?:\.\d*)?|\.\d+)"
_SIGN = r"(?:[-+] ?)?"
_TERM = _SIGN + _DECIMAL
_PART = re.compile(_TERM, re.ASCII)
_SIGNED = re.compile(r"\s*+([-+]?)\s*+([^-+\s].*)", re.DOTALL)
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{ ?(\d+) ?\}|\\(?:overline|bar|dot) ?(\d)|\((\d+)\))",
    re.ASCII,
)
_FRACTION = re.compile(
    rf"\\frac ?(?:\{{ ?({_TERM}) ?\}}|(\d)) ?(?:\{{ ?({_TERM}) ?\}}|(\d))|({_TERM}) ?/ ?({_TERM})",
    re.ASCII,
)
_MIXED = re.compile(rf"({INTEGER}) ?(\\frac.+|(?<= )\d+ ?/ ?\d+)", re.ASCII)
_GROUPED = re.compile(r"\d{1,3}(?: \d{3})+ ?/")  # 1 000/2 is no mixed number, 2 500/600 may be one
_SCIENTIFIC = re.compile(
    rf"(?:({_DECIMAL}) ?(?:\\times|\\cdot|\*|x) ?)?10 ?\^ ?(?:\{{ ?([-+]?\d+) ?\}}|([-+]?\d+))"
    rf"|({_DECIMAL})[eE]([-+]?\d+)",
    re.ASCII,
)


def read_integer(text: str) -> fmpz | None:
    """Return an integer of any size; None for anything else."""
    digits = digits_of(text)
    return None if digits is None else fmpz(digits)


def _magnitude(text: str) -> Fraction | None:
    """Return the value of a numeral without percent sign, or before a fraction's bar."""
    if _PART.fullmatch(text):
        return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))
    if match := _REPEATING.fullmatch(text):
        whole, fixed, *periods = match.groups()
        (period,) = filter(None, periods)
        behind = int(fixed or 0) + Fraction(int(period), 10 ** len(period) - 1)
        return int(whole or 0) + behind / 10 ** len(fixed)
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match[2] or match[3] or match[5])
        factor = _magnitude(match[1] or match[4] or "1")
        if factor is None or abs(exponent) > LARGEST_EXPONENT:
            return None
        return factor * Fraction(10) ** exponent
    if _GROUPED.match(text):
        return None
    if (match := _MIXED.fullmatch(text)) and not {*match[2]} & {*"-+."}:
        whole, part = map(_magnitude, match.groups())
        return None if whole is None or part is None else whole + part
    if match := _FRACTION.fullmatch(text):
        above, below = (_magnitude(part.strip()) for part in filter(None, match.groups()))
        return above / below if above is not None and below else None
    return None


_CODE = re.compile(r"(?=.*[A-Z])[A-Z\d]{2,}(?:_\{?\d+\}?)?", re.ASCII)
_WRITTEN = re.compile(
    r"\d{4}([-/])\d{1,2}\1\d{1,2}|\d{1,2}([-/])\d{1,2}\2\d{4}",
    re.ASCII,  # dates
)
COLON = re.compile(r" ?(?:\\text\{ ?to ?\}|:) ?")
_RATIO = re.compile(rf"\d{{1,30}}(?:{COLON.pattern}\d{{1,30}})+", re.ASCII)
_BASED = re.compile(
    r"(-?)(?=[A-Fa-f]*\d)([\dA-Fa-f]+(?:\.[\dA-Fa-f]+)?)(?:_(?:base)?|(?:in)?base)(\w+)", re.ASCII
)
_PREFIXED = re.compile(r"^(0[bBoOxX])([\dA-Fa-f]+)$", re.ASCII)
_BASES = {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "bin": 2, "hex": 16}
_BASES |= {"0b": 2, "0o": 8, "0x": 16} | VALUES


def read_number(text: str) -> Fraction | None:
    """Return the value of a plain numeral in normalised text; None for anything else."""
    body = text.removesuffix("%").rstrip()
    match = _SIGNED.fullmatch(body) if len(text) <= LONGEST_NUMERAL else None
    if match is None or (value := _magnitude(match[2])) is None:
        return None
    return value * (-1 if match[1] == "-" else 1) / (100 if text.endswith("%") else 1)


def read_digits(text: str) -> tuple[str, int] | None:
    """Return (digits, base) of a numeral that names its base, as 52_8 or 11 (base two)."""
    plain = re.sub(r"\\text|[{}()\[\] ]|(?<=\d),(?=\d{3})", "", text)
    plain = _PREFIXED.sub(lambda match: f"0{match[2]}_{match[1].lower()}", plain)
    if len(text) > LONGEST_NUMERAL or (match := _BASED.fullmatch(plain)) is None:
        return None
    sign, digits, name = match.groups()
    base = int(name) if name.isdecimal() and len(name) < 3 else _BASES.get(name.lower(), 0)
    is_valid = base in BASES and all(int(digit, 16) < base for digit in digits.replace(".", ""))
    return (sign + (digits.upper().lstrip("0") or "0"), base) if is_valid else None


class Literal(NamedTuple):
    """Text that is compared as a whole: a number, ratio, code or date."""

    kind: str
    value: Any


def read_literal(text: str) -> Literal | None:
    """Return the number, ratio, code or date that a normalised text is; else None."""
    if _WRITTEN.fullmatch(text):
        return Literal("written", re.sub(r"(?<![\dA-Za-z])0+(?=[\dx])", "", text.lower()))
    if (number := read_number(text)) is not None:
        return Literal("number", number)
    if (integer := read_integer(text)) is not None:  # longer than a numeral may be
        return Literal("number", integer)
    if _RATIO.fullmatch(text):
        return Literal("ratio", tuple(map(int, COLON.split(text))))
    return Literal("code", re.sub("[{}]", "", text)) if _CODE.fullmatch(text) else None


def same_ratio(given: Literal, gold: Literal) -> bool:
    """Test the equality of ratios without zeros, as 2:4:6 and 1:2:3; a number is a ratio to 1."""
    a, b = (each.value if each.kind == "ratio" else (each.value, 1) for each in (given, gold))
    fits = len(a) == len(b) and (all(a + b) if given.kind == gold.kind else a[-1] * b[-1] != 0)
    return fits and all(x * b[-1] == y * a[-1] for x, y in zip(a, b, strict=True))
