"""Tables of the combinations of settings that make sense.

A line of a table is `CONDITIONS -> NEEDS` or `CONDITIONS -> NEEDS: REASON`. If all conditions hold
(there may be none), every need must hold:

    name=a|b    the value is a or b; patterns as in file names; nothing: the empty text
    name!=a|b   the value is another one; if it must not be empty, the reason says what it is
    name>0      the value is above 0
    name~a      the list of names, such as reward.parts, has a
    name!~a     it does not have a
    name        (a need) the setting has its default: nothing reads it
    name.       (a need) the same of all settings of the section

`@TRAIT` stands for every estimator with that trait, `module:function` for a user's function. A
condition on a setting that names a user's function does not hold: it may read any setting.
"""

import fnmatch
import functools
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dapo_jax.config.algorithm import ESTIMATOR_TRAITS
from dapo_jax.config.settings import defaults, rules
from dapo_jax.types.rules import Choices, OwnChoices, is_own

# (dotted name of a setting, True if its value fits the others, what is allowed)
Checks = Iterator[tuple[str, bool, str]]
OWN = "module:function"


def _text(value: Any) -> str:
    """Return a value as tables write it."""
    return value if isinstance(value, str) else str(value).lower().removesuffix(".0")


class _Term(NamedTuple):
    name: str
    sign: str
    values: list[str]

    def holds(self, value: Any) -> bool:
        if self.sign == ">":
            return value > float(*self.values)
        if "~" in self.sign:
            names = {entry.partition("=")[0].strip() for entry in value.split(",")}
            return names.isdisjoint(self.values) == (self.sign == "!~")
        matches = any(fnmatch.fnmatchcase(_text(value), pattern) for pattern in self.values)
        return (matches or OWN in self.values and is_own(value)) == (self.sign == "=")

    def describe(self, value: Any, choices: Any) -> str:
        """Return what is allowed in place of a value, in words."""
        sign, values = self.sign, self.values
        if sign == "!=" and isinstance(choices, Choices):
            sign, values = "=", [choice for choice in choices if self.holds(choice)]
        words = {"": "empty", OWN: f"your {OWN}"}
        shown = [words.get(v, repr(v) if isinstance(value, str) else v) for v in values]
        before = {"=": "", "!=": "not ", ">": "above ", "~": "with ", "!~": "without "}
        return before[sign] + " or ".join(shown)


def _parse_term(text: str, prefix: str) -> _Term:
    name, sign, values = re.split(r"(!=|!~|=|~|>|$)", text, maxsplit=1)
    listed = []
    for value in values.split("|"):
        trait = value.removeprefix("@")
        having = [name for name, traits in ESTIMATOR_TRAITS.items() if trait in traits.split()]
        listed += having if trait != value else [value]
    full_name = name if "." in name else prefix + name
    return _Term(full_name.removesuffix("."), sign, listed)


@functools.cache
def parse_table(table: str, prefix: str) -> list[tuple[list[_Term], list[_Term], str]]:
    """Return (conditions, needs, reason) of each line."""
    rows = []
    for line in filter(None, map(str.strip, table.splitlines())):
        terms, _, reason = line.partition(": ")
        sides = [[_parse_term(text, prefix) for text in s.split()] for s in terms.split("->")]
        rows.append((*sides, reason))
    return rows


def check_table(config: Any, table: str, prefix: str = "") -> Checks:
    """Yield a check for each need of the lines that apply to a config.

    Names without a dot get the prefix.
    """
    read, usual, rule = operator.attrgetter, defaults(type(config)), rules(type(config))
    for conditions, needs, reason in parse_table(table, prefix):
        others = {term.name: read(term.name)(config) for term in conditions}
        own = [isinstance(rule[n].allowed, OwnChoices) and is_own(v) for n, v in others.items()]
        if any(own) or not all(term.holds(others[term.name]) for term in conditions):
            continue
        given = " and ".join(f"{name} = {value!r}" for name, value in others.items())
        given = f" with {given}" if given else ""
        for need in needs:
            if need.sign:
                value = read(need.name)(config)
                if reason and need[1:] == ("!=", [""]):
                    allowed = reason + given
                else:
                    allowed = need.describe(value, rule[need.name].allowed) + given
                    allowed += f": {reason}" if reason else ""
                yield need.name, need.holds(value), allowed
                continue
            for name in usual:
                if f"{name}.".startswith(f"{need.name}.") and name not in others:
                    value = usual[name]
                    allowed = f"{'empty' if value == '' else repr(value)}{given}: nothing reads it"
                    yield name, read(name)(config) == value, allowed
