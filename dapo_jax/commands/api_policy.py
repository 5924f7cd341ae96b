"""Python API of a policy in memory; public as `dapo_jax.Policy` and `dapo_jax.sample`.

Heavy modules are imported when a function is called.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dapo_jax.commands import checks
from dapo_jax.commands.api_environments import MAX_TURNS, Environment, Shown, Tools, opened
from dapo_jax.commands.api_folders import File
from dapo_jax.config.experiment import Config, Data, Log, Model, Packing, Rollout, Sampler
from dapo_jax.config.files import read_config
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import require

if TYPE_CHECKING:
    from dapo_jax.structs import Completion, Prompt

AT_LEAST = {
    "samples": "a whole number above 0",
    "top_k": "a whole number, at least 0",
    "temperature": "0, or from 0.001 to 100",
    "top_p": "a number above 0 and at most 1",
}
Messages = Sequence[Mapping[str, str]]


class Policy:
    """Policy in memory, for sampling.

    >>> policy = dapo_jax.Policy(base, max_prompt_tokens=8, max_response_tokens=24, slots=8)
    >>> [len(responses) for responses in policy.sample(["1+2=", "3+3="], samples=4)]
    [4, 4]

    Args:
        model: a model folder, or the run_dir of a run, whose newest checkpoint is taken.
        max_prompt_tokens, max_response_tokens: longest prompt and response.
        slots: responses decoded side by side.
        seed: key of the draws.

    Raises:
        ConfigError: no such folder, or one that can't be read.
    """

    def __init__(
        self,
        model: File,
        *,
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        slots: int = 16,
        seed: int = 0,
    ):
        from dapo_jax.run.components import build
        from dapo_jax.run.evaluation.evaluate import open_checkpoints, open_policy

        model = os.fspath(model)
        run = (pathlib.Path(model) / "checkpoints").is_dir()
        source = read_config(Config, model) if run else Config(model=Model(folder=model))
        # Settings of the checkpoint's content and place; training and rewards are not needed.
        config = Config(
            run_dir=model,
            seed=seed,
            model=dataclasses.replace(source.model, reference_folder=""),
            lora=source.lora,
            compute=dataclasses.replace(source.compute, attention="auto"),
            mesh=source.mesh,
            optimizer=source.optimizer,
            data=Data(max_prompt_tokens=max_prompt_tokens, heldout_problems=0),
            rollout=Rollout(samples_per_prompt=max(slots, 2)),
            packing=Packing(
                row_tokens=max_prompt_tokens + max_response_tokens,
                rows_per_microbatch=source.packing.rows_per_microbatch,
            ),
            log=Log(console=False),
            sampler=Sampler(
                slots=slots,
                max_response_tokens=max_response_tokens,
                first_window_tokens=max_prompt_tokens,
            ),
        )
        checks.check(config)
        processes.set_compilation_cache()
        with contextlib.ExitStack() as stack:
            checkpoints = open_checkpoints(config, not run, stack)
            self._components = build(config, training=False)
            stack.callback(self._components.close)  # nothing is judged here
            self.name, self._params = open_policy(config, self._components, checkpoints)
        self.tokenizer = self._components.tokenizer

    def __repr__(self) -> str:
        config = self._components.config
        return (
            f"<Policy {self.name}: prompts of at most {config.data.max_prompt_tokens} tokens, "
            f"responses of at most {config.sampler.max_response_tokens}>"
        )

    def _prompt(self, index: int, text: str | Messages, shown: Shown) -> "Prompt":
        from dapo_jax.structs import Problem, Prompt, present

        chat, problem = self.tokenizer.chat, text if isinstance(text, str) else ""
        if isinstance(text, str):
            text = shown.opening(Problem(str(index), text, "", "")).text
        else:
            require(chat is not None, "model", self.name, "a folder with a chat template")
            messages, problem = [dict(message) for message in text], str(text[-1]["content"])
            text = present(chat, "chat template").render(messages, tools=shown.tools)
        tokens = self.tokenizer.encode_prompt(text)
        limit = self._components.config.data.max_prompt_tokens
        require(
            0 < len(tokens) <= limit,
            f"prompts[{index}]",
            f"{len(tokens)} tokens",
            f"from 1 to max_prompt_tokens = {limit} tokens long",
        )
        return Prompt(
            index, str(index), text, np.asarray(tokens, np.int32), "", "", problem=problem
        )

    def sample(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        environment: Environment | None = None,
        tools: Tools = (),
        max_turns: int = MAX_TURNS,
    ) -> "list[list[Completion]]":
        """Samples responses to each prompt; arguments as for `dapo_jax.sample`."""
        from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING, SamplingRule
        from dapo_jax.structs import with_texts

        require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts")
        for name, value in {"samples": samples, "top_k": top_k}.items():
            require(
                type(value) is int and value >= (name == "samples"), name, value, AT_LEAST[name]
            )
        for name, value in {"temperature": temperature, "top_p": top_p}.items():
            fits = type(value) in (int, float) and (
                0 < value <= 1 if name == "top_p" else value == 0 or 0.001 <= value <= 100
            )
            require(fits, name, value, AT_LEAST[name])
        sampler, rule = self._components.sampler, SamplingRule(temperature, top_p, top_k)
        chat = any(not isinstance(prompt, str) for prompt in prompts)
        responses: dict[int, list[Completion]] = {}
        with opened(self.tokenizer, chat, environment, tools, max_turns) as (environments, shown):
            requests = [self._prompt(i, text, shown) for i, text in enumerate(prompts)]
            sampler.environments = environments
            sampler.begin(self._params, purpose=SAMPLE_FOR_SERVING, step=0, rule=rule)
            for prompt in requests:
                sampler.submit(prompt, samples)
            while not sampler.idle:
                responses |= {prompt.index: list(done) for prompt, done in sampler.decode_burst()}
            sampler.release()
        decode_all = self.tokenizer.decode_all
        return [list(with_texts(responses[prompt.index], decode_all)) for prompt in requests]


def sample(
    model: File,
    prompts: Sequence[str | Messages],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    environment: Environment | None = None,
    tools: Tools = (),
    max_turns: int = MAX_TURNS,
    **limits: int,
) -> "list[list[Completion]]":
    """Samples responses of a policy to prompts. `Policy` reads the model once for several calls.

    >>> answers = dapo_jax.sample(base, ["1+2="], temperature=0, max_response_tokens=24)
    >>> answers[0][0].text.startswith("1+2=")
    True

    Args:
        model: a model folder, or the run_dir of a run.
        prompts: texts as the policy sees them, or lists of messages (`role` and `content`), which
            go through the folder's chat template.
        samples: responses to each prompt.
        temperature: 0 takes the likeliest token.
        top_p, top_k: what of the distribution is drawn from; 1 and 0: all.
        environment: answers the policy between its turns: a class with `step(text)`, or the name
            of one, as in docs/environments.md.
        tools: functions that the policy may call, where prompts are messages.
        max_turns: of a trajectory.
        limits: `max_prompt_tokens`, `max_response_tokens`, `slots`, `seed` of `Policy`.

    Returns:
        per prompt a list of responses, each with `text`, `tokens`, `sampler_logprobs` and
        `truncated` (whether the limit cut it off); with an environment also `turns` and `rewards`.

    Raises:
        ConfigError: an argument makes no sense, or the model can't be read.
    """
    policy = Policy(model, **limits)
    return policy.sample(
        prompts,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        environment=environment,
        tools=tools,
        max_turns=max_turns,
    )
