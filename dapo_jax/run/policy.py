"""Policies in memory for the Python API: `dapo_jax.Policy` and `dapo_jax.sample`.

Functions import heavy modules when they are called.
"""

import contextlib
import dataclasses
import inspect
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_jax.config import experiment
from dapo_jax.config.experiment import Config, Data, Log, Model, Packing, Rollout, Sampler
from dapo_jax.config.files import read_config
from dapo_jax.config.settings import check_settings
from dapo_jax.run import checks
from dapo_jax.run.objects import Environment, File, Tools, environment_settings
from dapo_jax.runtime import processes
from dapo_jax.runtime.tool_calls import read_message
from dapo_jax.types.errors import ConfigError, nearest, require

if TYPE_CHECKING:
    from dapo_jax.rollout.environments.sessions import Environments
    from dapo_jax.types.structs import Completion, Prompt

Messages = Sequence[Mapping[str, str]]
MAX_TURNS = 8


def _check_sampling(
    prompts: Iterable[str | Messages],
    *,
    samples: int = 1,
    environment: Environment | None = None,
    tools: Tools = (),
    max_turns: int = MAX_TURNS,
    answers: Sequence[str] = (),
    **sampling: Any,
) -> tuple[list[str | Messages], bool]:
    """Return the prompts, and whether some are messages. Raises `ConfigError`."""
    known = [*inspect.signature(sample).parameters, *inspect.signature(Policy.sample).parameters]
    for name in sampling.keys() - {"temperature", "top_p", "top_k"}:
        raise ConfigError(f"sample: there is no argument {name!r}{nearest(name, known)}")
    require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts")
    prompts = list(prompts)  # a column of a table, or an iterator
    require(type(samples) is int and samples > 0, "samples", samples, "a whole number above 0")
    check_settings(Sampler(top_k=sampling.pop("top_k", 0)))
    check_settings(experiment.Evaluation(**sampling))
    for i, prompt in enumerate(prompts):
        is_chat = isinstance(prompt, list | tuple) and all(isinstance(m, dict) for m in prompt)
        allowed = "text, or a list of messages with role and content"
        require(isinstance(prompt, str) or is_chat, f"prompts[{i}]", prompt, allowed)
    fits = not isinstance(answers, str) and all(isinstance(answer, str) for answer in answers)
    fits = fits and len(answers) in (0, len(prompts))
    require(fits, "answers", answers, f"a list of {len(prompts)} texts, one for each prompt")
    chat = any(not isinstance(prompt, str) for prompt in prompts)
    if environment is not None or tools:
        from dapo_jax.rollout.environments.registry import open_factory, tool_names

        require(max_turns > 0, "max_turns", max_turns, "above 0")
        require(chat or not tools, "tools", len(tools), "none, or prompts that are messages")
        settings = experiment.Environment(**environment_settings(environment, tools))
        open_factory(settings.name, tool_names(settings))
    return prompts, chat


