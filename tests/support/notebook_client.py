"""A client that executes notebooks with widgets and misses no reply of the kernel."""

import os
import pathlib

import nbformat
import zmq
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]


class Client(NotebookClient):
    """Looks for a reply whenever it has sent the kernel something.

    nbclient sends a widget's state back while it waits for the cell's reply. jupyter_client sends on a
    blocking shadow of the socket, and sending takes in what has arrived there, with the signal that the
    event loop waits for: a reply that arrives at that moment, as on a busy machine, waits for ever.
    Asking for the socket's events schedules what is left (pyzmq, edge-triggered file descriptors).
    """

    async def async_start_new_kernel_client(self):
        client = await super().async_start_new_kernel_client()
        channel = client.shell_channel
        send = channel.send

        def send_and_look(message: dict) -> None:
            send(message)
            channel.socket.get(zmq.EVENTS)

        channel.send = send_and_look
        return client


def execute(notebook: nbformat.NotebookNode, folder: pathlib.Path, **environment: str) -> None:
    """Runs every cell in a kernel of its own that stands in the folder. Raises CellExecutionError."""
    resources = {"metadata": {"path": str(folder)}}
    client = Client(notebook, timeout=300, resources=resources)
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)} | environment)
