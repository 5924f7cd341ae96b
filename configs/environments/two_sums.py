"""An environment package of verifiers for the embedded policy: two sums in turn.

The policy adds without carrying: only the last digit of a sum counts.
"""

import itertools
import random

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]: installed by hand


class SumsData(vf.TaskData):
    sums: list[str]


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """Return the fraction of the sums that are right."""
        replies = [message.content or "" for message in trace.assistant_messages]
        answers = [str(sum(map(int, text[:-1].split("+"))) % 10) for text in self.data.sums]
        pairs = zip(replies, answers, strict=False)
        return sum(reply.endswith(f" {answer}") for reply, answer in pairs) / len(answers)


class SumsEnv(vf.SingleAgentEnv):
    async def run(self, task: SumsTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            for text in task.data.sums:
                if (await talk.turn(text)).terminated:
                    break


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            make = random.Random(index)
            sums = ["+".join(str(make.randint(1, 9)) for _ in range(n)) + "=" for n in (4, 3)]
            yield SumsTask(SumsData(prompt=None, sums=sums), self.config.task)


__all__ = ["SumsEnv", "SumsTaskset"]
