"""A notebook session: Ctrl-C and resumption, functions of a cell, help, and output."""

import re
import textwrap

import nbformat
from notebook_client import execute

CELLS = (
    """
    import asyncio, os, signal, dapo_jax
    def config(name, **changes):
        return dapo_jax.Config(
            run_dir=name,
            total_steps=2,
            algorithm=dapo_jax.preset("reinforce"),
            model=dapo_jax.Model(folder=BASE),
            data=dapo_jax.Data(max_terms=3, max_prompt_tokens=8, heldout_problems=0),
            rollout=dapo_jax.Rollout(4, 4, 1),
            sampler=dapo_jax.Sampler(slots=16, max_response_tokens=24),
            packing=dapo_jax.Packing(row_tokens=64, rows_per_microbatch=16),
            log=dapo_jax.Log(tensorboard=False, report=False, show_group_every_steps=0),
            **changes,
        )
    get_ipython().object_inspect_mime("dapo_jax.Sampler")["text/plain"]
    """,
    """
    SCALE, TRAINER = 0.5, os.getpid()
    def score(prompt, response, answer):
        if os.getpid() == TRAINER or response.endswith("7"):
            raise RuntimeError("not seven")
        return SCALE * len(response)
    async def waits(prompt, response, answer):
        await asyncio.sleep(0.01)
        return 1.0
    def leave(step, row):
        os.kill(os.getpid(), signal.SIGINT)  # as the notebook's stop button
    given = {"rule": 1, score: 1, waits: 1}
    spread = config("run", reward=dapo_jax.Reward(correct="spread"))
    try:
        dapo_jax.train(spread, reward=given, on_step=leave)
        print("never")
    except KeyboardInterrupt:
        print("interrupted")
    """,
    """
    result = dapo_jax.train(spread, reward=given)
    print(result.metrics["reward_parts/given:waits"].to_pylist())
    result
    """,
    """
    result.policy, spread
    """,
)


def test_a_session(base, tmp_path):
    sources = [f"BASE = {str(base)!r}", *map(textwrap.dedent, CELLS)]
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    execute(notebook, tmp_path)
    results, printed = [], []
    for cell in notebook.cells[1:]:
        kinds = {"execute_result": [], "stream": []}  # no widget of a live line
        for output in cell.outputs:
            kinds[output["output_type"]].append(output)
        results += [output["data"]["text/plain"] for output in kinds["execute_result"]]
        printed.append("".join(output["text"] for output in kinds["stream"]))
    tip, finished, last = results
    assert "slots: int = 128" in tip and "Responses decoded in parallel. Above 0." in tip
    assert "Result(run_dir='run', summary={'steps': 2" in finished and len(finished) < 500
    assert "<Policy run step 2: prompts of at most" in last
    assert "run_dir='run'" in last and "Critic" not in last
    _, training, after, _ = printed
    assert "step 1/2" in training and "step 2/2" not in training and "\x1b" not in training
    assert re.search(r'score.*raise RuntimeError\("not seven"\)', training)
    assert training.splitlines()[-1] == "interrupted"
    assert "resuming run after step 1" in after and "step 2/2" in after and "[1.0, 1.0]" in after
