"""A Hub on loopback, as far as the real huggingface_hub client needs one to create and commit.

Repositories are lists of commits over whole file trees. Files of 1 KiB or more, or that are not
text, go through the git-lfs endpoints (basic transfer); the client must run with
HF_HUB_DISABLE_XET=1, for the other transport is a content-addressed store of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LFS_FROM = 1024


@dataclass
class Commit:
    title: str
    files: dict[str, bytes]
    parent: str = ""

    @property
    def sha(self) -> str:
        digest = hashlib.sha1(f"{self.parent} {self.title}".encode(), usedforsecurity=False)
        for path in sorted(self.files):
            digest.update(path.encode() + hashlib.sha256(self.files[path]).digest())
        return digest.hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, list[Commit]]


class Refused(Exception):
    """An answer that is an error: status, the Hub's error code, a sentence and more in its body."""

    def __init__(self, status: int, code: str = "", sentence: str = "", **more: str) -> None:
        super().__init__(sentence)
        self.status, self.code, self.sentence, self.more = status, code, sentence, more


@dataclass(frozen=True)
class Call:
    """One request: who asks, about which repository and revision (or stored object), with what."""

    token: str
    body: bytes
    repo_id: str = ""
    revision: str = "main"
    oid: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StandInHub:
    """`tokens` maps a token to the owners it may write to; `requests` lists "METHOD /path"."""

    tokens: dict[str, set[str]]
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fail_with: int = 0  # answer every request with this status

    def add(self, repo_id: str, *, private: bool, files: dict[str, bytes] | None = None) -> None:
        """Create a repository, with the first commit that the Hub makes itself."""
        first = Commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        first.files.update(files or {})
        self.repositories[repo_id] = Repository(private=private, branches={"main": [first]})

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        if repo_id not in self.repositories:
            raise Refused(404, "RepoNotFound", "Repository not found")
        branches = self.repositories[repo_id].branches
        if revision not in branches:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return branches[revision]

    def answer(self, request: str, token: str, body: bytes) -> Any:
        """The JSON that answers "METHOD /path"; raises Refused."""
        if self.fail_with:
            raise Refused(self.fail_with, sentence="out of order")
        tried = ((re.fullmatch(route[0], request), *route[1:]) for route in ROUTES)
        found, needs, handle = next((route for route in tried if route[0]), (None, "", None))
        if found is None or handle is None:
            raise Refused(404, sentence=f"the stand-in does not know {request}")
        call = Call(
            token, body, **{key: unquote(value) for key, value in found.groupdict().items()}
        )
        if needs and token not in self.tokens:
            # the real Hub does not echo a token: the client must survive one that does
            raise Refused(401, sentence=f"Invalid user token {token}.")
        if needs == "write" and call.repo_id.partition("/")[0] not in self.tokens[token]:
            raise Refused(403, sentence=f"{token} has no write permission")
        return handle(self, call)

    def create(self, call: Call) -> Any:
        owner, name = call.json["organization"], call.json["name"]
        if owner not in self.tokens[call.token]:
            raise Refused(403, sentence=f"{call.token} may not create repositories for {owner}")
        url = f"{self.url}/{owner}/{name}"
        if f"{owner}/{name}" in self.repositories:
            raise Refused(409, sentence="You already created this model repo", url=url)
        self.add(f"{owner}/{name}", private=call.json.get("visibility") == "private")
        return {"url": url}

    def validate(self, call: Call) -> Any:
        metadata = yaml.safe_load(call.json["content"].split("---")[1])
        if metadata.get("license") == "unheard-of":
            raise Refused(400, sentence=f"license is not a known one, {call.token}")
        return {"errors": [], "warnings": []}

    def info(self, call: Call) -> Any:
        head = self.commits(call.repo_id, call.revision)[-1]
        return {
            "id": call.repo_id,
            "sha": head.sha,
            "private": self.repositories[call.repo_id].private,
            "siblings": [{"rfilename": path} for path in sorted(head.files)],
        }

    def branch(self, call: Call) -> Any:
        branches = self.repositories[call.repo_id].branches
        if call.revision in branches:
            raise Refused(409, sentence="Reference already exists")
        branches[call.revision] = list(branches["main"])
        return {}

    def preupload(self, call: Call) -> Any:
        known = self.commits(call.repo_id, call.revision)[-1].files
        ignored = known.get(".gitignore", b"").decode().split()
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if _is_lfs(file) else "regular",
                    "shouldIgnore": file["path"] in ignored,
                    "oid": _oid(known.get(file["path"]), lfs=_is_lfs(file)),
                }
                for file in call.json["files"]
            ]
        }

    def batch(self, call: Call) -> Any:
        things = call.json["objects"]
        for thing in things:
            if thing["oid"] not in self.objects:
                thing["actions"] = {"upload": {"href": f"{self.url}/objects/{thing['oid']}"}}
        return {"transfer": "basic", "objects": things}

    def store(self, call: Call) -> Any:
        if hashlib.sha256(call.body).hexdigest() != call.oid:
            raise Refused(422, sentence="the content is not what was announced")
        self.objects[call.oid] = call.body
        return {}

    def commit(self, call: Call) -> Any:
        commits = self.commits(call.repo_id, call.revision)
        header, *lines = (json.loads(line) for line in call.body.splitlines())
        parent = commits[-1]
        if header["value"].get("parentCommit", parent.sha) != parent.sha:
            raise Refused(412, sentence="A commit has happened since")
        new = Commit(header["value"]["summary"], dict(parent.files), parent.sha)
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                new.files[value["path"]] = self.objects[value["oid"]]
            else:
                assert (line["key"], value["encoding"]) == ("file", "base64")
                new.files[value["path"]] = base64.b64decode(value["content"])
        commits.append(new)
        return {"commitUrl": f"{self.url}/{call.repo_id}/commit/{new.sha}", "commitOid": new.sha}


