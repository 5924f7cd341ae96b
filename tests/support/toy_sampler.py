"""Samplers without engine and caches: a full forward pass for every token, or a script."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.model.decoder import Decoder
from dapo_jax.rollout.sampling import sample_key, sample_tokens
from dapo_jax.types.structs import Completion, PartialGroup, Prompt, SamplerCounts

WIDTH = 48  # tokens of prompt and response


class Request(NamedTuple):
    prompt: Prompt
    step: int
    responses: dict[int, Completion]


class ToySampler:
    """A `contracts.Sampler` that extends the first `rows` responses by a token per burst."""

    environments = None

    def __init__(self, config, end_ids: tuple[int, ...], seed: int, limit=20, rows=8):
        self.seed, self.end_ids, self.limit, self.rows = seed, end_ids, limit, rows
        self.prepared = {}
        self.next_tokens = jax.jit(functools.partial(next_tokens, config), static_argnames="rule")

    def prepare(self, params, policy_step):
        self.prepared = {policy_step: params}

    def begin(self, params, *, purpose, step, rule, policy_step=None):
        self.purpose, self.step, self.rule = purpose, step, rule
        self.policy_step = step if policy_step is None else policy_step
        self.params = self.prepared.pop(self.policy_step, params)
        self.requests, self.counts = [], SamplerCounts()

    idle = property(lambda self: not self.requests)
    room = property(lambda self: self.rows - len(self.running()))

    def submit(self, prompt, samples, carried=None):
        self.add(prompt, range(samples), carried)

    def submit_each(self, prompt, samples):
        for sample in samples:
            self.add(prompt, [sample], None)

    def add(self, prompt, samples, carried):
        if not len(prompt.tokens):
            raise ValueError(f"prompt {prompt.id!r} has no tokens")
        known = carried if carried and carried.tokens else PartialGroup(prompt, self.step)
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32), False, self.policy_step, ""
        responses = {sample: Completion(*empty, sample) for sample in samples}
        responses |= {c.sample: c for c in (*known.finished, *known.begun)}
        self.requests.append(Request(prompt, known.step, responses))

    def ended(self, done):
        return len(done) and (done.tokens[-1] in self.end_ids or len(done) >= self.limit)

    def running(self):
        every = [(request, i) for request in self.requests for i in request.responses]
        return [(request, i) for request, i in every if not self.ended(request.responses[i])]

    def decode_burst(self, meanwhile=lambda: None):
        meanwhile()
        running = self.running()[: self.rows]
        self.counts.bursts += bool(running)
        for (request, i), (tokens, logprobs) in zip(running, self.extend(running), strict=True):
            old = request.responses[i]
            tokens = np.append(old.tokens, tokens).astype(np.int32)
            logprobs = np.append(old.sampler_logprobs, logprobs).astype(np.float32)
            cut = tokens[-1] not in self.end_ids
            request.responses[i] = Completion(tokens, logprobs, cut, self.policy_step, "", i)
        groups = [(r.prompt, tuple(r.responses.values())) for r in self.requests]
        whole = [all(map(self.ended, responses)) for _, responses in groups]
        self.requests = [r for r, done in zip(self.requests, whole, strict=True) if not done]
        finished = [group for group, done in zip(groups, whole, strict=True) if done]
        self.counts.tokens += sum(len(done) for _, responses in finished for done in responses)
        return finished

    def extend(self, running):
        rows, lengths = np.zeros((self.rows, WIDTH), np.int32), np.ones(self.rows, np.int32)
        keys, positions = [jax.random.key(0)] * self.rows, np.zeros(self.rows, np.int32)
        for row, (request, i) in enumerate(running):
            prompt, known = request.prompt, request.responses[i].tokens
            positions[row], lengths[row] = len(known), len(prompt.tokens) + len(known)
            rows[row, : lengths[row]] = np.append(prompt.tokens, known)
            key = sample_key(self.seed, self.purpose, request.step, prompt.index)
            keys[row] = jax.random.fold_in(key, i)
        arrays = self.params, rows, lengths, jnp.stack(keys), positions
        tokens, logprobs = jax.device_get(self.next_tokens(*arrays, rule=self.rule))
        return list(zip(tokens, logprobs, strict=True))[: len(running)]

    def suspend(self):
        parts = []
        for prompt, step, responses in sorted(self.requests, key=lambda r: r.prompt.index):
            done = tuple(c for c in responses.values() if self.ended(c))
            begun = tuple(c for c in responses.values() if len(c) and not self.ended(c))
            parts.append(PartialGroup(prompt, step, done, begun))
        self.requests = []
        return parts

    def abandon(self):
        self.counts.abandoned_responses += len(self.running())
        self.counts.abandoned_tokens += sum(len(r.responses[i]) for r, i in self.running())
        self.requests = []

    def release(self):
        self.abandon()

    def resident(self):
        return None


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
        self.begin(None, purpose=0, step=0, rule=None)

    def add(self, prompt, samples, carried):
        super().add(prompt, samples, carried)
        self.submitted.append(prompt.index)

    def extend(self, running):
        for request, i in running:
            bursts = len(request.responses[i]) + 1
            ends = bursts == self._bursts(request.prompt.index)
            yield ([5, 1], [0.0, 0.0]) if ends else ([5], [0.0])
