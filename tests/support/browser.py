"""Drives the Chromium of this machine over its DevTools pipe, without a package."""

import base64
import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run".split()
PIPES = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'  # it reads 3 and writes 4
TROUBLE = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}

# Resolves once something is true, with false where it isn't after 20 seconds.
UNTIL = """new Promise(done => {{
    const begun = performance.now();
    const look = () => {} ? done(true)
        : performance.now() > begun + 20000 ? done(false) : setTimeout(look, 20);
    look();
}})"""


class Browser:
    """One page. `trouble` has the messages of its console, `asked` every address it went to."""

    def __init__(self, process: subprocess.Popen):
        self._process, self._number, self._session, self._rest = process, 0, {}, b""
        self.trouble: list[dict] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict:
        while b"\0" not in self._rest:
            part = self._process.stdout.read1(1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict:
        """Return the answer to a command; keep what happens meanwhile."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": params} | self._session
        self._process.stdin.write(json.dumps(order).encode() + b"\0")
        self._process.stdin.flush()
        while (message := self._message()).get("id") != self._number:
            if message.get("method") in TROUBLE:
                self.trouble.append(message["params"])
            elif message.get("method") == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        assert "error" not in message, message
        return message["result"]

    def run(self, code: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        assert self.run(UNTIL.format(f"({condition})")), (condition, self.trouble)

    def open(self, page: pathlib.Path, width: int) -> None:
        """Load a page at a width in CSS pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        self.wait(f"document.readyState == 'complete' && location.href == '{page.as_uri()}'")

    def screenshot(self, path: pathlib.Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    line = ["bash", "-c", PIPES, CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Browser(process)
        finally:
            process.terminate()
