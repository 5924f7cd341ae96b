"""Drives the Chromium of this machine over its DevTools pipe, without a package."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run".split()
TROUBLE = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}

# Resolves once something is true, with false where it isn't after 20 seconds.
UNTIL = """new Promise(done => {{
    const begun = performance.now();
    const look = () => {} ? done(true)
        : performance.now() > begun + 20000 ? done(false) : setTimeout(look, 20);
    look();
}})"""


# Scrolls to each picture and waits until it is drawn.
SCROLL = """(async () => {
    for (const plot of document.querySelectorAll(".plot")) {
        plot.scrollIntoView();
        while (!plot.children.length) await new Promise(done => setTimeout(done, 20));
    }
    scrollTo(0, 0);
})()"""


class Browser:
    """One page. `trouble` is what it said on its console, `asked` every address it went to."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, os.fdopen(read, "rb")
        self._number, self._session, self._rest = 0, "", b""
        self.trouble: list[dict] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict:
        while b"\0" not in self._rest:
            part = self._read.read1(1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict:
        """The answer to a command; what happens meanwhile is kept."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            if message.get("method") in TROUBLE:
                self.trouble.append(message["params"])
            elif message.get("method") == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        assert "error" not in message, message
        return message["result"]

    def run(self, code: str) -> Any:
        """What an expression of JavaScript gives, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns once an expression of JavaScript is true."""
        assert self.run(UNTIL.format(f"({condition})")), (condition, self.trouble)

    def open(
        self,
        page: pathlib.Path,
        width: int,
        height: int = 900,
        ready: str = "document.documentElement?.dataset.firstPicture",
    ) -> None:
        """Loads a page at a width in CSS pixels, and waits for a report's first picture."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        self.wait(ready)

    def scroll_through(self) -> None:
        """Scrolls to the end and back as a reader does, which draws every picture."""
        self.wait("document.querySelector('#spent .plot')")  # the last ones are there
        self.run(SCROLL)

    def screenshot(self, path: pathlib.Path) -> None:
        """The whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    """A browser with a profile of its own in that folder."""
    their_read, write = os.pipe()
    read, their_write = os.pipe()

    def place() -> None:  # the pipe is read at 3 and written at 4
        ends = os.dup(their_read), os.dup(their_write)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}"],
        preexec_fn=place,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        yield Browser(write, read)
    finally:
        process.terminate()
        process.wait(30)
        os.close(write)
