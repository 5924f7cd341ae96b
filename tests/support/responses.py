"""Scored responses of an evaluation."""

from dapo_jax.run.scores import Response


def respond(index, sample, correct, **changes) -> Response:
    fields = {
        "problem": f"p{index}",
        "question": f"question {index}",
        "answer": "1",
        "response": "",
        "extracted": "1" if correct else "2",
        "truncated": False,
        "tokens": 10,
        "logprob": -5.0,
        "reflection": False,
        "repetition": 0.0,
    }
    return Response(index=index, sample=sample, correct=correct, **fields | changes)


def respond_all(table, **changes) -> list[Response]:
    return [
        respond(i, j, bool(right), **changes)
        for i, row in enumerate(table)
        for j, right in enumerate(row)
    ]
