"""Units, currency and degree signs behind (or before) a value."""

import re

from dapo_jax.extras.math.problem import NO_PROBLEM, Problem, stem

LONG_WORD = 4  # letters, from where capitals don't count
LONGEST_WITH_UNIT = 300  # characters; longer texts are no measured value

# Units of the SI and their names, with all prefixes; other units and their names.
_SI = """
    m meter metre, g gram gm, s second sec, L liter litre l, J joule, W watt, V volt, A ampere amp,
    Hz hertz, N newton, Pa pascal, eV electronvolt ev, mol mole, F farad, C coulomb, T tesla,
    H henry, Ω ohm, cal calorie, B byte, bit, K kelvin, Wb weber, bar
"""
_PREFIXES = "k kilo, M mega, G giga, T tera, c centi, m milli, d deci, μ micro, n nano, p pico"
_UNITS = """
    inch in inches, foot ft feet, yard yd, mile mi, lb pound_mass lbs, ounce oz, ton tonne,
    minute min, hour hr h, day, week, month, year yr, degree deg circ, radian rad, cent, yuan,
    dollar usd USD buck, euro eur EUR, pound gbp GBP, yen JPY, rupee, mph, unit, point pt, pint,
    gallon gal, quart, acre, hectare ha, Å angstrom, atm, rpm, ppm, amu, person people, man men,
    child children, woman women, way, time, am AM a.m., pm PM p.m.
"""
_CANONICAL = {name: names.split()[0] for names in _UNITS.split(",") for name in names.split()}
for _unit in _SI.split(","):
    _symbol, *_names = _unit.split()
    _CANONICAL |= dict.fromkeys((_symbol, *_names), _symbol)
    for _prefix in _PREFIXES.split(","):
        _short, _long = _prefix.split()
        _all = (_short + _symbol, *(_long + name for name in _names))
        _CANONICAL |= {name: _all[0] for name in _all if name not in _CANONICAL}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_GLUE = {"per": "/", "of": "", "a": "", "an": "", "in": "", "each": "", "the": "", "total": ""}
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
_NUMBERS += [f"{stem}teen" for stem in "thir four fif six seven eigh nine".split()]
_TENS = [f"{stem}ty" for stem in "twen thir for fif six seven eigh nine".split()]
VALUES = {word: n for n, word in enumerate(_NUMBERS, 1)}
VALUES |= {word: 10 * n for n, word in enumerate(_TENS, 2)}
_FRACTIONS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4} | {
    word: n for n, word in enumerate("fifth sixth seventh eighth ninth tenth".split(), 5)
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
MAX_NUMBER_WORDS = 12
# Words of a problem that change the number before them, or join another one.
CHANGING = {*VALUES, *_FRACTIONS, *SCALES, "hundredth", "thousandth"} | set(
    "root power part share fraction ratio reciprocal inverse derivative logarithm log sine cosine "
    "tangent doubled halved tripled squared cubed double twice triple factorial percent percentage "
    "percentile modulo mod base choose dozen gross score pair lakh crore fortnight zero negative "
    "positive plus minus times over divided multiplied more less fewer greater than least most at "
    "about around approximately roughly almost nearly or and but not no never none nor neither "
    "either without except excluding unless if is are was were do does will would could may "
    "might from with for as all both any another else only just even also too wrong false true "
    "correct incorrect impossible undefined remainder modulus complex minimum maximum infinity "
    "infinite kilo mega giga milli micro nano oder und nicht kein dutzend consecutive quotient "
    "increased decreased added subtracted quadrupled inverted nothing nobody".split()
)
_IDEOGRAPHS = set("万亿千百十半打双对或和不非")
LONGEST_COUNTED = 2  # letters of words that are nouns only if they are listed
_PARTS = re.compile(r"square (?=root)|cube (?=root)|root|power|part|share")
_PIECE = re.compile(r"[^\W\d]+|\^ ?\{? ?-?\d ?\}?|[/*.]|\\(?:cdot|times)|-?\d|[^\s{}~]")
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
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![A-Za-z])|\b(?:sin|cos|tan)\b")
_PLAIN_TAIL = re.compile(r"(.*?[\d)}])( ?)([^\W\d_][\w ./^{}-]*)$", re.S)
_CURRENCY = re.compile(r"(-?) ?\\text\{(dollar|euro|pound|yen|rupee|cent)\} ?(.+)$", re.S)


