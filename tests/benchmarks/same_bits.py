"""Record what short runs compute, and compare two records bit for bit.

python tests/benchmarks/same_bits.py record FOLDER [NAME ...]     one JSON file per run
python tests/benchmarks/same_bits.py compare OLD NEW              exits 1 if a run differs

A record holds the rows of metrics.jsonl (without times), the recorded responses and the SHA-256 of
the exported parameters. Record the code before a change, then after it: a change that is meant to
keep the behaviour keeps every record. Two records of one processor are comparable, no others.
"""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
    "total_steps=2 rollout.prompts_per_step=8 rollout.samples_per_prompt=8 sampler.slots=32 "
    "checkpoint.every_steps=2 evaluation.every_steps=2 data.heldout_problems=8 "
    "evaluation.samples_per_problem=2 optimizer.warmup_steps=1 log.report=false "
    "log.tensorboard=false"
)
TWO_UPDATES = "rollout.updates_per_rollout=2"
PRESETS = (
    "reinforce ppo grpo dapo dr_grpo rloo reinforce_pp reinforce_pp_baseline gspo vapo rft dpo "
    "cispo dppo_tv dppo_kl prime_rl ipo sapo gmpo luspo gspo_token vespo topr dro gpg tis "
    "sequence_tis icepop sequence_mis worst_token_mis deepseek_v3p2 lite_ppo maxrl opo gdpo "
    "pass_at_k best_minus_second on_policy_distillation gkd"
).split()
ONE_UPDATE = (
    "reinforce rloo rft dpo maxrl opo best_minus_second gpg gkd"
).split()  # the ratio of these is 1

# Name: (config, settings). Folders in braces are made by MODELS.
RUNS = {
    f"arithmetic_{name}": (
        f"arithmetic.py:{name}",
        ""
        + ("" if name in ONE_UPDATE else TWO_UPDATES)
        + (" critic.pretrain_steps=1" if name in ("ppo", "vapo") else "")
        + (" teacher.folder={sft}" if name in ("on_policy_distillation", "gkd") else ""),
    )
    for name in PRESETS
} | {
    "calculator": ("calculator.py", TWO_UPDATES + " model.folder={calculator}"),
    "calculator_keep_turns": (
        "calculator.py",
        TWO_UPDATES + " model.folder={calculator} sampler.keep_turns=true",
    ),
    "guessing": ("guessing.py", ""),
    "two_strategies": ("two_strategies.py", TWO_UPDATES + " total_steps=1"),
    "two_strategies_naive": ("two_strategies.py:1_naive", TWO_UPDATES + " total_steps=1"),
    "adapters": ("arithmetic.py", TWO_UPDATES + " lora.rank=4"),
    "experts": ("arithmetic.py", TWO_UPDATES + " model.folder={experts}"),
    "experts_replay": (
        "arithmetic.py",
        TWO_UPDATES + " model.folder={experts} algorithm.router_replay=sampler",
    ),
    "pages": ("arithmetic.py", TWO_UPDATES + " sampler.cache=paged sampler.pages=48"),
    "int8": (
        "arithmetic.py",
        TWO_UPDATES + " sampler.weights_dtype=int8 sampler.cache_dtype=int8",
    ),
    "lag": ("arithmetic.py:tis", TWO_UPDATES + " rollout.lag=1 total_steps=3"),
    "carry_all": (
        "arithmetic.py:tis",
        TWO_UPDATES + " rollout.carry_over=all total_steps=3",
    ),
    "carry_unfinished": (
        "arithmetic.py:tis",
        TWO_UPDATES + " rollout.carry_over=unfinished total_steps=3",
    ),
    "sampler_share": ("arithmetic.py:tis", TWO_UPDATES + " mesh.sampler_share=0.5 rollout.lag=1"),
    "two_processes": ("arithmetic.py", TWO_UPDATES),
    "sft": ("arithmetic_sft.py", ""),
    "dpo_offline": ("", ""),
}


