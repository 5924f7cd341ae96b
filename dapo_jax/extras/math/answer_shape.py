"""Outer shape of an answer: list, set, tuple, interval, union, matrix, relation, or a value.

Only brackets and separators are read here; what stands between them stays text.
"""

import functools
import re
from typing import NamedTuple

from dapo_jax.extras.math.normalisation import unwrap

DEEPEST = 8  # nested sets, tuples and matrices


class Node(NamedTuple):
    """Shape and its parts.

    kind: 'value' (text), 'list' (items; mark 'or', 'and' or ','), 'set' (items), 'tuple' (items;
    mark: its two brackets), 'union' / 'intersection' / 'difference' (items), 'matrix' /
    'determinant' / 'norm' (items: rows of kind 'tuple'), 'relation' (items; marks: the operators
    between them).
    """

    kind: str
    text: str
    items: tuple["Node", ...] = ()
    marks: tuple[str, ...] = ()


_TOKEN = re.compile(r"\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_BRACKETS = r"( ) ]|[ ) ]|{ }|\{ \}|\langle \rangle|\lfloor \rfloor|\lceil \rceil"  # and their ends
_PAIRS = {start: ends for start, *ends in map(str.split, _BRACKETS.split("|"))}
_ENDS = {end for ends in _PAIRS.values() for end in ends}
_WRITTEN, _MEANT = r"= < > \le \ge \ne \in \equiv \approx".split(), "= < > <= >= != in = ~".split()
RELATIONS: dict[str, str] = dict(zip(_WRITTEN, _MEANT, strict=True))
_REGIONS = {"union": {r"\cup"}, "intersection": {r"\cap"}}
_REGIONS |= {"difference": {r"\setminus", r"\backslash"}}
_WORD_SEPARATOR = re.compile(
    r"\\text\{ ?,? ?(and|or) ?\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])|\\(land|lor)(?![A-Za-z])"
)
_REAL_VARIABLE = re.compile(r"[A-Za-z](?: ?\\in ?\\mathbb ?\{?R\}?)?")
# Rows below each other, in brackets: matrices, systems of equations, functions by cases.
_ROWS = re.compile(
    r"(\\?[(\[|{]|) ?\\begin\{([A-Za-z]+)\*?\}(?:\{[lcr|]*\}|\[[lcr]\])?(.*)\\end\{\2\*?\}"
    r" ?(\\?[)\]|}]|)",
    re.DOTALL,
)
_MATRIX = re.compile(r"[pbBvV]?(?:small)?matrix|array")
_PAIRED = {("", ""), ("(", ")"), ("[", "]"), ("|", "|"), (r"\|", r"\|")}
_BARS = {"|": "determinant", r"\|": "norm", "v": "determinant", "V": "norm"}
_CONDITION = re.compile(r" ?(?:\\text\{ ?)?,? ?(?:if|for|when|where)\b ?(?:\} ?)?")
_OTHER = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "=": "!=", "!=": "="}
_OTHERWISE = re.compile(r" ?(?:\\text\{ ?)?(?:otherwise|else)(?: ?\})?[,. ]*")
_SIGN = re.compile(r"\\([pm])(?:m|p)(?![A-Za-z])")  # plus-minus, minus-plus


def _pieces(text: str, separators: set[str]) -> tuple[list[str], list[str]] | None:
    """Split text at the separators outside all brackets; return None if unbalanced."""
    parts, marks, start, closers = [], [], 0, []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _PAIRS or token.startswith(r"\begin"):
            closers.append(_PAIRS.get(token, [r"\end" + token[6:]]))
        elif token in _ENDS or token.startswith(r"\end"):
            if not closers or token not in closers.pop():
                return None
        elif token in separators and not closers:
            parts.append(text[start : match.start()])
            marks.append(token)
            start = match.end()
    return None if closers else ([*parts, text[start:]], marks)