def _singular(word: str) -> str:
    for name in (word, word.lower())[: 1 + (len(word) >= LONG_WORD)]:  # mW and MW differ
        for end, new in (("ies", "y"), ("es", ""), ("s", ""), ("", "")):
            singular = name.removesuffix(end) + new
            if name.endswith(end) and singular in _CANONICAL:
                return _CANONICAL.get(singular, singular)
    return word.lower().removesuffix("s") if len(word) >= LONG_WORD else word


def _is_listed(word: str) -> bool:
    return _singular(word) in _CANONICAL.values()


def _is_noun(word: str, problem: Problem) -> bool:
    """Test for a noun of the problem: a word of it that neither changes nor joins numbers."""
    if {word.lower(), _singular(word).lower(), stem(word)} & CHANGING or set(word) & _IDEOGRAPHS:
        return False
    return problem.names(word) and (len(word) > LONGEST_COUNTED or not word.isascii())


def canonical_unit(text: str, problem: Problem = NO_PROBLEM) -> tuple[str, bool]:
    """Return the canonical spelling of a unit, and whether all of it is units and known nouns."""
    for old, new in ((r"\text", " "), ("US dollar", "dollar"), ("p.m.", "pm"), ("a.m.", "am")):
        text = text.replace(old, new)
    text = text.replace(r"\mu ", "μ").replace(r"\Omega", "Ω")
    parts, known, pending = [], True, ""
    # Parts and powers can be counted; `18 square roots` is no 18.
    counted = {"root", "power", "part", "share"} if len(_PARTS.findall(text)) < 2 else set()
    for piece in _PIECE.findall(text):
        word = piece.strip()
        if word.lower() in _POWERS:
            pending = _POWERS[word.lower()]  # square miles, but miles squared
            if parts and word.lower().endswith("ed"):
                parts[-1], pending = parts[-1] + pending, ""
        elif word.lower() in _GLUE and (parts or pending or word == "per"):
            parts.append(_GLUE[word.lower()])
        elif word[0].isalpha():
            name = _singular(word)
            known &= _is_listed(word) or name in counted or _is_noun(word, problem)
            known &= not pending or name in _CANONICAL.values()
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


def split_unit(
    text: str, problem: Problem = NO_PROBLEM, *, trusted: bool = False
) -> tuple[str, str]:
    """Return (value, canonical unit) of a normalised answer; no unit is empty.

    The problem's nouns are units; of a trusted text, all words behind a number.
    """
    if len(text) > LONGEST_WITH_UNIT:
        return text, ""
    if (match := _CURRENCY.fullmatch(text)) is not None:
        sign, currency, amount = match.groups()
        value, unit = split_unit(amount.strip(), problem, trusted=trusted)
        is_same = unit.startswith("/") or unit == currency  # $45 per day, $45 dollars
        return sign + (value if is_same else amount.strip()), currency
    match = _DEGREE.search(text)
    if match is not None and match.start() > 0 and not _TRIGONOMETRIC.search(text):
        letter = match[1] or match[2] or ""
        return text[: match.start()].strip(), "degree" + letter
    start = text.find(r"\text{")
    value = text[:start].rstrip()
    if start > 0 and _VALUE_END.search(value) and _TEXT_TAIL.fullmatch(text, start):
        unit, known = canonical_unit(text[start:], problem)
        return (value, unit) if unit and (known or trusted) else (text, "")
    if (match := _PLAIN_TAIL.fullmatch(text)) is not None:
        unit, known = canonical_unit(match[3], problem)
        first, *others = re.findall(r"[^\W\d_]+", match[3])
        is_long = len(first) > LONG_WORD or len(first) == LONG_WORD and first.endswith("s")
        is_long |= not first.isascii()
        if not re.search(r"[A-Za-z]{2}|[^\x00-\x7f]", match[3]):  # 5 m, but 5m is a product
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
    if words[0] in ("a", "an") and words[1:2] and {*words[1:2]} & {*_FRACTIONS, *SCALES}:
        words = ["one", *words[1:]]
    value, used = _read_words(words)
    if used == 0:
        return None
    rest = words[used:]
    if len(rest) == 1 and (below := _FRACTIONS.get(rest[0].removesuffix("s"))):
        return rf"{sign}\frac{{{value}}}{{{below}}}"
    if {_singular(word) for word in rest} & CHANGING:
        return None
    return f"{sign}{value}" + (rf"\text{{ {' '.join(rest)}}}" if rest else "")


def _read_words(words: list[str]) -> tuple[int, int]:
    """Return the value of the number in words at the start, and how many words it has."""
    total, group, used, bound = 0, 0, 0, 1_000  # bound: of the next word's value
    for i, word in enumerate(words):
        if VALUES.get(word, bound) < bound:
            group += VALUES[word]
            bound = 10 if VALUES[word] >= 20 else 0
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
