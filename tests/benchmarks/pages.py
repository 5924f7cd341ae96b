"""How many responses decode side by side in a given memory: slots of full length, or pages.

    python tests/benchmarks/pages.py --gib=71.6 --page_tokens=128

Lengths follow a long-tailed law (log-normal, cut off at the limit). Each cache serves the same
responses of one replica, in groups, refilled as they end; the book of pages is the sampler's own.
No model runs. Prints a JSON line per cache; the default sizes are Qwen2.5-32B's, cut in 4.
"""

import argparse
import collections
import dataclasses
import json
from typing import Any

import numpy as np

from dapo_jax.sampler.pages import PageBook

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Work:
    """Responses, in order: the prompt's tokens, the response's, and which prompt."""

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    group: np.ndarray


def make_work(args: argparse.Namespace) -> Work:
    """`responses` in groups of `group`; the median and spread are of the lengths before the cut."""
    rng = np.random.default_rng(args.seed)
    drawn = rng.lognormal(np.log(args.median), args.spread, args.responses)
    prompts = rng.lognormal(np.log(args.prompt_median), 0.5, args.responses // args.group)
    return Work(
        np.repeat(np.clip(prompts, 16, args.max_prompt), args.group).astype(int),
        np.clip(drawn, 1, args.max_response).astype(int),
        np.repeat(np.arange(args.responses // args.group), args.group),
    )


def run(work: Work, book: PageBook, slots: int, burst: int) -> dict[str, Any]:
    """Bursts until all are drawn; side by side means over the bursts in which some still waited."""
    waiting = collections.deque(range(len(work.group)))
    running: dict[int, tuple[int, int]] = {}  # slot: response, tokens drawn
    bursts, beside, redrawn, steps = 0, [], 0, 0
    while waiting or running:
        free = [slot for slot in range(slots) if slot not in running] if waiting else []
        for slot in free:
            if not waiting:
                break
            first = waiting[0]
            tokens, group = int(work.prompt_tokens[first]) - 1, int(work.group[first])
            if not book.has_room(slot, tokens, group):
                break
            book.start(slot, tokens, group)
            running[slot] = (waiting.popleft(), 0)
        order = list(running)
        lengths = [work.prompt_tokens[i] - 1 + n + burst for i, n in running.values()]
        for slot in book.make_room(order, lengths):
            response, drawn = running.pop(slot)
            redrawn += drawn
            waiting.appendleft(response)
        bursts += 1
        if waiting:
            beside.append(len(running))
        for slot, (response, drawn) in list(running.items()):
            drawn += burst
            steps += burst
            running[slot] = (response, drawn)
            if drawn >= work.response_tokens[response]:
                book.release(slot)
                del running[slot]
    book.check()
    return {
        "side_by_side_mean": round(float(np.mean(beside)), 1) if beside else 0,
        "side_by_side_most": max(beside, default=0),
        "decode_steps": bursts * burst,
        "redrawn_share": round(redrawn / work.response_tokens.sum(), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=71.6, help="a device has for the cache")
    parser.add_argument("--token_bytes", type=int, default=64 * 2 * 2 * 128 * 2, help="a device")
    parser.add_argument("--page_tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 192, 244, 320])
    parser.add_argument("--burst", type=int, default=64)
    parser.add_argument("--responses", type=int, default=2048, help="of one replica")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--median", type=float, default=2900.0)
    parser.add_argument("--spread", type=float, default=0.9)
    parser.add_argument("--prompt_median", type=float, default=150.0)
    parser.add_argument("--max_prompt", type=int, default=2048)
    parser.add_argument("--max_response", type=int, default=20_480)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work, limit = make_work(args), args.max_prompt + args.max_response
    told = {
        "responses": len(work.group),
        "mean_tokens": round(float(work.response_tokens.mean())),
        "at_the_limit": round(float((work.response_tokens == args.max_response).mean()), 4),
    }
    print(json.dumps(told), flush=True)
    room = int(args.gib * GIB // args.token_bytes)
    whole = room // limit  # a page as long as a slot is a slot
    caches = [("slots", whole, whole, limit)]
    caches += [("paged", n, room // args.page_tokens, args.page_tokens) for n in args.slots]
    for name, slots, pages, size in caches:
        book = PageBook(
            replicas=1, pages=pages + 1, page_tokens=size, slots=slots, slot_tokens=limit
        )
        line = {"cache": name, "slots": slots, "pages": pages}
        print(json.dumps(line | run(work, book, slots, args.burst)), flush=True)


if __name__ == "__main__":
    main()
