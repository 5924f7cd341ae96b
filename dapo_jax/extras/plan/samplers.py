"""Samplers in other processes in a plan: their layout, and the fleet that samples a step."""

import copy
import math

import jax

from dapo_jax.commands.command_line import check_flag
from dapo_jax.config.experiment import Config, Mesh
from dapo_jax.extras.plan.chips import parse
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.extras.plan.fleet import Fleet, Times
from dapo_jax.extras.plan.programs import Layout, lay_out
from dapo_jax.extras.plan.simulate import Costs, Meter, RolloutRecord, simulate_sampler
from dapo_jax.extras.plan.workload import Workload


def lay_out_sampler(config: Config, settings: PlanSettings) -> Layout:
    """Lay a sampler of a run out on one host. Raises `ConfigError`."""
    topology = parse(settings.sampler_topology)
    check_flag(topology.hosts == 1, "sampler_topology", topology.name, "a single host")
    needed = "'only' with --samplers, since the plan lets no trainer sample beside them"
    check_flag(
        config.rollout.remote == "only", "config.rollout.remote", config.rollout.remote, needed
    )
    config = copy.deepcopy(config)
    config.mesh = Mesh(data=-1, fsdp=1, tensor=settings.sampler_tensor or topology.chips)
    config.sampler.slots = settings.sampler_slots or config.sampler.slots
    config.sampler.pages = settings.sampler_pages or config.sampler.pages
    return lay_out(config, topology)


def version_bytes(layout: Layout) -> int:
    """Return the size of a version of the policy: all trained arrays in the type of decoding."""
    trained = layout.learners.policy.abstract_state.params
    arrays = layout.engine.programs.weights.load_trained.abstract(trained)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def open_fleet(
    layout: Layout, costs: Costs, settings: PlanSettings, hosts: int, law: Workload
) -> Fleet:
    """Return the simulated samplers of a run; `hosts` are the trainer's."""
    config, read = layout.config, version_bytes(layout) / (settings.storage * 1e9)
    times = Times(
        write=read / hosts,
        read=read,
        ahead=config.rollout.staleness > 0,
        lease=config.sampler.lease_seconds,
        restart=settings.restart_seconds,
        preemptions=settings.preemptions,
    )
    records = [RolloutRecord(law, Meter(costs)) for _ in range(settings.samplers)]
    model = layout.decoder, layout.sampling_mesh
    opened = [simulate_sampler(config, *model, record) for record in records]
    return Fleet(opened, config.sampler.slots, times, config.seed)
