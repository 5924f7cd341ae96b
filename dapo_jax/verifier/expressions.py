"""Bounded recursive-descent parser: LaTeX-like text to a `Tree`. Runs in a worker process.

The parser consumes the whole text and refuses large expressions. No string is evaluated. Refused
text is compared as text.
"""

import re

from flint import fmpq

from dapo_jax.verifier.expression_tree import (
    EULER,
    IMAGINARY,
    INFINITY,
    PI,
    Refused,
    Tree,
    add,
    binomial,
    call,
    divide,
    factorial,
    multiply,
    negate,
    number,
    odd_root,
    power,
    symbol,
    symbols,
)
from dapo_jax.verifier.tokens import FUNCTIONS, GREEK, tokens_of

DEEPEST, MOST_DIGITS, LARGEST_ROOT = 40, 400, 100


_FUNCTION_LETTERS = set("ghpqGHIJKLNPQRSTV")  # before one letter or number in brackets
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_CONSTANTS = {"pi": PI, "infty": INFINITY, "infinity": INFINITY, "inf": INFINITY}
_BARS = {"|": "|", r"\|": r"\|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_TIMES = {"*", r"\times", r"\cdot"}
_DIVIDE = {"/", r"\div"}


def _rational(literal: str) -> Tree:
    """A number as written, `1,234.5` or `.5`."""
    whole, _, behind = literal.replace(",", "").partition(".")
    return number(fmpq(int(whole + behind), 10 ** len(behind)))


class _Parser:
    def __init__(self, text: str):
        self._tokens, self._at, self._depth = tokens_of(text), 0, 0
        self._bars: list[str] = []
        self._read_ahead: tuple[int, int, Tree] | None = None  # from, to, and what is there

    def whole(self) -> Tree:
        value = self._sum()
        if self._at != len(self._tokens):
            raise Refused(f"unexpected {self._peek()}")
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
        if self._peek() and self._peek() in tokens:
            self._at += 1
            return True
        return False

    def _sum(self) -> Tree:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Refused("too deep")
        terms = [self._signed_term()]
        while self._peek() in ("+", "-"):
            terms.append(self._signed_term())
        self._depth -= 1
        return add(terms)

    def _signed_term(self) -> Tree:
        negative = False
        for _ in range(2):  # a + -b is written, a - - - b is not
            if self._peek() in ("+", "-"):
                negative ^= self._take() == "-"
        value = self._product()
        return negate(value) if negative else value

    def _product(self) -> Tree:
        value = self._power()
        while True:
            if self._accept(*_TIMES):
                value = multiply(value, self._signed_power())
            elif self._accept(*_DIVIDE):
                value = divide(value, self._signed_power())
            elif self._starts_factor():
                self._refuse_two_numbers()
                value = multiply(value, self._power())
            else:
                return value

    def _refuse_two_numbers(self) -> None:
        """`2 3` is two values, not a product."""
        before, here = self._tokens[self._at - 1], self._peek()
        if here == "{" and self._at + 1 < len(self._tokens):
            here = self._tokens[self._at + 1]
        if re.match(r"\.?\d", here) and re.search(r"[\d}]$", before):
            raise Refused("two numbers side by side")

    def _signed_power(self) -> Tree:
        if self._peek() in ("+", "-"):
            return negate(self._power()) if self._take() == "-" else self._power()
        return self._power()

    def _starts_factor(self) -> bool:
        token = self._peek()
        if self._bars and token == self._bars[-1]:
            return False
        name = token[1:]
        known = name in FUNCTIONS or name in GREEK or name in _CONSTANTS
        named = token[:1] == "\\" and (known or name in ("frac", "binom", "mathbf"))
        plain = token.isalnum() or token[:1] == "." and len(token) > 1 or token[:1].isdigit()
        return bool(token) and (token in "({[" or token in _BARS or named or plain)

    def _power(self) -> Tree:
        base = self._mixed_or_atom()
        while self._peek() and self._peek() in "^!%'":
            mark = self._take()
            if mark == "!":
                if self._peek() == "!":
                    raise Refused("a double factorial")
                base = factorial(base)
            elif mark == "%":
                base = divide(base, number(100))
            elif mark == "'":
                base = symbol(f"{base.value}'") if base.kind == "symbol" else self._refuse()
            elif self._is_degree():
                base = multiply(base, divide(PI, number(180)))
            else:
                base = power(base, self._exponent())
                if self._peek() == "^" and not self._is_degree_next():
                    raise Refused("two exponents of one base")
        return base

    def _refuse(self):
        raise Refused("a prime")

    def _is_degree_next(self) -> bool:
        here = self._at
        self._at += 1
        is_degree, self._at = self._is_degree(), here
        return is_degree

    def _is_degree(self) -> bool:
        for written in (["\\circ"], ["{", "\\circ", "}"]):
            if self._tokens[self._at : self._at + len(written)] == written:
                self._at += len(written)
                return True
        return False

    def _exponent(self) -> Tree:
        if self._peek() in ("+", "-"):
            return negate(self._atom()) if self._take() == "-" else self._atom()
        return self._atom()

    def _mixed_or_atom(self) -> Tree:
        start, value = self._at, self._atom()
        mixed = re.fullmatch(r"\d+", self._tokens[start]) and self._at == start + 1
        if mixed and self._peek() == r"\frac":
            here = self._at
            part = self._atom()
            written = "".join(self._tokens[here + 1 : self._at])
            if part.kind == "number" and re.fullmatch(r"[\d{}]+", written):
                return add([value, part])
            # A factor then. It is not read again: nested, that would take exponential time.
            self._read_ahead = here, self._at, part
            self._at = here
        return value

    def _argument(self) -> Tree:
        """Argument of a command: a group, or one digit or letter."""
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = list(token)
        return self._atom()

    def _group(self, end: str) -> Tree:
        outer, self._bars = self._bars, []
        value = self._sum()
        if end == "}" and self._accept(r"\choose"):
            value = binomial(value, self._sum())
        self._take(end)
        self._bars = outer
        return value

    def _atom(self) -> Tree:
        if self._read_ahead is not None and self._read_ahead[0] == self._at:
            _, self._at, part = self._read_ahead
            return part
        token = self._take()
        if token[0].isdigit() or token[0] == "." and len(token) > 1:
            if len(token) > MOST_DIGITS:
                raise Refused("a long number")
            return _rational(token)
        if token in ("(", "{", "["):
            return self._group({"(": ")", "{": "}", "[": "]"}[token])
        if token in _BARS:
            return self._bars_of(token)
        if token.startswith("\\"):
            return self._command(token[1:])
        if token.isalpha() and token.isascii():
            return self._letter(token)
        raise Refused(f"unexpected {token}")

    def _bars_of(self, token: str) -> Tree:
        end = _BARS[token]
        self._bars.append(end)
        value = self._sum()
        self._bars.pop()
        self._take(end)
        return call({r"\lfloor": "floor", r"\lceil": "ceiling"}.get(token, "abs"), value)

    def _letter(self, name: str) -> Tree:
        if self._accept("_"):
            return symbol(f"{name}_{self._subscript()}")
        single = self._tokens[self._at + 2 : self._at + 3] == [")"]
        if self._peek() == "(" and (name in "fF" or name in _FUNCTION_LETTERS and single):
            return symbol(f"{name}({self._bracketed()})")  # f(x), whatever f may be
        return {"e": EULER, "i": IMAGINARY}.get(name) or symbol(name)

    def _subscript(self) -> str:
        if not self._accept("{"):
            return self._take()
        inside = []
        while self._peek() != "}":
            inside.append(self._take())
        self._take("}")
        return "".join(inside)

    def _command(self, name: str) -> Tree:
        if name == "frac":
            above = self._argument()
            return divide(above, self._argument())
        if name == "binom":
            above = self._argument()
            return binomial(above, self._argument())
        if name == "sqrt":
            order = self._group("]").whole if self._accept("[") else 2
            inside = self._argument()
            if order is None or not 2 <= order <= LARGEST_ROOT:
                raise Refused("a root")
            if order % 2 and inside.kind != "number" and not symbols(inside):
                return odd_root(inside, order)
            if inside.kind == "number" and inside.rational < 0 and order % 2:
                return negate(power(negate(inside), number(fmpq(1, order))))
            return power(inside, number(fmpq(1, order)))
        if name == "mathbf":
            return symbol(f"bold_{self._subscript()}")
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return self._letter(name)
        raise Refused(f"unknown \\{name}")

    def _function(self, name: str) -> Tree:
        function, exponent, base = FUNCTIONS[name], None, None
        if function == "log" and self._accept("_"):
            base = self._argument()
            if base.whole in (0, 1):
                raise Refused("a logarithm's base")
        if self._accept("^"):
            exponent = self._exponent()
            if exponent.whole == -1 and name in _INVERSES:
                function, exponent = FUNCTIONS[_INVERSES[name]], None
        value = self._value_of(function, self._function_argument(), base)
        return value if exponent is None else power(value, exponent)

    @staticmethod
    def _value_of(function: str, argument: Tree, base: Tree | None) -> Tree:
        if function == "sqrt":
            return power(argument, number(fmpq(1, 2)))
        if function == "lg":
            function, base = "log", number(10)
        value = call(function, argument)
        return value if base is None else divide(value, call("log", base))

    def _function_argument(self) -> Tree:
        """A group, or the factors up to the next sign or function: sin 2x is sin(2x)."""
        if self._peek() in ("(", "["):
            return self._power() if self._peek() == "[" else self._bracketed()
        negative = self._accept("-")
        value = self._power()
        while self._starts_factor() and self._peek()[1:] not in FUNCTIONS and self._peek() != "(":
            value = multiply(value, self._power())
        return negate(value) if negative else value

    def _bracketed(self) -> Tree:
        self._take("(")
        return self._group(")")


def parse(text: str) -> Tree:
    """Expression tree of a text. Raises `Refused`."""
    try:
        return _Parser(text).whole()
    except RecursionError:
        raise Refused("too deep") from None
