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
_COUNTED = set(
    "people person student child children way time apple orange egg book page car coin ball marble "
    "card ticket cup cookie game item piece box bag student boy girl man men woman women dog cat "
    "step row column side edge face vertex vertices triangle square cube number integer solution "
    "value pair factor divisor digit root term bus boat tree flower pencil question problem shirt "
    "block round trip bottle slice pizza chair table seat fish bird animal cow chicken sheep tile "
    "worker employee house room floor friend customer photo stamp song video movie word letter "
    "arrangement combination permutation subset path handshake match goal win".split()
)
_CANONICAL = {name: names.split()[0] for names in _UNITS.split(",") for name in names.split()}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_GLUE = {"per": "/", "of": "", "a": "", "an": "", "in": "", "each": "", "the": "", "total": ""}
_PIECE = re.compile(r"[A-Za-z_]+|\^ ?\{? ?-?\d ?\}?|[/*.]|\\(?:cdot|times)|-?\d|[^\s{}~]")
_DEGREE = re.compile(
    r"\s*(?:\{\s*\})?\^?\s*\{?\s*\^?\s*\\circ\s*\}?\s*(?:\\text\{\s*([CFK])\s*\}|([CFK]))?\s*$"
)
# Possessive throughout: a long run of units must not be read in exponentially many ways.
_TEXT_TAIL = re.compile(
    r"(?:\\text\{[^{}]*+\}\s*+(?:\^ ?\{? ?-?\d ?\}?)?+\s*+(?:/|\\cdot|\\times)?+\s*+)++"
)
_VALUE_END = re.compile(r"[\d)}\]a-zA-Z.!%]$")
_MEASURED = re.compile(r"[-+]?[\d., ]+")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])|\b(?:sin|cos|tan)\b")
_PLAIN_TAIL = re.compile(r"(.*?[\d)}])( ?)([A-Za-z][A-Za-z ./^\d{}-]*)$", re.S)
_CURRENCY = re.compile(r"\\text\{(dollar|euro|pound|yen|cent)\}\s*(.+)$", re.S)
_CURRENCY_SIGNED = re.compile(r"-\s*\\text\{(dollar|euro|pound|yen)\}\s*(.+)$", re.S)


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
    return lower


def canonical_unit(text: str) -> tuple[str, bool]:
    """Return the canonical spelling of a unit, and whether every word in it is a known unit."""
    text = text.replace(r"\text", " ").replace("p.m.", "pm").replace("a.m.", "am")
    parts, known, pending = [], True, ""
    for piece in _PIECE.findall(text):
        word = piece.strip()
        if word.lower() in _POWERS:
            if parts and word.lower().endswith("ed"):
                parts.append(_POWERS[word.lower()])
            else:
                pending = _POWERS[word.lower()]
        elif word.lower() in _GLUE and len(parts) + bool(pending) > 0:
            parts.append(_GLUE[word.lower()])
        elif word[0].isalpha():
            name = _singular(word)
            known &= name in _CANONICAL.values() or name in _COUNTED
            parts.append(name + pending)
            pending = ""
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
    for pattern, sign in ((_CURRENCY, ""), (_CURRENCY_SIGNED, "-")):
        match = pattern.fullmatch(text)
        if match is not None:
            return sign + match[2].strip(), match[1]
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
        one_letter = not re.search(r"[A-Za-z]{2}", match[3])
        if known and not (one_letter and not (match[2] and _MEASURED.fullmatch(match[1]))):
            return match[1].strip(), unit
    return text, ""
