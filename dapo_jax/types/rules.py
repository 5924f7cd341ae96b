"""Allowed values of settings, as annotations of their types."""

import dataclasses
from typing import Annotated, Any, Literal

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Choices(tuple[str, ...]):
    """The allowed values of a setting that is one of several words."""

    def __call__(self, value: Any) -> bool:
        return value in self

    def __str__(self) -> str:
        return f"one of {', '.join(self)}"


class OwnChoices(Choices):
    """The allowed words of a setting that also takes a function of the user, or its name."""

    def __call__(self, value: Any) -> bool:
        return value in self or is_own(value)

    def __str__(self) -> str:
        return f"{super().__str__()}, or your module:function"


def is_own(value: Any) -> bool:
    """Return True for the name of a user's function."""
    return isinstance(value, str) and ":" in value


@dataclasses.dataclass(frozen=True)
class Range:
    """The allowed values of a number."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    also: float | None = None  # an additional value outside the range

    def __call__(self, value: float) -> bool:
        return value == self.also or (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            text = f"from {self.at_least} to {self.at_most}"
        else:
            limits = {"above": self.above, "at least": self.at_least}
            limits |= {"below": self.below, "at most": self.at_most}
            text = " and ".join(f"{word} {n}" for word, n in limits.items() if n is not None)
        return text if self.also is None else f"{text}, or {self.also}"


@dataclasses.dataclass(frozen=True)
class Addresses:
    """The allowed values of a setting with the URL of a server, or several; it may be empty."""

    several: bool = False

    def __call__(self, value: Any) -> bool:
        urls = value.split(",") if self.several else [value]
        return value == "" or all(url.strip().startswith(("http://", "https://")) for url in urls)

    def __str__(self) -> str:
        several = "URLs such as http://HOST:8000, comma-separated"
        return several if self.several else "a URL such as http://HOST:8200"


Allowed = Choices | Range | Addresses
# The values of a `Literal` are its choices.
Count = Annotated[int, Range(above=0)]
CountOr0 = Annotated[int, Range(at_least=0)]
AutoCount = Annotated[int, Range(at_least=0, also=-1)]  # -1: the program chooses
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]
Port = Annotated[int, Range(at_least=0, at_most=65_535)]
Positive = Annotated[float, Range(above=0)]
PositiveOr0 = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(above=0.0, at_most=1.0)]
Unit = Annotated[float, Range(at_least=0, at_most=1)]
Below1 = Annotated[float, Range(at_least=0, below=1)]
Temperature = Annotated[float, Range(at_least=0.001, at_most=100.0, also=0)]
Dtype = Literal["float32", "bfloat16"]
Url = Annotated[str, Addresses()]
Urls = Annotated[str, Addresses(several=True)]
