"""Samplers without engine and caches: a full forward pass for every token, or a script."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.model.decoder import Decoder
from dapo_jax.rollout.sampling import sample_keys, sample_tokens
from dapo_jax.types.structs import (
    Completion,
    PartialGroup,
    Request,
    RolloutKey,
    SamplerCounts,
    SamplingRule,
    Stop,
)

WIDTH = 48  # tokens of prompt and response


class ToySampler:
    """A `contracts.Sampler` that extends the first `rows` responses by a token per burst."""

    environments = key = None

    def __init__(self, config, end_ids: tuple[int, ...], seed: int, limit=20, rows=8):
        self.seed, self.end_ids, self.limit, self.rows = seed, end_ids, limit, rows
        self.next_tokens = jax.jit(functools.partial(next_tokens, config), static_argnames="rule")
        self.requests: dict[Request, dict[int, Completion]] = {}
        self.counts = SamplerCounts()

    def begin(self, params, key, rule):
        self.params, self.key, self.rule = params, key, rule
        self.requests, self.counts = {}, SamplerCounts()

    idle = property(lambda self: not self.requests)
    room = property(lambda self: self.rows - len(self.running()))

    def submit(self, prompt, samples, rule=None, budget=None, stop=Stop(), *, carried=None):  # noqa: B008
        request = Request(prompt, samples, rule, budget, stop, self.key.step)
        if (rule or self.rule) != self.rule or stop.texts:
            raise ValueError(f"prompt {prompt.id!r}: rule or stop is not that of the rollout")
        request.step = carried.step if carried and carried.tokens else self.key.step
        request.finished = {done.sample: done for done in carried.finished} if carried else {}
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32), False, self.key.policy_step, ""
        missing = [i for i in request.samples if i not in request.finished]
        begun = {done.sample: done for done in carried.begun} if carried else {}
        self.requests[request] = {i: Completion(*empty, i) for i in missing} | begun
        return request

    def cancel(self, request):
        held = self.requests.pop(request, {}).values()
        self.counts.abandoned_responses += sum(len(done) > 0 for done in held)

    def running(self):
        return [(request, i) for request, held in self.requests.items() for i in held]

    def step(self, meanwhile=lambda: None):
        meanwhile()
        running = self.running()[: self.rows]
        self.counts.bursts += bool(running)
        finished = []
        for (request, i), (tokens, logprobs) in zip(running, self.extend(running), strict=True):
            held = self.requests[request]
            tokens = np.append(held[i].tokens, tokens).astype(np.int32)
            logprobs = np.append(held[i].sampler_logprobs, logprobs).astype(np.float32)
            cut = tokens[-1] not in (*self.end_ids, *request.stop.ids)
            held[i] = Completion(tokens, logprobs, cut, self.key.policy_step, "", i)
            if not cut or len(tokens) >= min(self.limit, request.budget or self.limit):
                self.counts.tokens += len(tokens)
                finished += request.finish(held.pop(i))
        self.requests = {request: held for request, held in self.requests.items() if held}
        return finished

    def extend(self, running):
        rows, lengths = np.zeros((self.rows, WIDTH), np.int32), np.ones(self.rows, np.int32)
        keys, positions = [jax.random.key(0)] * self.rows, np.zeros(self.rows, np.int32)
        for row, (request, i) in enumerate(running):
            prompt, known = request.prompt, self.requests[request][i].tokens
            positions[row], lengths[row] = len(known), len(prompt.tokens) + len(known)
            rows[row, : lengths[row]] = np.append(prompt.tokens, known)
            (key,) = sample_keys([(self.seed, self.key.purpose, request.step, prompt.index)])
            keys[row] = jax.random.fold_in(key, i)
        arrays = self.params, rows, lengths, jnp.stack(keys), positions
        tokens, logprobs = jax.device_get(self.next_tokens(*arrays, rule=self.rule))
        return list(zip(tokens, logprobs, strict=True))[: len(running)]

    def stop(self, keep):
        parts = []
        for request, held in sorted(self.requests.items(), key=lambda pair: pair[0].prompt.index):
            done = tuple(request.finished[i] for i in sorted(request.finished))
            begun = tuple(c for c in held.values() if len(c))
            parts.append(PartialGroup(request.prompt, request.step, done, begun))
        if not keep:
            running = self.running()
            self.counts.abandoned_responses += len(running)
            self.counts.abandoned_tokens += sum(len(self.requests[r][i]) for r, i in running)
        self.requests = {}
        return parts if keep else []

    def close(self):
        self.stop(keep=False)
        self.key = None


def next_tokens(config, params, rows, lengths, keys, positions, rule):
    places = jnp.broadcast_to(jnp.arange(WIDTH), rows.shape)
    segments = (places < lengths[:, None]).astype(jnp.int32)
    hidden = Decoder(config).apply({"params": params}, rows, segments, places)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    logits = (last @ params.get("head", params["embedding"].T)).astype(jnp.float32)
    return sample_tokens(logits, keys, positions, rule)


class ScriptedSampler(ToySampler):
    """Ends the responses to prompt `index` after `bursts(index)` bursts in a slot.

    `submitted` has the indices of the submitted prompts, in order.
    """

    def __init__(self, bursts: Callable[[int], int], slots: int = 128):
        super().__init__(None, (1,), 0, limit=10_000, rows=slots)
        self._bursts = bursts
        self.submitted: list[int] = []
        self.begin(None, RolloutKey(0), SamplingRule())

    def submit(self, prompt, *options, **named):
        self.submitted.append(prompt.index)
        return super().submit(prompt, *options, **named)

    def extend(self, running):
        for request, i in running:
            bursts = len(self.requests[request][i]) + 1
            ends = bursts == self._bursts(request.prompt.index)
            yield ([5, 1], [0.0, 0.0]) if ends else ([5], [0.0])
