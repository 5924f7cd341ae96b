"""Elementary functions of elements: floors, exponentials, logarithms.

Integer variables may be split by remainders: `NumberField.moduli` names the helpful moduli.
"""

import math

from flint import acb, arb, fmpq

from dapo_jax.verifier.ball_arithmetic import LARGEST_FLOORED, Undefined, whole_part, with_bits
from dapo_jax.verifier.expression_tree import Refused, Undecided
from dapo_jax.verifier.number_field import BITS, NumberField
from dapo_jax.verifier.polynomials import (
    ONE,
    Atom,
    Element,
    Poly,
    as_rational,
    constant,
    monomial,
    powers_of,
    rational,
)
from dapo_jax.verifier.roots import (
    content_of,
    imaginary,
    is_real,
    minus_one_to,
    opaque,
    prime_powers,
    real_root,
    root,
    sign,
)

INTEGERS = "nmkN"  # letters that stand for whole numbers where floors and (-1)^n ask
COMPLEX = "zw"  # letters that need not be real
LARGEST_POWER = 1_000


def symbol(field: NumberField, name: str) -> Element:
    """Return the variable; in a case of remainders, modulus * another + remainder."""
    if name in field.residues:
        modulus, remainder = field.residues[name]
        if modulus == 0:
            return rational(remainder)
        inner = field.atom("symbol", name, constant=False, whole=name)
        return field.add(field.scale(inner, modulus), rational(remainder))
    whole = name if name in INTEGERS else None
    return field.atom("symbol", name, constant=False, real=name[0] not in COMPLEX, whole=whole)


def pi(field: NumberField) -> Element:
    """Return the number pi."""

    def value(bits: int) -> acb:
        with with_bits(bits):
            return acb.pi()

    return field.atom("pi", "", value=value)


def _ask_for_remainders(field: NumberField, names: set[str], modulus: int) -> None:
    for name in names:
        field.moduli[name] = math.lcm(field.moduli.get(name, 1), modulus)


def _integers_in(field: NumberField, powers: dict[int, int]) -> set[str] | None:
    """Return the variables of a term that is a whole number; None if others occur."""
    names = {field.atoms[number].whole for number in powers}
    return None if None in names else names


