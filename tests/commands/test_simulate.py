"""The simulator: hand-computed steps, conserved tokens, and the counts of a real run."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from named_meshes import named_mesh
from simulate import RecordedWorkload, calibrate, replay
from small_runs import make_quick_config, open_run

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Data, Log, Mesh, Rollout, Sampler
from dapo_jax.extras.plan import simulate
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.extras.plan.fleet import Fleet, Times
from dapo_jax.extras.plan.simulate import (
    HOSTS,
    Costs,
    Meter,
    RolloutRecord,
    Simulation,
    simulate_sampler,
)
from dapo_jax.extras.plan.workload import (
    AssumedWorkload,
    Drawn,
    beta_from_kept,
    kept_fraction,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.types.structs import SamplingRule

SHAPE = DecoderConfig(
    vocab=2, layers=1, embed=128, heads=2, kv_heads=2, head_dim=128, mlp=1, dtype=jnp.bfloat16
)
WORKLOAD = AssumedWorkload(
    40, 0.8, 200, prompt_median_tokens=20, max_prompt_tokens=56, beta=(0.4, 0.6)
)
COSTS = Costs(burst=1e-3, decode_step=2e-3, read_token=1e-6, response=1e-3, update_token=1e-5)


class Constant:
    """Workload of responses of one length; every other one is correct."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def prompt_tokens(self, index):
        return 5

    def draw(self, step, index, samples):
        correct = np.arange(samples) % 2 == 0
        return Drawn(np.full(samples, self._tokens), np.zeros(samples, bool), correct)


def make_simulation(
    workload=WORKLOAD,
    costs=COSTS,
    replicas=1,
    filtered=True,
    carry_over="none",
    shape=SHAPE,
    platform="tpu",
    preset="dapo",
    fleet=None,
    **sampler,
):
    algorithm = algorithms.PRESETS[preset]()
    algorithm.dynamic_sampling = filtered
    sizes = {"slots": 16, "burst_tokens": 8, "max_response_tokens": 200, "page_tokens": 8}
    config = Config(
        algorithm=algorithm,
        data=Data(max_prompt_tokens=56),
        rollout=Rollout(prompts_per_step=16, samples_per_prompt=4, carry_over=carry_over),
        sampler=Sampler(**sizes | sampler),
    )
    mesh = named_mesh(Mesh(fsdp=replicas), platform, replicas)
    if fleet:
        count, times = fleet
        records = [RolloutRecord(workload, Meter(costs)) for _ in range(count)]
        opened = [simulate_sampler(config, shape, mesh, record) for record in records]
        fleet = Fleet(opened, config.sampler.slots, times)
    return Simulation(config, shape, mesh, workload, costs, fleet)


def test_responses_of_one_length_take_the_steps_counted_by_hand():
    """64 responses of 20 tokens in 16 slots: 4 waves, each of bursts of 8, 8 and (it stops) 4."""
    step = make_simulation(Constant(20), filtered=False).step()
    assert step.counts["decode_step"] == 4 * 20 and step.counts["burst"] == 4 * 3
    assert step.utilisation == 1 and step.kept == step.asked == 16
    # The first token of a response finds its 4 kept prompt tokens and itself, and so on.
    assert step.counts["read_token"] == 64 * sum(range(5, 25))
    expected = 12 * 1e-3 + 80 * 2e-3 + step.counts["read_token"] * 1e-6 + 64 * 1e-3
    assert math.isclose(step.rollout_seconds, expected)
    # A row of 256 tokens holds ten responses of 25; each of 4 updates has 16, so 2 of 16 rows.
    assert step.rows == 4 * 2 and math.isclose(step.fill, 64 * 25 / (4 * 16 * 256))
    assert math.isclose(step.update_seconds, 4 * 16 * 256 * 1e-5)


