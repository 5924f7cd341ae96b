"""Worker process of the verifier.

`python -m dapo_jax.extras.math.algebra_worker` serves one JSON line per batch of `Question`s.
"""

import time
from collections.abc import Callable

from dapo_jax.extras.math.answer_algebra import WORK
from dapo_jax.extras.math.expression_tree import Budget
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.sympy_stage import closed_form
from dapo_jax.extras.math.verifier import BATCH_SECONDS, LOAD, Question, Settings, make_verifier
from dapo_jax.runtime.workers.child import limit_process, serve

BATCH_CHARACTERS = 50_000  # of answers; JSON takes up to 12 bytes for one, of 1 MiB for a reply


def make_answer() -> Callable[[dict], dict]:
    """Return the function that answers `{"settings", "questions"}` with `{"replies"}`.

    The replies are to the first questions, at least to one of them. A reply has the fields of a
    `VerifierResult` or is the text of an error. `LOAD` imports sympy.
    """
    limit_process()

    def answer(job: dict) -> dict:
        if job == LOAD:
            for text in (r"\int_0^1 x^2 dx", r"\sum_{k=1}^{\infty} k^{-2}"):
                closed_form(parse(text), Budget(WORK))
            return {}
        verifier = make_verifier(Settings(*job["settings"]))
        until, replies, characters = time.monotonic() + BATCH_SECONDS, [], 0
        for fields in job["questions"]:
            try:
                replies.append(verifier(*Question(*fields)))
            except Exception as error:
                replies.append(repr(error)[:200])
            characters += sum(len(part) for part in replies[-1] if isinstance(part, str))
            if time.monotonic() > until or characters > BATCH_CHARACTERS:
                break
        return {"replies": replies}

    return answer


if __name__ == "__main__":
    serve(make_answer)