def run(command: str, *arguments: str, processes: int = 1) -> None:
    """Run a command of the library; raises if it fails."""
    flags = f"--xla_force_host_platform_device_count={2 // processes}"
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".venv/jax_cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for index in range(processes):
        joined = {
            "DAPO_COORDINATOR": f"127.0.0.1:{port}",
            "DAPO_PROCESSES": str(processes),
            "DAPO_PROCESS_ID": str(index),
        }
        env = os.environ | (joined if processes > 1 else {})
        env |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        line = [sys.executable, "-m", "dapo_jax", command, *arguments]
        children.append(
            subprocess.Popen(
                line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("\n".join([" ".join(line), *(text[-3000:] for text in outputs)]))


def settings(text: str) -> list[str]:
    return [f"--config.{part}" for part in text.split()]


def digest(folder: pathlib.Path) -> str:
    """SHA-256 of the tensors of a model folder."""
    content = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        content.update(path.read_bytes())
    return content.hexdigest()


def make_models(folder: pathlib.Path) -> dict[str, str]:
    """Make the model folders that some runs start from, once."""
    made = {name: str(folder / name) for name in ("sft", "calculator", "experts")}
    if not (folder / "sft").is_dir():
        run("sft", f"--config={ROOT}/configs/arithmetic_sft.py", f"--config.out={made['sft']}",
            "--config.total_steps=4")  # fmt: skip
    if not (folder / "calculator").is_dir():
        run("sft", f"--config={ROOT}/configs/calculator_base.py",
            f"--config.out={made['calculator']}", "--config.total_steps=60")  # fmt: skip
    if not (folder / "experts").is_dir():
        source = folder / "experts_source"
        shutil.copytree(ROOT / "dapo_jax/data/policies/arithmetic_base", source)
        make_experts(source, folder / "experts")
    return made


def make_experts(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write a folder of the base policy with four experts, each its MLP with a little noise."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    tensors, random = load_file(source / "model.safetensors"), np.random.default_rng(0)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    out: dict = {}
    for name, value in tensors.items():
        if ".mlp." not in name:
            if ".self_attn." in name and name.endswith("bias"):
                continue
            out[name] = value
            continue
        head, tail = name.split(".mlp.")
        for expert in range(4):
            noise = random.normal(size=value.shape) * 0.02
            out[f"{head}.mlp.experts.{expert}.{tail}"] = (value + noise).astype(value.dtype)
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        gate = random.normal(size=(4, width)).astype("float32")
        out[f"{prefix}.mlp.gate.weight"] = gate
        for norm in ("q_norm", "k_norm"):
            out[f"{prefix}.self_attn.{norm}.weight"] = np.full(head_dim, 3.0, np.float32)
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "head_dim": head_dim,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (target / "config.json").write_text(json.dumps(config))
    save_file(out, target / "model.safetensors")
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, target)


PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
    for a in range(1, 9)
    for b in range(1, 5)
]


def record(name: str, models: dict[str, str], work: pathlib.Path) -> dict:
    """Run one entry of RUNS and return its rows, responses and digests of parameters."""
    config, changes = RUNS[name]
    changes = changes.format(**models)
    run_dir, exported = work / "run", work / "exported"
    if name in ("sft", "dpo_offline"):
        arguments = ["--config.total_steps=6", f"--config.out={run_dir}"]
        if name == "dpo_offline":
            pairs = work / "pairs.jsonl"
            pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
            run("dpo", f"--config.data.source={pairs}", *arguments,
                "--config.start=dapo_jax:arithmetic_base", "--config.packing.row_tokens=160",
                "--config.pairs_per_step=8")  # fmt: skip
        else:
            run("sft", f"--config={ROOT}/configs/{config}", *arguments)
        return {"params": digest(run_dir), "rows": read_rows(run_dir), "responses": {}}
    run(
        "train",
        f"--config={ROOT}/configs/{config}",
        *settings(SMALL + " " + changes),
        f"--config.run_dir={run_dir}",
        processes=2 if name == "two_processes" else 1,
    )
    run("export", f"--config.run={run_dir}", f"--config.out={exported}")
    responses = {}
    for folder in ("rollouts", "evaluations"):
        for path in sorted((run_dir / folder).glob("*")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            content = hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
            responses[f"{folder}/{path.name}"] = [len(lines), content]
    return {"params": digest(exported), "rows": read_rows(run_dir), "responses": responses}


def read_rows(run_dir: pathlib.Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [untimed(row) for row in rows]


def untimed(row: dict) -> dict:
    return {k: v for k, v in row.items() if k != "time" and "second" not in k}


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Print what differs between two folders of records; 1 if anything does."""
    different = 0
    for path in sorted(old.glob("*.json")):
        if not (new / path.name).is_file():
            print(f"{path.stem}: missing in {new}")
            different += 1
            continue
        left, right = (json.loads((side / path.name).read_text()) for side in (old, new))
        for side in (left, right):
            side["rows"] = [untimed(row) for row in side["rows"]]
        parts = [part for part in left if left[part] != right[part]]
        for part in parts:
            if part == "rows":
                pairs = zip(left["rows"], right["rows"], strict=False)
                names = {k for a, b in pairs for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
                part += f" ({', '.join(sorted(names)[:8])})"
            print(f"{path.stem}: {part} differ")
        different += bool(parts)
    print(f"{different} of {len(list(old.glob('*.json')))} runs differ")
    return int(bool(different))


def main() -> int:
    if sys.argv[1] == "compare":
        return compare(*map(pathlib.Path, sys.argv[2:4]))
    folder, names = pathlib.Path(sys.argv[2]), sys.argv[3:] or list(RUNS)
    folder.mkdir(parents=True, exist_ok=True)
    models = make_models(pathlib.Path(os.environ.get("MODELS", str(folder / "models"))))
    for name in names:
        if (folder / f"{name}.json").is_file():
            continue
        with tempfile.TemporaryDirectory() as work:
            found = record(name, models, pathlib.Path(work))
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
        print(name, len(found["rows"]), "rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
