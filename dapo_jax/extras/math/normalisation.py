"""Normal form of answers that look the same: Unicode, spacing, wrappers and LaTeX synonyms.

The normal form is LaTeX without decoration. Nothing here is evaluated.
"""

import functools
import re
import unicodedata

from dapo_jax.extras.math.extraction import closing_brace
from dapo_jax.extras.math.units import SCALES, number_in_words

FORBIDDEN = "\ufffd"  # stands for what must never help: it equals nothing

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_COMMANDS = (  # a character and the name of its command
    "×times ✕times ✖times ·cdot ⋅cdot ∙cdot •cdot ∗cdot ±pm ∓mp ≤le ≦le ⩽le ≥ge ≧ge ⩾ge ≠ne "
    "≈approx ∞infty πpi 𝜋pi ∪cup ∩cap ∈in ∅emptyset ∘circ ∠angle △triangle ⟨langle ⟩rangle "
    "⌊lfloor ⌋rfloor ⌈lceil ⌉rceil …ldots ∧land ∨lor ¬neg →to αalpha βbeta γgamma δdelta "
    "εepsilon θtheta λlambda μmu σsigma φphi ωomega ρrho τtau"
)
_SYMBOLS = {
    **{written[0]: f"\\{written[1:]} " for written in _COMMANDS.split()},
    **dict.fromkeys("−–—‐‑‒―﹣－", "-"),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("°º˚", r"^\circ "),
    **{"℃": r"^\circ C", "℉": r"^\circ F"},
    **dict.fromkeys("′’", "'"),
    **{"″": "''", "∣": "|", "、": ",", "。": ".", "ℝ": r"\mathbb{R}"},
    **{"€": r"\text{euro} ", "£": r"\text{pound} ", "¥": r"\text{yen} ", "¢": r"\text{cent} "},
}
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_SHIFTED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+|[{''.join(_SUBSCRIPTS)}]+")
_ROOT = re.compile(r"([√∛∜])\s?(\d+(?:\.\d+)?)?")


def _shifted(match: re.Match) -> str:
    mark, table = ("^", _SUPERSCRIPTS) if match[0][0] in _SUPERSCRIPTS else ("_", _SUBSCRIPTS)
    return f"{mark}{{{''.join(map(table.__getitem__, match[0]))}}}"


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
    """Return text in ASCII LaTeX as far as possible; forbidden characters become `FORBIDDEN`."""
    text = text.strip("\u200b\u2060\ufeff \t\r\n")
    if text.isascii() and text.isprintable():
        return text
    text = unicodedata.normalize("NFC", text)  # letters with their accents
    text = _ROOT.sub(lambda m: _ROOTS[m[1]] + (f"{{{m[2]}}}" if m[2] else " "), text)
    text = _SHIFTED.sub(_shifted, text)
    return "".join(char if " " <= char <= "~" else _character(char) for char in text)


