"""Normal form of answers that look the same: Unicode, spacing, wrappers and LaTeX synonyms.

The normal form is LaTeX without decoration. Nothing here is evaluated.
"""

import functools
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from dapo_jax.data.extraction import closing_brace
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
    "₹": r"\text{rupee} ",
}
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_SHIFTED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+|[{''.join(_SUBSCRIPTS)}]+")
_ROOT = re.compile(r"([√∛∜])\s?(\d+(?:\.\d+)?)?")


def _shifted(match: re.Match) -> str:
    mark, table = ("^", _SUPERSCRIPTS) if match[0][0] in _SUPERSCRIPTS else ("_", _SUBSCRIPTS)
    text = "".join(map(table.__getitem__, match[0]))
    return mark + (text if len(text) == 1 else f"{{{text}}}")


def _character(char: str) -> str:
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    kind = unicodedata.category(char)
    if kind == "Zs" or char.isspace() and char.isascii():
        return " "
    if kind[0] == "C" or kind in ("Mn", "Me", "Zl", "Zp"):
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
_WORDS_ONLY = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
LONGEST_PHRASE = 80  # characters
_NAMES = r"""
    \frac dfrac tfrac cfrac, \binom dbinom tbinom, \le leq leqslant leqq, \ge geq geqslant geqq,
    \ne neq, < lt, > gt, \{ lbrace, \} rbrace, [ lbrack, ] rbrack, | lvert rvert vert mid,
    \| lVert rVert Vert, \emptyset varnothing, ^\circ degree, \times cross ast, \lor vee,
    \land wedge, \angle measuredangle, \epsilon varepsilon, \theta vartheta, \phi varphi, i imath,
    \text mathrm textrm textbf textit textsf texttt textsc mbox hbox operatorname operatorname* emph
    textnormal mathsf, \mathbf boldsymbol bm mathit vec overrightarrow mathcal pmb, Å AA,
    _ tiny small normalsize large Large LARGE huge Huge bf bfseries rm it underline displaystyle
    textstyle limits middle mathstrut nobreak
"""
_RENAMED = {
    name: new.replace("_", " ")
    for new, *names in map(str.split, _NAMES.split(","))
    for name in names
}
_PREFIXES = r"\\((?:kilo|mega|giga|centi|milli|deci|micro|nano|pico))(?=\\)"


def _measured(match: re.Match) -> str:
    """Return the number and the unit of siunitx's commands."""
    unit = re.sub(r"\\per\b", "/", re.sub(_PREFIXES + r"\\", r" \1", match[3] or ""))
    unit = rf"\text{{ {unit.replace(chr(92), ' ')}}}" if unit else ""
    return match[2] + (r"^\circ" if match[1] == "ang" else "") + unit


def _constant(match: re.Match) -> str:
    r"""Return a constant in roman type, \pi or e; 9\text{e}-4 is a product, not 9e-4."""
    after_digit = match.string[: match.start()][-1:].isdigit()
    name = r"\pi" if match[1] == "pi" else match[1]
    return rf"\cdot {name} " if after_digit and name == "e" else f"{name} "


def _scaled(match: re.Match) -> str:
    """Return the factor of `3 million people`; the rest of its words stay text."""
    opened = "" if match[3] and match[1] else (match[1] or "") + match[3]
    return rf"\times 10^{{{SCALES[match[2].lower()]}}}{opened}"


def _round(match: re.Match) -> str:
    """Return an interval with its brackets turned outwards, ]0,1[, as (0,1)."""
    start, content, end = match.groups()
    if start + end == "[]" or content.lstrip()[0] in ",;":
        return match[0]
    return ("(" if start == "]" else "[") + content + (")" if end == "[" else "]")


