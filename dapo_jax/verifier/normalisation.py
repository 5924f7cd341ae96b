"""Normal form of answers that look the same: Unicode, spacing, wrappers and LaTeX synonyms.

The normal form is LaTeX without decoration. Nothing here is evaluated.
"""

import re
import unicodedata

FORBIDDEN = "\ufffd"  # stands for what must never help: it equals nothing

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒―﹣－", "-"),
    **dict.fromkeys("×✕✖", r"\times "),
    **dict.fromkeys("·⋅∙•∗", r"\cdot "),
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "±": r"\pm ",
    "∓": r"\mp ",
    "≤": r"\le ",
    "≦": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "≧": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∞": r"\infty ",
    "π": r"\pi ",
    "𝜋": r"\pi ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "˚": r"^\circ ",
    "∘": r"\circ ",
    "∠": r"\angle ",
    "△": r"\triangle ",
    "′": "'",
    "″": "''",
    "’": "'",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "∣": "|",
    "…": r"\ldots ",
    "、": ",",
    "。": ".",
    "∧": r"\land ",
    "∨": r"\lor ",
    "¬": r"\neg ",
    "→": r"\to ",
    "€": r"\text{euro} ",
    "£": r"\text{pound} ",
    "¥": r"\text{yen} ",
    "¢": r"\text{cent} ",
}
_GREEK = "alpha beta gamma delta epsilon theta lambda mu sigma phi omega rho tau".split()
_SYMBOLS |= {
    unicodedata.lookup(f"GREEK SMALL LETTER {'LAMDA' if n == 'lambda' else n.upper()}"): f"\\{n} "
    for n in _GREEK
}
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_SHIFTED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+|[{''.join(_SUBSCRIPTS)}]+")
_ROOT = re.compile(r"([√∛∜])\s?(\d+(?:\.\d+)?)?")


def _shifted(match: re.Match) -> str:
    run = match[0]
    if run[0] in _SUPERSCRIPTS:
        return "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run)) + "}"
    return "_{" + "".join(map(_SUBSCRIPTS.__getitem__, run)) + "}"


def _character(char: str) -> str:
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    kind = unicodedata.category(char)
    if kind == "Zs" or char in "\t\n\r\f\v":
        return " "
    if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me", "Zl", "Zp"):
        return FORBIDDEN
    plain = unicodedata.normalize("NFKC", char)
    if "\u2044" in plain:  # a vulgar fraction
        above, _, below = plain.partition("\u2044")
        return rf"\frac{{{above or 1}}}{{{below}}}" if below else plain
    return plain


def plain_characters(text: str) -> str:
    """Text in ASCII LaTeX as far as possible; forbidden characters become `FORBIDDEN`."""
    text = text.strip("\u200b\u2060\ufeff \t\r\n")
    if text.isascii() and text.isprintable():
        return text
    text = unicodedata.normalize("NFC", text)  # letters with their accents
    text = _ROOT.sub(lambda m: _ROOTS[m[1]] + (f"{{{m[2]}}}" if m[2] else " "), text)
    text = _SHIFTED.sub(_shifted, text)
    return "".join(char if " " <= char <= "~" else _character(char) for char in text)


# LaTeX that only decorates, longest first where one begins another.
_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits"
    r"|middle|mathstrut|nobreak|hspace\{[^{}]*\}|phantom\{[^{}]*\})(?![A-Za-z])(?:\s*\.(?!\d))?"
)
_SPACES = re.compile(
    r"(\\\\)|\\[,;:!> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|(?<!\\)~|\\$|[ \n\t]+"
)
_SYNONYMS = [
    (re.compile(rf"\\(?:{old})(?![A-Za-z])"), new)
    for old, new in (
        ("dfrac|tfrac|cfrac", r"\\frac"),
        ("dbinom|tbinom", r"\\binom"),
        ("leq|leqslant", r"\\le"),
        ("geq|geqslant", r"\\ge"),
        ("neq", r"\\ne"),
        ("lt", "<"),
        ("gt", ">"),
        ("lbrace", r"\\{"),
        ("rbrace", r"\\}"),
        ("lbrack", "["),
        ("rbrack", "]"),
        ("lvert|rvert|vert|mid", "|"),
        ("varnothing", r"\\emptyset"),
        ("degree", r"^\\circ"),
        (
            "mathrm|textrm|textbf|textit|textsf|texttt|mbox|operatorname\\*?|emph|textnormal|mathsf",
            r"\\text",
        ),
        ("mathbf|boldsymbol|bm|mathit|vec|overrightarrow|mathcal|pmb", r"\\mathbf"),
        ("cross|ast", r"\\times"),
        ("imath", "i"),
        ("varepsilon", r"\\epsilon"),
        ("vartheta", r"\\theta"),
        ("varphi", r"\\phi"),
        ("vee", r"\\lor"),
        ("wedge", r"\\land"),
        ("ge|geqq", r"\\ge"),
        ("le|leqq", r"\\le"),
    )
]
_UNITS_CONSTANTS = re.compile(r"\\text\{\s*(e|i|d|pi)\s*\}")
_TEXT_FUNCTIONS = re.compile(r"\\text\{\s*(sin|cos|tan|log|ln|exp|arcsin|arccos|arctan|gcd)\s*\}")
_PERCENT = re.compile(r"\s*(?:\\text\{\s*per\s?cent\s*\}|\bper\s?cent\b)")
_TEXT_SIGN = re.compile(r"\\text\{([^A-Za-z{}]*)\}")
_ELLIPSIS = re.compile(r"\.{2,}|\\(?:dots|cdots|dotsc)(?![A-Za-z])")
_BOARD = re.compile(r"\\mathbb ?([A-Z])(?![A-Za-z])")
_NOT_EQUAL = re.compile(r"\\not ?=|=/=")
_NOT_IN = re.compile(r"\\not ?\\in(?![A-Za-z])")
_BOLD_NUMBER = re.compile(r"\\mathbf\{([-\d. ]+)\}")  # blanks between letters don't show in math
_THOUSANDS_BRACES = re.compile(r"(?<=\d)\{,\}(?=\d)")
_THOUSANDS_NARROWED = re.compile(r"(?<=\d),(?:\\!|\\,|~) ?(?=\d{3}(?!\d))")
_THOUSANDS_THIN = re.compile(r"(?<=\d)(?:\\[,!]|\\ )(?=\d{3}(?!\d))")