_NUMERAL = re.compile(r"(\$?)(-?\d{1,18}(?:\.\d{1,18})?)\1", re.ASCII)
_BLANKS = re.compile(r"[ \t\n]{2,}")
_COLOURS = re.compile(r"\\(?:color|textcolor|colorbox)(?:\[[a-z]{1,9}\])?\{[\w#,.! -]{1,30}\}")
_ABOUT = re.compile(r"^\\(?:approx|sim|simeq|cong)(?![A-Za-z]) ?")
_WORDS_ONLY = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
# LaTeX that only decorates.
_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|hspace\{[^{}]*\}"
    r"|phantom\{[^{}]*\})(?![A-Za-z])(?:\s*\.(?!\d))?"
)
_SPACES = re.compile(
    r"(\\\\)|\\[,;:!> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|(?<!\\)~|\\$|[ \n\t]+"
)
_RENAMED = {
    name: new
    for new, names in {
        r"\frac": "dfrac tfrac cfrac",
        r"\binom": "dbinom tbinom",
        r"\le": "leq leqslant leqq",
        r"\ge": "geq geqslant geqq",
        r"\ne": "neq",
        "<": "lt",
        ">": "gt",
        r"\{": "lbrace",
        r"\}": "rbrace",
        "[": "lbrack",
        "]": "rbrack",
        "|": "lvert rvert vert mid",
        r"\|": "lVert rVert Vert",
        r"\emptyset": "varnothing",
        r"^\circ": "degree",
        r"\text": "mathrm textrm textbf textit textsf texttt textsc mbox hbox operatorname "
        "operatorname* emph textnormal mathsf",
        r"\mathbf": "boldsymbol bm mathit vec overrightarrow mathcal pmb",
        r"\times": "cross ast",
        "i": "imath",
        r"\epsilon": "varepsilon",
        r"\theta": "vartheta",
        r"\phi": "varphi",
        " ": "tiny small normalsize large Large LARGE huge Huge bf bfseries rm it underline "
        "displaystyle textstyle limits middle mathstrut nobreak",
        r"\lor": "vee",
        r"\land": "wedge",
    }.items()
    for name in names.split()
}
_COMMAND = re.compile(r"\\(operatorname\*|[A-Za-z]+)")
_UNITS_CONSTANTS = re.compile(r"\\text\{\s*(e|i|d|pi)\s*\}")
_TEXT_FUNCTIONS = re.compile(
    r"\\text\{\s*((?:arc|ar|a)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|gcd)\s*\}"
)
_SCALE = re.compile(
    rf"(?<=[\d}}])\s*(?:(\\text\{{)\s*)?({'|'.join(SCALES)})(?![A-Za-z])\s*(\}}?)", re.IGNORECASE
)
_PERCENT = re.compile(r" ?(?:\\text\{ ?per ?cent ?\}|\bper ?cent\b)")
_TEXT_SIGN = re.compile(r"\\text\{([^A-Za-z{}]*)\}")
_ELLIPSIS = re.compile(r"\.{2,}|\\(?:dots|cdots|dotsc)(?![A-Za-z])")
_BOARD = re.compile(r"\\mathbb ?([A-Z])(?![A-Za-z])")
_NOT_EQUAL = re.compile(r"\\not ?=|=/=")
_NOT_IN = re.compile(r"\\not ?\\in(?![A-Za-z])")
_BOLD_NUMBER = re.compile(r"\\mathbf\{([-\d. ]+)\}")  # blanks between letters don't show in math
_LATEX_E = re.compile(r"(?<=\$)( ?[\d.]+)e([-+]\d+ ?)(?=\$)", re.ASCII)  # no power of ten there
_POWER = re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({-])")  # of a programmer
_THOUSANDS_BRACES = re.compile(r"(?<=\d)\{,\}(?=\d)")
_THOUSANDS_NARROWED = re.compile(r"(?<=\d),(?:\\!|\\,|~) ?(?=\d{3}(?!\d))")
_THOUSANDS_THIN = re.compile(r"(?<=\d)(?:\\[,!]|\\ )(?=\d{3}(?!\d))")
_ROWS = re.compile(r"\\\\(?:\*| {0,3}\[ ?-?[\d.]{1,9} ?(?:pt|mm|cm|em|ex|in) ?\])|\\cr(?![A-Za-z])")
_COLONS = re.compile(r"(?<=\d)(?:\{:\}|\\!:\\!|\\colon) ?(?=\d)")
_SIUNITX = re.compile(r"\\(SI|qty|num|ang)\{([-\d.e]{1,40})\}(?:\{([^{}]{1,40})\})?")
_SHARES = r"(?:roots?|powers?|parts?|shares?|fractions?|derivatives?|of)\b"
_ORDINAL = re.compile(
    r"(?<![\d.,])(\d{1,18}) ?(?:\^ ?)?(?:st|nd|rd|th|\{ ?(?:st|nd|rd|th) ?\}"
    r"|\{? ?\\text\{ ?(?:st|nd|rd|th) ?\} ?\}?)(?![A-Za-z])"
    rf"(?! ?(?:\\text\{{ ?)?{_SHARES})"
)
_ORDINAL_NOUN = re.compile(rf"(?<=\d)\\text\{{ ?(?:st|nd|rd|th) (?!{_SHARES})")
_PHRASES = {
    phrase: new
    for new, phrases in {
        "0": "zero",
        r"\mathbb{R}": "all real numbers|all reals|the real numbers",
        r"\emptyset": "no solution|no solutions|empty set|the empty set|there is no solution"
        "|there are no solutions|no real solutions|no real solution|no solutions exist",
        "does not exist": "dne|the limit does not exist",
    }.items()
    for phrase in phrases.split("|")
}
_CHOICE_WORD = re.compile(
    r"^(?:\\text\{ ?(?:option|choice) ?\} ?|(\\text\{ ?)?(?:option|choice) )(?=\(?[A-J]\b)",
    re.IGNORECASE,
)
_WHOLE_LETTER = re.compile(
    r"[,;]? ?\(?(?:\\text\{ ?,? ?(?:where|for|with|and)?(?: all)? ?\})? ?(?:\\forall )?"
    r"(?:[kmn] ?\\in ?\\mathbb\{Z|[a-z] ?\\in ?\\mathbb\{R)\}\)?$"
)
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_FOR_ALL = re.compile(r"[,;.]? ?(?:\\text\{ ?,? ?)?\bfor (?:all|every|each|any)\b")
LONGEST_TAIL = 80  # characters of "for all real numbers x"
_DOLLARS_AND_CENTS = re.compile(
    r"(?:\\text\{dollar\} ?(\d{1,15})|(\d{1,15}) ?(?:\\text\{ ?)?dollars?(?: ?\})?)"
    r" ?(?:\\text\{)? ?(?:and|,)? ?\}? ?(\d{1,2}) ?(?:\\text\{ ?)?cents?(?: ?\})?"
)
_WRAPPERS = [pair.split() for pair in r'$$ $$|$ $|\( \)|\[ \]|** **|__ __|` `|" "'.split("|")]
_WRAPPING = {start[0] for start, _ in _WRAPPERS}
_WRAPPING_COMMANDS = ("boxed", "fbox", "text", "mathbf", "ensuremath", "bf", "rm")


