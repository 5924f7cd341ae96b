"""Experts in the compiled text of a TPU's programs. Needs libtpu (the tpu extra), and no TPU."""

import importlib.util
import json
import re

import pytest
from command_lines import RL, load
from hlo_arrays import instructions, looped_collectives

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan import chips
from dapo_jax.extras.plan.chips import compiler_options
from dapo_jax.extras.plan.programs import lay_out, programs
from dapo_jax.extras.plan.published_shapes import config_values

EXPERTS, WIDTH, ROW = 24, 256, 1024
SHARDS = 4
CHOSEN = SHARDS * ROW * 2  # tokens that a device gathers, each for its two experts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Compiled text of update and decoding, by name: experts over 4 of 16 chips of v5e."""
    folder = tmp_path_factory.mktemp("experts")
    values = config_values("Qwen3-30B-A3B") | {"num_hidden_layers": 2, "hidden_size": 512}
    values |= {"num_attention_heads": 4, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    values |= {"moe_intermediate_size": WIDTH, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(values))
    flags = (
        f"mesh.data=1 mesh.fsdp=4 mesh.expert={SHARDS} packing.rows_per_microbatch=16 "
        f"packing.row_tokens={ROW} sampler.slots=128 sampler.max_response_tokens=640 "
        "data.max_prompt_tokens=128 compute.dtype=bfloat16 compute.remat=full "
        f"rollout.prompts_per_step=16 model.folder={folder}"
    )
    config = load(Config, f"{RL}:dapo", *(f"--config.{flag}" for flag in flags.split()))
    topology = chips.parse("v5e:4x4")
    wanted = (p for p in programs(lay_out(config, topology), 1) if p.name in ("update", "decode"))
    options = compiler_options(topology)
    return {p.name: p.lower().compile(compiler_options=options).as_text() for p in wanted}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("name", ["update", "decode"])
def test_no_array_has_an_element_for_each_pair_of_token_and_expert(name, texts):
    """Not inside of fusions either: there it would cost operations."""
    shapes = {
        tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+)\]", texts[name])
    }
    both = {s for s in shapes if CHOSEN in s and {EXPERTS, EXPERTS // SHARDS} & set(s)}
    assert not {s for s in both if len(s) > 2}, both
    assert "ragged-dot" in texts[name]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_decode_step_gathers_no_expert(texts):
    """Tokens go to their experts; 128 slots in all."""
    moved = looped_collectives(instructions(texts["decode"]))
    assert moved and not [line for line in moved if re.search(rf"\[{EXPERTS},|,{WIDTH}\]", line)]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_no_array_of_an_update_is_as_large_as_a_row_squared(texts):
    assert not [x for x in instructions(texts["update"]) if x.shape.count(ROW) > 1]