def split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Return the pieces of `_pieces`, with unbalanced text as one piece."""
    is_one = not any(separator in text for separator in separators)
    return ([text], []) if is_one else _pieces(text, separators) or ([text], [])


_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


def _split_list(text: str) -> tuple[list[str], str]:
    """Return the members of a bare list, and how they are joined."""
    whole = text
    words = [next(filter(None, m.groups())) for m in _WORD_SEPARATOR.finditer(text)]
    words = [{"land": "and", "lor": "or"}.get(word, word) for word in words]
    if len(set(words)) > 1:  # which of them binds the other is not said
        return [text], ","
    joined = words[0] if words else ","
    text = _WORD_SEPARATOR.sub(" ; ", text)
    # Commas inside numerals stay, unless every comma could be one and a space says otherwise.
    text = _THOUSANDS.sub(lambda m: m[0].replace(",", "\0"), text)
    parts, _ = split(text, {",", ";"})
    parts = [part.replace("\0", ",").strip() for part in parts]
    if len(parts) == 1:
        return [whole], ","
    return [part for part in parts if part], joined


def _inside(text: str, start: str) -> str | None:
    """Return the content if one pair of brackets encloses the whole text."""
    end = next(filter(text.endswith, _PAIRS[start]), "")
    if not (end and text.startswith(start)):
        return None
    content = text[len(start) : len(text) - len(end)]
    is_escaped = start == r"\{" and content.endswith("\\")
    return None if is_escaped or _pieces(content, set()) is None else content


def _members(content: str, depth: int) -> tuple[Node, ...]:
    parts, _ = split(content, {",", ";"})
    return tuple(read(part, depth + 1) for part in parts if content.strip())


def _read_rows(text: str, depth: int) -> Node | None:
    """Return a matrix, or the list of a system's equations or of a function's cases."""
    if (match := _ROWS.fullmatch(text.strip())) is None:
        return None
    start, name, body, end = match.groups()
    if _SIGN.search(text):
        return _with_signs(text, depth)
    rows = [row.strip(" ,;.") for row in split(body.replace(r"\hline", " "), {r"\\"})[0]]
    cells = [split(row, {"&"})[0] for row in rows if row]
    is_matrix = _MATRIX.fullmatch(name) and start not in ("", r"\{") or name[0] in "pbBvV"
    if not is_matrix and all("".join(row[1:]).lstrip()[:1] in ("", "=") for row in cells):
        lines = tuple(read("".join(row), depth + 1) for row in cells)
        if len(lines) == 1:
            return lines[0]
        if lines and all(line.marks == ("=",) for line in lines):
            return Node("list", text, lines, (",",))
    if name == "cases":
        return _by_cases(text, cells, depth)
    if not _MATRIX.fullmatch(name) or (start, end) not in _PAIRED:
        return None
    texts = ("&".join(row) for row in cells)
    each = (tuple(read(cell, depth + 1) for cell in row) for row in cells)
    nodes = tuple(Node("tuple", *pair, ("&", "&")) for pair in zip(texts, each, strict=True))
    return Node(_BARS.get(start or name[0], "matrix"), text, nodes)


def _by_cases(text: str, rows: list[list[str]], depth: int) -> Node | None:
    """Return the list of (value, condition) of a function by cases."""
    cases = []
    for row in rows:
        cells = row if len(row) > 1 else split(row[0], {","})[0]
        if len(cells) != 2:
            return None
        condition = _CONDITION.sub("", cells[1].strip(" ,.;"), count=1)
        if condition.count("}") > condition.count("{"):  # \text{if x > 0}
            condition = condition.removesuffix("}")
        condition = "otherwise" if _OTHERWISE.fullmatch(condition) else condition.strip(" ,.;")
        items = read(cells[0].strip(" ,;"), depth + 1), read(condition, depth + 1)
        cases.append(Node("tuple", "&".join(cells), items, ("&", "&")))
    if len(cases) == 2 and cases[1].items[1].text == "otherwise":
        cases[1] = cases[1]._replace(items=(cases[1].items[0], _negated(cases[0].items[1])))
    return Node("list", text, tuple(cases), (",",))


def _negated(condition: Node) -> Node:
    """Return x <= 2 for x > 2; what is no single relation stays `otherwise`."""
    if condition.kind != "relation" or len(condition.items) > 2 or condition.marks[0] not in _OTHER:
        return Node("value", "otherwise")
    return condition._replace(text=f"not {condition.text}", marks=(_OTHER[condition.marks[0]],))


def _read_brackets(text: str, depth: int) -> Node | None:
    """Return a set, tuple or interval; None if no pair of brackets encloses the text."""
    if (content := _inside(text, r"\{")) is not None:
        condition, marks = split(content, {":", "|", r"\colon"})
        if len(marks) == 1:  # {x : x > 2}, and nothing but a real variable before the colon
            real = _REAL_VARIABLE.fullmatch(condition[0].strip())
            kept = read(condition[1], depth + 1) if real else None
            whole = kept is not None and kept.kind in ("relation", "list")
            return kept if whole else Node("value", text)
        return Node("set", text, _members(content, depth))
    for start in ("(", "[", r"\langle"):
        if (content := _inside(text, start)) is None:
            continue
        if len(split(content, {",", ";"})[0]) > 1:
            if _SIGN.search(text):
                return _with_signs(text, depth)
            brackets = (start, r"\rangle" if start[0] == "\\" else text[-1])
            return Node("tuple", text, _members(content, depth), brackets)
        if start == "(" and text[-1] == ")":
            return read(content, depth + 1)
    return None


def _with_signs(text: str, depth: int) -> Node:
    """Return the two answers that plus-minus signs give, all upper or all lower ones."""
    both = (_SIGN.sub(lambda m, signs=signs: signs[m[1] == "m"], text) for signs in ("+-", "-+"))
    return Node("list", text, tuple(read(each, depth + 1) for each in both), (",",))


@functools.lru_cache(maxsize=256)
def read(text: str, depth: int = 0) -> Node:
    """Return the shape of a normalised answer. Text without a readable shape is a value."""
    text = unwrap(text)
    if depth >= DEEPEST:
        return Node("value", text)
    if rows := _read_rows(text, depth):
        return rows
    parts, joined = _split_list(text)
    if len(parts) > 1:
        items = tuple(read(part, depth + 1) for part in parts)
        if items[0].marks == ("!=",):  # x != 2, 3
            first = items[0].items[0]
            items = tuple(
                item if item.kind != "value" else Node("relation", text, (first, item), ("!=",))
                for item in items
            )
        named = {item.items[0].text for item in items if item.kind == "relation"}
        if len(named) > 1 and _SIGN.search(text):
            return _with_signs(text, depth)
        return Node("list", text, items, (joined,))
    text = parts[0] if parts else text
    members, operators = split(text, set(RELATIONS))
    if r"\ne" in operators and _SIGN.search(text):
        return _with_signs(text, depth)._replace(marks=("and",))
    if operators:
        items = tuple(read(member, depth + 1) for member in members)
        return Node("relation", text, items, tuple(RELATIONS[o] for o in operators))
    for kind, commands in _REGIONS.items():
        sets, marks = split(text, commands)
        if marks:
            return Node(kind, text, tuple(read(part, depth + 1) for part in sets))
    if node := _read_brackets(text, depth):
        return node
    if _SIGN.search(text):
        return _with_signs(text, depth)
    return Node("set", text) if text.strip() == r"\emptyset" else Node("value", text)