def _balanced(text: str) -> bool:
    """Test that braces close in order and the first never closes before the end."""
    return closing_brace(text + "}", 0, len(text) + 1) == len(text)


def unwrap(text: str) -> str:
    """Return the answer without dollar signs, emphasis, outer braces and trailing punctuation."""
    while True:
        before, text = text, text.strip()
        if text[-1:] in (",", ";", ":", ".") and text[-2:] not in (r"\,", r"\;", r"\:"):
            text = text[:-1]
        for start, end in _WRAPPERS if text[:1] in _WRAPPING else ():
            inner = text[len(start) : len(text) - len(end)]
            if text.startswith(start) and text.endswith(end) and inner and end not in inner:
                text = inner
                break
        if text.startswith("{") and text.endswith("}") and _balanced(text[1:-1]):
            text = text[1:-1]
        for name in _WRAPPING_COMMANDS if text.startswith("\\") else ():
            head = f"\\{name}{{"
            if text.startswith(head) and text.endswith("}") and _balanced(text[len(head) : -1]):
                text = text[len(head) : -1]
        if text == before:
            return text


def _without_ending(match: re.Match) -> str:
    """Return 1 for 1st, 12 for 12th; 12st is a product of letters."""
    number, ending = match[1], re.sub(r"[^a-z]|text", "", match[0][len(match[1]) :])
    teen = number[-2:-1] == "1"
    wanted = "th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number if ending == wanted else match[0]


def _constant(match: re.Match) -> str:
    r"""Return a letter in roman type; 9\text{e}-4 is a product, no power of ten."""
    after_digit = match.string[: match.start()][-1:].isdigit()
    name = r"\pi" if match[1] == "pi" else match[1]
    return rf"\cdot {name} " if after_digit and name == "e" else f"{name} "


