"""The program of docs/environments.md, run as it stands but for its sizes."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALLER = {
    "STEPS, EXAMPLES = 30, 600": "STEPS, EXAMPLES = 1, 2",
    'source="multi_digit_sums", max_prompt_tokens=16': (
        'source="multi_digit_sums", max_prompt_tokens=16, heldout_problems=0'
    ),
    "environment=dapo_jax.Environment": (
        "rollout=dapo_jax.Rollout(prompts_per_step=4, samples_per_prompt=4, "
        "max_sample_rounds=1),\n    environment=dapo_jax.Environment"
    ),
    "Sampler(max": "Sampler(slots=16, max",
}


@pytest.mark.slow
def test_the_program_runs_in_forty_lines(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs/environments.md").read_text()
    (program,) = re.findall(r"```python\n(import re\n.*?)```", text, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 42
    for old, new in SMALLER.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    exec(compile(program, "environments.py", "exec"), scope)
    assert scope["answer"].tokens.size
    assert "step 1/1" in capsys.readouterr().out