def _rules(table: str, **functions: Callable[[re.Match], str]) -> list[tuple[re.Pattern, Any]]:
    """Return (pattern, replacement) for each line `pattern => replacement`, or `=> function`.

    A word in angle brackets stands for a part of patterns.
    """
    parts = {
        "<scales>": "|".join(SCALES),
        "<raised>": r"(?:<th>|\{ ?<th> ?\}|\{? ?\\text\{ ?<th> ?\} ?\}?)",
        "<th>": "(?:st|nd|rd|th)",
        "<ordinal>": r"(?:1(?=<pre>st)|2(?=<pre>nd)|3(?=<pre>rd)|(?:[04-9]|1\d)(?=<pre>th))",
        "<pre>": r"[ ^{]*(?:\\text\{ ?)?",
        "<share>": r"(?:roots?|powers?|parts?|shares?|fractions?|derivatives?|of)\b",
        "<sized>": "(?:left|right|[bB]igg?[lr]?)",
        "<trig>": "(?:arc|ar|a)?(?:sin|cos|tan|cot|sec|csc)h?",
        "<reals>": r"\\text\{ ?all real(?: numbers|s)?,? (?:except|but)(?: for)? ",
    }
    rules = []
    for line in table.strip().splitlines():
        pattern, new = line.strip().split(" =>")
        for name, part in parts.items():
            pattern = pattern.replace(name, part)
        rules.append(
            (re.compile(pattern), functions.get(new.strip(), new.strip(" ").replace("_", " ")))
        )
    return rules