def test_samplers_share_a_step_and_wait_for_the_weights():
    """64 responses of 20 tokens: four samplers of 16 slots take a quarter of the time of one."""
    costs, times = dataclasses.replace(COSTS, response=0.0), Times(write=2.0, read=3.0)
    alone, one, four = (
        make_simulation(Constant(20), costs, filtered=False, fleet=n and (n, times))
        for n in (0, 1, 4)
    )
    steps = [[simulation.step() for _ in range(2)] for simulation in (alone, one, four)]
    for step, of_one, of_four in zip(*steps, strict=True):
        decode = step.rollout_seconds
        assert math.isclose(of_one.seconds["samplers"], 5.0 + decode)
        assert math.isclose(of_four.seconds["samplers"], 5.0 + decode / 4)
        assert step.sampled.tokens == of_one.sampled.tokens == of_four.sampled.tokens
        assert step.update_seconds == of_four.update_seconds and of_four.kept == 16
    ahead = dataclasses.replace(times, ahead=True)
    behind = make_simulation(Constant(20), costs, filtered=False, fleet=(1, ahead)).step()
    assert math.isclose(behind.seconds["samplers"], steps[0][0].rollout_seconds)
    assert math.isclose(behind.update_seconds, 5.0 + steps[0][0].update_seconds)


def test_a_sampler_starts_responses_before_the_groups_of_others_end():
    """A slot is free when its response ends, not when the longest one of its group does."""
    alone, one = (
        sum(simulation.step().rollout_seconds for _ in range(8))
        for fleet in (None, (1, Times()))
        for simulation in [make_simulation(WORKLOAD, fleet=fleet, prefill_prompts=1)]
    )
    assert math.isclose(alone, one, rel_tol=0.1)


def test_groups_of_preempted_samplers_are_sampled_again_by_others():
    """A sampler lives for a minute on average; a step takes 5 s without preemptions, or more."""
    costs = Costs(decode_step=20e-3)
    times = Times(read=1.0, lease=3.0, restart=5.0)
    stable = make_simulation(WORKLOAD, costs, fleet=(3, times))
    times = dataclasses.replace(times, preemptions=60.0)
    spot = make_simulation(WORKLOAD, costs, fleet=(3, times))
    pairs = [(stable.step(), spot.step()) for _ in range(8)]
    assert spot.sampler.preemptions > 1 and stable.sampler.preemptions == 0
    assert [a.kept for a, _ in pairs] == [b.kept for _, b in pairs]
    assert [a.kept_tokens for a, _ in pairs] == [b.kept_tokens for _, b in pairs]
    lost = sum(b.drawn_tokens - a.drawn_tokens for a, b in pairs)
    late = sum(b.rollout_seconds - a.rollout_seconds for a, b in pairs)
    assert lost > 0 and late > 0


def test_the_greedy_baseline_of_remax_is_one_more_response_per_group():
    """16 more responses of 20 tokens fill the 16 slots once."""
    step = make_simulation(Constant(20), filtered=False, preset="remax").step()
    assert step.counts["decode_step"] == (4 + 1) * 20
    assert step.drawn_tokens == (64 + 16) * 20 and step.kept_tokens == 64 * 20


def test_host_work_costs_time_unless_devices_hide_it():
    """16 groups of 4 responses of 20 tokens, with 5 of a prompt: 12 bursts of 16 slots."""
    costs = Costs(**dict.fromkeys(HOSTS, 1.0), update_token=1e-2, score_token=2e-1)
    step = make_simulation(Constant(20), costs, filtered=False).step()
    trained, updates = 64 * 25, 4 * 16 * 256 * 1e-2
    # The score pass hides the weights, and updates hide some of the metrics.
    seconds, scores = [step.seconds[name] for name in HOSTS], 15 * updates  # of 3 in 4 minibatches
    assert seconds[:3] == [12 * 16, trained, 0] and scores > trained
    assert math.isclose(seconds[3], trained - updates)
    assert math.isclose(step.update_seconds, 2 * trained + scores)


def test_several_replicas_do_not_stop_a_burst_early():
    step = make_simulation(Constant(20), filtered=False, replicas=2).step()
    assert step.counts["decode_step"] == 4 * 24 and step.utilisation == 20 / 24


