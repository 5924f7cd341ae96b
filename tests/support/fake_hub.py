"""A hub of models on this machine: what huggingface_hub asks of one to publish a folder."""

import base64
import http.server
import json
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
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def add(self, name: str, private: bool, files: dict[str, bytes]) -> None:
        self.repositories[name] = {"private": private, "files": files, "tags": []}

    def answer(self, path: str, body: bytes, user: dict | None) -> tuple[Any, int, str]:
        parts = path.replace("/api/models/", "/").replace(".git/", "/").split("/")[1:]
        if path == self.refused:
            return {"error": "the disk of the hub is full"}, 500, ""
        if parts[0] == "large":
            self.large[parts[1]] = body
            return {}, 200, ""
        if user is None:
            return {"error": "Invalid credentials"}, 401, ""
        if parts == ["api", "whoami-v2"]:
            return user | {"auth": {"accessToken": {"role": user["role"]}}}, 200, ""
        if parts == ["api", "validate-yaml"]:
            return {"errors": [], "warnings": []}, 200, ""
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or user['name']}/{asked['name']}"
            known = name in self.repositories
            if not known:
                self.add(name, asked["visibility"] == "private", {".gitattributes": b""})
            return {"url": f"{self.url}/{name}"}, 409 if known else 200, ""
        name = "/".join(parts[:2])
        if name not in self.repositories:
            return {"error": "Repository not found"}, 404, "RepoNotFound"
        return self.of_repository(name, parts[2] if parts[2:] else "", body), 200, ""

    def of_repository(self, name: str, action: str, body: bytes) -> Any:
        repository = self.repositories[name]
        files = repository["files"]
        if action == "":
            known = {"id": name, "private": repository["private"], "tags": repository["tags"]}
            return known | {"siblings": [{"rfilename": file} for file in files]}
        if action == "tree":
            sizes = {file: len(content) for file, content in sorted(files.items())}
            return [{"type": "file", "path": f, "size": n, "oid": "0"} for f, n in sizes.items()]
        if action == "preupload":
            answers = []
            for path in (file["path"] for file in json.loads(body)["files"]):
                mode = "lfs" if path.endswith(LARGE) else "regular"
                answer = {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                answers.append(answer)
            return {"files": answers}
        if action == "info":  # of large files, in a batch
            objects = json.loads(body)["objects"]
            for asked in objects:
                upload = {"href": f"{self.url}/large/{asked['oid']}", "header": {}}
                asked["actions"] = {"upload": upload}
            return {"transfer": "basic", "objects": objects}
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        url = f"{self.url}/{name}/commit/{'0' * 40}"
        return {"commitUrl": url, "commitOid": "0" * 40, "success": True}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        user = USERS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        content, code, error = self.server.answer(path, body, user)
        answer = json.dumps(content).encode()
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_HEAD = _handle
