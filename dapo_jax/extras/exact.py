"""A sampler without caches: every token is sampled from a forward pass of the trainer.

    dapo-jax train arithmetic --config.sampler.engine=exact --config.packing.single_responses=true

Each response has a row of the score pass's shape. What the pass computes for a token depends on the
tokens before it alone, so on CPU the log-probs of the two are the same bits. A token costs a pass
over whole rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.learner.update import ROWS
from dapo_jax.model.decoder import head_kernel
from dapo_jax.model.lm_head import Scale, logits_of
from dapo_jax.model.logprobs import Rows, hidden_states, logprobs_of
from dapo_jax.rollout.requests import carry_groups
from dapo_jax.rollout.sampling import sample_keys, sample_tokens
from dapo_jax.run.build import SamplerParts
from dapo_jax.runtime import processes, sharding
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Completion, Request, SamplerCounts, Stop


class ExactSampler:
    """A `contracts.Sampler` that extends the first `slots` responses by a token per burst.

    `shape` are rows and tokens of a microbatch of the score pass, `chunk_tokens` those of its head.
    """

    environments: Any = None
    key: Any = None  # a `RolloutKey`
    idle = property(lambda self: not self._running)
    room = property(lambda self: self._slots - len(self._running))

    def __init__(self, decoder, mesh, shape, *, chunk_tokens, end_ids, slots, limit, seed):
        self._mesh, self._shape, self._end_ids = mesh, shape, end_ids
        self._slots, self._limit, self._seed = slots, limit, seed
        compute = functools.partial(next_tokens, decoder, chunk_tokens)
        self._next_tokens = jax.jit(compute, static_argnames="rule")
        self._running, self.counts = {}, SamplerCounts()  # (request, sample) -> response so far

    def begin(self, params, key, rule):
        self._params, self.key, self._rule = params, key, rule
        self._running, self.counts = {}, SamplerCounts()

    def submit(self, prompt, samples, rule=None, budget=None, stop=Stop(), *, carried=None):  # noqa: B008
        request = Request(prompt, samples, rule, budget, stop, self.key.step)
        if stop.texts or (rule or self._rule) != self._rule:
            raise ValueError(f"prompt {prompt.id!r}: rule and stop must be those of the rollout")
        begun = {}
        if carried and carried.tokens:
            request.step = carried.step
            request.finished = {done.sample: done for done in carried.finished}
            begun = {done.sample: done for done in carried.begun}
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32), False, self.key.policy_step, ""
        for sample in [i for i in request.samples if i not in request.finished]:
            self._running[request, sample] = begun.get(sample) or Completion(*empty, sample)
        return request

    def cancel(self, request):
        self._drop([key for key in self._running if key[0] is request])

    def _drop(self, keys):
        lengths = [len(self._running.pop(key)) for key in keys]
        self.counts.abandoned_responses += sum(length > 0 for length in lengths)
        self.counts.abandoned_tokens += sum(lengths)

    def step(self, meanwhile=do_nothing):
        meanwhile()
        chosen, finished = list(self._running)[: self._slots], []
        self.counts.bursts += bool(chosen)
        for first in range(0, len(chosen), self._shape[0]):
            keys = chosen[first : first + self._shape[0]]
            for key, new in zip(keys, self._extend(keys), strict=True):
                finished += self._add(*key, *new)
        return finished

    def _add(self, request, sample, tokens, logprobs):
        """Add tokens to a response; return what is finished by them."""
        held = self._running[request, sample]
        tokens = np.append(held.tokens, tokens).astype(np.int32)
        logprobs = np.append(held.sampler_logprobs, logprobs).astype(np.float32)
        cut = int(tokens[-1]) not in (*self._end_ids, *request.stop.ids)
        done = Completion(tokens, logprobs, cut, self.key.policy_step, "", sample)
        self._running[request, sample] = done
        if cut and len(tokens) < min(self._limit, request.budget or self._limit):
            return []
        self.counts.tokens += len(tokens)
        return request.finish(self._running.pop((request, sample)))

    def _extend(self, keys):
        """Return the next token and its log-prob of at most as many responses as a pass has."""
        tokens = np.zeros(self._shape, np.int32)
        positions, lengths, samples = np.zeros((3, len(tokens)), np.int32)
        parts = [(0, 0, 0, 0)] * len(tokens)
        for row, (request, samples[row]) in enumerate(keys):
            prompt, held = request.prompt, self._running[request, samples[row]].tokens
            positions[row], lengths[row] = len(held), len(prompt.tokens) + len(held)
            tokens[row, : lengths[row]] = np.append(prompt.tokens, held)
            parts[row] = self._seed, self.key.purpose, request.step, prompt.index
        random = jax.vmap(jax.random.fold_in)(sample_keys(parts), samples)
        with sharding.activate(self._mesh):
            rows = sharding.put(self._mesh, tokens, *ROWS[1:])
            arrays = self._params, rows, lengths, random, positions
            new = jax.device_get(self._next_tokens(*arrays, rule=self._rule))
        return list(zip(*new, strict=True))[: len(keys)]

    def stop(self, keep):
        parts = [(key[0], held if len(held) else None) for key, held in self._running.items()]
        if not keep:
            self._drop(list(self._running))
        self._running = {}
        return carry_groups(parts) if keep else []

    def close(self):
        self.stop(keep=False)
        self.key = self._params = None


def next_tokens(decoder, chunk_tokens, params, tokens, lengths, keys, positions, rule):
    """Return the token after the first `lengths` of each row [R, T], and its log-prob."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    inside = (places < lengths[:, None]).astype(jnp.int32)
    hidden, _ = hidden_states(params, decoder, Rows(tokens, inside, places * inside))
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    head = head_kernel(params).astype(hidden.dtype)
    logits = logits_of(last, head, Scale(cap=decoder.logit_cap))
    sampled, *_ = sample_tokens(logits, keys, positions, rule)
    # The log-prob is the trainer's own function of these hidden states: sums round as there.
    is_next, scale = places == lengths[:, None], Scale(rule.temperature or 1.0, decoder.logit_cap)
    tokens = jnp.where(is_next, sampled[:, None], tokens)
    logprobs, _ = logprobs_of(params, hidden, tokens, is_next, scale, chunk_tokens)
    return sampled, jnp.sum(jnp.where(is_next, logprobs, 0.0), axis=1)


def open_exact(parts: SamplerParts) -> tuple[Any, Any]:
    """Return the sampler of a run, as `SamplerParts` says. Raises `ConfigError`."""
    config, decoder, rows = parts.config, parts.decoder, parts.config.rows()
    allowed = "true with sampler.engine = 'exact': a neighbour in a row changes the last bits"
    require(rows.single_responses, "packing.single_responses", rows.single_responses, allowed)
    one_turn = not config.environment.used and processes.count() == 1
    plain = not (decoder.adapters or decoder.frozen_layers or decoder.experts)
    allowed = "'own' with an environment, adapters, frozen layers, experts or several hosts"
    require(one_turn and plain, "sampler.engine", "exact", allowed)
    sampler = ExactSampler(
        decoder,
        parts.mesh,
        (rows.rows_per_microbatch, rows.row_tokens),
        chunk_tokens=config.compute.logprob_chunk_tokens,
        end_ids=parts.tokenizer.end_ids,
        slots=config.sampler.slots,
        limit=config.sampler.max_response_tokens,
        seed=config.seed,
    )
    return sampler, sampler.close
