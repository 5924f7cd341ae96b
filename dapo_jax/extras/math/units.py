"""Units, currency and degree signs behind (or before) a value."""

import re

LONG_WORD = 4  # letters, from where capitals don't count
LONGEST_WITH_UNIT = 300  # characters; longer texts are no measured value

# Each unit and its other names.
_UNITS = """
    cm centimeter centimetre cms, mm millimeter millimetre, m meter metre,
    km kilometer kilometre kms, inch in inches, foot ft feet, yard yd yds, mile mi,
    nm nanometer nanometre, g gram gm, kg kilogram kgs, mg milligram, lb pound_mass lbs,
    ounce oz, ton tonne, second s sec secs, minute min mins, hour hr h hrs, day days, week weeks,
    month months, year yr yrs, liter l litre L, ml milliliter millilitre mL,
    degree deg degs circ, radian rad rads, dollar usd USD bucks, cent cents, euro eur EUR,
    pound gbp GBP, yen JPY, newton N, joule J, watt W, volt V, kelvin K, pascal Pa, hertz Hz,
    mph, unit units, point pts, gallon gal, coulomb, ampere A amp amps, ohm, mole mol, ev eV,
    calorie cal
"""
# Short nouns for what is counted; other short words may be products of letters.
_COUNTED = set(
    "way time egg book page car coin ball card cup game item box bag boy girl man men dog cat step "
    "row side edge face cube pair root term bus boat tree trip seat fish bird cow tile room song "
    "word path goal win".split()
)
_CANONICAL = {name: names.split()[0] for names in _UNITS.split(",") for name in names.split()}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_GLUE = {"per": "/", "of": "", "a": "", "an": "", "in": "", "each": "", "the": "", "total": ""}
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
_NUMBERS += [f"{stem}teen" for stem in "thir four fif six seven eigh nine".split()]
_TENS = [f"{stem}ty" for stem in "twen thir for fif six seven eigh nine".split()]
_VALUES = {word: n for n, word in enumerate(_NUMBERS, 1)}
_VALUES |= {word: 10 * n for n, word in enumerate(_TENS, 2)}
_FRACTIONS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4} | {
    word: n for n, word in enumerate("fifth sixth seventh eighth ninth tenth".split(), 5)
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
MAX_NUMBER_WORDS = 12
# Words behind a number that change it, or are not what is counted.
_CHANGING = {*_VALUES, *_FRACTIONS, *SCALES} | set(
    "root power part share fraction ratio reciprocal inverse derivative logarithm log sine cosine "
    "tangent sin cos tan exp hundredth thousandth doubled halved tripled squared cubed double "
    "twice triple factorial percent percentage percentile modulo mod base choose dozen gross score "
    "zero negative positive plus minus times over divided multiplied by to "
    "or and but not no never none nor neither either without except excluding unless if when "
    "where while because since until although though whether is are was were be been being has "
    "have had do does did could will would shall should may might must less fewer "
    "greater than least most at about around approximately roughly almost nearly down out off "
    "from with for as so such this that these those it its he she they them we you who which what "
    "how why some any all both few many much several other another else only just even also too "
    "very wrong false true correct incorrect impossible undefined remainder modulus complex i e pi "
    "minimum maximum infinity infinite kilo mega giga milli micro nano".split()
)
_ORDINARY = re.compile(r"(?=[^aeiouyAEIOUY]*[aeiouyAEIOUY])[A-Za-z]{3,20}")
_PARTS = re.compile(r"square (?=root)|cube (?=root)|root|power|part|share")
_PIECE = re.compile(r"[A-Za-z_]+|\^ ?\{? ?-?\d ?\}?|[/*.]|\\(?:cdot|times)|-?\d|[^\s{}~]")
# A normal form has no long run of blanks.
_DEGREE = re.compile(
    r" ?(?:\{ ?\} ?)?\^? ?\{? ?\^? ?\\circ ?\}? ?(?:\\text\{ ?([CFK]) ?\}|([CFK]))? ?$"
)
# Possessive throughout: a long run of units must not be read in exponentially many ways.
_TEXT_TAIL = re.compile(
    r"(?:\\text\{[^{}]*+\} ?+(?:\^ ?\{? ?-?\d ?\}?)?+ ?+(?:/|\\cdot|\\times)?+ ?+)++"
)
_VALUE_END = re.compile(r"[\d)}\]a-zA-Z.!%]$")
_MEASURED = re.compile(r"[-+]?[\d., ]+")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])|\b(?:sin|cos|tan)\b")
_PLAIN_TAIL = re.compile(r"(.*?[\d)}])( ?)([A-Za-z][A-Za-z ./^\d{}-]*)$", re.S)
_CURRENCY = re.compile(r"(-?) ?\\text\{(dollar|euro|pound|yen|cent)\} ?(.+)$", re.S)


def _singular(word: str) -> str:
    if word in _CANONICAL:
        return _CANONICAL[word]
    if len(word) < LONG_WORD:  # mW and MW differ
        return word
    lower = word.lower()
    if lower in _CANONICAL:
        return _CANONICAL[lower]
    for end, new in (("ies", "y"), ("es", ""), ("s", "")):
        if lower.endswith(end) and len(lower) > len(end) + 1:
            stem = lower.removesuffix(end) + new
            if stem in _CANONICAL or stem in _COUNTED:
                return _CANONICAL.get(stem, stem)
    return lower.removesuffix("s")


