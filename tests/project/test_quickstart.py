"""docs/quickstart.md, followed literally in an empty folder."""

import json
import re
import subprocess

from first_hour import PAGE, environment, first_hour


def test_a_first_hour_by_the_quickstart_alone(tmp_path):
    output = "\n".join(first_hour(tmp_path))
    assert "step 2/2" in output and "\x1b" not in output
    assert (tmp_path / "models/mine/config.json").exists()
    completion = next(line for line in output.splitlines() if '"text_completion"' in line)
    begin = completion.index('{"id"')  # curl ends no line: server output may follow
    choice = json.JSONDecoder().raw_decode(completion, begin)[0]["choices"][0]
    assert re.match(r"\d\+\d=\d", choice["text"]) and choice["finish_reason"] == "stop"
    rows = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert "reward_parts/mine.reward:score" in json.loads(rows[-1])


def test_mistake_of_the_quickstart_prints_its_error(tmp_path):
    command, answer = re.search(r"^(dapo-jax .*)\n\n(error: .*)$", PAGE.read_text(), re.M).groups()
    config = re.search(r"cat > (mine/config.py) <<'EOF'\n(.*?)^EOF$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "mine").mkdir()
    (tmp_path / config[1]).write_text(config[2])
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), text=True, capture_output=True
    )
    assert (done.returncode, done.stderr.strip()) == (2, answer)