def test_a_filter_requests_prompts_by_its_estimate_and_stops_with_a_full_batch():
    step = make_simulation(Constant(20), slots=64).step()
    assert step.asked == 32 and step.kept == 16  # half are expected to stay
    # The first 16 groups end after 20 steps; their verdicts are read after one more burst.
    assert step.counts["decode_step"] == 20 + 8 and step.surplus == 0
    assert step.sampled.abandoned_tokens == 64 * 8


@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_all_sampled_tokens_are_accounted_for(cache):
    pages = 64 if cache == "paged" else 0
    simulation = make_simulation(cache=cache, slots=32, pages=pages)
    for _ in range(3):
        step = simulation.step()
        busy = sum(burst.busy_slot_steps for burst in step.bursts)
        assert busy == step.drawn_tokens > step.kept_tokens > 0
        assert (step.sampled.put_back_tokens > 0) == (cache == "paged")
    whole = simulation.sample(40)
    lengths = [
        WORKLOAD.draw(3, i, 4).tokens.sum()
        for i in range(simulation.position - 40, simulation.position)
    ]
    assert whole.sampled.tokens == sum(lengths)


def test_pages_decode_more_responses_at_once_than_slots_in_the_same_memory():
    slots = make_simulation(cache="slots", slots=8).sample(32)
    paged = make_simulation(cache="paged", slots=32, pages=8 * 256 // 8).sample(32)
    assert paged.sampled.tokens == slots.sampled.tokens
    assert paged.counts["decode_step"] < slots.counts["decode_step"] / 2


@pytest.mark.parametrize("kind", ["unfinished", "all"])
@pytest.mark.parametrize("filtered", [True, False])
def test_carry_over_uses_every_prompt_once_and_samples_every_token_once(
    filtered, kind, monkeypatch
):
    """Half a batch decodes at once. `unfinished` samples its few surplus groups again."""
    plain = make_simulation(filtered=filtered, slots=32)
    plain = [plain.step() for _ in range(8)]
    seen, collect = [], simulate.collect
    keep = lambda *args, **known: seen.append(collect(*args, **known)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(simulate, "collect", keep)
    made = make_simulation(filtered=filtered, carry_over=kind, slots=32)
    steps = [made.step() for _ in range(8)]
    used = [group for collected in seen for group in collected.judged]
    places = {group.prompt.index for group in used}
    left = {group.prompt.index for group in seen[-1].carried}
    assert len(places) == len(used) and left.isdisjoint(places)
    assert left | places == set(range(made.position))
    assert all(step.kept == 16 for step in steps)
    lags = [
        number - policy
        for number, collected in enumerate(seen)
        for group in collected.groups
        for done in group.completions
        for policy, _ in done.drawn_by
    ]
    assert max(lags) in (1, 2) and min(lags) == 0
    drawn, before = (sum(step.drawn_tokens for step in run) for run in (steps, plain))
    spent = sum(len(done) for group in used for done in group.completions)
    spent += sum(group.tokens for group in seen[-1].carried)
    assert drawn == spent if kind == "all" else spent <= drawn < 1.1 * spent
    assert not filtered or drawn < before
    took, before = (sum(step.counts["decode_step"] for step in run) for run in (steps, plain))
    assert took < 0.8 * before


def test_groups_of_the_assumed_workload_are_kept_at_the_given_fraction():
    beta = beta_from_kept(0.6, 0.5, 8)
    assert math.isclose(kept_fraction(beta, 8), 0.5) and math.isclose(beta[0] / sum(beta), 0.6)
    workload = AssumedWorkload(10, 0.1, 200, beta=beta)
    counts = [workload.draw(0, i, 8).correct.sum() for i in range(4000)]
    assert abs(np.mean([0 < count < 8 for count in counts]) - 0.5) < 0.03
    with pytest.raises(ConfigError, match="at most 0.651"):
        beta_from_kept(0.9, 0.8, 10)


class Known:
    """Workload of the groups that a run sampled."""

    def __init__(self, groups: dict, prompt_tokens: dict[int, int]):
        self._groups, self._prompt_tokens = groups, prompt_tokens

    def prompt_tokens(self, index):
        return self._prompt_tokens[index]

    def draw(self, step, index, samples):
        completions, correct = self._groups[index]
        lengths = np.array([len(done) for done in completions])
        return Drawn(lengths, np.array([done.truncated for done in completions]), correct)


def draw_all(run, prompts: int) -> Known:
    """Sample every response to the first prompts as the first step would."""
    parts = run.components
    rule, keyed = SamplingRule(), {"purpose": SAMPLE_FOR_TRAINING, "step": 0}
    parts.sampler.begin(run.state.learners.policy.params, rule=rule, **keyed)
    parts.prompts.position = 0
    asked = [next(parts.prompts) for _ in range(prompts)]
    for prompt in asked:
        parts.sampler.submit(prompt, parts.config.rollout.samples_per_prompt)
    done = []
    while not parts.sampler.idle:
        done += [parts.judge.submit(*group) for group in parts.sampler.decode_burst()]
    groups = {g.prompt.index: (g.completions, g.correct) for g in parts.judge.groups(done)}
    parts.prompts.position = 0
    return Known(groups, {prompt.index: len(prompt.tokens) for prompt in asked})


SAME = "decode_steps decode_bursts prefills abandoned_tokens put_back_tokens".split()


@pytest.mark.parametrize("cache", ["slots", pytest.param("paged", marks=pytest.mark.slow)])
def test_a_simulated_step_counts_what_the_run_counts(cache, base, alone, tmp_path):
    sampler = Sampler(slots=16, burst_tokens=4, max_response_tokens=24, cache=cache)
    if cache == "paged":
        sampler.page_tokens, sampler.pages = 4, 40
    config = make_quick_config(
        base,
        tmp_path / "run",
        sampler=sampler,
        log=Log(show_group_every_steps=0, tensorboard=False),
    )
    with open_run(config) as run:
        model = run.components.decoder, run.components.learners.policy.mesh
        workload = draw_all(run, config.rollout.prompts_per_step * config.rollout.max_sample_rounds)
        run.step()
        run.store.storage.drain()  # rollouts are written in the background
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    step = Simulation(config, *model, workload, Costs()).step()
    sampled = step.sampled
    counts = [step.counts["decode_step"], step.counts["burst"], sampled.prefills]
    counts += [sampled.abandoned_tokens, sampled.put_back_tokens]
    assert counts == [row[name] for name in SAME]
    assert step.sampled.occupancy == row["slot_occupancy"]
    assert (step.kept, step.surplus) == (row["trained_groups"], row["surplus_groups"])
    assert math.isclose(step.drawn_tokens / step.kept_tokens, row["sampled_to_kept_tokens"])
    assert row["abandoned_tokens"] > 0 and (row["put_back_tokens"] > 0) == (cache == "paged")
    # The recorded groups, with others in place of those that the run stopped.
    (again,) = replay(config, *model, tmp_path / "run", 1)
    assert again.kept_tokens == step.kept_tokens and again.surplus == step.surplus
    with pytest.raises(ConfigError, match="has 1 steps"):
        calibrate(config, *model, tmp_path / "run")


def test_invalid_laws_and_meshes_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="holds no rollouts"):
        RecordedWorkload(tmp_path)
    with pytest.raises(ConfigError, match="^--spread = 0.0: must be above 0"):
        PlanSettings(spread=0.0).check()
    with pytest.raises(ConfigError, match="factorisation of the 6 devices"):
        named_mesh(Mesh(tensor=4), "tpu", 6)


@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_sliding_layers_read_their_rings(cache):
    """One layer of two sees 8 tokens: it reads its whole ring, in all 16 slots."""
    shape = dataclasses.replace(SHAPE, layers=2, window=8, sliding=(True, False))
    step, full = (
        make_simulation(Constant(20), filtered=False, cache=cache, shape=layers).step()
        for layers in (shape, SHAPE)
    )
    rings = full.counts["decode_step"] * 16 * 8
    assert step.counts["read_token"] == (rings + full.counts["read_token"]) / 2
