"""Environments of the library verifiers, in this process, with the policy as their model.

An episode runs in the event loop of a thread. Where the library would ask a model server, a local
endpoint hands its request to the trajectory and waits for the policy's next turn. Only text crosses
here: the tokens of a turn stay those that were sampled, and a request that does not continue the
conversation word for word is an error.
"""

import asyncio
import contextlib
import functools
import importlib
import json
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from dapo_jax.extras.environments.verifiers_tasks import open_package
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import Observation, Problem

SESSION = "X-Session-ID"  # the library's header with the id of an agent's trace, random hex
MAX_REQUEST_BYTES = 1 << 26
Message = dict[str, Any]


def _text(content: Any) -> str:
    """Return the text of a message. Raises ValueError if it has other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message has parts that are not text")
    return "\n".join(part["text"] for part in content)


def _plain(message: Message) -> tuple[str, str, list[Any]]:
    """Return what the policy sees of a message: role, text, and calls of tools."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message["role"], _text(message.get("content")), calls


class _Episode:
    """An episode of the library, seen by its model."""

    def __init__(self):
        self.requests = queue.SimpleQueue[Message | None]()  # None: the episode has ended
        self.replies = asyncio.Queue[Message]()  # of the loop of its `_Host`
        self.trace = ""  # id of the trace whose model is the policy
        self.task: Any = None


class _Host:
    """Environment of a package in this process: its event loop, and the endpoint of its model."""

    def __init__(self, name: str):
        self._package = open_package("environment.name", name)
        self._environment = self._package.loaders.load_environment(self._package.config)
        self._episodes: dict[str, _Episode] = {}  # by the ids of their traces
        self._stack = contextlib.AsyncExitStack()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._context = self.run(self._serve())

    def run(self, coroutine: Coroutine) -> Any:
        """Return the result of a coroutine in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def _serve(self) -> Any:
        web = importlib.import_module("aiohttp.web")
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", functools.partial(self._complete, web))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await self._stack.enter_async_context(self._environment.serving())
        url, library = f"http://127.0.0.1:{runner.addresses[0][1]}/v1", self._package.library
        client = library.EvalClientConfig(base_url=url, api_key_var="DAPO_JAX_NO_API_KEY")
        return library.ModelContext(model="policy", client=client)

    async def _complete(self, web: Any, request: Any) -> Any:
        """Answer a request of the library with the policy's next turn."""
        identity = request.headers.get(SESSION, "")
        episode = self._episodes.get(identity)
        if episode is None or episode.trace not in ("", identity):
            text = "no such episode, or its second conversation with the policy"
            return web.json_response({"error": {"message": text}}, status=400)
        episode.trace = identity
        episode.requests.put(await request.json())
        message = await episode.replies.get()
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        reply = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(reply | {"choices": [choice]})

    async def start(self, data: dict[str, Any]) -> _Episode:
        """Begin an episode of a task, given its data. Raises what pydantic raises."""
        taskset, episode = self._package.config.taskset, _Episode()
        kind = self._package.loaders.task_type(taskset.id)
        task = kind(kind.data_type().model_validate(data), taskset.task)

        def follow(trace: Any) -> None:
            self._episodes[trace.id] = episode

        run = self._environment.run_episode(task, self._context, on_trace=follow)
        episode.task = asyncio.create_task(run)
        episode.task.add_done_callback(lambda _: episode.requests.put(None))
        return episode

    async def end(self, episode: _Episode) -> None:
        """Cancel what is left of an episode, and wait for its clean-up."""
        episode.replies.put_nowait({"role": "assistant", "content": ""})  # for a late request
        episode.task.cancel()
        await asyncio.gather(episode.task, return_exceptions=True)
        self._episodes = {key: one for key, one in self._episodes.items() if one is not episode}


_host = functools.cache(_Host)


