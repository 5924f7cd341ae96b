"""Remote sampler: leases the groups of a run to other processes (`dapo-jax sampler`)."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import leaves
from dapo_jax.data.policies import model_path
from dapo_jax.extras.samplers.lease_server import LeaseServer
from dapo_jax.extras.samplers.leases import LOCAL, AnswerLimits, Leases, Session, Task
from dapo_jax.extras.samplers.weight_versions import WeightVersions
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.rollout.group_format import completion_from, from_text, read_counts, to_text
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.checkpointing.same_run import may_change
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import LOOPBACK, read_key
from dapo_jax.runtime.storage.retries import is_storage_error, reason
from dapo_jax.types.contracts import Sampler, do_nothing
from dapo_jax.types.structs import (
    Completion,
    Finished,
    PartialGroup,
    Prompt,
    Request,
    RolloutKey,
    SamplerCounts,
    SamplingRule,
    present,
)

Responses = tuple[Completion, ...]
POLL_SECONDS = 0.2  # between looks at signals
# Settings that decide what is sampled, unless a resumed run may change them.
DECISIVE = (
    *("algorithm.router_replay", "lora.", "model.freeze_layers", "compute.dtype"),
    *("environment.", "sampler.", "seed"),
)


def answer_limits(config: Config, decoder: DecoderConfig) -> AnswerLimits:
    """Return the bounds of responses that a run accepts."""
    routes = None
    if decoder.records_routes:
        routes = decoder.layers, decoder.experts_per_token, decoder.experts
    return AnswerLimits(decoder.vocab, config.sampler.max_response_tokens, routes)


def sampler_identity(config: Config) -> dict[str, Any]:
    """Return what a sampler must have in common with the trainer, by name."""
    settings = {name: value for name, _, value in leaves(config)}
    decisive = [name for name in settings if name.startswith(DECISIVE)]
    folder = model_path(config.model.folder)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    return {
        "dapo_jax's code": processes.code_digest(),
        "jax's version": jax.__version__,
        "the content of config.model.folder": fingerprint(config.model.folder),
        "its tokenizer.json": hashlib.sha256(tokenizer).hexdigest()[:16],
        **{f"config.{n}": settings[n] for n in decisive if not may_change(n, settings)},
    }


class RemoteSampler:
    """A `contracts.Sampler` that leases the groups of training steps to other processes.

    The local sampler draws evaluations, and all that the others leave if `also` is true. It also
    draws a step whose weights can't be written. Of several processes the first one's leases
    decide, and all receive its finished groups.
    """

    def __init__(
        self,
        local: Sampler,
        leases: Leases,
        load: Callable[[Any], dict[str, Any]],  # decoding weights of parameters
        # Writes a version of weights, again if it is damaged and the third argument is true;
        # returns its digest.
        write: Callable[[int, Callable[[], dict[str, Any]], bool], str],
        also: bool,
        slots: int,
        warn: Callable[[str], None],
    ):
        self.environments = local.environments
        self.key: RolloutKey | None = None
        self.counts = SamplerCounts()
        self.leases = leases
        self._local, self._load, self._write_version = local, load, write
        self._loaded: Any = None  # decoding weights of the policy, until they are written
        self._announced: tuple[int, Any] = (-1, None)  # step and parameters of the next policy
        self._written = -1  # step of the newest version
        self._also, self._slots, self._warn = also, slots, warn
        self._wanted: dict[str, tuple[Task, Request]] = {}  # by key, in data order
        self._tasks: dict[Request, Task] = {}  # that the local sampler draws
        self._room = 0  # of the samplers, by the last burst
        self._is_local = self._draws = True  # no leases at all; the local sampler draws too
        self._begun: Any = None  # parameters and rule of `begin`

    def announce(self, params: Any, policy_step: int) -> None:
        """Write a policy once its update has ended, so that samplers read it while they sample.

        Not if this process samples too: the memory holds the weights of one policy.
        """
        if not self._also:
            self._announced = policy_step, params

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        announced = self._announced
        self.close()
        self._announced = announced
        self.key, self._begun = key, (params, rule)
        self._is_local, self._draws = key.purpose != SAMPLE_FOR_TRAINING, self._also
        if self._is_local or self._draws:
            self._local.begin(params, key, rule)
        if not self._is_local and self._written != key.policy_step:
            self._loaded = self._load(params)
        self.counts = self._local.counts if self._is_local else SamplerCounts()
        self._room = self._slots  # until the first burst asks

    def _open(self, key: RolloutKey) -> None:
        """Write the version of the policy, if it is new, and begin to lease groups."""
        digest = self._write(key)
        version = key.purpose, key.step, key.policy_step
        self.leases.open(Session(*version, self._begun[1], digest))

    def _write(self, key: RolloutKey, repair: bool = False) -> str:
        """Write the version of `begin`; if that fails, this process samples all groups itself."""
        self.leases.unreadable = False
        loaded, self._loaded = self._loaded, None
        params, rule = self._begun
        load = (lambda: loaded) if loaded else (lambda: self._load(params))
        digest = self._write_policy(load, key.policy_step, repair)
        if not digest and not self._draws:
            self._draws = True
            self._local.begin(params, key, rule)
        return digest

    def _write_policy(self, load: Callable[[], Any], step: int, repair: bool = False) -> str:
        """Write a version unless it is there; return its digest, or "" if the storage fails."""
        try:
            digest = self._write_version(step, load, repair)
        except Exception as error:
            if not is_storage_error(error):
                raise
            self._warn(f"the weights of step {step} can't be written: {reason(error)}")
            return ""
        self._written = step
        return digest

    def submit(
        self,
        prompt: Prompt,
        samples: int | Sequence[int],
        *options: Any,
        carried: PartialGroup | None = None,
        **named: Any,
    ) -> Request:
        key = present(self.key, "key")
        if self._is_local:
            return self._local.submit(prompt, samples, *options, carried=carried, **named)
        if options or named:
            raise ValueError(f"prompt {prompt.id!r}: rule, budget and stop are those of the run")
        request = Request(prompt, samples, step=key.step)
        if self.leases.session is None:
            self._open(key)
        session = present(self.leases.session, "session")
        indices = tuple(request.samples)
        for part in [indices] if request.whole else [(i,) for i in indices]:
            task = Task(session, prompt, part)
            self._wanted[task.key] = task, request
            self._room -= len(part)
            self.leases.add(task)
        return request

    def cancel(self, request: Request) -> None:
        """Forget the tasks of a request; samplers end theirs with the session."""
        for key in [key for key, (_, other) in self._wanted.items() if other is request]:
            self.counts.abandoned_responses += len(self._wanted.pop(key)[0].samples)
        self._local.cancel(request)

    @property
    def idle(self) -> bool:
        return self._local.idle if self._is_local else not self._wanted

    @property
    def _outstanding(self) -> int:
        return sum(len(task.samples) for task, _ in self._wanted.values())

    @property
    def room(self) -> int:
        if self._is_local:
            return self._local.room
        return self._room + (self._local.room if self._draws else 0)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[Finished]:
        if self._is_local:
            return self._local.step(meanwhile)
        unreadable, updated, leased = processes.broadcast_from_host0(self._look, "leases")
        if unreadable:
            self._write(present(self.key, "key"), repair=True)
        if updated:
            (step, params), self._announced = self._announced, (-1, None)
            if digest := self._write_policy(lambda: self._load(params), step):
                self.leases.following = step, digest
        if self._draws:
            for task in (self._wanted[key][0] for key in leased if key in self._wanted):
                self._tasks[submit(self._local, task)] = task
            for request, responses in self._local.step(meanwhile):
                self.leases.finish(self._tasks.pop(request), responses)
        else:
            meanwhile()
        answers, counts, self._room = self._take(
            0.0 if self._draws and not self._local.idle else POLL_SECONDS
        )
        total = counts + (self._local.counts if self._draws else None)
        vars(self.counts).update(vars(total))
        wanted = [(self._wanted.pop(key, None), responses) for key, responses in answers]
        return [(pair[1], responses) for pair, responses in wanted if pair]

    def _look(self) -> tuple[bool, bool, list[str]]:
        """Return if weights are damaged, if an update has ended, and the local sampler's keys."""
        tasks = self.leases.lease(LOCAL, self._local.room) if self._draws else []
        params = jax.tree.leaves(self._announced[1])
        updated = bool(params) and all(leaf.is_ready() for leaf in params)
        return self.leases.unreadable, updated, [task.key for task in tasks]

    def _take(self, seconds: float) -> tuple[list[tuple[str, Responses]], SamplerCounts, int]:
        """Return finished responses by key, counts and room of samplers, on every process."""

        def take() -> tuple[list[tuple[str, Responses]], SamplerCounts, int]:
            finished = [(task.key, responses) for task, responses in self.leases.take(seconds)]
            return finished, self.leases.remote_counts(), self.leases.room()

        if processes.count() == 1:
            return take()
        text = processes.broadcast_from_host0(lambda: to_text(take()), "finished groups")
        finished, counts, room = from_text(text)
        answers = [(key, tuple(map(completion_from, responses))) for key, responses in finished]
        return answers, read_counts(counts), room

    def stop(self, keep: bool) -> list[PartialGroup]:
        """Stop everything; kept groups are without tokens: samplers keep what they have drawn."""
        if self._is_local:
            return self._local.stop(keep)
        prompts = {task.prompt.index: task for task, _ in self._wanted.values()}
        self.counts.abandoned_responses += self._outstanding * (not keep)
        self._local.stop(keep=False)
        self._tasks.clear()
        self._wanted.clear()
        self.leases.clear()
        kept = sorted(prompts) if keep else []
        return [PartialGroup(prompts[i].prompt, prompts[i].session.step) for i in kept]

    def close(self) -> None:
        self.stop(keep=False)
        self.leases.open(None)
        self._local.close()
        self.key = self._begun = self._loaded = None
        self._announced = -1, None  # the next update consumes it


