"""What an answer to a reasoning-gym task may look like where the task's scorer evaluates text.

The package hands some answers to `eval` or to sympy's parser, which is `eval` as well. Such a
scorer sees an answer only once its form is proven to be data: letters, digits and points without a
call, a literal, or arithmetic of bounded size. Every other answer scores 0 unseen. A task whose
scorer evaluates text and that has no rule here is refused, so that a newer release of the package
can't bring in what nobody looked at.
"""

import ast
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Callable

LONGEST = 10_000  # characters of any answer
LONGEST_EXPRESSION = 600
DEEPEST = 40  # brackets in brackets
MOST_BITS = 1 << 14  # of a number that an expression can make
MOST_EXPONENT_BITS = 8

Form = Callable[[str], bool]

# Neither brackets nor quotes nor underscores: nothing that calls, and no exponent above 999.
_PLAIN = re.compile(r"(?!.*\d\.?[eE][+-]?\d{4})[A-Za-z0-9 \t\r\n,.:;=/%$°\\+-]*", re.DOTALL)
_COORDINATES = re.compile(r"[0-9 (),.°+-]{0,100}")
_NUMBERS = re.compile(r"[0-9 \t\r\n,;.+-]*")
_CAPITALS = re.compile(r"[A-Z \t\r\n,]*")  # no variable of the scorer has such a name
_DIGITS = re.compile(r"[+-]?0?[xXbBoO]?[0-9A-Fa-f]{1,1000}")  # those of 0x1e2000 are no exponent
_BOARD = re.compile(r"[_Q \t\r\n]*")  # of names made of these, none exists
_TOKENS = re.compile(
    r"(?:(?<![A-Za-z0-9.])(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?![A-Za-z0-9.])"
    r"|[A-Za-z][A-Za-z0-9]*+|\*\*|[-+*/(),]|[ \t\r\n])*+"
)
_LITERAL = re.compile(r"[A-Za-z0-9_ \t\r\n\[\](),.'\"+-]*")
_LOGIC = re.compile(r"(?:[A-Z](?![A-Z])|[ ()∨∧→↔¬]){0,400}")
_MOVES = re.compile(r"(?!.*\d{3})[A-Za-z0-9' \t\r\n]*", re.DOTALL)  # of the cube; U999999999 hangs

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_SIGNS = (ast.UAdd, ast.USub)
_UNREADABLE = (SyntaxError, ValueError, MemoryError, RecursionError)


class _Refused(Exception):
    """This is not of the form."""


def _nested(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _parse(text: str) -> ast.expr:
    """The tree of a text; it is read, never run. Raises `_Refused`."""
    if _nested(text) > DEEPEST:
        raise _Refused
    try:
        return ast.parse(text.strip(), mode="eval").body
    except _UNREADABLE:
        raise _Refused from None


def _plain(text: str) -> bool:
    """Words and numbers: evaluated, at most a name, a number or an error."""
    return bool(_PLAIN.fullmatch(text))


def _matches(pattern: re.Pattern[str]) -> Form:
    return lambda text: _nested(text) <= DEEPEST and bool(pattern.fullmatch(text))


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _SIGNS) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, str)


def _literal(text: str) -> bool:
    """Numbers and strings, in lists and tuples."""
    try:
        return bool(_LITERAL.fullmatch(text)) and _is_literal(_parse(text))
    except _Refused:
        return False


