"""Advice on settings to change where a plan does not fit."""

from typing import Any

from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.compile_programs import CompiledProgram
from dapo_jax.commands.plan.programs import SAMPLING
from dapo_jax.commands.plan.step_estimate import token_bytes

STRONGER_REMAT = {
    "none": "dots",
    "dots": "attention",
    "attention": "full",
    "full": "offload",
}


def _sampling(plan: Any, program: CompiledProgram, missing: float) -> list[str]:
    """Changes for programs of the sampler: fewer slots, more shards, loading by layers."""
    config, engine = plan.layout.config, plan.layout.engine
    if program.name == "load":
        layers = max(1, plan.layout.decoder.layers // 8)
        return [f"config.sampler.load_layers={layers}: fewer layers are copied at once"]
    held = token_bytes(plan.layout) * engine.cache_tokens
    fewer = int(-(-missing // held)) * engine.replicas
    advice = []
    if config.sampler.slots > fewer:
        advice.append(f"config.sampler.slots={config.sampler.slots - fewer}: {fewer} fewer")
    if plan.layout.decoder.kv_heads % (2 * config.mesh.tensor * config.mesh.decode_tensor) == 0:
        advice.append(f"config.mesh.decode_tensor={2 * config.mesh.decode_tensor}")
    advice.append("config.sampler.pages: pages for the lengths that come, not for full slots")
    return advice


def _training(plan: Any) -> list[str]:
    """Changes for update and score passes: more recomputed, fewer rows, more shards."""
    config, advice = plan.layout.config, []
    stronger = STRONGER_REMAT.get(config.compute.remat)
    if stronger:
        advice.append(f"config.compute.remat={stronger}")
    rows, shards = config.packing.rows_per_microbatch, plan.layout.mesh.size
    if rows % 2 == 0 and rows > shards // config.mesh.tensor:
        advice.append(f"config.packing.rows_per_microbatch={rows // 2}")
    if config.mesh.tensor * config.mesh.decode_tensor < plan.layout.decoder.kv_heads:
        advice.append(f"config.mesh.tensor={2 * config.mesh.tensor}: rows are shared by more chips")
    return advice


def changes(plan: Any) -> list[str]:
    """Lines of advice, one per program that does not fit: how much is missing, what would help."""
    lines = []
    for program in plan.measured.values():
        missing = program.together - plan.limit
        if program.fits(plan.limit):
            continue
        state = sum(v for k, v in program.alive.items() if k not in ("cache", "prompts"))
        if state > plan.limit:
            what = (
                f"what stays takes {state / GIB:.1f} GiB of a chip alone: more chips, a smaller "
                "model, or config.lora.rank"
            )
        else:
            sampling = program.name in SAMPLING
            several = _sampling(plan, program, missing) if sampling else _training(plan)
            what = f"try {' or '.join(several)}"
        lines.append(f"- {program.name}: {missing / GIB:.2f} GiB too much; {what}")
    return lines
