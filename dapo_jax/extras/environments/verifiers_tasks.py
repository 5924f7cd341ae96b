"""Tasks of environment packages of the library verifiers, as problems."""

import itertools
import json
import os
import sys
import types
from typing import Any, NamedTuple

from dapo_jax.config.experiment import Data
from dapo_jax.extras.environments import import_package
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

HARNESS = "dapo_jax_chat"


class Package(NamedTuple):
    """An environment package: the library, its loaders, and the package's config."""

    library: Any
    loaders: Any
    config: Any


def _chat_harness(library: Any) -> types.ModuleType:
    """Return the plug-in with the harness of the policy: a chat loop that calls the task's tools.

    It is the library's harness `null` without a program in another process.
    """
    import httpx
    from verifiers.v1.dialects import chat  # pyright: ignore[reportMissingImports]: optional
    from verifiers.v1.harnesses.utils import mcp  # pyright: ignore[reportMissingImports]: optional

    class Chat(library.Harness[library.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [chat.message_to_wire(message) for message in prompt or ()]
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            headers, calls = {"Authorization": f"Bearer {secret}"}, True
            client = httpx.AsyncClient(timeout=None, trust_env=False, verify=False, headers=headers)
            async with mcp.AsyncExitStack() as stack, client:
                tools, places, connections = await mcp.connect_mcp(servers, stack)
                body = {"model": ctx.model, "messages": messages} | (
                    {"tools": tools} if tools else {}
                )
                while calls:
                    reply = await client.post(f"{endpoint}/chat/completions", json=body)
                    reply.raise_for_status()
                    messages.append(reply.json()["choices"][0]["message"])
                    calls = messages[-1].get("tool_calls") or ()
                    for call in calls:
                        name = call["function"]["name"]
                        arguments = json.loads(call["function"]["arguments"])
                        content = await mcp.call_mcp(connections, places, name, arguments)
                        result = {"role": "tool", "tool_call_id": call["id"], "name": name}
                        messages.append(result | {"content": content})
            return library.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType(HARNESS)
    vars(module).update(Chat=Chat, __all__=["Chat"])
    return module


def open_package(field: str, name: str) -> Package:
    """Return the package of `verifiers:ENV_ID?JSON`; the JSON is the library's environment config.

    `FOLDER/ENV_ID` is a package that is not installed. An agent without a harness or runtime of its
    own gets a chat loop in this process.

    Raises:
        ConfigError: the library or the package is missing, the config is invalid, or the policy
            would play several agents.
    """
    setting = f"config.{field} = {name!r}"
    path, _, text = name.partition(":")[2].partition("?")
    *folders, identity = path.rsplit("/", 1)
    sys.path += {*map(os.path.abspath, folders)} - {*sys.path}
    library = import_package(setting, "verifiers.v1", "verifiers>=0.4")
    loaders = import_package(setting, "verifiers.v1.utils.loaders", "verifiers>=0.4")
    try:
        if HARNESS not in sys.modules:
            sys.modules[HARNESS] = _chat_harness(library)
        options = json.loads(text or "{}")
        options["taskset"] = {**options.get("taskset", {}), "id": identity}
        config = loaders.resolve_env_config(options)
        agents = {key: value for key, value in config if isinstance(value, library.AgentConfig)}
        played = [key for key, agent in agents.items() if agent.model is None]
        if len(played) != 1:
            raise ValueError(f"the policy plays one agent, not {', '.join(played) or 'none'}")
        agent = agents[played[0]]
        changes: dict[str, Any] = {}
        if agent.harness is None and loaders.default_harness_id(identity) == "bash":
            changes["harness"] = library.HarnessConfig(id=HARNESS)
        if "runtime" not in agent.model_fields_set:
            changes["runtime"] = library.SubprocessConfig()
        config = config.model_copy(update={played[0]: agent.model_copy(update=changes)})
    except Exception as error:  # the library's own, and whatever a package raises
        raise ConfigError(f"{setting}: {type(error).__name__}: {error!s:.300}") from None
    return Package(library, loaders, config)


def open_problems(
    field: str, name: str, data: Data, seed: int, split: str
) -> tuple[Problem, ...] | None:
    """Return a package's tasks as problems; a problem's metadata holds the task's data.

    Held-out ones (None) are taken from these. An endless package gives as many as both splits need.

    Raises:
        ConfigError: the package can't be opened, or can't load its tasks.
    """
    if split == "heldout":
        return None
    package, problems = open_package(field, name), []
    try:
        taskset = package.loaders.load_taskset(package.config.taskset)
        limit = data.train_problems + data.heldout_count() if taskset.INFINITE else None
        for task in itertools.islice(taskset, limit):
            content = task.data.model_dump(mode="json")
            identity = f"{package.config.taskset.id}-{content['idx']}"
            text = json.dumps(content | {"idx": None}, sort_keys=True)  # tasks may share a prompt
            problems.append(Problem(identity, text, "", name, metadata=json.dumps(content)))
    except Exception as error:  # whatever the package raises
        allowed = f"{type(error).__name__}: {error!s:.300}"
        raise ConfigError(f"config.{field} = {name!r}: its tasks: {allowed}") from None
    return tuple(problems)