class Policy:
    """Policy in memory, for sampling.

    >>> policy = dapo_jax.Policy(base, max_prompt_tokens=8, max_response_tokens=24, slots=8)
    >>> [len(responses) for responses in policy.sample(["1+2=", "3+3="], samples=4)]
    [4, 4]

    Args:
        model: a model folder, or the run_dir of a run (its latest checkpoint).
        max_prompt_tokens, max_response_tokens: longest prompt and response.
        slots: responses decoded at the same time.
        seed: random seed of sampling.

    Raises:
        ConfigError: the folder does not exist or can't be read.
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
        from dapo_jax.run.build import build
        from dapo_jax.run.evaluate import open_checkpoints, open_policy

        model = os.fspath(model)
        is_run = (pathlib.Path(model) / "checkpoints").is_dir()
        source = read_config(Config, model) if is_run else Config(model=Model(folder=model))
        # Keep the settings that locate and shape the checkpoint; drop training and rewards.
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
        processes.prepare_jax()
        with contextlib.ExitStack() as stack:
            checkpoints = open_checkpoints(config, not is_run, stack)
            self._components = build(config, training=False)
            stack.callback(self._components.close)  # sampling alone scores nothing
            self.name, self._params = open_policy(config, self._components, checkpoints)
            self._step = checkpoints.latest_step() if checkpoints else None
        self.tokenizer = self._components.tokenizer

    def __repr__(self) -> str:
        config = self._components.config
        return (
            f"<Policy {self.name}: prompts of at most {config.data.max_prompt_tokens} tokens, "
            f"responses of at most {config.sampler.max_response_tokens}>"
        )

    def _encode(
        self, index: int, prompt: str | Messages, answer: str, environments: "Environments | None"
    ) -> "Prompt":
        """Return a prompt in tokens, as the environment opens it. Raises `ConfigError`."""
        from dapo_jax.rollout.environments.registry import tool_schemas
        from dapo_jax.types.structs import Problem, Prompt, present

        problem = ""
        if not isinstance(prompt, str):
            chat = self.tokenizer.chat
            require(chat is not None, "model", self.name, "a folder with a chat template")
            tools = tool_schemas(environments.settings) if environments else None
            field = f"prompts[{index}]"
            try:
                messages = [read_message(dict(message)) for message in prompt]
            except ValueError as error:
                raise ConfigError(f"{field}: {error}", field) from None
            problem = messages[-1].get("content", "")
            text = present(chat, "chat template").render(messages, field, tools=tools)
        elif environments:
            text = environments.open(Problem(str(index), prompt, answer, "")).text
        else:
            text = prompt
        tokens = self.tokenizer.encode_prompt(text)
        limit = self._components.config.data.max_prompt_tokens
        allowed = f"from 1 to max_prompt_tokens = {limit} tokens long"
        fits = 0 < len(tokens) <= limit
        require(fits, f"prompts[{index}]", f"{len(tokens)} tokens", allowed)
        ids = np.asarray(tokens, np.int32)
        return Prompt(index, str(index), text, ids, answer, "", problem=problem)

    def sample(
        self,
        prompts: Iterable[str | Messages],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        environment: Environment | None = None,
        tools: Tools = (),
        max_turns: int = MAX_TURNS,
        answers: Sequence[str] = (),
    ) -> "list[list[Completion]]":
        """Sample responses to each prompt; arguments as for `dapo_jax.sample`."""
        from dapo_jax.rollout.environments.sessions import Environments
        from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING
        from dapo_jax.types.structs import RolloutKey, SamplingRule, with_texts

        prompts, chat = _check_sampling(
            prompts,
            samples=samples,
            environment=environment,
            tools=tools,
            max_turns=max_turns,
            answers=answers,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        sampler, environments = self._components.sampler, None
        responses: dict[int, list[Completion]] = {}
        with contextlib.ExitStack() as stack:
            if environment is not None or tools:
                names = environment_settings(environment, tools)
                settings = experiment.Environment(max_turns=max_turns, **names)
                environments = Environments(settings, self.tokenizer, chat)
                stack.callback(environments.close)
            golds = [*answers] or [""] * len(prompts)
            pairs = enumerate(zip(prompts, golds, strict=True))
            requests = [self._encode(i, text, gold, environments) for i, (text, gold) in pairs]
            sampler.environments = environments
            rule = SamplingRule(temperature, top_p, top_k)
            sampler.begin(self._params, RolloutKey(SAMPLE_FOR_SERVING), rule)
            for prompt in requests:
                sampler.submit(prompt, samples)
            while not sampler.idle:
                for request, completions in sampler.step():
                    step = self._step or 0  # the random numbers are those of step 0
                    done = [dataclasses.replace(c, policy_step=step) for c in completions]
                    responses[request.prompt.index] = done
            sampler.close()
        decode_all = self.tokenizer.decode_all
        return [list(with_texts(responses[prompt.index], decode_all)) for prompt in requests]

    generate = sample

    def save_pretrained(self, folder: File, **settings: Any) -> pathlib.Path:
        """Write the policy of a run as a model folder; arguments as for `dapo_jax.export`."""
        from dapo_jax.run.export import export

        if self._step is None:
            allowed = "the policy of a run: a model folder is saved already, copy it"
            raise ConfigError(f"config.model = {self.name!r}: must be {allowed}")
        run, out = self._components.config.run_dir, os.fspath(folder)
        config = experiment.ExportConfig(run=run, out=out, step=self._step, **settings)
        return export(config)


def sample(
    model: File,
    prompts: Iterable[str | Messages],
    *,
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 512,
    slots: int = 16,
    seed: int = 0,
    **sampling: Any,
) -> "list[list[Completion]]":
    """Sample responses of a policy to prompts. `Policy` loads the model once for several calls.

    >>> answers = dapo_jax.sample(base, ["1+2="], temperature=0, max_response_tokens=24)
    >>> answers[0][0].text.startswith("1+2=")
    True

    Args:
        model: a model folder, or the run_dir of a run.
        prompts: list, column of a table or iterator of texts as the policy sees them, or of lists
            of messages (`role` and `content`), which go through the folder's chat template.
        max_prompt_tokens, max_response_tokens, slots, seed: as for `Policy`.
        sampling: `samples` to each prompt (1); `temperature` (1.0; 0 takes the most likely token);
            `top_p` (1.0) and `top_k` (0: all tokens), which restrict sampling to the most likely
            tokens; `environment`, which replies to the policy between its turns: a class with
            `step(text)`, or the name of one, as in docs/environments.md; `tools`: functions that
            the policy may call, if prompts are messages; `max_turns` of a trajectory (8);
            `answers`: the answer to each prompt, for an environment that reads it.

    Returns:
        a list of responses per prompt, each with `text`, `tokens`, `sampler_logprobs` and
        `truncated` (cut off by the token limit); with an environment also `turns` and `rewards`.

    Raises:
        ConfigError: an argument is out of range, or the model can't be read.
    """
    prompts, _ = _check_sampling(prompts, **sampling)
    policy = Policy(
        model,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        slots=slots,
        seed=seed,
    )
    return policy.sample(prompts, **sampling)
