"""Answers wandb's client as far as runs need it, and keeps what it was sent.

python wandb_server.py PORT_FILE STATE_FILE writes its port to the first file, and after each request what it has to the
second, from which it also starts:
{run id: {"history": [row], "config": {}, "tags": [], "files": [name], "artifacts": [[type, name]]}}.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

ENTITY = {"id": "e", "name": "team"}
RUNS: dict[str, dict] = {}
LOCK = Lock()


def upsert(variables):
    run = RUNS.setdefault(
        variables["name"], {"history": [], "config": {}, "tags": [], "files": [], "artifacts": []}
    )
    run["project"] = variables["project"]
    run["config"].update(json.loads(variables.get("config") or "{}"))
    run["tags"] = variables.get("tags") or run["tags"]
    project = {"id": "p", "name": run["project"], "entity": ENTITY}
    bucket = {**status(variables["name"]), "project": project, "sweepName": None, "historyTail": ""}
    return {"upsertBucket": {"bucket": bucket, "inserted": True}}


def status(name):
    run = RUNS[name]
    last = run["history"][-1] if run["history"] else {}
    return {
        "id": f"id-{name}",
        "name": name,
        "displayName": name,
        "summaryMetrics": json.dumps(last),
        "historyTail": json.dumps([json.dumps(last)] if last else []),
        "eventsTail": "[]",
        "logLineCount": 0,
        "historyLineCount": len(run["history"]),
        "eventsLineCount": 0,
        "config": json.dumps(run["config"]),
        "tags": run["tags"],
        "wandbConfig": json.dumps(run["config"].get("_wandb", {}).get("value", {})),
    }


def graphql(request):
    variables = request.get("variables") or {}
    name = re.search(r"(?:query|mutation) (\w+)", request["query"])[1]
    if name == "UpsertBucket":
        return upsert(variables)
    if name == "RunResumeStatus":
        known = variables["name"] in RUNS
        bucket = status(variables["name"]) if known else None
        return {"model": {"id": "p", "name": "p", "entity": ENTITY, "bucket": bucket}}
    if name == "CreateRunFiles":
        RUNS[variables["run"]]["files"] += variables["files"]
        port = SERVER.server_address[1]
        files = [
            {"name": file, "uploadUrl": f"http://127.0.0.1:{port}/upload/{file}"}
            for file in variables["files"]
        ]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
    if name == "CreateArtifact":
        given = variables["input"]
        RUNS[given["runName"]]["artifacts"].append(
            [
                given["artifactTypeName"],
                given["artifactCollectionNames"][0]
                if given.get("artifactCollectionNames")
                else given.get("artifactCollectionName"),
            ]
        )
        artifact = {
            "id": "a",
            "state": "COMMITTED",
            "artifactSequence": {"id": "s", "latestArtifact": {"id": "a", "versionIndex": 0}},
        }
        return {"createArtifact": {"artifact": artifact}}
    if name == "ArtifactType":  # it has no such artifact yet
        return {"project": None}
    if name == "Viewer":
        return {
            "viewer": {
                "id": "u",
                "entity": "team",
                "username": "u",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }
    return {}


def stream(run, request):
    part = (request.get("files") or {}).get("wandb-history.jsonl")
    if part:
        rows = RUNS[run]["history"]
        del rows[part["offset"] :]
        rows += map(json.loads, part["content"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Quiet."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = {}
        with LOCK:
            if self.path == "/graphql":
                answer = {"data": graphql(json.loads(body))}
            elif self.path.endswith("/file_stream"):
                stream(self.path.split("/")[-2], json.loads(body))
            Path(sys.argv[2]).write_text(json.dumps(RUNS))
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST  # noqa: N815 - http.server wants these names


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """A client that hangs up is no error."""


if __name__ == "__main__":
    if Path(sys.argv[2]).exists():
        RUNS.update(json.loads(Path(sys.argv[2]).read_text()))
    SERVER = Server(("127.0.0.1", 0), Handler)
    Path(sys.argv[1]).write_text(str(SERVER.server_address[1]))
    SERVER.serve_forever()