# What replaces what, in this order; `_` is a blank. First in the text as written: colons, siunitx,
# ends of rows, and no power of ten in LaTeX,
_WRITTEN = _rules(
    r"""
    (?<=\d)(?:\{:\}|\\!:\\!|\\colon) ?(?=\d) => :
    \\(SI|qty|num|ang)\{([-\d.e]{1,40})\}(?:\{([^{}]{1,40})\})? => measured
    \\\\(?:\*| {0,3}\[ ?-?[\d.]{1,9} ?(?:pt|mm|cm|em|ex|in) ?\]) => \\\\
    \\(?:cr|newline|tabularnewline)(?![A-Za-z]) => \\\\
    (?a)(?<=\$)( ?[\d.]+)e([-+]\d+ ?)(?=\$) => \1_\\cdot_e\2
    """,
    measured=_measured,
)
# then, with plain characters, before what wraps the answer is removed (a box inside another, blanks
# between letters that don't show),
_WRAPPED = _rules(
    r"""
    \.{2,}|\\(?:dots|cdots|dotsc)(?![A-Za-z]) => \\ldots_
    \\(?:text)?color(?:box)?(?:\[[a-z]{1,9}\])?\{[\w#,.! -]{1,30}\}|\\boxed(?![A-Za-z]) => _
    \\not ?=|=/= => \\ne_
    \\not ?\\in(?![A-Za-z]) => \\notin_
    \\mathbb ?([A-Z])(?![A-Za-z]) => \\mathbb{\1}
    \\mathbf\{([-\d. ]+)\} => joined
    """,
    joined=lambda match: match[1].replace(" ", ""),
)
# and then without it: powers of programmers, thousands, decoration, commands, currency, units,
# constants and functions in text, blanks, percent, ordinals, scales, choices.
_REST = _rules(
    r"""
    (?<=[\w)}\]])\*\*(?=[\w({-]) => ^
    (?<=\d)\{,\}(?=\d)|(?<=\d)(?:,?\\[,!]|,~|\\ ) ?(?=\d{3}(?!\d)) => ,
    \\(?:<sized>|hspace\{[^{}]*\}|phantom\{[^{}]*\})(?![A-Za-z])(?:\s*\.(?!\d))? => _
    \\(operatorname\*|[A-Za-z]+) => renamed
    \\text\{ ?\\\$ ?\}|\\\$ => \\text{dollar}_
    ^([^$]*)\$(?=[^$]*$) => \1\\text{dollar}_
    \$ => _
    \\([%#&]) => \1
    \\text\{ ?(\\text\{[^{}]*\}|Å) ?\} => \1
    (?:\\text\{ ?)?degrees? (C|F)(?:elsius|ahrenheit)(?: ?\})? => ^\\circ_\1
    \\text\{ ?\^\\circ ?([CF]?) ?\} => ^\\circ_\1
    (?<=\d) ?(?:\\[,: ] ?)?\\mu ?(?:\\text\{ ?)?([msgFLACVW])\}?$ => \\text{_μ\1}
    (?<=\d) ?(?:\\[,: ] ?)?(?:\\text\{ ?)?([kM]?)\}? ?(?:\\Omega|Ω) ?\}?$ => \\text{_\1Ω}
    \\text\{\s*(e|i|d|pi)\s*\} => constant
    \\text\{ ?([CP]) ?\}(?= ?[_^(]) => \1
    \\text\{\s*(<trig>|log|ln|exp|gcd|cis)\s*\}|(?<=[\d ])(cis)(?=[ \d(\\]) => function
    \\text\{([^A-Za-z{}]*)\} => _\1_
    (\\\\)|\\[,;:!> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|(?<!\\)~|\\$|[ \n\t]+ => blank
    [ ]?(?:\\text\{ ?per ?cent ?\}|\bper ?cent\b) => %
    [ \t\n]{2,} => _
    (?<![\d.,])(\d{0,17}<ordinal>) ?\^? ?<raised>(?![A-Za-z])(?! ?(?:\\text\{ ?)?<share>) => \1
    (?i)(?<=[\d}])\s*(?:(\\text\{)\s*)?(<scales>)(?![A-Za-z])\s*(\}?) => scaled
    (?<=\d)\\text\{ ?<th> (?!<share>) => \\text{_
    (?i)^ ?(?:\\text\{ ?(?:option|choice) ?\} ?|(\\text\{ ?)?(?:option|choice) )(?=\(?[A-J]\b) => \1
    ^ ?\\(?:approx|sim|simeq|cong)(?![A-Za-z]) ? =>
    (?i)<reals>?\} ?(\S+) ?$|<reals>(\S+) ?\}$ => without
    >= => \\ge_
    <= => \\le_
    != => \\ne_
    == => =
    (\\mathbb\{R\}|[)\]]) ?- ?(?=\\\{) => \1\\setminus_
    ([\[\]])([^\[\]()]+[,;][^\[\]()]+)([\[\]]) => round
    ^ ?\\\{(.+?)[:|] ?([A-Za-z]) ?\\in ?\\mathbb\{Z\} ?\\\}$ => \1,_\2_\\in_\\mathbb{Z}
    (\d{1,15}) ?(?:\\text\{ ?)?dollars?(?: and|,)? (\d\d) cents?(?: ?\})?$ => \\text{dollar}_\1.\2
    """,
    renamed=lambda match: _RENAMED.get(match[1]) or match[0],
    constant=_constant,
    function=lambda match: rf"\{match[1] or match[2]} ",
    blank=lambda match: match[1] or " ",
    scaled=_scaled,
    round=_round,
    without=lambda match: rf"\mathbb{{R}}\setminus\{{{match[1] or match[2]}\}}",
)
_PHRASES = _rules(
    r"""
    (?i)^zero$ => 0
    (?i)^(?:all real numbers|all reals|the real numbers)$ => \\mathbb{R}
    (?i)^(?:none|(?:the )?empty set)$ => \\emptyset
    (?i)^(?:there (?:is|are) )?no(?: real)? (?:solution|root)s?(?: exists?)?$ => \\emptyset
    (?i)^(?:there (?:is|are) )?(no [a-z ]{2,40}?) exists?$ => \1
    (?i)^(?:dne|\\nexists|(?:the )?limit does not exist)$ => does_not_exist
    """
)
_WRAPPERS = [pair.split() for pair in r'$$ $$|$ $|\( \)|\[ \]|** **|__ __|` `|" "'.split("|")]
_WRAPPING = {start[0] for start, _ in _WRAPPERS}
_WRAPPING_COMMANDS = ("boxed", "fbox", "text", "mathbf", "ensuremath", "bf", "rm")


def _balanced(text: str) -> bool:
    """Test that braces close in order and the first never closes before the end."""
    return closing_brace(text + "}", 0) == len(text)


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


@functools.lru_cache(maxsize=64)
def normalise(text: str) -> str:
    """Return the normal form of an answer; several rules ask for that of the same one."""
    if (numeral := _NUMERAL.fullmatch(text)) is not None:  # most answers
        return numeral[2]
    for prepare, rules in ((str, _WRITTEN), (plain_characters, _WRAPPED), (unwrap, _REST)):
        text = prepare(text)
        for pattern, new in rules:
            text = pattern.sub(new, text)
    text = unwrap(text)
    if len(text) > LONGEST_PHRASE:
        return text
    if _WORDS_ONLY.fullmatch(text):
        text = number_in_words(text) or text
    for pattern, new in _PHRASES:
        text = pattern.sub(new, text)
    return text