def floor(field: NumberField, a: Element) -> Element:
    """Return the floor of a real value."""
    if field.is_constant(a):
        return _floor_of_constant(field, a)
    if a.below != ONE:
        return opaque(field, "floor", a)
    whole, rest = constant(0), a.above
    for exponents, coefficient in a.above.terms():
        powers = powers_of(exponents)
        names = _integers_in(field, powers)
        if names is None:
            continue
        if names and coefficient.q != 1:
            _ask_for_remainders(field, names, int(coefficient.q))
            continue
        part = monomial(powers) * fmpq(coefficient.p // coefficient.q)
        whole, rest = whole + part, rest - part
    if as_rational(rest) is None:  # else from 0 to 1
        return field.add(Element(whole, ONE), opaque(field, "floor", Element(rest, ONE)))
    return Element(whole, ONE)


def _floor_of_constant(field: NumberField, a: Element) -> Element:
    if not is_real(field, a):
        raise Undecided("the floor of what may not be real")
    for bits in BITS:
        try:
            with with_bits(bits):
                real = field.value(a, bits).real
                whole = whole_part(acb(real)).unique_fmpz()
                assert whole is not None  # whole_part looked
                return rational(whole)
        except Undefined:
            if not abs(real) < LARGEST_FLOORED:
                raise Undecided("a huge number's floor") from None
            with with_bits(bits):
                near = (real.mid() + arb(0.5)).floor().unique_fmpz()
            if near is not None and field.vanishes(field.subtract(a, rational(near)).above):
                return rational(near)
    raise Undecided("a floor on the edge")


# --- exponentials and logarithms ----------------------------------------------------------------


def exp(field: NumberField, a: Element) -> Element:
    """Return the exponential e^a, as a product over the terms of a."""
    result = rational(1)
    for exponents, coefficient in a.above.terms():
        factor = _exp_of_term(field, powers_of(exponents), coefficient, a.below)
        result = field.multiply(result, factor)
    return result


def _is_imaginary(atom: Atom) -> bool:
    return atom.kind == "root" and atom.degree == 2 and atom.radicand == -ONE


def _exp_of_term(field: NumberField, powers: dict[int, int], c: fmpq, below: Poly) -> Element:
    """Return the exponential of c * (a product of atoms) / below."""
    atoms = {field.atoms[number].kind: number for number, n in powers.items() if n == 1}
    if below == ONE and len(powers) == 1 and "log" in atoms:
        return power_of(field, field.atoms[atoms["log"]].argument, c)
    turns = below == ONE and {"root", "pi"} <= set(atoms)
    if turns and _is_imaginary(field.atoms[atoms["root"]]):
        others = {n: k for n, k in powers.items() if n not in (atoms["root"], atoms["pi"])}
        if not others:
            return field.power(minus_one_to(field, int(c.q)), int(c.p) % (2 * int(c.q)))
        names = _integers_in(field, others)
        if names is not None:
            if c.q == 1 and c.p % 2 == 0:
                return rational(1)
            _ask_for_remainders(field, names, 2 * int(c.q))
    return _power_of_exp(field, powers, c, below)


def _power_of_exp(field: NumberField, powers: dict[int, int], c: fmpq, below: Poly) -> Element:
    """Return the power of one atom, exp(product / (below * step))."""
    key = f"{sorted(powers.items())} {below}"
    number, step = field.exponentials.get(key, (None, 1))
    if number is None or step % int(c.q):
        older = {}
        if number is not None:
            older["degree"] = math.lcm(step, int(c.q)) // step
            older["radicand"] = field.atoms[number].generator
        step = math.lcm(step, int(c.q))
        argument = Element(monomial(powers) / step, below)
        exponential = field.atom("exp", f"{key} {step}", **_exp_fields(field, argument), **older)
        ((number, _),) = field.atoms_in(exponential.above)
        field.exponentials[key] = number, step
    power = c * step
    if abs(power) > LARGEST_POWER:
        raise Undecided("a high power of an exponential")
    return field.power(Element(field.atoms[number].generator, ONE), int(power))


def _exp_fields(field: NumberField, argument: Element) -> dict:
    above, below = ([atom for _, atom in field.atoms_in(poly)] for poly in argument)
    # The argument is one product over `below`: with i in the one and real atoms beside, i times
    # a real number, whose exponential lies on the unit circle.
    turns = [_is_imaginary(atom) for atom in above]
    rest = [atom for atom, turn in zip(above, turns, strict=True) if not turn]
    on_circle = any(turns) and all(atom.real for atom in (*rest, *below))

    def value(bits: int) -> acb:
        with with_bits(bits):
            return field.value(argument, bits).exp()

    return {
        "argument": argument,
        "constant": field.is_constant(argument),
        "real": all(atom.real for atom in (*above, *below)),
        "value": value,
        "inverse_is_conjugate": on_circle,
    }


def power_of(field: NumberField, base: Element, q: fmpq) -> Element:
    """Return the principal power base ** q."""
    if abs(q.p) > LARGEST_POWER or q.q > LARGEST_POWER:
        raise Undecided("a high power")
    if q.q == 1:
        return field.power(base, int(q.p))
    logarithm, rest = _without_exponentials(field, base)
    turned = field.power(root(field, rest, int(q.q)), int(q.p))
    return field.multiply(exp(field, field.scale(logarithm, q)), turned)


def odd_root(field: NumberField, a: Element, degree: int) -> Element:
    """Return the real root of odd degree of a real number; else the principal root."""
    logarithm, rest = _without_exponentials(field, a)
    growth = exp(field, field.scale(logarithm, fmpq(1, degree)))
    return field.multiply(growth, real_root(field, rest, degree))


def _without_exponentials(field: NumberField, a: Element) -> tuple[Element, Element]:
    """Return (b, c) with a = e^b c; e^b is the common real power of e of all terms."""
    logarithm, rest = rational(0), list(a)
    for i, way in enumerate((1, -1)):
        for number, atom in field.atoms_in(a[i]):
            if atom.kind != "exp" or not atom.real:
                continue
            field.budget.spend(len(a[i]))
            powers = [powers_of(exponents).get(number, 0) for exponents in a[i].monoms()]
            shared = min(powers, default=0)
            if shared:
                assert atom.argument is not None  # of an exponential
                logarithm = field.add(logarithm, field.scale(atom.argument, way * shared))
                rest[i] = rest[i] / atom.generator**shared
    return logarithm, Element(*rest)


def power(field: NumberField, base: Element, exponent: Element) -> Element:
    """Return the principal power base ** exponent = exp(exponent * log base)."""
    q = as_rational(exponent.above) if exponent.below == ONE else None
    if q is not None:
        return power_of(field, base, q)
    if _is_whole(field, exponent):
        return exp(field, field.multiply(exponent, _sum_of_logs(field, base)))
    return exp(field, field.multiply(exponent, log(field, base)))


def _is_whole(field: NumberField, a: Element) -> bool:
    """Prove that a value is whole for all whole values of its letters."""
    terms = [(powers_of(exponents), c) for exponents, c in a.above.terms()]
    whole = (c.q == 1 and _integers_in(field, powers) is not None for powers, c in terms)
    return a.below == ONE and all(whole)


def _sum_of_logs(field: NumberField, a: Element) -> Element:
    """Return the sum of the logarithms of the factors of a.

    It is one of the values of log a, so that n times it gives the n-th power for a whole n.
    """
    total = rational(0)
    for poly, way in ((a.above, 1), (a.below, -1)):
        field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
        unit, factors = poly.factor()
        parts = [(constant(unit), 1), *factors] if unit != 1 else factors
        for factor, power in parts:
            logarithm = log(field, Element(factor, ONE))
            total = field.add(total, field.scale(logarithm, way * power))
    return total


def log(field: NumberField, a: Element) -> Element:
    """Return the principal logarithm."""
    exponent, a = _without_exponentials(field, a)
    return field.add(exponent, _log_of_rest(field, a))


def _log_of_rest(field: NumberField, a: Element) -> Element:
    number = as_rational(a.above) if a.below == ONE else None
    if number is None:
        return _log_of_constant(field, a) if field.is_constant(a) else _log_of_variable(field, a)
    if number == 0:
        raise Refused("the logarithm of 0")
    result = rational(0)
    for prime, n in prime_powers(field, abs(number)):
        logarithm = _log_atom(field, rational(prime), real=True)
        result = field.add(result, field.scale(logarithm, n))
    return result if number > 0 else field.add(result, _half_turn(field))


def _half_turn(field: NumberField) -> Element:
    return field.multiply(imaginary(field), pi(field))


def _log_of_variable(field: NumberField, a: Element) -> Element:
    logarithm = _log_of_monomial(field, a) if len(a.above) == 1 and a.below == ONE else None
    if logarithm is not None:
        return logarithm
    content = content_of(a.above) / content_of(a.below)
    rest = _log_atom(field, field.scale(a, 1 / content), real=False)
    return rest if content == 1 else field.add(rest, log(field, rational(content)))


def _log_of_constant(field: NumberField, a: Element) -> Element:
    logarithm = _log_of_monomial(field, a) if len(a.above) == 1 and a.below == ONE else None
    if logarithm is not None:
        return logarithm
    if not is_real(field, a):
        return _log_atom(field, a, real=False)
    direction = sign(field, a)
    if direction == 0:
        raise Refused("the logarithm of 0")
    if direction < 0:
        return field.add(log(field, field.scale(a, -1)), _half_turn(field))
    return _log_atom(field, a, real=True)


def _log_of_monomial(field: NumberField, a: Element) -> Element | None:
    """Return the log of a number times roots of positive numbers and of -1, or of one root.

    None for another product.
    """
    ((exponents, coefficient),) = a.above.terms()
    total, turn = log(field, rational(abs(coefficient))), fmpq(int(coefficient < 0))
    powers = powers_of(exponents)
    for number, n in powers.items():
        atom = field.atoms[number]
        base = as_rational(atom.radicand) if atom.kind == "root" else None
        alone = len(powers) == 1 and coefficient > 0 and atom.kind == "root"
        if base == -1:
            turn += fmpq(n, atom.degree)
        elif alone and not atom.odd or base is not None and base > 0:
            logarithm = log(field, Element(atom.radicand, ONE))
            total = field.add(total, field.scale(logarithm, fmpq(n, atom.degree)))
        else:
            return None
    turn -= 2 * (turn / 2).floor()
    turn -= 2 * int(turn > 1)  # from -1, left out, to 1
    return field.add(total, field.scale(_half_turn(field), turn)) if turn else total


def _log_atom(field: NumberField, a: Element, *, real: bool) -> Element:
    def value(bits: int) -> acb:
        with with_bits(bits):
            return field.value(a, bits).log()

    constant = field.is_constant(a)
    return field.atom("log", str(a), argument=a, constant=constant, real=real, value=value)
