# SPDX-License-Identifier: Apache-2.0
"""vLLM's own route file of one release, mounted in FastAPI and served by uvicorn, in front of an engine that records.

The routes are vLLM's, and so are the engine class that reads the bodies, joins, receives and unpacks, and the process
group through which it learns the NCCL id. NCCL itself is replaced by sockets, see host_cuda.py, and memory of other
processes by files, see host_ipc.py.
"""
import asyncio
import copy
import importlib
import json
import socket
import threading
import types

import torch

from vllm_worker import Worker

ROUTE_FILES = ("vllm.entrypoints.rl.online.api_router", "vllm.entrypoints.serve.dev.rlhf.api_router",
               "vllm.entrypoints.serve.rlhf.api_router")


def route_file(folder):
    """The module name of the release's route file."""
    for name in ROUTE_FILES:
        if (folder / (name.replace(".", "/") + ".py")).is_file():
            return name
    raise FileNotFoundError(f"no route file under {folder}")


class EngineError(Exception):
    """What the API server gets when something was raised inside the engine."""

    def __init__(self, cause):
        super().__init__(f"Call to collective_rpc method failed: {cause}")


class RecordingEngine:
    """The calls that the route file makes, as (name, argument) in `calls`, done by ranks with vLLM's engine class."""

    def __init__(self, worker_ranks, has_sessions, backend="nccl"):
        self.vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(
            world_size=worker_ranks, world_size_across_dp=worker_ranks))
        self.said = [[] for _ in range(worker_ranks)]
        devices = [torch.device("cuda", rank) if backend == "ipc" else torch.device("cpu")
                   for rank in range(worker_ranks)]
        self.workers = [Worker(device, has_sessions, self.said[rank].append, rank, worker_ranks, backend)
                        for rank, device in enumerate(devices)]
        self.calls = []
        self.version = "default"
        self.paused = False

    async def all_ranks(self, name, *arguments):
        # Each rank gets a copy, as from another process: engines take away from it what they have read.
        calls = [(worker.call, name, *copy.deepcopy(arguments)) for worker in self.workers]
        done = await asyncio.gather(*(asyncio.to_thread(*call) for call in calls), return_exceptions=True)
        for problem in done:
            if problem is not None:
                raise EngineError(problem)

    async def init_weight_transfer_engine(self, request):
        self.calls.append(("init", request.init_info))
        await self.all_ranks("init", request.init_info)
        self.calls.append(("joined", None))

    async def start_weight_update(self, is_checkpoint_format=True):
        self.calls.append(("start", is_checkpoint_format))
        await self.all_ranks("start")

    async def update_weights(self, request):
        self.calls.append(("update", request.update_info))
        await self.all_ranks("update", request.update_info)

    async def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))
        await self.all_ranks("finish")
        self.version = weight_version or self.version

    async def get_weight_version(self):
        return self.version

    async def update_weight_version(self, version):
        self.calls.append(("update_weight_version", version))
        self.version = version

    async def pause_generation(self, mode, clear_cache, wait_for_inflight_requests=False):
        self.calls.append(("pause", (mode, clear_cache, wait_for_inflight_requests)))
        self.paused = True

    async def resume_generation(self):
        self.calls.append(("resume", None))
        self.paused = False

    async def is_paused(self):
        return self.paused


class Recorder:
    """ASGI middleware: every request with its status, as a dictionary in `requests`."""

    def __init__(self, app, requests):
        self.app = app
        self.requests = requests

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        entry = {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode(),
                 "type": dict(scope["headers"]).get(b"content-type", b"").decode(), "body": b"", "reply": b""}
        self.requests.append(entry)
        more = True
        while more:  # here, since a route need not read its body
            message = await receive()
            entry["body"] += message.get("body", b"")
            more = message.get("more_body", False)
        first = [{"type": "http.request", "body": entry["body"], "more_body": False}]

        async def receiving():
            return first.pop() if first else await receive()

        async def sending(message):
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            else:
                entry["reply"] += message.get("body", b"")
            await send(message)

        await self.app(scope, receiving, sending)


def envelope(status, kind, text):
    """vLLM's error body."""
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": status}}, status)


class Server:
    """Serves until stop(), on a port that the system chose."""

    def __init__(self, folder, version, worker_ranks=1, backend="nccl"):
        import uvicorn
        from fastapi import FastAPI, HTTPException
        from fastapi.exceptions import RequestValidationError

        routes = importlib.import_module(route_file(folder))
        self.routes_from = routes.__file__
        self.requests = []
        has_sessions = tuple(map(int, version.split(".")[:2])) >= (0, 21)
        self.engine = RecordingEngine(worker_ranks, has_sessions, backend)
        app = FastAPI()
        app.state.engine_client = self.engine
        app.include_router(routes.router)
        app.get("/version")(lambda: {"version": version})
        app.get("/health")(lambda: None)
        app.add_exception_handler(HTTPException, lambda _, e: envelope(e.status_code, "Bad Request", e.detail))
        app.add_exception_handler(RequestValidationError, lambda _, e: envelope(400, "Bad Request", str(e)))
        app.add_exception_handler(EngineError, lambda _, e: envelope(500, "Internal Server Error", str(e)))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)  # from now on: who connects before the server runs waits for it
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(Recorder(app, self.requests), log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)

    def sent(self, path):
        """The requests to one path, bodies read as JSON where there are any."""
        return [{**entry, "json": json.loads(entry["body"]) if entry["body"] else None}
                for entry in self.requests if entry["path"] == path]
