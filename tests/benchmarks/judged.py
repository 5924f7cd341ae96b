"""A policy that learns from a judge alone: a small model behind our own server.

    python tests/benchmarks/judged.py --folder runs/judged

The judge learns from worked examples of the embedded task whether a response ends in the reference
answer. Then its scores are the embedded policy's only reward; the verifier only measures.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import bench
import flax.linen as nn
import jax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from dapo_jax.config.experiment import Examples, ModelJudge
from dapo_jax.data.arithmetic import make_worked_example
from dapo_jax.extras.judge import write_messages
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params

END = "<|end|>"
TURN = "{{ m.content }}{{ '" + END + "' if m.role == 'assistant' else '\n' }}"
TEMPLATE = "{% for m in messages %}" + TURN + "{% endfor %}"
# So small a model compares two numbers only if they are one token.
COMPARED = r'#### \d",\n "reference answer": "\d"'
PIECES = pre_tokenizers.Split(Regex(COMPARED + r"|\d|\n|#### |[+=,?]|[^\d\n#+=,?]+|."), "isolated")
JUDGE = ModelJudge(rubric="Does the response end in #### and the reference answer?", highest=1)
SFT = (
    "examples_per_step=32 data.passes=1 data.heldout_examples=16 packing.row_tokens=256 "
    "packing.rows_per_microbatch=8 optimizer.learning_rate=5e-3 optimizer.schedule=linear"
)
TRAIN = (
    "reward.parts=judge=1 reward.correct=spread reward.timeout_seconds=120 reward.judge.highest=1 "
    "reward.judge.model=judge reward.judge.structured=false reward.judge.max_tokens=16 "
    "rollout.prompts_per_step=16 rollout.samples_per_prompt=8 rollout.updates_per_rollout=2 "
    "algorithm.overlong_punishment=false optimizer.learning_rate=4e-4 data.heldout_problems=128 "
    "evaluation.every_steps=4 evaluation.samples_per_problem=2 log.report=false"
)
SERVE = "--http_port=0 --served_name=judge --max_prompt_tokens=512 --log_requests=false"


def make_row(index: int) -> dict[str, list[dict[str, str]]]:
    """Return a judgement of a worked example."""
    problem, response = make_worked_example(1, index, Examples(max_terms=8))
    if index % 8 == 0:
        response = response.rpartition("####")[0]  # cut off
    answer = str(sum(map(int, problem[:-1].split("+"))) % 10)
    right = response.endswith(f"#### {answer}")
    grade = {"reason": "yes" if right else "no", "score": int(right)}
    reply = {"role": "assistant", "content": json.dumps(grade)}
    return {"messages": [*write_messages(JUDGE, problem, response, answer, ""), reply]}


def write_start(folder: pathlib.Path, rows: list[dict], splits: Any = PIECES) -> None:
    """Write a small model with random weights, whose tokens are the pieces of the rows' texts."""
    texts = [message["content"] + "\n" for row in rows for message in row["messages"]]
    pieces = {piece for text in texts for piece, _ in splits.pre_tokenize_str(text)}
    vocab = {piece: index for index, piece in enumerate([END, "[unknown]", *sorted(pieces)])}
    backend = Tokenizer(models.WordLevel(vocab, "[unknown]"))
    backend.add_special_tokens([END])
    backend.pre_tokenizer, backend.decoder = splits, decoders.Fuse()
    sizes = {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
    decoder = DecoderConfig(vocab=len(vocab), **sizes, rope_theta=100.0)
    params = nn.unbox(init_params(decoder, jax.random.key(0)))
    save_huggingface.save_folder(folder, params, decoder, (0,))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    options, extra = bench.read_arguments(
        __doc__, others=True, folder=pathlib.Path("runs/judged"), examples=6400, steps=12
    )
    root, examples = options.folder, options.folder / "examples.jsonl"
    rows = [make_row(index) for index in range(options.examples)]
    write_start(root / "start", rows)
    examples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = bench.flags(f"start={root / 'start'} data.source={examples} {SFT}")
    judge = bench.sft(root / "judge", *source)
    given = bench.flags(f"{TRAIN} total_steps={options.steps} reward.judge.cache={root / 'cache'}")
    command = [sys.executable, "-m", "dapo_jax", "serve", str(judge), *SERVE.split()]
    piped = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {"XLA_FLAGS": ""}}
    with subprocess.Popen(command, **piped) as server:
        try:
            (url,) = re.findall(r"http://\S+", server.stdout.readline())
            asked = f"url={url}", f"rubric={JUDGE.rubric}"
            given += [f"--config.reward.judge.{setting}" for setting in asked]
            metrics = bench.train(root / "run", "dapo", *given, *extra)
        finally:
            server.terminate()
    bench.print_table(["step", "held-out accuracy", "from", "to (95 %)", "score of the judge"])
    for row in metrics:
        if "heldout_accuracy" in row:
            names = ("accuracy", "accuracy_low", "accuracy_high", "reward")
            bench.print_row([row["step"], *(f"{row[f'heldout_{name}']:.3f}" for name in names)])
    for path in sorted((root / "run/rollouts").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        agreed = sum(line["reward_parts"]["judge"] == line["correct"] for line in lines)
        print(f"{path.stem}: the judge agrees with the verifier on {agreed} of {len(lines)}")


if __name__ == "__main__":
    main()
