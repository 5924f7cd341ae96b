"""Worker process that decides whether two answers are equal."""

from collections.abc import Callable

from dapo_jax.runtime.workers.child import limit_process, serve
from dapo_jax.verifier.proven_algebra import ProvenAlgebra
from dapo_jax.verifier.work_budget import Budget, Undecided


def make_algebra() -> Callable[[dict], dict]:
    """The function that answers `{"question", "prediction", "answer", "work"}`.

    Its reply is `{"same", "work"}`, work being what was spent of it, and `"undecided"` where that
    is why they are not the same.
    """
    limit_process()

    def answer(job: dict) -> dict:
        budget, reply = Budget(job["work"]), dict[str, object](same=False)
        try:
            algebra = ProvenAlgebra(budget)
            reply["same"] = getattr(algebra, job["question"])(job["prediction"], job["answer"])
        except Undecided as error:
            reply["undecided"] = str(error)
        except Exception as error:  # not understood is not equal, whatever the reason
            reply["failure"] = repr(error)[:200]
        return reply | {"work": job["work"] - max(0, budget.left)}

    return answer


if __name__ == "__main__":
    serve(make_algebra)
