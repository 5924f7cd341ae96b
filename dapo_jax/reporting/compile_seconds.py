"""Programs that are compiled: their names, and the seconds that each took the last time."""

import contextlib
import json

import jax
from etils import epath

from dapo_jax.runtime import processes

# Our names of programs.
PROGRAMS = {
    "jit(_generate)": "the decode step",
    "jit(_prefill)": "the prefill",
    "jit(_score_fn)": "the score pass",
    "jit(_unstack)": "the copy of the weights for decoding",
    "jit(_update_fn)": "the update",
    "jit(start_responses)": "the start of responses",
}
FILE = "dapo_jax_seconds.json"  # beside jax's compiled programs


class CompileSeconds:
    """Seconds that programs took to compile, of this process and those before it.

    They are an estimate and no more: a file that can't be read or written is done without.

    Args:
        model: the folder; another model's programs of the same name take another time.
    """

    def __init__(self, model: str):
        cache = getattr(jax.config, processes.CACHE_DIR)
        self._path = epath.Path(cache) / FILE if cache else None
        self._model, self._seconds = model, self._read()

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(Exception):  # of the file, or of a bucket's client
            found = json.loads(self._path.read_text()) if self._path else {}
            return {str(name): float(seconds) for name, seconds in found.items()}
        return {}

    def last(self, program: str) -> float | None:
        """Seconds of the last compilation of a program; None: it is the first."""
        return self._seconds.get(f"{self._model} {program}")

    def keep(self, program: str, seconds: float) -> None:
        """Remembers a compilation. Of several processes the first one writes."""
        self._seconds[f"{self._model} {program}"] = round(seconds, 1)
        if not self._path or not processes.is_first():
            return
        with contextlib.suppress(Exception):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A reader beside it sees the old file or the new one.
            unfinished = self._path.with_name(f"{FILE}.unfinished")
            unfinished.write_text(json.dumps(self._read() | self._seconds, indent=1))
            unfinished.replace(self._path)
