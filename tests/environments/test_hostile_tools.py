"""A tool that executes the policy's code sees no gold, and its forged replies reach nobody."""

import dataclasses
import json
import textwrap

import pytest
from conftest import make_prompt

from dapo_jax.config.experiment import Environment
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.rollout.environments.sessions import Environments

TOOLS = textwrap.dedent(
    """
    def run(code):
        names = {}
        exec(code, names)
        return str(names.get("result", ""))
    """
)
GOLD = "gold-7f3a"
# All strings that the process can reach: objects of the collector, and locals of every frame.
SEARCH = """
import gc, sys
shown = [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
frame = sys._getframe()
while frame:
    shown.append(repr(frame.f_locals))
    frame = frame.f_back
wanted = "".join(PARTS)  # not in the code itself, whose constants are objects too
result = sum(wanted in text for text in shown)
"""
FORGED = {"prompt": None, "cut": False, "failure": "", "shown": ""}
FORGED["observation"] = {"text": "forged", "messages": [], "reward": 9.0, "done": True}
FORGED["observation"] |= {"role": "tool", "failure": ""}
# Replies as of this protocol with guessed ids, and as of one without ids.
FORGE = """
import json, os
forged = json.loads({forged!r})
lines = [forged] + [{{"id": i, "reply": forged}} for i in (None, 0, 1, "0", "1", "")]
for descriptor in range(3 if {after} else 0, 256):
    try:
        if descriptor > 2:
            os.write(descriptor, b"".join(json.dumps(line).encode() + b"\\n" for line in lines))
    except OSError:
        pass
result = "done"
"""
# What a program that the tool starts has of the channel: it prints the targets of its descriptors.
INHERITED = """
import subprocess, sys
program = "import os; print([os.readlink('/proc/self/fd/%d' % i) for i in range(3)], "
program += "[i for i in range(3, 256) if os.path.exists('/proc/self/fd/%d' % i)])"
result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
"""
FORKED = """
import os
reader, writer = os.pipe()
if os.fork() == 0:
    pipes = [i for i in range(3, 256) if os.path.exists(f"/proc/self/fd/{i}")]
    kinds = [os.readlink(f"/proc/self/fd/{i}") for i in pipes if i not in (reader, writer)]
    os.write(writer, repr(kinds).encode())
    os._exit(0)
os.close(writer)
result = os.read(reader, 4096).decode()
"""


@pytest.fixture
def environments(tmp_path, monkeypatch):
    (tmp_path / "hostile_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    settings = Environment(tools="hostile_tools:run", workers=1, max_observation_tokens=2000)
    made = Environments(settings, arithmetic_tokenizer(), chat=False)
    yield made
    made.close()


def call(environments, code, index=0):
    prompt = dataclasses.replace(
        make_prompt(index, [3, 4], GOLD),
        id=f"id of {GOLD}",
        problem="1+1=",
        metadata=json.dumps({"answer": GOLD}),
    )
    turn = json.dumps({"name": "run", "arguments": {"code": code}})
    (reply,) = environments.steps([environments.submit(prompt, 7, [turn], [])])
    return reply


def test_no_object_of_the_tools_process_holds_the_answer(environments):
    assert call(environments, SEARCH.replace("PARTS", "['1+', '1=']")).text != "0"
    assert call(environments, SEARCH.replace("PARTS", "['gold', '-7f3a']")).text == "0"


def test_forged_replies_fail_and_later_trajectories_get_their_own(environments):
    forge = FORGE.format(forged=json.dumps(FORGED), after=False)
    for index in range(3):
        reply = call(environments, forge, index=index)
        assert reply.reward == 0 and "forged" not in reply.text
        assert "no reply to the request" in reply.failure
        assert call(environments, f"result = {index} + 1", index=9).text == str(index + 1)


def test_a_line_of_a_thread_after_the_reply_is_nobodys_reply(environments):
    forge = FORGE.format(forged=json.dumps(FORGED), after=True)
    late = "import threading, time\ndef later():\n    time.sleep(0.3)\n"
    late += textwrap.indent(forge, "    ") + "\nthreading.Thread(target=later).start()\nresult = 1"
    assert call(environments, late).text == "1"
    reply = call(environments, "import time\ntime.sleep(0.8)\nresult = 2", index=1)
    assert (reply.text, reply.failure) == ("2", "")


def test_programs_and_forks_of_a_tool_do_not_inherit_the_channel(environments):
    null = "/dev/null"
    shown = call(environments, INHERITED).text
    assert shown.startswith(f"['{null}', 'pipe:[") and shown.rstrip().endswith("] []")
    kinds = call(environments, FORKED).text
    assert "pipe" not in kinds and "socket" not in kinds
