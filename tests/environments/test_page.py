"""The program of docs/environments.md, run as it stands but for its sizes."""

import pathlib
import re

import pytest
from row_files import read_table

ROOT = pathlib.Path(__file__).parents[2]
SMALLER = dict(read_table(__file__, "smaller"))


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
