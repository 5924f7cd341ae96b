"""Problems that are made on demand."""

import dataclasses
from collections.abc import Callable

from dapo_jax.types.structs import Problem


@dataclasses.dataclass(frozen=True)
class Generated:
    """Random-access problems that are made on demand."""

    length: int
    make: Callable[[int], Problem]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(int(index))
