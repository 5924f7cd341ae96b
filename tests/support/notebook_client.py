"""A client that runs notebooks with widgets and misses no reply of the kernel."""

import os
import pathlib
from typing import Any

import nbformat
import zmq
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]


class Client(NotebookClient):
    """Notebook client that looks for a reply whenever it has sent the kernel something.

    nbclient sends a widget's state back while it waits for the cell's reply. jupyter_client sends
    through a blocking shadow of the socket, and sending swallows the signal of whatever arrived
    since the event loop last looked: a reply that comes at that moment, as on a busy machine, was
    waited for for ever. Reading the socket's events schedules what has arrived (pyzmq's sockets
    are edge-triggered).
    """

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        channel: Any = client.shell_channel
        send = channel.send

        def send_and_look(message: dict) -> None:
            send(message)
            channel.socket.get(zmq.EVENTS)

        channel.send = send_and_look
        return client


def execute(notebook: nbformat.NotebookNode, folder: pathlib.Path, **environment: str) -> None:
    """Runs every cell in a kernel that stands in the folder. Raises CellExecutionError."""
    resources = {"metadata": {"path": str(folder)}}
    client = Client(notebook, timeout=300, resources=resources)
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)} | environment)