def open_remote(
    config: Config,
    decoder: DecoderConfig,
    local: Sampler,
    load: Callable[[Any], dict[str, Any]],
    warn: Callable[[str], None],
) -> tuple[RemoteSampler, Callable[[], None]]:
    """Return the sampler of a run, and a function that ends the server of its leases.

    Raises `ConfigError`.
    """
    settings = config.sampler
    key = read_key(settings.key_file, "sampler.key_file")
    if not key and settings.host.strip("[]") not in LOOPBACK:
        warn(f"anyone who can reach {settings.host} can send responses: there is no key")
    leases = Leases(answer_limits(config, decoder), settings.lease_seconds)
    versions = WeightVersions(config.run_dir)
    servers: list[LeaseServer] = []

    def serve(_: int) -> None:
        versions.clear()
        servers.append(LeaseServer(leases, sampler_identity(config), settings, key, warn))

    processes.map_over_hosts([0], serve, "server of leases")

    is_also = config.rollout.remote == "also"
    sampler = RemoteSampler(local, leases, load, versions.write, is_also, settings.slots, warn)

    def close() -> None:
        for server in servers:  # on process 0
            server.close()

    return sampler, close


def submit(sampler: Sampler, task: Task) -> Request:
    """Request the responses of a task: a whole group together, or each sample alone."""
    count = len(task.samples)
    whole = task.samples == tuple(range(count))
    return sampler.submit(task.prompt, count if whole else task.samples)
