"""Work that is counted, so that a verdict never depends on how fast the machine is."""

WORK = 400_000  # units of a verdict; a unit is about a microsecond


class Undecided(ArithmeticError):
    """Neither proven equal nor proven different within what may be spent."""


class Budget:
    """Work that is left. `spend` raises `Undecided` when nothing is."""

    def __init__(self, units: int = WORK):
        self.left = units

    def spend(self, units: float) -> None:
        self.left -= units
        if self.left < 0:
            raise Undecided("too much work")
