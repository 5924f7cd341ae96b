"""Bounded recursive-descent parser: LaTeX-like text to a `Tree`. Runs in a worker process.

The parser consumes the whole text and refuses large expressions. No string is evaluated. Refused
text is compared as text.
"""

import itertools
import math
import re
from collections.abc import Callable

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Refused, Tree

DEEPEST, MAX_DIGITS, LARGEST_ROOT = 40, 400, 100
MAX_TOKENS, LONGEST_PRODUCT = 400, 4  # letters of a product that nothing parts
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|(\\[A-Za-z]+)|([A-Za-z]+)|(\\.|.))", re.S
)
DEGREE = "°"
_DEGREE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))")
# Combinations and permutations: `nC2` with its indices in any way, C_n^2, C(n, 2).
_INDEX = r" ?\{{?(?P<{}>(?<=\{{)\w+|\w)\}}? ?"
_N, _K = _INDEX.format("n"), _INDEX.format("k")
_CHOICES = [
    re.compile(pattern)
    for pattern in (
        rf"(?:\{{ ?\}} ?)?[_^]{_N}(?P<of>[CP]) ?_{_K}",
        r"(?<![A-Za-z\d_^{}\\])(?P<n>\d{1,3}|[nmN])(?P<of>[CP])(?P<k>\d{1,3})(?!\d)",
        rf"(?<![A-Za-z\\])(?P<of>C) ?_{_N}\^{_K}",
        rf"(?<![A-Za-z\\])(?P<of>C) ?\^{_K}_{_N}",
        r"(?<![A-Za-z\\])(?P<of>[CP]) ?\( ?(?P<n>[nmN]|(?<=C\()\d{1,3}) ?, ?(?P<k>\w{1,3}) ?\)",
    )
]
GREEK = set(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell hbar".split()
)
INVERTED = "sin cos tan cot sec csc sinh cosh tanh".split()
FUNCTIONS = (
    {name: name for name in (*INVERTED, "exp", "log", "abs", "sqrt", "lg", "cis")}
    | {f"{arc}{name}": f"a{name}" for name in INVERTED for arc in ("a", "ar", "arc")}
    | {"ln": "log"}
)
_COMMANDS = set(FUNCTIONS) | {"pi", "infinity", "inf"}
_FUNCTION_NAMES = {"f", "F", "Gamma", "zeta", "phi", "psi"}  # before any bracket
_CONSTANTS = {"pi": trees.PI, **dict.fromkeys(("infty", "infinity", "inf"), trees.INFINITY)}
_BARS = {"|": "|", r"\|": r"\|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_OF_BARS = {r"\lfloor": "floor", r"\lceil": "ceiling"}
_TIMES = {"*", r"\times", r"\cdot"}
_BOUND = {"sum": "total", "prod": "times", "int": "integral"}  # bind a variable
_OF_SEVERAL = {"max", "min", "gcd"}
_FACTORS = {*FUNCTIONS, *GREEK, *_CONSTANTS, *_BOUND, *_OF_SEVERAL, "frac", "binom", "mathbf"}
_DIFFERENTIALS = {"d", r"\delta", r"\Delta"}
_DIVIDE = {"/", r"\div"}
_DIGITS_OVER_DIGITS = re.compile(r"\\frac(?:\{\d+\}|\d){2}")


def _chosen(match: re.Match) -> str:
    n, k = match["n"], match["k"]
    return rf"\binom{{{n}}}{{{k}}}" if match["of"] == "C" else rf"\frac{{{n}!}}{{({n}-{k})!}}"


def tokens_of(text: str) -> list[str]:
    """Return at most `MAX_TOKENS`. Raises `Refused` for words that are no function's."""
    tokens, text = [], _DEGREE.sub(DEGREE, text.rstrip())
    for pattern in _CHOICES if "C" in text or "P" in text else ():
        text = pattern.sub(_chosen, text)
    for match in _TOKEN.finditer(text):
        number, command, word, other = match.groups()
        if word and word.lower() in _COMMANDS:
            tokens.append("\\" + word.lower())
        elif word and len(word) > LONGEST_PRODUCT:
            raise Refused(f"a word: {word}")
        else:
            tokens.extend(word or [number or command or other])
        if len(tokens) > MAX_TOKENS:
            raise Refused("too long")
    return tokens


class _Parser:
    def __init__(self, text: str, factors: set[str] | None, folds: bool):
        self._tokens, self._at, self._depth, self._folds = tokens_of(text), 0, 0, folds
        self._factors = factors
        pairs = zip(self._tokens, self._tokens[1:], self._tokens[3:], strict=False)
        applied = {letter.lstrip("\\") for letter, *ends in pairs if ends == ["(", ")"]}
        self._functions = _FUNCTION_NAMES | applied
        self._bars: list[str] = []
        self._ends_in_digits = False  # the factor that was read last

    def whole(self) -> Tree:
        value = self._fraction()
        if self._at != len(self._tokens):
            raise Refused(f"unexpected {self._peek()}")
        applied = {node.value for node in trees.nodes(value) if node.kind == "function"}
        if applied & trees.symbols(value):
            raise Refused("a letter that is a function and a factor")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *allowed: str) -> str:
        token = self._peek()
        if not token or allowed and token not in allowed:
            raise Refused(f"unexpected {token or 'end'}")
        self._at += 1
        return token

    def _accept(self, *tokens: str) -> bool:
        is_next = self._peek() != "" and self._peek() in tokens
        self._at += is_next
        return is_next

    def _signed(self, read: Callable[[], Tree], most: int = 1) -> Tree:
        """Read what has signs before it: a + -b is written, a - - - b is not."""
        is_negative = False
        for _ in range(most):
            is_negative ^= self._accept("-") or self._accept("+") and False
        return trees.negate(read()) if is_negative else read()

    def _sum(self) -> Tree:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Refused("too deep")
        terms = [self._signed(self._product)]
        while self._peek() in ("+", "-"):
            terms.append(self._signed(self._product, 2))
        self._depth -= 1
        return trees.add(terms)

    def _product(self) -> Tree:
        start, value = self._at, self._power()
        while True:
            if self._accept(*_TIMES):
                value = trees.multiply(value, self._signed(self._power))
            elif self._accept(*_DIVIDE):
                self._refuse_derivative(start)
                value = trees.divide(value, self._signed(self._power))
            elif self._accept(r"\bmod"):
                value = Tree("remainder", (value, self._power()))
            elif self._starts_factor():
                value = trees.multiply(value, self._next_factor())
            else:
                return value

    def _next_factor(self) -> Tree:
        """Return the factor without a sign before it; `2 3` is two values, not a product."""
        ahead = itertools.takewhile(lambda token: token != "}", self._tokens[self._at :])
        begin = [token for token in ahead if token != "{"]
        is_number = any(map(_is_digits, begin[:1])) and r"\choose" not in begin
        if is_number and (self._ends_in_digits or begin[0] == "1"):
            raise Refused("two numbers side by side, or a one behind a factor")
        return self._power()

    def _refuse_derivative(self, start: int) -> None:
        """Raise `Refused` for dy/dx: not both may have a d, below before a letter."""
        below = [t for t in self._tokens[self._at : self._at + 4] if t not in "({"]
        if below[1:] and below[0] in _DIFFERENTIALS and below[1].lstrip("\\").isalpha():
            if below[0] in self._tokens[start : self._at]:
                raise Refused("a derivative")

    def _starts_factor(self) -> bool:
        token = self._peek()
        if self._bars and token == self._bars[-1]:
            return False
        named = token[:1] == "\\" and token[1:] in _FACTORS
        plain = token.isalnum() or _is_digits(token)
        return bool(token) and (token in "({[" or token in _BARS or named or plain)

    def _power(self) -> Tree:
        start = self._at
        base = self._applied(self._mixed_or_atom(), start)
        last = [token for token in self._tokens[start : self._at] if token != "}"][-1]
        of_digits = self._tokens[start] == "{" and last.isdigit() or _is_digits(self._tokens[start])
        while self._peek() and self._peek() in "^!%'" + DEGREE:
            mark = self._take()
            if mark == "!":
                if self._peek() == "!":
                    raise Refused("a double factorial")
                base, of_digits = trees.factorial(base), False
            elif mark == "%":
                base = trees.divide(base, trees.number(100))
            elif mark == DEGREE:
                base = trees.multiply(base, trees.divide(trees.PI, trees.number(180)))
            elif mark == "'":
                if base.kind != "symbol":
                    raise Refused("a prime")
                base = self._applied(Tree("symbol", value=f"{base.value}'"), start)
            else:
                letter, of_digits = base, False
                base = trees.real_power(base, self._signed(self._atom))
                if self._peek() == "^":
                    raise Refused("two exponents of one base")
                if self._applied(letter, start) != letter:
                    raise Refused("a power of a function")
        self._ends_in_digits = of_digits
        return base

    def _applied(self, letter: Tree, start: int) -> Tree:
        """Read a function of the bracket that follows, or the letter if they are factors.

        A bracket around a sum is a factor, where the other side has the letter as a variable.
        """
        ahead = self._tokens[self._at : self._at + 2]
        opened = ahead[:1] in (["("], ["["]) or ahead in (["{", "("], ["{", "["])
        if letter.kind != "symbol" or not opened or self._tokens[start] in ("(", "["):
            return letter
        name = letter.value.partition("_")[0].rstrip("'")
        if name in self._functions or not self._opens_a_sum():
            return Tree("function", (self._atom(),), letter.value)
        if self._factors is not None and letter.value not in self._factors:
            raise Refused("a factor or a function")
        return letter

    def _opens_a_sum(self) -> bool:
        """Test for a sum in the bracket ahead, at any depth; a sign at its start makes none."""
        depth, before = 0, "("
        for token in self._tokens[self._at :]:
            depth += (token in "([{") - (token in ")]}")
            if depth == 0:
                break
            if token in ("+", "-") and before not in _TIMES | _DIVIDE | set("([{^"):
                return True
            before = token
        return False

    def _mixed_or_atom(self) -> Tree:
        value, last = self._atom(), self._tokens[self._at - 1]
        ahead = "".join(self._tokens[self._at : self._at + 7])
        is_whole = last.isdigit() and value.kind in ("number", "numeral")
        if not (is_whole and _DIGITS_OVER_DIGITS.match(ahead)):
            return value
        fraction = self._atom()
        return trees.add([value, fraction]) if self._folds else _mixed(value, fraction)

    def _argument(self) -> Tree:
        """Return the argument of a command: a group, or one digit or letter."""
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = list(token)
        return self._atom()

    def _group(self, end: str) -> Tree:
        outer, self._bars = self._bars, []
        value = self._fraction() if end == "}" else self._sum()
        self._take(end)
        self._bars = outer
        return value

    def _fraction(self) -> Tree:
        """Return the content of braces: a sum, or one over another."""
        value = self._sum()
        if self._accept(r"\choose"):
            return trees.binomial(value, self._sum())
        return trees.divide(value, self._sum()) if self._accept(r"\over") else value

    def _atom(self) -> Tree:
        token = self._take()
        if _is_digits(token):
            if len(token) > MAX_DIGITS:
                raise Refused("a long number")
            whole, _, behind = token.replace(",", "").partition(".")  # 1,234.5 or .5
            literal = trees.number(fmpq(int(whole + behind), 10 ** len(behind)))
            return literal if self._folds else literal._replace(kind="numeral")
        if token in ("(", "{", "["):
            return self._group(")}]"["({[".index(token)])
        if token in _BARS:
            self._bars.append(_BARS[token])
            inside = self._sum()
            self._take(self._bars.pop())
            return Tree(_OF_BARS.get(token, "abs"), (inside,))
        if token.startswith("\\"):
            return self._command(token[1:])
        if token.isalpha() and token.isascii():
            return self._letter(token)
        raise Refused(f"unexpected {token}")

    def _letter(self, name: str) -> Tree:
        if self._accept("_"):
            return Tree("symbol", value=f"{name}_{self._subscript()}")
        return {"e": trees.EULER, "i": trees.IMAGINARY}.get(name, Tree("symbol", value=name))

    def _subscript(self) -> str:
        if not self._accept("{"):
            return self._take()
        inside = []
        while not self._accept("}"):
            inside.append(self._take())
        return "".join(inside)

    def _command(self, name: str) -> Tree:
        if name in ("frac", "binom"):
            start, above = self._at, self._argument()
            self._refuse_derivative(start)
            join = trees.divide if name == "frac" else trees.binomial
            return join(above, self._argument())
        if name == "sqrt":
            order = self._group("]") if self._accept("[") else trees.number(2)
            inside = self._argument()
            if order.kind == "number" and order.whole not in range(2, LARGEST_ROOT + 1):
                raise Refused("a root")
            if order.whole and order.whole % 2:
                return trees.odd_root(inside, order.whole)
            return trees.power(inside, trees.divide(trees.number(1), order))
        if name == "mathbf":
            return Tree("symbol", value=f"bold_{self._subscript()}")
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return self._letter(name)
        if name in _OF_SEVERAL:
            return Tree(name, tuple(self._members()))
        if name == "int":
            return self._integral()
        if name in _BOUND:
            return self._over_a_range(name)
        raise Refused(f"unknown \\{name}")

    def _members(self) -> list[Tree]:
        end = {"(": ")", r"\{": r"\}"}[self._take("(", r"\{")]
        members = [self._sum()]
        while self._accept(","):
            members.append(self._sum())
        self._take(end)
        return members

    def _over_a_range(self, name: str) -> Tree:
        """Read a sum or a product; its body ends at the next sign."""
        self._take("_")
        self._take("{")
        letter = self._variable(self._take())
        self._take("=")
        low = self._sum()
        self._take("}")
        self._take("^")
        return trees.bind(_BOUND[name], letter, [low, self._argument()], self._product())

    def _integral(self) -> Tree:
        ends = []
        if self._accept("_"):
            ends.append(self._signed(self._atom))
            self._take("^")
            ends.append(self._signed(self._atom))
        depth, at = 0, self._at
        while depth or self._tokens[at : at + 1] != ["d"]:
            if at >= len(self._tokens) or depth < 0:
                raise Refused("an integral without its variable")
            depth += (self._tokens[at] in "({[") - (self._tokens[at] in ")}]")
            at += 1
        letter = self._variable("".join(self._tokens[at + 1 : at + 2]))
        self._tokens[at : at + 2] = [r"\differential"]
        body = self._sum()
        self._take(r"\differential")
        return trees.bind("integral", letter, ends, body)

    def _variable(self, token: str) -> Tree:
        """Return the variable of a sum or integral: a factor before a bracket."""
        letter = self._letter(token.lstrip("\\"))
        if self._factors is not None and letter.kind == "symbol":
            self._factors = self._factors | {letter.value}
        return letter

    def _function(self, name: str) -> Tree:
        function, exponent, base = FUNCTIONS[name], None, None
        if function == "log" and self._accept("_"):
            base = self._argument()
            if base.whole in (0, 1):
                raise Refused("a logarithm's base")
        if self._accept("^"):
            exponent = self._signed(self._atom)
            if exponent.whole == -1:
                if function not in INVERTED:
                    raise Refused("an inverse or a power")
                function, exponent = f"a{function}", None
        if function == "lg":
            function, base = "log", trees.number(10)
        argument = self._function_argument()
        if function == "sqrt":
            value = trees.power(argument, trees.number(fmpq(1, 2)))
        elif function == "cis":
            value = trees.power(trees.EULER, trees.multiply(trees.IMAGINARY, argument))
        else:
            value = Tree(function, (argument,))
            value = value if base is None else trees.divide(value, Tree("log", (base,)))
        return value if exponent is None else trees.power(value, exponent)

    def _function_argument(self) -> Tree:
        """Return a group, or the factors up to the next sign or function: sin 2x is sin(2x)."""
        if self._peek() in ("(", "["):
            return self._power() if self._peek() == "[" else self._atom()
        is_negative = self._accept("-")
        value = self._power()
        while self._starts_factor() and self._peek()[1:] not in FUNCTIONS and self._peek() != "(":
            value = trees.multiply(value, self._next_factor())
        return trees.negate(value) if is_negative else value


def _mixed(whole: Tree, part: Tree) -> Tree:
    """Return a mixed number as one numeral, if its fraction is in lowest terms and below 1."""
    above, below = (term.whole or 0 for term in part.parts)
    if above >= below or math.gcd(above, below) > 1:
        return Tree("mixed", (whole, part))
    return Tree("numeral", value=whole.value + fmpq(above, below))


def _is_digits(token: str) -> bool:
    return token.lstrip(".")[:1].isdigit()


def parse(text: str, factors: set[str] | None = None, *, folds: bool = True) -> Tree:
    """Return the expression tree of a text. Raises `Refused`.

    Args:
        factors: letters that may stand as factors before a bracket; None for all.
        folds: arithmetic of numbers is done; else the tree shows what is written, its numbers of
            kind 'numeral', and nothing large is ever computed.
    """
    try:
        return _Parser(text, factors, folds).whole()
    except RecursionError:
        raise Refused("too deep") from None