_ID, _REVISION = "(?P<repo_id>[^/]+/[^/]+?)", "(?P<revision>[^/]+)"
# request, what the token must permit, handler; stored objects need none, like a presigned address
ROUTES = [
    ("PUT /objects/(?P<oid>[0-9a-f]{64})", "", StandInHub.store),
    ("POST /api/repos/create", "read", StandInHub.create),
    ("POST /api/validate-yaml", "read", StandInHub.validate),
    (f"GET /api/models/{_ID}", "read", StandInHub.info),
    (f"GET /api/models/{_ID}/revision/{_REVISION}", "read", StandInHub.info),
    (f"POST /api/models/{_ID}/branch/{_REVISION}", "write", StandInHub.branch),
    (f"POST /api/models/{_ID}/preupload/{_REVISION}", "write", StandInHub.preupload),
    (rf"POST /{_ID}\.git/info/lfs/objects/batch", "write", StandInHub.batch),
    (f"POST /api/models/{_ID}/commit/{_REVISION}", "write", StandInHub.commit),
]


def _is_lfs(file: dict[str, Any]) -> bool:
    return file["size"] >= LFS_FROM or b"\0" in base64.b64decode(file["sample"])


def _oid(content: bytes | None, *, lfs: bool) -> str | None:
    if content is None:
        return None
    if lfs:
        return hashlib.sha256(content).hexdigest()
    blob = b"blob %d\0" % len(content) + content
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            request = f"{self.command} {urlsplit(self.path).path}"
            hub.requests.append(request)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            body = self._body()
            try:
                status, code, tree = 200, "", hub.answer(request, token, body)
            except Refused as no:
                status, code = no.status, no.code
                sentence = {"error": no.sentence, "errors": [{"message": no.sentence}]}
                tree = {**sentence, **no.more}
            content = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status >= 400:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _respond

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass  # `hub.requests` has them

    return Handler


@contextmanager
def stand_in_hub(tokens: dict[str, set[str]]) -> Iterator[StandInHub]:
    """Serve a Hub on a free loopback port for as long as the block runs."""
    hub = StandInHub(tokens)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
