"""Remote sampler: leases the groups of a run to other processes (`dapo-jax sampler`)."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.extras.samplers.lease_server import LeaseServer
from dapo_jax.extras.samplers.leases import Leases, Session, Task
from dapo_jax.extras.samplers.weight_versions import WeightVersions
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.rollout.group_format import completion_from, from_text, read_counts, to_text
from dapo_jax.rollout.requests import carry_groups
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.build import SamplerParts
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import LOOPBACK, read_key
from dapo_jax.runtime.storage.files import is_storage_error, reason, suppress_storage_errors
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types import structs
from dapo_jax.types.contracts import Sampler, do_nothing
from dapo_jax.types.structs import PartialGroup, Prompt, Request, RolloutKey, SamplingRule

POLL_SECONDS = 0.2  # between looks at signals


def sampler_identity(config: Config) -> dict[str, Any]:
    """Return what a sampler must have in common with the trainer, by name.

    Both read the settings from the run's folder, and a resumed run can't change what decides.
    """
    tokenizer = (model_path(config.model.folder) / "tokenizer.json").read_bytes()
    return {
        "dapo_jax's code": processes.code_digest(),
        "jax's version": jax.__version__,
        "the content of config.model.folder": fingerprint(config.model.folder),
        "its tokenizer.json": hashlib.sha256(tokenizer).hexdigest()[:16],
    }


class LeasedSampler:
    """A `contracts.Sampler` that leases all groups to other processes.

    Of several processes the first one's leases decide, and all receive its finished groups.
    """

    key: RolloutKey | None = None
    room = 0  # of the samplers, by the last step, less what was submitted since

    def __init__(
        self,
        leases: Leases,
        load: Callable[[Any], dict[str, Any]],  # decoding weights of parameters
        write: Callable[[dict[str, Any]], str],  # writes a version of them; returns its name
        slots: int,
    ):
        self.counts = structs.SamplerCounts()
        self._leases, self._load, self._write_version, self._slots = leases, load, write, slots
        self._loaded: Any = None  # decoding weights of the policy, until they are written
        self._written: tuple[int, str] = (-1, "")  # step and name of the newest version
        self._wanted: dict[str, tuple[Task, Request]] = {}  # by key, in data order
        self._begun: Any = None  # parameters and rule of `begin`

    @property
    def idle(self) -> bool:
        return not self._wanted

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        self.close()
        self.key, self._begun = key, (params, rule)
        self._loaded = None if self._written[0] == key.policy_step else self._load(params)
        self.counts, self.room = structs.SamplerCounts(), self._slots  # until the first step asks

    def _write(self, key: RolloutKey, again: bool = False) -> str:
        """Return the name of the policy's version; write it if it is new. Raises OSError."""
        loaded = self._loaded or (self._load(self._begun[0]) if again else None)
        self._loaded, self._leases.unreadable = None, False
        if loaded:
            self._written = key.policy_step, self._write_version(loaded)
        return self._written[1]

    def submit(self, prompt: Prompt, samples: Any, *options: Any, **named: Any) -> Request:
        named.pop("carried", None)  # has no tokens
        if options or named:
            raise ValueError(f"prompt {prompt.id!r}: rule, budget and stop are those of the run")
        assert self.key is not None  # set by `begin`
        request = Request(prompt, samples, step=self.key.step)
        if self._leases.session is None:
            self._leases.open(Session(self.key, self._begun[1], self._write(self.key)))
        assert self._leases.session is not None
        indices = tuple(request.samples)
        for part in [indices] if request.whole else [(i,) for i in indices]:
            task = Task(self._leases.session, prompt, part)
            self._wanted[task.key] = task, request
            self.room -= len(part)
            self._leases.add(task)
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request; samplers finish what they have begun of it."""
        self._wanted = {key: pair for key, pair in self._wanted.items() if pair[1] is not request}

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[structs.Finished]:
        meanwhile()
        text = processes.broadcast_from_host0(self._look, "leases")
        unreadable, finished, counts, self.room = from_text(text)
        if unreadable and self.key:
            with suppress_storage_errors():  # samplers will say so again
                self._write(self.key, again=True)
        vars(self.counts).update(vars(read_counts(counts)))
        wanted = [(self._wanted.pop(key, None), responses) for key, responses in finished]
        return [(pair[1], tuple(map(completion_from, done))) for pair, done in wanted if pair]

    def _look(self) -> str:
        """Return what process 0 knows."""
        leases = self._leases
        finished = leases.take(POLL_SECONDS if self._wanted else 0.0)
        answers = [(task.key, responses) for task, responses in finished]
        return to_text([leases.unreadable, answers, leases.counts(), leases.room()])

    def stop(self, keep: bool) -> list[PartialGroup]:
        """Stop everything; kept groups are without tokens: samplers keep what they have sampled."""
        requests = dict.fromkeys(request for _, request in self._wanted.values())
        samples = sum(len(task.samples) for task, _ in self._wanted.values())
        self.counts.abandoned_responses += samples * (not keep)
        self._wanted.clear()
        self._leases.clear()
        return carry_groups((request, None) for request in requests if keep)

    def close(self) -> None:
        self.stop(keep=False)
        self._leases.open(None)
        self.key = self._begun = self._loaded = None


class RemoteSampler:
    """The leases for training steps; the local sampler for all else.

    It also samples a step whose weights can't be written.
    """

    def __init__(self, local: Sampler, leased: LeasedSampler, warn: Callable[[str], None]):
        self.environments = local.environments
        self._local, self._leased, self._warn = local, leased, warn
        self._now: Any = leased  # the one that samples since `begin`
        self._begun: Any = None  # arguments of `begin`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        """Begin with one of the samplers."""
        self._now.close()
        self._now = self._leased if key.purpose == SAMPLE_FOR_TRAINING else self._local
        self._now.begin(params, key, rule)
        self._begun = params, key, rule

    def submit(self, prompt: Prompt, *options: Any, **named: Any) -> Request:
        """Submit a request; the first one writes the weights."""
        try:
            return self._now.submit(prompt, *options, **named)
        except Exception as error:
            if self._now is self._local or not is_storage_error(error):
                raise
            step = self._begun[1].policy_step
            self._warn(f"the weights of step {step} can't be written: {reason(error)}")
        self._now.close()
        self._now = self._local
        self._now.begin(*self._begun)
        return self._now.submit(prompt, *options, **named)


def open_remote(parts: SamplerParts) -> tuple[RemoteSampler, Callable[[], None]]:
    """Return the sampler of a run, as `SamplerParts` says. Raises `ConfigError`."""
    config, decoder, _, _, local, load, warn = parts
    settings = config.extras.samplers
    key = read_key(settings.key_file, "extras.samplers.key_file")
    if not key and settings.host.strip("[]") not in LOOPBACK:
        warn(f"anyone who can reach {settings.host} can send responses: there is no key")
    limits = decoder.vocab, config.sampler.max_response_tokens
    leases = Leases(limits, settings.lease_seconds)
    servers: list[LeaseServer] = []

    def serve(_: int) -> None:
        servers.append(LeaseServer(leases, sampler_identity(config), settings, key, warn))

    processes.map_over_hosts([0], serve, "server of leases")
    write = WeightVersions(config.run_dir).write
    leased = LeasedSampler(leases, load, write, config.sampler.slots)

    def close() -> None:
        for server in servers:  # on process 0
            server.close()

    return RemoteSampler(local, leased, warn), close