def _measured(match: re.Match) -> str:
    """Return the number and the unit of siunitx's commands."""
    unit = re.sub(r"\\per\b", "/", match[3] or "").replace("\\", "")
    return match[2] + (r"^\circ" if match[1] == "ang" else "") + (rf"\text{{ {unit}}}" * bool(unit))


def _scaled(match: re.Match) -> str:
    """Return the factor of `3 million people`; the rest of its words stay text."""
    opened = "" if match[3] and match[1] else (match[1] or "") + match[3]
    return rf"\times 10^{{{SCALES[match[2].lower()]}}}{opened}"


def _without_for_all(text: str) -> str:
    """Return the equation without the range of its variable."""
    tails = [m.start() for m in _FOR_ALL.finditer(text)]
    cut = tails and len(text) - tails[-1] <= LONGEST_TAIL and "=" in text[: tails[-1]]
    return text[: tails[-1]] if cut and "=" not in text[tails[-1] :] else text


def _without_whole(text: str) -> str:
    """Return the formula without the words that its letter is a whole number."""
    rest = _WHOLE_LETTER.sub("", text)
    return text if not rest or _INEQUALITY.search(rest) else rest


@functools.lru_cache(maxsize=64)
def normalise(text: str) -> str:
    """Return the normal form of an answer; several rules ask for that of the same one."""
    if (numeral := _NUMERAL.fullmatch(text)) is not None:  # most answers
        return numeral[2]
    text = _ROWS.sub(r"\\\\", _SIUNITX.sub(_measured, _COLONS.sub(":", text)))
    text = _ELLIPSIS.sub(r"\\ldots ", plain_characters(_LATEX_E.sub(r"\1 \\cdot e\2", text)))
    text = _NOT_IN.sub(r"\\notin ", _NOT_EQUAL.sub(r"\\ne ", _COLOURS.sub(" ", text)))
    text = _BOARD.sub(r"\\mathbb{\1}", text.replace(r"\boxed", ""))  # a box inside another
    text = _POWER.sub("^", unwrap(_BOLD_NUMBER.sub(lambda m: m[1].replace(" ", ""), text)))
    for pattern in (_THOUSANDS_BRACES, _THOUSANDS_THIN, _THOUSANDS_NARROWED):
        text = pattern.sub(",", text)
    text = _DROPPED.sub(" ", text)
    text = _COMMAND.sub(lambda m: _RENAMED.get(m[1], m[0]), text)
    text = text.replace(r"\text{\$}", r"\$").replace(r"\$", r"\text{dollar} ")
    if text.count("$") == 1:  # a currency sign; in pairs they only delimit
        text = text.replace("$", r"\text{dollar} ")
    text = text.replace("$", " ").replace(r"\%", "%").replace(r"\#", "#").replace(r"\&", "&")
    text = _UNITS_CONSTANTS.sub(_constant, text)
    text = _TEXT_FUNCTIONS.sub(r"\\\1 ", text)
    text = _TEXT_SIGN.sub(r" \1 ", text)
    text = _PERCENT.sub("%", _SPACES.sub(lambda m: m[1] or " ", text))
    text = _ORDINAL.sub(_without_ending, _BLANKS.sub(" ", text))
    text = _SCALE.sub(_scaled, _without_for_all(text))
    text = _ORDINAL_NOUN.sub(r"\\text{ ", text)
    if (amount := _DOLLARS_AND_CENTS.fullmatch(text.strip())) is not None:
        text = rf"\text{{dollar}} {amount[1] or amount[2]}.{amount[3]:0>2}"
    text = _CHOICE_WORD.sub(lambda m: m[1] or "", _without_whole(text.strip()))
    text = _ABOUT.sub("", unwrap(text))
    if len(text) < LONGEST_TAIL and _WORDS_ONLY.fullmatch(text):
        text = number_in_words(text) or text
    return _PHRASES.get(text.lower(), text) if len(text) < LONGEST_TAIL else text
