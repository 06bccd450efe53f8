#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A worker whose NCCL engine is vLLM's own class, behind vLLM's routes, for our trainer to drive.

interop_nccl_worker.py --vllm FOLDER --version V  prints its port, then one line a round: the digest of every tensor
that came, summed. Ends when its input ends. The routes are vLLM's in a server of the standard library, since the
machines with GPUs need not have FastAPI; `POST /weight_checker` gives the digests of the last round, as ours does.
"""
import argparse
import http.server
import json
import pathlib
import sys
import threading
import urllib.parse

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "interop"))
import vllm_modules  # noqa: E402
from vllm_worker import Worker  # noqa: E402
from weights import digest_text  # noqa: E402


class Failure(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Routes(http.server.BaseHTTPRequestHandler):
    """vLLM's routes of one release over one worker; the class attributes are set by main."""

    protocol_version = "HTTP/1.1"
    worker = None
    version = ""
    release = (0, 0)
    weight_version = "default"
    paused = False

    def log_message(self, *_):
        pass

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self, method):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = urllib.parse.urlsplit(self.path).path
        try:
            handler = getattr(self, f"{method}_{path.strip('/')}", None)
            if not self.has(path) or handler is None:
                known = self.has(path) and hasattr(self, f"post_{path.strip('/')}")
                raise Failure(405 if known else 404, "Method Not Allowed" if known else "Not Found")
            self.reply(200, handler(body))
        except Failure as wrong:
            self.reply(wrong.status, {"detail": str(wrong)})
        except Exception as wrong:  # as vLLM does with whatever is raised inside its engine
            text = f"Call to collective_rpc method failed: {wrong}"
            print(text, file=sys.stderr, flush=True)
            self.reply(500, {"error": {"message": text, "type": "Internal Server Error", "param": None, "code": 500}})

    def has(self, path):
        since = {"/start_weight_update": (0, 21), "/finish_weight_update": (0, 21), "/weight_info": (0, 27)}
        return self.release >= since.get(path, (0, 16))

    def do_GET(self):
        self.serve("get")

    def do_POST(self):
        self.serve("post")

    @staticmethod
    def object_of(body, key=None):
        try:
            value = json.loads(body)
        except ValueError:
            raise Failure(400, "Invalid JSON format") from None
        if key is not None and value.get(key) is None:
            raise Failure(400, f"Missing '{key}' in request body")
        return value if key is None else value[key]

    def get_version(self, _):
        return {"version": self.version}

    def get_health(self, _):
        return {}

    def get_get_world_size(self, _):
        return {"world_size": 1}

    def get_weight_info(self, _):
        return {"weight_version": Routes.weight_version}

    def get_is_paused(self, _):
        return {"is_paused": Routes.paused}

    def post_pause(self, _):
        Routes.paused = True
        return {"status": "paused"}

    def post_resume(self, _):
        Routes.paused = False
        return {"status": "resumed"}

    def post_init_weight_transfer_engine(self, body):
        info = self.object_of(body, "init_info")
        self.worker.call("init", info)
        return {"message": "Weight transfer initialized"}

    def post_start_weight_update(self, body):
        if self.release < (0, 25):
            self.object_of(body)
        self.worker.call("start")
        return {"message": "Weight update started"}

    def post_update_weights(self, body):
        info = self.object_of(body, "update_info")
        self.worker.call("update", info)
        return {"message": "Weights updated"}

    def post_finish_weight_update(self, body):
        self.worker.call("finish")
        if self.release >= (0, 27) and body:
            told = self.object_of(body).get("weight_version")
            Routes.weight_version = told or Routes.weight_version
        return {"message": "Weight update finished"}

    def post_weight_checker(self, body):
        ours = {name: digest_text(value) for name, value in self.worker.model.digests.items()}
        request = self.object_of(body)
        if request["action"] == "checksum":
            return {"checksums": ours}
        theirs = request["baseline"]
        wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        return {"match": not wrong, "mismatches": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, help="folder that holds vllm/ of the release")
    parser.add_argument("--version", required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    vllm_modules.activate(arguments.vllm)
    Routes.version = arguments.version
    Routes.release = tuple(int(part) for part in arguments.version.split(".")[:2])
    Routes.worker = Worker(torch.device("cuda", arguments.device), has_sessions=Routes.release >= (0, 21),
                           say=lambda text: print(text, flush=True))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), Routes)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
