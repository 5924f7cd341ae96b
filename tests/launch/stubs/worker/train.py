"""A trainer for tests: short steps, saved on a gs:// that is a folder; ends as the scenario says.

One start after the other takes an entry of the scenario's `runs`, whose keys are steps, seconds
(of a step), preempt, stands_still and at (steps where that happens), code (of the end at `at`)
and worker (the only one that ends so), and ignore (signals). SIGTERM and SIGINT save and end with
128 + the signal's number, as in the real one.
"""

import json
import os
import pathlib
import signal
import sys
import time

stub, worker = pathlib.Path(os.environ["STUB"]), int(os.environ["STUB_WORKER"])
runs = json.loads((stub / "scenario.json").read_text()).get("runs", [{}])
record = stub / "starts.jsonl"
before = [json.loads(line) for line in record.open()] if record.exists() else []
number = sum(one["worker"] == worker for one in before)
plan = runs[min(number, len(runs) - 1)]
told = {k: v for k, v in os.environ.items() if k.startswith(("JAX", "LIBTPU", "TEST_"))}
with record.open("a") as starts:
    starts.write(json.dumps({"worker": worker, "arguments": sys.argv[1:], "env": told}) + "\n")

asked = []
for wish in (signal.SIGTERM, signal.SIGINT):
    signal.signal(wish, lambda number, _: asked.append(number))
saved = stub / "gs" / f"step_{worker}"
saved.parent.mkdir(exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
print(f"from step {step}", flush=True)
while step < plan.get("steps", 6):
    step += 1
    print(f"step {step} of worker {worker}", flush=True)
    time.sleep(plan.get("seconds", 0.02))
    saved.write_text(str(step))
    if step == plan.get("preempt") and worker == 0:
        node = json.loads((stub / "node.json").read_text())
        (stub / "node.json").write_text(json.dumps(node | {"state": "PREEMPTED"}))
    if step == plan.get("stands_still"):
        time.sleep(60)
    if not (stub / "node.json").exists() or "READY" not in (stub / "node.json").read_text():
        os.kill(os.getpid(), signal.SIGKILL)
    if step == plan.get("at") and worker == plan.get("worker", worker):
        print("error: what is wrong", flush=True)
        sys.exit(plan["code"])
    if asked and not plan.get("ignore"):
        print(f"stopped by {signal.Signals(asked[0]).name}; saved", flush=True)
        sys.exit(128 + asked[0])
pathlib.Path("runs/a").mkdir(parents=True, exist_ok=True)
pathlib.Path("runs/a/summary.json").write_text("{}")