def _is_listed(word: str) -> bool:
    name = _singular(word)
    return name in _CANONICAL.values() or name in _COUNTED or word.lower() in _POWERS


def canonical_unit(text: str) -> tuple[str, bool]:
    """Return the canonical spelling of a unit, and whether every word in it is a known unit."""
    for old, new in ((r"\text", " "), ("US dollar", "dollar"), ("p.m.", "pm"), ("a.m.", "am")):
        text = text.replace(old, new)
    parts, known, pending = [], True, ""
    # Parts and powers can be counted; `18 square roots` is no 18.
    counted = {"root", "power", "part", "share"} if len(_PARTS.findall(text)) < 2 else set()
    for piece in _PIECE.findall(text):
        word = piece.strip()
        if word.lower() in _POWERS:
            if parts and word.lower().endswith("ed"):
                parts.append(_POWERS[word.lower()])
            else:
                pending = _POWERS[word.lower()]
        elif word.lower() in _GLUE and (parts or pending or word == "per"):
            parts.append(_GLUE[word.lower()])
        elif word[0].isalpha():
            name = _singular(word)
            changes = {name, word.lower()} & (_CHANGING - counted)
            is_noun = _ORDINARY.fullmatch(word) is not None and not changes
            known &= is_noun or name in _CANONICAL.values()
            parts.append(name + pending)
            pending = ""
        elif word == "-" and parts:  # push-ups
            continue
        elif word[0] == "^":
            parts.append("^" + re.sub(r"[^-\d]", "", word))
        elif word in ("/", "*", r"\cdot", r"\times", "."):
            parts.append("/" if word == "/" else "")
        else:
            parts.append(word)
            known = False
    return "".join(parts), known and bool(parts)


def split_unit(text: str, *, trusted: bool = False) -> tuple[str, str]:
    """Return (value, canonical unit) of a normalised answer; no unit is empty.

    Args:
        trusted: a gold answer's words behind a number are a unit even where no table knows them.
    """
    if len(text) > LONGEST_WITH_UNIT:
        return text, ""
    match = _CURRENCY.fullmatch(text)
    if match is not None:
        sign, currency, amount = match.groups()
        value, unit = split_unit(amount.strip(), trusted=trusted)
        is_same = unit.startswith("/") or unit == currency  # $45 per day, $45 dollars
        return sign + (value if is_same else amount.strip()), currency
    match = _DEGREE.search(text)
    if match is not None and match.start() > 0 and not _TRIGONOMETRIC.search(text):
        letter = match[1] or match[2] or ""
        return text[: match.start()].strip(), "degree" + letter
    start = text.find(r"\text{")
    value = text[:start].rstrip()
    if start > 0 and _VALUE_END.search(value) and _TEXT_TAIL.fullmatch(text, start):
        unit, known = canonical_unit(text[start:])
        return (value, unit) if unit and (known or trusted) else (text, "")
    match = _PLAIN_TAIL.fullmatch(text)
    if match is not None:
        unit, known = canonical_unit(match[3])
        first, *others = re.findall("[A-Za-z]+", match[3])
        is_long = len(first) > LONG_WORD or len(first) == LONG_WORD and first.endswith("s")
        if not re.search(r"[A-Za-z]{2}", match[3]):  # 5 m, but 5m is a product
            known &= match[2] == " " and _MEASURED.fullmatch(match[1]) is not None
        if known and (others or is_long or _is_listed(first)):
            return match[1].strip(), unit
    return text, ""


def number_in_words(text: str) -> str | None:
    """Return the numeral for a number in words, `minus two thirds`; the noun behind it stays."""
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > MAX_NUMBER_WORDS:
        return None
    sign = "-" if words[0] in ("minus", "negative") else ""
    words = words[1:] if sign else words
    if words[0] in ("a", "an") and len(words) == 2:
        words = ["one", *words[1:]]
    value, used = _read_words(words)
    if used == 0:
        return None
    rest = words[used:]
    if len(rest) == 1 and (below := _FRACTIONS.get(rest[0].removesuffix("s"))):
        return rf"{sign}\frac{{{value}}}{{{below}}}"
    if rest and not canonical_unit(" ".join(rest))[1]:
        return None
    return f"{sign}{value}" + (rf"\text{{ {' '.join(rest)}}}" if rest else "")


def _read_words(words: list[str]) -> tuple[int, int]:
    """Return the value of the number in words at the start, and how many words it has."""
    total, group, used, bound = 0, 0, 0, 1_000  # bound: of the next word's value
    for i, word in enumerate(words):
        if _VALUES.get(word, bound) < bound:
            group += _VALUES[word]
            bound = 10 if _VALUES[word] >= 20 else 0
        elif word == "hundred" and group:
            group, bound = 100 * group, 100
        elif word in SCALES and group and (not total or 10 ** SCALES[word] < total):
            total, group, bound = total + group * 10 ** SCALES[word], 0, 1_000
        elif word == "and" and used and group % 100 == 0:  # one hundred and five
            continue
        else:
            break
        used = i + 1
    return total + group, used
