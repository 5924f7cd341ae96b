"""Folders of runs made without a run, and a reader of pages."""

import dataclasses
import html.parser
import json

from dapo_jax.config.experiment import Config

HOSTILE = '</script><img src=x onerror="alert(1)"><!--<script>\u2028\u202e\x00 & ${data}'


def row(step: int, **values) -> dict:
    result = {
        "step": step,
        "reward": step / 100 - 1,
        "accuracy": 0.5,
        "entropy": 1 / (1 + step),
        "seconds_step": 2.0,
        "seconds_rollout": 1.0,
        "seconds_decode": 0.5,
        "seconds_update": 0.75,
        "sampled_tokens_per_second": 1000.0,
        "abandoned_tokens": 100.0,
        "trained_groups": 8.0,
        "sampled_to_kept_tokens": 2.2,
        "clip_fraction_high": 0.01,
    }
    if step % 5 == 0:
        for name, value in (("", 0.4), ("_low", 0.3), ("_high", 0.5)):
            result[f"heldout_accuracy{name}"] = value
            result[f"heldout_reward{name}"] = 2 * value - 1
    return result | values


def response(index: int, sample: int, **values) -> dict:
    result = {"index": index, "sample": sample, "prompt_id": f"p{index}", "prompt": "1+1="}
    result |= {"response": "so 2", "extracted": "2", "correct": sample == 0, "truncated": False}
    result |= {"tokens": 4, "reward": 1.0, "reward_parts": {"rule": 1.0}, "advantage": 0.5}
    return result | {"answer": "2"} | values


def run_writer(tmp_path):
    def write(name: str, steps: int = 20, rollouts=(), seed: int = 0, rows=None, **changes) -> str:
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        config = Config(run_dir=str(folder), seed=seed, total_steps=steps)
        for section, value in changes.items():
            setattr(config, section, value)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        lines = [row(step) for step in range(steps + 1)] if rows is None else rows
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        for step, result in rollouts:
            path = folder / "rollouts" / f"step_{step:06d}.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in result))
        return str(folder)

    return write


class Page(html.parser.HTMLParser):
    """The tags of a page, its texts and the text outside of them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data
