"""Print the table of docs/pods.md: `dapo-jax plan` of every shipped variant of a real model.

    PYTHON tests/benchmarks/plan_table.py             all: hours on two cores, with the tpu extra
    PYTHON tests/benchmarks/plan_table.py 0p5b v5e_8  rows with all these parts in their name

Plans are cached (~/.cache/dapo_jax/plan), so a second call prints at once.
"""

import json
import subprocess
import sys

from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.programs import SAMPLING

SHAPES = {  # of a variant's number of chips
    "v5p": {"4": "2x2x1", "8": "2x2x2", "16": "2x2x4", "64": "4x4x4"},
    "v5e": {"1": "1x1", "4": "2x2", "8": "2x4", "16": "4x4", "256": "16x16"},
}
SHAPES["v6e"] = SHAPES["v5e"]
VARIANTS = {
    "dapo_qwen2p5_32b": "v5p_64 v6e_256 v5e_256",
    "qwen2p5_7b_math": "v6e_8 v6e_16 v5e_16 v5p_4 v5p_8 v5p_16",
    "qwen2p5_1p5b_gsm8k": "v5e_4 v5e_8 v5e_16 v6e_4 v6e_8 v6e_16",
    "qwen2p5_0p5b_gsm8k": "v5e_1 v5e_4 v5e_8 v5e_16",
}


def row(config: str, topology: str) -> str:
    """Return a row: GiB of a chip, seconds of a step, MFU, and what planning took."""
    command = [sys.executable, "-m", "dapo_jax", "plan", f"--config={config}", "--json"]
    done = subprocess.run(
        [*command, f"--topology={topology}"], stdout=subprocess.PIPE, text=True, check=False
    )
    plan = json.loads(done.stdout)
    bytes_of = {name: program["together_bytes"] for name, program in plan["programs"].items()}
    decoding = max(bytes_of[name] for name in SAMPLING)
    cells = [f"`{config}`", f"`{topology}`"]
    cells += [f"{n / GIB:.2f}" for n in (bytes_of["update"], decoding, plan["limit_bytes"])]
    if step := plan["step"]:
        mfu = f"{step['update_mfu']:.0%}, {step['update_mfu_of_full_rows']:.0%}"
        cells += [f"{step['seconds_step']:,.1f}", mfu]
    else:
        cells += ["does not fit", ""]
    cells.append(f"{plan['seconds']:.0f}, {plan['host_bytes'] / GIB:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    for file, names in VARIANTS.items():
        for name in names.split():
            config, (chip, count) = f"configs/{file}.py:{name}", name.split("_")
            if all(part in config for part in sys.argv[1:]):
                print(row(config, f"{chip}:{SHAPES[chip][count]}"), flush=True)


if __name__ == "__main__":
    main()
