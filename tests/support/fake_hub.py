"""A hub of models on this machine: what huggingface_hub asks of one to publish a folder."""

import base64
import http.server
import json
import re
import threading
from typing import Any

USERS = {  # by token
    "writes": {"name": "alice", "orgs": [{"name": "lab"}], "role": "write"},
    "reads": {"name": "alice", "orgs": [], "role": "read"},
}
LARGE = (".safetensors", ".png")  # files that go to the store of large ones


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves while the block lasts.

    Attributes:
        repositories: `private`, `tags` and `files` of each, by name.
        asked: method and path of every request.
        refused: path that is answered with 500; empty: none.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.large: dict[str, bytes] = {}
        self.refused = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def add(self, name: str, private: bool, files: dict[str, bytes], tags=()) -> None:
        self.repositories[name] = {"private": private, "files": dict(files), "tags": list(tags)}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, content: Any, code: int = 200, error: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        user = USERS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if path == self.server.refused:
            self._answer({"error": "the disk of the hub is full"}, 500)
        elif path.startswith("/large/"):
            self.server.large[path.rpartition("/")[2]] = body
            self._answer({})
        elif user is None:
            self._answer({"error": "Invalid credentials"}, 401)
        elif path == "/api/whoami-v2":
            self._answer(user | {"auth": {"accessToken": {"role": user["role"]}}})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body), user)
        elif found := re.fullmatch(r"/(?:api/models/)?(\w+/[\w-]+?)(\.git)?(/.*)?", path):
            self._of_repository(found[1], found[3] or "", body)
        else:
            self._answer({"error": f"no such place: {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _create(self, asked: dict[str, Any], user: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or user['name']}/{asked['name']}"
        known = name in self.server.repositories
        if not known:
            self.server.add(name, asked["visibility"] == "private", {".gitattributes": b""})
        self._answer({"url": f"{self.server.url}/{name}"}, 409 if known else 200)

    def _of_repository(self, name: str, below: str, body: bytes) -> None:
        one = self.server.repositories.get(name)
        if one is None:
            self._answer({"error": "Repository not found"}, 404, "RepoNotFound")
        elif below == "":
            files = [{"rfilename": file} for file in one["files"]]
            self._answer({"id": name, "siblings": files} | {k: one[k] for k in ("private", "tags")})
        elif below.startswith("/tree/"):
            listed = one["files"].items()
            self._answer(
                [{"type": "file", "path": f, "size": len(c), "oid": "0"} for f, c in listed]
            )
        elif below.startswith("/preupload/"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if file.endswith(LARGE) else "regular" for file in files]
            answers = zip(files, modes, strict=True)
            keys = {"shouldIgnore": False, "oid": None}
            self._answer({"files": [{"path": f, "uploadMode": mode} | keys for f, mode in answers]})
        elif below == "/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for asked in objects:
                place = {"href": f"{self.server.url}/large/{asked['oid']}", "header": {}}
                asked["actions"] = {"upload": place}
            self._answer({"transfer": "basic", "objects": objects})
        elif below.startswith("/commit/"):
            self._commit(name, one["files"], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": f"no such place: {below}"}, 404)

    def _commit(self, name: str, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        url = f"{self.server.url}/{name}/commit/{'0' * 40}"
        self._answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