_ORDINAL = re.compile(
    r"(?<![\d.,])(\d{1,18}) ?(?:\^ ?)?(?:st|nd|rd|th|\{ ?(?:st|nd|rd|th) ?\}"
    r"|\{? ?\\text\{ ?(?:st|nd|rd|th) ?\} ?\}?)(?![A-Za-z])"
)
_FOR_ALL = re.compile(r"[,;.]? ?(?:\\text\{ ?,? ?)?\bfor (?:all|every|each|any)\b")
LONGEST_TAIL = 80  # characters of "for all real numbers x"
_DOLLARS_AND_CENTS = re.compile(
    r"(?:\\text\{dollar\} ?(\d{1,15})|(\d{1,15}) ?(?:\\text\{ ?)?dollars?(?: ?\})?)"
    r" ?(?:\\text\{)? ?(?:and|,)? ?\}? ?(\d{1,2}) ?(?:\\text\{ ?)?cents?(?: ?\})?"
)

_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("__", "__"),
    ("`", "`"),
    ('"', '"'),
)
_WRAPPING_COMMANDS = ("boxed", "fbox", "text", "mathbf", "ensuremath", "bf", "rm")


def _balanced(text: str) -> bool:
    """Test that braces close in order and the first never closes before the end."""
    depth, i = 0, 0
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth < 0:
                return False
        i += 1
    return depth == 0


def unwrap(text: str) -> str:
    """Answer without dollar signs, emphasis, outer braces and trailing punctuation."""
    while True:
        before, text = text, text.strip()
        if text[-1:] in (",", ";", ":", ".") and text[-2:] not in (r"\,", r"\;", r"\:"):
            text = text[:-1]
        for start, end in _WRAPPERS:
            inner = text[len(start) : len(text) - len(end)]
            if (
                text.startswith(start)
                and text.endswith(end)
                and len(text) > len(start) + len(end)
                and end not in inner
            ):
                text = inner
                break
        if text.startswith("{") and text.endswith("}") and _balanced(text[1:-1]):
            text = text[1:-1]
        for name in _WRAPPING_COMMANDS:
            head = f"\\{name}{{"
            if text.startswith(head) and text.endswith("}") and _balanced(text[len(head) : -1]):
                text = text[len(head) : -1]
        if text == before:
            return text


def _without_ending(match: re.Match) -> str:
    """1 for 1st, 12 for 12th; 12st is a product of letters."""
    number, ending = match[1], re.sub(r"[^a-z]|text", "", match[0][len(match[1]) :])
    teen = number[-2:-1] == "1"
    wanted = "th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number if ending == wanted else match[0]


def _without_for_all(text: str) -> str:
    """Equation without the range of its variable."""
    tails = [m.start() for m in _FOR_ALL.finditer(text)]
    cut = tails and len(text) - tails[-1] <= LONGEST_TAIL and "=" in text[: tails[-1]]
    return text[: tails[-1]] if cut and "=" not in text[tails[-1] :] else text


def normalise(text: str) -> str:
    """Normal form of an answer."""
    text = _ELLIPSIS.sub(r"\\ldots ", plain_characters(text))
    text = _NOT_IN.sub(r"\\notin ", _NOT_EQUAL.sub(r"\\ne ", text))
    text = _BOARD.sub(r"\\mathbb{\1}", text.replace(r"\boxed", ""))  # a box inside another
    text = unwrap(_BOLD_NUMBER.sub(lambda m: m[1].replace(" ", ""), text))
    for pattern in (_THOUSANDS_BRACES, _THOUSANDS_THIN, _THOUSANDS_NARROWED):
        text = pattern.sub(",", text)
    text = _DROPPED.sub(" ", text)
    for pattern, new in _SYNONYMS:
        text = pattern.sub(new, text)
    text = text.replace(r"\$", r"\text{dollar} ")
    if text.count("$") == 1:  # a currency sign; in pairs they only delimit
        text = text.replace("$", r"\text{dollar} ")
    text = text.replace("$", " ").replace(r"\%", "%").replace(r"\#", "#").replace(r"\&", "&")
    text = _UNITS_CONSTANTS.sub(lambda m: r"\pi " if m[1] == "pi" else m[1] + " ", text)
    text = _TEXT_FUNCTIONS.sub(r"\\\1 ", text)
    text = _TEXT_SIGN.sub(r" \1 ", text)
    text = _PERCENT.sub("%", _SPACES.sub(lambda m: m[1] or " ", text))
    text = _without_for_all(_ORDINAL.sub(_without_ending, text))
    amount = _DOLLARS_AND_CENTS.fullmatch(text.strip())
    if amount is not None:
        text = rf"\text{{dollar}} {amount[1] or amount[2]}.{amount[3]:0>2}"
    return unwrap(text)
