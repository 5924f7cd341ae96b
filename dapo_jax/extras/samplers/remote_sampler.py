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
from dapo_jax.types.contracts import FinishedResponses, Sampler, do_nothing
from dapo_jax.types.structs import Completion, PartialGroup, Prompt, SamplerCounts, SamplingRule

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
        self.counts = SamplerCounts()
        self.leases = leases
        self._local, self._load, self._write_version = local, load, write
        self._prepared: tuple[int, Any] = (-1, None)  # step and weights of a policy
        self._announced: tuple[int, Any] = (-1, None)  # step and parameters of the next policy
        self._written = -1  # step of the newest version
        self._also, self._slots, self._warn = also, slots, warn
        self._wanted: dict[str, Task] = {}  # by key, in data order
        self._tasks: dict[tuple[int, tuple[int, ...]], Task] = {}  # that the local sampler draws
        self._room = 0  # of the samplers, by the last burst
        self._is_local = self._draws = True  # no leases at all; the local sampler draws too
        self._begun: tuple[Any, dict[str, Any]] = (None, {})  # arguments of `begin`

    def prepare(self, params: Any, policy_step: int) -> None:
        self._announced = -1, None  # the next update consumes it
        if self._written != policy_step:
            self._prepared = policy_step, self._load(params)
        if self._also:
            self._local.prepare(params, policy_step)

    def announce(self, params: Any, policy_step: int) -> None:
        """Write a policy once its update has ended, so that samplers read it while they sample.

        Not if this process samples too: the memory holds the weights of one policy.
        """
        if not self._also:
            self._announced = policy_step, params

    def begin(
        self,
        params: Any,
        *,
        purpose: int,
        step: int,
        rule: SamplingRule,
        policy_step: int | None = None,
    ) -> None:
        """Write the version of the policy, if it is new, and begin to lease groups."""
        self.release()
        version = step if policy_step is None else policy_step
        keyed = {"purpose": purpose, "step": step, "rule": rule, "policy_step": version}
        self._is_local, self._draws = purpose != SAMPLE_FOR_TRAINING, self._also
        self._begun = params, keyed
        digest = "" if self._is_local else self._write()
        if not self._is_local:
            self.leases.open(Session(purpose, step, version, rule, digest))
        if self._is_local or self._draws:
            self._local.begin(params, **keyed)
        self.counts = self._local.counts if self._is_local else SamplerCounts()
        self._room = self._slots  # until the first burst asks

    def _write(self, repair: bool = False) -> str:
        """Write the version of `begin`; if that fails, this process samples all groups itself."""
        params, keyed = self._begun
        self.leases.unreadable = False
        digest = self._write_policy(params, keyed["policy_step"], repair)
        if not digest:
            if repair and not self._draws:
                self._local.begin(params, **keyed)
            self._draws = True
        return digest

    def _write_policy(self, params: Any, step: int, repair: bool = False) -> str:
        """Write a version unless it is there; return its digest, or "" if the storage fails."""
        (prepared, loaded), self._prepared = self._prepared, (-1, None)
        load = (lambda: loaded) if prepared == step else (lambda: self._load(params))
        try:
            digest = self._write_version(step, load, repair)
        except Exception as error:
            if not is_storage_error(error):
                raise
            self._warn(f"the weights of step {step} can't be written: {reason(error)}")
            return ""
        self._written = step
        return digest

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        if self._is_local:
            return self._local.submit(prompt, samples, carried)
        return self._add(prompt, tuple(range(samples)))

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        if self._is_local:
            return self._local.submit_each(prompt, samples)
        for sample in samples:
            self._add(prompt, (sample,))
        return None

    def _add(self, prompt: Prompt, samples: tuple[int, ...]) -> None:
        if len(prompt.tokens) == 0:
            raise ValueError(f"prompt {prompt.id!r} has no tokens")
        assert self.leases.session is not None  # set by `begin`
        task = Task(self.leases.session, prompt, samples)
        self._wanted[task.key] = task
        self._room -= len(samples)
        self.leases.add(task)

    def resident(self) -> Any:
        return self._local.resident()

    @property
    def idle(self) -> bool:
        return self._local.idle if self._is_local else not self._wanted

    @property
    def _outstanding(self) -> int:
        return sum(len(task.samples) for task in self._wanted.values())

    @property
    def room(self) -> int:
        if self._is_local:
            return self._local.room
        return self._room + (self._local.room if self._draws else 0)

    def decode_burst(self, meanwhile: Callable[[], None] = do_nothing) -> list[FinishedResponses]:
        if self._is_local:
            return self._local.decode_burst(meanwhile)
        unreadable, updated, leased = processes.broadcast_from_host0(self._look, "leases")
        if unreadable:
            self._write(repair=True)
        if updated:
            (step, params), self._announced = self._announced, (-1, None)
            if digest := self._write_policy(params, step):
                self.leases.following = step, digest
        if self._draws:
            for task in map(self._wanted.__getitem__, leased):
                self._tasks[task.prompt.index, task.samples] = task
                submit(self._local, task.prompt, task.samples)
            for prompt, responses in self._local.decode_burst(meanwhile):
                samples = tuple(response.sample for response in responses)
                self.leases.finish(self._tasks.pop((prompt.index, samples)), responses)
        else:
            meanwhile()
        answers, counts, self._room = self._take(
            0.0 if self._draws and not self._local.idle else POLL_SECONDS
        )
        total = counts + (self._local.counts if self._draws else None)
        vars(self.counts).update(vars(total))
        return [(self._wanted.pop(key).prompt, responses) for key, responses in answers]

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

    def suspend(self) -> list[PartialGroup]:
        """Return the groups without tokens: the samplers keep what they have drawn."""
        if self._is_local:
            return self._local.suspend()
        prompts = {task.prompt.index: task for task in self._wanted.values()}
        self._clear()
        return [PartialGroup(prompts[i].prompt, prompts[i].session.step) for i in sorted(prompts)]

    def abandon(self) -> None:
        if self._is_local:
            return self._local.abandon()
        self.counts.abandoned_responses += self._outstanding
        return self._clear()

    def _clear(self) -> None:
        self._local.abandon()
        self._tasks.clear()
        self._wanted.clear()
        self.leases.clear()

    def release(self) -> None:
        self.abandon()
        self.leases.open(None)
        self._local.release()
        self._begun = None, {}


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


def submit(sampler: Sampler, prompt: Prompt, samples: tuple[int, ...]) -> None:
    """Request the responses of a task: a whole group together, or each sample alone."""
    if samples == tuple(range(len(samples))):
        sampler.submit(prompt, len(samples))
    else:
        sampler.submit_each(prompt, samples)
