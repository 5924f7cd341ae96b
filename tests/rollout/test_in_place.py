"""Compiled decoding updates its caches in place and does not synchronise replicas."""

import re

import jax
import numpy as np
import pytest
from hlo_arrays import COLLECTIVES, instructions
from samplers import make_engine

from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.types.structs import SamplingRule

WINDOW = 416
WRITES = ("scatter", "dynamic-update-slice")
PASSES_ON = ("parameter", "get-tuple-element", "bitcast", *WRITES)


def compiled_burst(mesh, params, **settings):
    """`generate` at a window that makes a cache far larger than anything else."""
    sizes = {"slots": 8, "burst": 4, "response": WINDOW - 16, "prompt": 16, "width": 4}
    engine = make_engine(mesh, **sizes, first_window_tokens=WINDOW, **settings)
    state, columns = engine.init_decode_state(), engine.layout.columns(WINDOW)
    loaded = engine.load_params(params)
    lowered = engine.programs.generate.lower(loaded, state, rule=SamplingRule(), columns=columns)
    return lowered.compile(), state.caches[0]


def made_anew(text: str, elements: int) -> list[str]:
    """Instructions that make an array of that many elements, and not by writing into one."""
    roots = dict(
        re.findall(r"^%?([\w.-]+) \([^\n]*\n(?:  [^\n]*\n)*?  ROOT [^\n]*? ([\w-]+)\(", text, re.M)
    )
    wrong = []
    for shape, kind, rest in re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\((.*)", text):
        if np.prod([int(n) for n in shape.split(",")]) != elements or kind in PASSES_ON:
            continue
        called = re.search(r"calls=%?([\w.-]+)", rest)
        if kind == "fusion" and called and roots.get(called[1]) in WRITES:
            continue
        wrong.append(f"{kind} [{shape}]")
    return wrong


# Many more pages than the slots' tables name, or what attention reads would have their size.
@pytest.mark.parametrize("sizes", [{}, {"cache": "paged", "page_tokens": 8, "pages": 2000}])
def test_caches_are_updated_in_place(sizes, tiny_params, one_device):
    compiled, cache = compiled_burst(one_device, tiny_params, **{"cache": "slots"} | sizes)
    largest = cache.pages if sizes else cache.values
    assert "most_likely" not in compiled.as_text()  # which only top-p and top-k need
    assert "scatter" in compiled.as_text() and not made_anew(compiled.as_text(), largest.size)
    assert sizes or compiled.memory_analysis().temp_size_in_bytes < largest.nbytes


@pytest.mark.parametrize(
    ("shape", "largest", "cache", "speculate"),
    [
        ((4, 2, 1), 0, "slots", 0),
        ((2, 2, 2), 2, "paged", 2),
        pytest.param((2, 2, 2), 2, "slots", 0, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), 0, "paged", 2, marks=pytest.mark.slow),
    ],
)
def test_decode_steps_do_not_synchronise_replicas(tiny_params, shape, largest, cache, speculate):
    mesh = make_mesh(*shape, devices=jax.devices())
    settings = {"cache": cache, "page_tokens": 8, "speculate": speculate}
    text = compiled_burst(mesh, tiny_params, **settings)[0].as_text()
    assert "all-reduce" in text  # what a burst cost is summed after it
    looped = [x for x in instructions(text) if x.looped]
    actual = [x.group for x in looped if x.operation.startswith(COLLECTIVES)]
    assert max(actual, default=0) == largest