def _json(text: str) -> bool:
    """A JSON document, which is also a literal of Python's."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _either(*forms: Form) -> Form:
    return lambda text: any(form(text) for form in forms)


@dataclasses.dataclass(frozen=True)
class Expression:
    """Arithmetic over some names and functions, whose numbers stay small however it is worked out.

    Attributes:
        names, functions: those allowed; none can be called that is not a function.
        powers: whether `**` is allowed.
    """

    names: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    powers: bool = False

    def __call__(self, text: str) -> bool:
        if len(text) > LONGEST_EXPRESSION or not _TOKENS.fullmatch(text):
            return False
        try:
            return self._bits(_parse(text)) <= MOST_BITS
        except (_Refused, RecursionError):
            return False

    def _bits(self, node: ast.expr) -> int:
        """Bound on the bits of numerator and denominator of every number in it, names being 1.

        It grows where terms are subtracted too, so that `9**(10**10 + x - x)` has a large one.
        """
        match node:
            case ast.Constant(value=int() | float() as value):
                return self._digits(value)
            case ast.Name(id=name) if name in self.names:
                return 1
            case ast.UnaryOp(op=sign, operand=operand) if isinstance(sign, _SIGNS):
                return self._bits(operand)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
                return self._bits(left) + self._bits(right) + 1
            case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=right) if self.powers:
                return 1 + self._bits(right)  # stays as it is, like exp
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if self.powers:
                exponent = self._bits(right)
                if exponent > MOST_EXPONENT_BITS:
                    raise _Refused
                return self._bits(left) << exponent
            case ast.Call(func=ast.Name(id=name), args=inputs, keywords=[]):
                if name in self.functions:
                    return 1 + sum(map(self._bits, inputs))
        raise _Refused

    @staticmethod
    def _digits(value: int | float) -> int:
        if isinstance(value, bool):
            raise _Refused
        return value.bit_length() if isinstance(value, int) else 4 * len(repr(value))


ARITHMETIC = Expression()
POLYNOMIAL = Expression(frozenset("xyzXYZ"), powers=True)
INTEGRAL = Expression(
    frozenset({*"xXcCkK", "E", "pi", "C1"}),
    frozenset(
        "sqrt cbrt exp log ln sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh "
        "asinh acosh atanh abs Abs Integral".split()  # some golds hold Integral(f, x)
    ),
    powers=True,
)

# Tasks whose scorer takes any expression of the right value, so also the question's own.
COMPUTED = ("simple_integration", "intermediate_integration", "polynomial_multiplication")

# Tasks whose scorer evaluates the answer: a form, and a jail (verifier.jail) besides.
EVALUATING: dict[str, Form] = {
    "binary_matrix": _either(_matches(_NUMBERS), _literal),
    "countdown": ARITHMETIC,
    "intermediate_integration": INTEGRAL,
    "n_queens": _either(_matches(_BOARD), _literal),
    "polynomial_multiplication": POLYNOMIAL,
    "puzzle24": ARITHMETIC,
    "simple_integration": INTEGRAL,
    "spiral_matrix": _either(_matches(_NUMBERS), _literal),
    "string_insertion": _either(_matches(_CAPITALS), _literal),
}

# Tasks whose code evaluates what it made itself, or reads an answer that can ask for any amount of
# time and memory. The form is one that could do no harm even if the answer were evaluated.
READING: dict[str, Form] = {
    "advanced_geometry": _either(_plain, _matches(_COORDINATES)),
    "basic_arithmetic": _plain,
    "bf": _plain,
    "bitwise_arithmetic": _either(_plain, _matches(_DIGITS)),
    "codeio": _either(_plain, _json),
    "coin_flip": _plain,
    "decimal_arithmetic": _plain,
    "gsm_symbolic": _plain,
    "number_sorting": _either(_plain, _literal),
    "polynomial_equations": _either(_plain, _literal),
    "propositional_logic": _matches(_LOGIC),
    "rubiks_cube": _matches(_MOVES),
    "simple_equations": _plain,
}

FORMS = EVALUATING | READING

# Named, or imported, these evaluate text, run programs, or compute without a bound.
_EVALUATORS = frozenset(
    "eval exec compile __import__ import_module literal_eval sympify parse_expr parse_latex "
    "lambdify system popen Popen run_path run_module".split()
)
_COMPUTING = frozenset({"Fraction"})  # only where called: of 1e999999999
_MODULES = frozenset(
    "sympy ast code codeop subprocess os pickle dill cloudpickle marshal shelve runpy ctypes "
    "multiprocessing numexpr pandas jinja2 builtins".split()
)


def is_harmless(task: str, answer: str) -> bool:
    """Whether the scorer of the task may see this answer."""
    if len(answer) > LONGEST:
        return False
    form = FORMS.get(task)
    return form is None or form(answer)


@functools.lru_cache(maxsize=1024)
def _read_module(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The evaluators in a module's source, and the modules of the same package it imports.

    Raises OSError where there is no source to read.
    """
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(name)
    origin = getattr(loaded, "__file__", None) or (spec and spec.origin)
    if not origin or not origin.endswith(".py"):
        raise OSError(f"the source of {name} can't be read")
    package = name if origin.endswith("__init__.py") else name.rpartition(".")[0]
    found, imported = set(), set()
    for node in ast.walk(ast.parse(pathlib.Path(origin).read_bytes())):
        match node:
            case ast.Name(id=used) if used in _EVALUATORS:
                found.add(used)
            case ast.Attribute(value=owner, attr=used) if used in _EVALUATORS:
                if not (used == "compile" and isinstance(owner, ast.Name) and owner.id == "re"):
                    found.add(used)
            case ast.Call(func=ast.Name(id=used) | ast.Attribute(attr=used)) if used in _COMPUTING:
                found.add(used)
            case ast.Import(names=names):
                imported |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = importlib.util.resolve_name("." * level + (module or ""), package)
                imported |= {base} | {f"{base}.{alias.name}" for alias in names}
    found |= {one.partition(".")[0] for one in imported} & _MODULES
    own = {one for one in imported if one.partition(".")[0] == name.partition(".")[0]}
    return frozenset(found), frozenset(own)


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def evaluators(dataset: type) -> list[str]:
    """What evaluates text in the modules of a task's class and in what they import.

    Only modules of the class's own package count, without the package's lists of its tasks. Raises
    OSError where a source can't be read.
    """
    left = {kind.__module__ for kind in dataset.__mro__} - {"builtins", "abc", "typing"}
    package = dataset.__module__.partition(".")[0]
    left = {name for name in left if name.partition(".")[0] == package}
    seen: set[str] = set()
    found: set[str] = set()
    while left:
        name = left.pop()
        seen.add(name)
        here, imported = _read_module(name)
        found |= here
        left |= {one for one in imported - seen - {package} if _is_module(one)}
    return sorted(found)
