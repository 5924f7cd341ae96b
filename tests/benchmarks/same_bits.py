"""Record what short runs compute, and compare two records bit for bit.

python tests/benchmarks/same_bits.py record FOLDER [NAME ...]     a JSON file per run, or `presets`
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
    "reinforce grpo dr_grpo rloo reinforce_pp reinforce_pp_baseline gspo rft dpo cispo dppo_tv "
    "dppo_kl prime_rl ipo sapo gmpo luspo gspo_token vespo topr dro gpg tis sequence_tis icepop "
    "sequence_mis worst_token_mis deepseek_v3p2 lite_ppo maxrl opo gdpo pass_at_k "
    "best_minus_second"
).split()

# Name: (config, settings). Folders in braces are made by `make_models`.
OF_PRESETS = {f"preset_{name}": (f"arithmetic.py:{name}", TWO_UPDATES) for name in PRESETS}
RUNS = {
    "dapo": ("arithmetic.py", TWO_UPDATES),
    "ppo": ("arithmetic.py:ppo", f"{TWO_UPDATES} critic.pretrain_steps=1"),
    "vapo": ("arithmetic.py:vapo", f"{TWO_UPDATES} critic.pretrain_steps=1"),
    "distillation": ("arithmetic.py:on_policy_distillation", "extras.teacher.folder={sft}"),
    "gkd": ("arithmetic.py:gkd", "extras.teacher.folder={sft}"),
}
RUNS |= {
    name: (config, f"{TWO_UPDATES} {settings}")
    for name, (config, settings) in {
        "calculator": ("calculator.py", "model.folder={calculator}"),
        "calculator_keep_turns": (
            "calculator.py",
            "model.folder={calculator} sampler.keep_turns=true",
        ),
        "two_strategies": ("two_strategies.py", "total_steps=1"),
        "two_strategies_naive": ("two_strategies.py:1_naive", "total_steps=1"),
        "adapters": ("arithmetic.py", "lora.rank=4"),
        "experts": ("arithmetic.py", "model.folder={experts}"),
        "experts_replay": (
            "arithmetic.py",
            "model.folder={experts} algorithm.router_replay=sampler",
        ),
        "pages": ("arithmetic.py", "sampler.cache=paged sampler.pages=48"),
        "int8": ("arithmetic.py", "sampler.weights_dtype=int8 sampler.cache_dtype=int8"),
        "staleness": ("arithmetic.py:tis", "rollout.staleness=1 total_steps=3"),
        "carry_all": ("arithmetic.py:tis", "rollout.carry_over=all total_steps=3"),
        "carry_unfinished": ("arithmetic.py:tis", "rollout.carry_over=unfinished total_steps=3"),
        "sampler_share": ("arithmetic.py:tis", "mesh.sampler_share=0.5 rollout.staleness=1"),
        "two_processes": ("arithmetic.py", ""),
    }.items()
}
RUNS |= {"guessing": ("guessing.py", ""), "sft": ("arithmetic_sft.py", ""), "dpo_offline": ("", "")}


def run(command: str, *arguments: str, processes: int = 1) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".venv/jax_cache"))
    line = [sys.executable, "-m", "dapo_jax", command, *arguments]
    children = []
    for index in range(processes):
        if processes > 1:
            env |= {"DAPO_COORDINATOR": f"127.0.0.1:{port}", "DAPO_PROCESSES": str(processes)}
            env["DAPO_PROCESS_ID"] = str(index)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        children.append(subprocess.Popen(line, cwd=ROOT, env=env, **options))
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("\n".join([" ".join(line), *(text[-3000:] for text in outputs)]))


def digest(folder: pathlib.Path) -> str:
    parts = (path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def make_models(folder: pathlib.Path) -> dict[str, str]:
    """Make the model folders that some runs start from, once."""
    made = {name: str(folder / name) for name in ("sft", "calculator", "experts")}
    for name, config, steps in (
        ("sft", "arithmetic_sft", 4),
        ("calculator", "calculator_base", 60),
    ):
        if not (folder / name).is_dir():
            source = f"--config={ROOT}/configs/{config}.py"
            run("sft", source, f"--config.out={made[name]}", f"--config.total_steps={steps}")
    if not (folder / "experts").is_dir():
        make_experts(ROOT / "dapo_jax/data/policies/arithmetic_base", folder / "experts")
    return made


def make_experts(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write a folder of the base policy with four experts, each its MLP with a little noise."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    tensors, random = load_file(source / "model.safetensors"), np.random.default_rng(0)
    width = config["hidden_size"]
    out: dict = {}
    for name, value in tensors.items():
        head, mlp, tail = name.partition(".mlp.")
        if mlp:
            for expert in range(4):
                noise = random.normal(size=value.shape) * 0.02
                out[f"{head}.mlp.experts.{expert}.{tail}"] = (value + noise).astype(value.dtype)
        elif not (".self_attn." in name and name.endswith("bias")):
            out[name] = value
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        out[f"{prefix}.mlp.gate.weight"] = random.normal(size=(4, width)).astype("float32")
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


PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
    for a in range(1, 9)
    for b in range(1, 5)
]


def record(name: str, models: dict[str, str], work: pathlib.Path) -> dict:
    config, changes = (RUNS | OF_PRESETS)[name]
    source = f"--config={ROOT}/configs/{config}"
    run_dir, exported = work / "run", work / "exported"
    if name in ("sft", "dpo_offline"):
        exported = run_dir
        arguments = ["--config.total_steps=6", f"--config.out={run_dir}"]
        if name == "dpo_offline":
            pairs = work / "pairs.jsonl"
            pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
            arguments += [f"--config.data.source={pairs}", "--config.pairs_per_step=8"]
            arguments += ["--config.start=dapo_jax:arithmetic_base"]
            # Not the defaults, which follow the model and the length of the run.
            fixed = ("learning_rate=1e-4", "warmup_steps=1")
            arguments += [f"--config.optimizer.{value}" for value in fixed]
            run("dpo", *arguments, "--config.packing.row_tokens=160")
        else:
            run("sft", source, *arguments)
    else:
        parts = f"{SMALL} {changes.format(**models)}".split()
        given = {part.partition("=")[0]: f"--config.{part}" for part in parts}  # the last counts
        settings = list(given.values())
        processes = 2 if name == "two_processes" else 1
        run("train", source, *settings, f"--config.run_dir={run_dir}", processes=processes)
        run("export", f"--config.run={run_dir}", f"--config.out={exported}")
    responses = {}
    for folder in ("rollouts", "evaluations"):
        for path in sorted((run_dir / folder).glob("*")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            content = hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
            responses[f"{folder}/{path.name}"] = [len(lines), content]
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    rows = [{k: v for k, v in row.items() if k != "time" and "second" not in k} for row in rows]
    return {"params": digest(exported), "rows": rows, "responses": responses}


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Print what differs between two folders of records; 1 if anything does."""
    different, paths = 0, sorted(old.glob("*.json"))
    for path in paths:
        if not (new / path.name).is_file():
            print(f"{path.stem}: missing in {new}")
            different += 1
            continue
        left, right = (json.loads((side / path.name).read_text()) for side in (old, new))
        parts = [part for part in left if left[part] != right[part]]
        for part in parts:
            if part == "rows":
                pairs = zip(left["rows"], right["rows"], strict=False)
                names = {k for a, b in pairs for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
                part += f" ({', '.join(sorted(names)[:8])})"
            print(f"{path.stem}: {part} differ")
        different += bool(parts)
    print(f"{different} of {len(paths)} runs differ")
    return int(bool(different))


def main() -> int:
    if sys.argv[1] == "compare":
        return compare(*map(pathlib.Path, sys.argv[2:4]))
    folder, names = pathlib.Path(sys.argv[2]), sys.argv[3:] or list(RUNS)
    if names == ["presets"]:
        names = list(OF_PRESETS)
    folder.mkdir(parents=True, exist_ok=True)
    models = make_models(pathlib.Path(os.environ.get("MODELS", str(folder / "models"))))
    for name in names:
        kept = folder / f"{name}.json"
        if not kept.is_file():
            with tempfile.TemporaryDirectory() as work:
                content = record(name, models, pathlib.Path(work))
            kept.write_text(json.dumps(content, indent=1))
            print(name, len(content["rows"]), "rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
