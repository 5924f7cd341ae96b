"""The table of docs/pods.md: `dapo-jax plan` of every shipped variant of a real model.

    PYTHON tests/benchmarks/plan_table.py             all: hours on two cores, with the tpu extra
    PYTHON tests/benchmarks/plan_table.py 0p5b v5e_8  rows whose name has all these parts

Plans are cached (~/.cache/dapo_jax/plan), so that a second call prints at once.
"""

import json
import subprocess
import sys

from dapo_jax.commands.plan.chips import GIB

TOPOLOGIES = {  # of a variant's name, where it is not its number of chips in a square
    "v5e_1": "v5e:1x1",
    "v5e_4": "v5e:2x2",
    "v5e_8": "v5e:2x4",
    "v5e_16": "v5e:4x4",
    "v5e_256": "v5e:16x16",
    "v6e_4": "v6e:2x2",
    "v6e_8": "v6e:2x4",
    "v6e_16": "v6e:4x4",
    "v6e_256": "v6e:16x16",
    "v5p_4": "v5p:2x2x1",
    "v5p_8": "v5p:2x2x2",
    "v5p_16": "v5p:2x2x4",
    "v5p_64": "v5p:4x4x4",
}
VARIANTS = {
    "dapo_qwen2p5_32b": "v5p_64 v6e_256 v5e_256",
    "qwen2p5_7b_math": "v6e_8 v6e_16 v5e_16 v5p_4 v5p_8 v5p_16",
    "qwen2p5_1p5b_gsm8k": "v5e_4 v5e_8 v5e_16 v6e_4 v6e_8 v6e_16",
    "qwen2p5_0p5b_gsm8k": "v5e_1 v5e_4 v5e_8 v5e_16",
}


def row(config: str, topology: str) -> str:
    """Row of a plan: GiB of a chip, seconds of a step, MFU, and what planning took."""
    command = [sys.executable, "-m", "dapo_jax", "plan", f"--config={config}"]
    done = subprocess.run(
        [*command, f"--topology={topology}", "--json"], stdout=subprocess.PIPE, text=True
    )
    told = json.loads(done.stdout)
    size = {name: program["together_bytes"] / GIB for name, program in told["programs"].items()}
    cells = [f"`{config}`", f"`{topology}`"]
    decoding = max(size[name] for name in ("load", "prefill", "insert", "decode"))
    cells += [f"{one:.2f}" for one in (size["update"], decoding, told["limit_bytes"] / GIB)]
    step = told["step"]
    if step is None:
        cells += ["does not fit", ""]
    else:
        share = f"{step['update_mfu']:.0%}, {step['update_mfu_of_full_rows']:.0%}"
        cells += [f"{step['seconds_step']:,.1f}", share]
    cells.append(f"{told['seconds']:.0f}, {told['host_bytes'] / GIB:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the rows that the command line asks for."""
    for file, names in VARIANTS.items():
        for name in names.split():
            config = f"configs/{file}.py:{name}"
            if all(part in config for part in sys.argv[1:]):
                print(row(config, TOPOLOGIES[name]), flush=True)


if __name__ == "__main__":
    main()
