"""Pages and slots give the same tokens, and no page is lost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samplers
from conftest import TINY, make_prompt
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from named_meshes import named_mesh
from paged_slots import SIZE, WIDTH, decode, make_slots
from samplers import GREEDY, TOKENIZER, make_engine, place, sample, tokens_of

from dapo_jax.config.experiment import Config, Mesh, Sampler
from dapo_jax.model.caches import PageCache
from dapo_jax.model.decode_attention import (
    PagedAttention,
    SlotContext,
    has_kernel,
    interleave,
    read_pages_by_kernel,
    rounded,
)
from dapo_jax.model.inference import prefill
from dapo_jax.model.training_attention import AttentionOptions, Window
from dapo_jax.rollout.cache_layout import CacheLayout
from dapo_jax.rollout.page_table import DROPPED, NO_OWNER, PageGeometry, PageTable
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.notices import setting_warnings
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import RolloutKey, SamplingRule

RAGGED = [make_prompt(i, [2 + (7 * i + j) % 20 for j in range(1 + 3 * i % 17)]) for i in range(14)]
LONGEST, RESPONSE = 17, 30


SIZES = {
    "slots": 8,
    "response": RESPONSE,
    "prompt": LONGEST,
    "width": 4,
    "first_window_tokens": 16,
    "page_tokens": 4,
}


def make_sampler(mesh, **settings) -> Scheduler:
    return samplers.make_sampler(mesh, **SIZES | settings)


def paged(mesh, **settings) -> tuple[Scheduler, PageTable]:
    engine = samplers.make_engine(mesh, **SIZES | {"cache": "paged"} | settings)
    return Scheduler(engine, TOKENIZER, seed=5), engine.pages


def free_pages(table: PageTable) -> int:
    return sum(map(len, table._free))


def held_pages(table: PageTable) -> int:
    """Return how many pages slots hold; every other page must be free."""
    held = {(table.replica(slot), page) for slot in table.slots for page in table.pages_of(slot)}
    assert NO_OWNER not in {page for _, page in held}
    geometry = table.geometry
    assert len(held) + free_pages(table) == geometry.replicas * (geometry.pages - 1)
    return len(held)


def watch(sampler, table) -> list[int]:
    """Check the page table after every burst; return how many pages were held then."""
    held, burst = [], sampler.step

    def checked():
        done = burst()
        held.append(held_pages(table))
        return done

    sampler.step = checked
    return held


@pytest.fixture(scope="module")
def unpaged(tiny_params, one_device):
    """Return a function of a rule: the tokens that slots of one length sample."""
    sampler = make_sampler(one_device, cache="slots")
    return functools.cache(lambda rule: tokens_of(sample(sampler, tiny_params, RAGGED, 5, rule)))


@pytest.mark.parametrize(
    "rule", [SamplingRule(), pytest.param(GREEDY, marks=pytest.mark.slow)], ids=["drawn", "greedy"]
)
def test_pages_and_slots_sample_the_same_tokens(tiny_params, one_device, unpaged, rule):
    sampler, table = paged(one_device)
    held = watch(sampler, table)
    assert tokens_of(sample(sampler, tiny_params, RAGGED, 5, rule)) == unpaged(rule)
    assert sampler.counts.prefills == len(RAGGED) and sampler.counts.put_back_tokens == 0
    assert max(held) > 8 and held[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "slots", "pages"),
    [("one_device", 8, 12), ("one_device", 8, 30), ("eight_devices", 16, 4 * 13)],
)
def test_responses_that_lost_their_pages_are_sampled_again(
    mesh, slots, pages, tiny_params, unpaged, request
):
    """Replicas have separate pages."""
    sampler, table = paged(request.getfixturevalue(mesh), slots=slots, pages=pages)
    held = watch(sampler, table)
    assert tokens_of(sample(sampler, tiny_params, RAGGED, 5)) == unpaged(SamplingRule())
    assert sampler.counts.put_back_tokens > 0
    assert sampler.counts.responses == 5 * len(RAGGED)
    assert max(held) > pages // 2 and held[-1] == 0


def test_a_prompts_full_pages_are_shared_by_its_responses(tiny_params, one_device):
    prompt = make_prompt(0, [3 + j % 9 for j in range(LONGEST)])
    sampler, table = paged(one_device, slots=8, burst=1)
    sampler.begin(tiny_params, RolloutKey(0, 2), SamplingRule())
    sampler.submit(prompt, 8)
    sampler.step()
    # Sixteen tokens before the one that is fed: four pages of all, and one each.
    assert held_pages(table) <= 4 + 8
    rows = [table.pages_of(slot) for slot in table.slots]
    assert len({tuple(row[:4]) for row in rows}) == 1
    assert len({row[4] for row in rows}) == len(rows) > 1


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_abandoned_responses_free_their_pages(tiny_params, one_device, unpaged, keep):
    sampler, table = paged(one_device, pages=12)
    sampler.begin(tiny_params, RolloutKey(0, 9), SamplingRule())
    for prompt in RAGGED:
        sampler.submit(prompt, 3)
    for _ in range(3):
        sampler.step()
    assert held_pages(table) > 0
    sampler.stop(keep)
    assert held_pages(table) == 0
    again = tokens_of(sample(sampler, tiny_params, RAGGED, 5))
    assert again == unpaged(SamplingRule())


def test_too_few_pages_are_rejected(one_device, eight_devices):
    with pytest.raises(ConfigError, match="sampler.pages = 11: must be 0.*at least 12"):
        paged(one_device, pages=11)
    with pytest.raises(ConfigError, match="sampler.pages = 50: .*multiple of data x fsdp = 4"):
        paged(eight_devices, pages=50)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int8_per_head"])
def test_an_eight_bit_cache_stays_near_the_exact_one(dtype, tiny_params, one_device, eight_devices):
    """Few pages on eight devices and the slots of one device, if they exist, sample the same."""
    exact = sample(make_sampler(one_device), tiny_params, RAGGED, 3)
    actual = sample(paged(one_device, cache_dtype=dtype)[0], tiny_params, RAGGED, 3)
    few, _ = paged(eight_devices, cache_dtype=dtype, pages=4 * 13)
    assert tokens_of(sample(few, tiny_params, RAGGED, 3)) == tokens_of(actual)
    if dtype == "int8":
        slots = sample(make_sampler(one_device, cache_dtype=dtype), tiny_params, RAGGED, 3)
        assert tokens_of(slots) == tokens_of(actual)
    gaps = [
        np.abs(a.sampler_logprobs[0] - b.sampler_logprobs[0])
        for index, group in exact.items()
        for a, b in zip(group, actual[index], strict=True)
        if a.tokens[0] == b.tokens[0]
    ]
    assert len(gaps) > 30 and 1e-6 < np.mean(gaps) < 0.05


@pytest.mark.parametrize(
    ("int8", "window"), [pytest.param(False, None, marks=pytest.mark.slow), (True, Window(5))]
)
def test_gathered_pages_equal_the_reference_of_the_kernel(window, int8, one_device, monkeypatch):
    """Head order, window and scale are those that the TPU's kernel receives."""
    rng = np.random.default_rng(0)
    slots, width, size, kv_heads, head_dim, heads = 4, 3, 8, 2, 128, 6

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pages, scales = normal(20, size, 2 * kv_heads, head_dim), None
    if int8:
        pages = jnp.round(pages * 30).astype(jnp.int8)
        scales = jnp.asarray(rng.uniform(0.01, 0.1, 2 * kv_heads), jnp.float32)
    tables = rng.permutation(np.arange(1, 20))[: slots * width].reshape(slots, width)
    tables, lengths = jnp.asarray(tables, jnp.int32), jnp.asarray([1, 8, 13, 24], jnp.int32)
    queries = normal(slots, 1, heads, head_dim)
    new = normal(slots, 1, kv_heads, head_dim), normal(slots, 1, kv_heads, head_dim)
    context = SlotContext(lengths[:, None] - 1, lengths > 0, tables)
    attend = PagedAttention(one_device, kernel=False)
    actual, cache = attend(
        queries, *new, context, PageCache(pages, scales), AttentionOptions(window)
    )
    options = {}

    def reference(queries, pages, *args, sm_scale, sliding_window, **others):
        options.update(others)
        scaled = {"sm_scale": sm_scale, "sliding_window": sliding_window}
        pages = pages.astype(queries.dtype)
        return kernel.ref_ragged_paged_attention(queries, pages, *args, **scaled)

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", reference)
    expected = read_pages_by_kernel(queries, cache, tables, lengths, window)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert options["k_scale"] == options["v_scale"] == (1.0 if int8 else None)
    assert options["num_kv_pages_per_block"] == width
    assert options["num_queries_per_block"] == slots