class Verifiers:
    """Adapter of an environment package: a trajectory is an episode, its rubric is the reward."""

    MAX_LIVE = 64  # episodes of a process; each may have servers of tools

    def __init__(self, name: str):
        self._name = name
        self._host: Any = None
        self._episode: Any = None
        self._messages: list[Message] = []
        self._tools: list[Message] = []

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        """Return the first messages of an episode of the problem's task.

        Raises:
            ValueError: the problem is of another source, or its tools are not the package's.
            RuntimeError: the episode ended before it asked the policy.
        """
        if not problem.metadata:
            raise ValueError(f"no task of verifiers: data.source must be {self._name!r}")
        self._host = _host(self._name)
        self._episode = self._host.run(self._host.start(json.loads(problem.metadata)))
        request = self._episode.requests.get()
        if request is None:
            raise RuntimeError(f"the episode asked nothing: {self._reward()}")
        self._messages, self._tools = request["messages"], request.get("tools") or []
        if self._tools != tool_schemas(self._name):
            raise ValueError("the task has other tools than its package declares")
        return [{"role": role, "content": text} for role, text, _ in map(_plain, self._messages)]

    def step(self, text: str) -> Observation:
        """Reply to a turn with the messages that follow it, at the end with the reward.

        Raises:
            ValueError: the environment changed the conversation or its tools.
            RuntimeError: the episode failed.
        """
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no UTF-8
        content, calls = read_calls(text, self._tools)
        for number, call in enumerate(calls):  # the same ids in a repeated step
            call["id"] = f"{len(self._messages):06}{number:03}"
        turn = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        self._host.loop.call_soon_threadsafe(self._episode.replies.put_nowait, turn)
        request = self._episode.requests.get()
        if request is None:
            return Observation(reward=self._reward(), done=True)
        before, self._messages = [*self._messages, turn], request["messages"]
        if [*map(_plain, self._messages[: len(before)])] != [*map(_plain, before)]:
            raise ValueError("the environment changed earlier messages of the conversation")
        if (request.get("tools") or []) != self._tools:
            raise ValueError("the environment changed its tools within a conversation")
        new = self._messages[len(before) :]
        if any(message["role"] == "assistant" for message in new):
            raise ValueError("the environment wrote a turn of the policy")
        return Observation(messages=[m | {"content": _text(m.get("content"))} for m in new])

    def close(self) -> None:
        """End the episode, with its servers."""
        if self._episode is not None:
            self._host.run(self._host.end(self._episode))

    def _reward(self) -> float:
        """Return the score of the ended episode. Raises RuntimeError if it failed."""
        result = self._episode.task.result()
        if not result.ok:
            errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
            last = f"{errors[-1].type}: {errors[-1].message}" if errors else "unknown"
            raise RuntimeError(f"the episode failed: {last}")
        return next(trace.reward for trace in result.traces if trace.id == self._episode.trace)


@functools.cache
def tool_schemas(name: str) -> list[dict[str, Any]]:
    """Return the schemas of a package's tools, named as its agents see them."""
    package = open_package("environment.name", name)
    tools = importlib.import_module("mcp.server.mcpserver.tools")
    config, schemas = package.config.taskset, []
    kind = package.loaders.taskset_class(config.id)
    for toolset in [*kind.toolsets(config), *kind.task_type().toolsets(config.task)]:
        manager = tools.ToolManager()
        toolset.register(manager)
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        for tool in manager.list_tools():
            function = {"name": prefix + tool.name, "description": tool.description or ""}
            function["parameters"] = tool.parameters
            schemas.append({"type": "function", "function": function})
    return schemas


def open_verifiers(name: str) -> Callable[[], Verifiers]:
    """Return the function that makes `verifiers:ENV_ID?JSON`. Raises ConfigError."""
    open_package("environment.name", name)
    return functools.partial(Verifiers, name)


open_verifiers.tool_schemas = tool_schemas  # pyright: ignore[reportFunctionMemberAccess]