@pytest.mark.parametrize("field", ["cache_dtype", "weights_dtype"])
def test_uncorrected_rounding_gives_a_warning(field):
    config = Config(sampler=Sampler(**{field: "int8"}))
    (warning,) = setting_warnings(config, [])
    assert field in warning and "importance_cap = 0" in warning
    config.algorithm.importance_cap = 2.0
    assert not [*setting_warnings(config, []), *setting_warnings(Config(), [])]


# --- the page table alone -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_every_page_is_either_free_or_held(seed):
    rng = np.random.default_rng(seed)
    replicas, each = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    size, longest = int(rng.integers(1, 7)), int(rng.integers(8, 60))
    full = -(-longest // size)
    table = PageTable(
        PageGeometry(
            replicas=replicas,
            pages=1 + full + int(rng.integers(0, 3 * full)),
            page_tokens=size,
            slots=replicas * each,
            slot_tokens=longest,
        )
    )
    total, lengths, ages = free_pages(table), {}, {}
    for time in range(300):
        free = [slot for slot in range(replicas * each) if slot not in lengths]
        for slot in free[: int(rng.integers(0, 4))]:
            prompt = int(rng.integers(0, 5))
            tokens = (3 * prompt) % (longest // 2)
            if table.claim(slot, tokens + 1, prompt):
                fills = table.fills([slot], [0], width=1, prompts=1, time=longest)
                written = fills.block[fills.page < DROPPED]
                assert written[-1] == tokens // size
                lengths[slot], ages[slot] = tokens, time
        order = sorted(lengths, key=lambda slot: (ages[slot], slot))
        needed = np.zeros(replicas * each, int)
        needed[order] = [lengths[slot] + 3 for slot in order]
        for slot in table.reserve(order, needed):
            older = [s for s in order if s in lengths and table.replica(s) == table.replica(slot)]
            assert older[-1] == slot  # nobody younger runs there
            del lengths[slot], ages[slot]
        for slot in list(lengths):
            lengths[slot] += 3
            row = table.tables[slot]
            assert (row > 0).sum() * size >= min(lengths[slot], longest)
            if lengths[slot] >= longest or rng.random() < 0.05:
                table.release(slot)
                table.release(slot)  # a second time changes nothing
                del lengths[slot], ages[slot]
        assert free_pages(table) + held_pages(table) == total
    for slot in list(lengths):
        table.release(slot)
    assert free_pages(table) == total and not table.tables.any()


# --- layout by platform and shape -----------------------------------------------------------------


def layout(cache: str = "auto", *, tensor: int = 1, cache_dtype: str = "auto", **shape):
    """Layout on TPU chips of pages of 16 tokens."""
    config, chips = (
        dataclasses.replace(TINY, **shape),
        named_mesh(Mesh(tensor=tensor), "tpu", tensor),
    )
    settings = Sampler(slots=2, page_tokens=SIZE, cache=cache, cache_dtype=cache_dtype)
    return CacheLayout(config, chips, settings, SIZE * WIDTH)


@pytest.mark.parametrize("head_dim", [64, 96, 192])
def test_unaligned_heads_never_use_the_ragged_kernel(head_dim, monkeypatch, one_device):
    def called(*args, **options):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", called)
    slots = make_slots(4, 2, head_dim, (5, 20), jnp.float32)
    slots.pages = np.nan_to_num(slots.pages)  # gathered keys of weight 0 are multiplied
    with pytest.raises(AssertionError, match="the kernel was called"):
        jax.jit(decode(one_device, kernel=True))(*slots.arrays(jnp.float32))
    assert layout(head_dim=head_dim).pages is None
    kernel = layout("paged", head_dim=head_dim).by_kernel
    mixed, _ = jax.jit(decode(one_device, kernel=kernel))(*slots.arrays(jnp.float32))
    np.testing.assert_allclose(mixed, slots.mixed(), atol=2e-6)


BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [
        *((heads, 128, BFLOAT16) for heads in (1, 3, 8, 10, 16)),
        *((heads, 128, FLOAT32) for heads in (3, 8, 10)),
        (2, 64, BFLOAT16),
        (2, 256, BFLOAT16),
    ],
)
def test_supported_kernel_shapes_are_those_that_jax_traces(kv_heads, head_dim, dtype, one_device):
    arrays = make_slots(2 * kv_heads, kv_heads, head_dim, (5,), dtype).arrays(dtype)
    try:
        jax.eval_shape(decode(one_device), *arrays)
        traced = True
    except (AssertionError, ValueError):
        traced = False
    assert has_kernel("tpu", head_dim, SIZE, kv_heads, dtype) == traced
    assert not has_kernel("gpu", head_dim, SIZE, kv_heads, dtype)


def test_the_layout_depends_on_the_heads_per_device():
    of_heads = {"head_dim": 128, "heads": 40, "kv_heads": 40, "dtype": jnp.bfloat16}
    assert layout(**of_heads).pages is not None
    assert layout(**of_heads).by_kernel
    assert layout(tensor=4, **of_heads).pages is None  # 10 of each
    assert not layout("paged", tensor=4, **of_heads).by_kernel


def test_int8_pages_on_tpu_need_a_scale_per_head():
    by_head = {"cache_dtype": "int8_per_head", "head_dim": 128}
    assert layout(**by_head).by_kernel
    with pytest.raises(ConfigError, match=r"sampler.cache_dtype = 'int8_per_head'.*2, 4, 8 or"):
        layout(**by_head, kv_heads=1)  # a word has four int8
    with pytest.raises(ConfigError, match=r"sampler.cache = 'slots'.*'paged' or 'auto'"):
        layout("slots", **by_head)
    assert layout(cache_dtype="int8", head_dim=128).pages is None
    with pytest.raises(ConfigError, match=r"sampler.cache = 'paged'.*reads no scales"):
        layout("paged", cache_dtype="int8", head_dim=128)


def test_calibrated_scales_cover_other_prompts(tiny_params, one_device):
    engine = make_engine(one_device, cache="paged", page_tokens=4, cache_dtype="int8_per_head")
    params = engine.load_params(place(tiny_params, TINY, one_device))
    scales = engine.init_decode_state().caches
    prompt = np.array([[3, 9, 4, 7, 20, 5, 2, 11]])
    caches, _ = jax.jit(prefill, static_argnums=1)(params, TINY, prompt, np.array([8]))
    for own, cache in zip(scales, caches, strict=True):
        pairs = np.asarray(interleave(cache.keys, cache.values, 2))
        assert own.scales.shape == (2 * TINY.kv_heads,) and (pairs.max((0, 1, 3)) > 0).all()
        shares = np.abs(pairs).max((0, 1, 3)) / (127 * np.asarray(own.scales))
        assert (shares > 0.2).all() and (shares <= 1).all()
        whole, none = rounded(own, jnp.asarray(pairs) * 100)  # what is beyond them is cut off
        assert none is None and np.abs(np.asarray(whole, int)).max() == 127
