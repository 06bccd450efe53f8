#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our trainer and worker against vLLM's own modules of several releases, without a GPU.

vllm_interop.py --programs FOLDER  where the built tests/support/vllm_tool.cpp is. For every release of vllm_files.py:

- our trainer drives vLLM's route file (FastAPI, uvicorn) in front of ranks with vLLM's engine class: init forms, calls
  and bodies are what the release takes, and the bytes are what was sent;
- our store client reads the id that vLLM's process group published as rank 0;
- vLLM's trainer code, with its HTTP client where there is one, drives our worker.

Both sides run the code that moves weights over NCCL; NCCL itself is replaced by sockets (host_cuda.py on vLLM's side,
host_machinery.hpp on ours).

A release that cannot be had is skipped, by name; so is all of it without torch, FastAPI, uvicorn and requests.
"""
import argparse
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from report import Report, default_jobs, run  # noqa: E402

import vllm_files  # noqa: E402
import vllm_modules  # noqa: E402

ROUNDS = 3
RANKS = 2


def numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


class Problems(list):
    """What is wrong, in words."""

    def need(self, holds, what, seen=None):
        if not holds:
            self.append(what if seen is None else f"{what}, not {str(seen)[:300]}")


def parameters_in(output):
    """What our tool lists: (name, torch's dtype, shape)."""
    return [(name, kind, [int(extent) for extent in extents.split()])
            for name, kind, extents in re.findall(r"^parameter (\S+) (\S+) ?(.*)$", output, re.MULTILINE)]


# --- our trainer against vLLM's routes

def check_forms(problems, version, server, packing, meeting):
    """Init forms are tried newest first; each that is refused is refused for a field that this release lacks."""
    posts = server.sent("/init_weight_transfer_engine")
    lacking = (meeting == "automatic" and numbers(version) < (0, 30)) + (numbers(version) < (0, 28))
    problems.need([post["status"] for post in posts] == [500] * lacking + [200], "init calls end 500 until a form fits",
                  [(post["status"], post["reply"]) for post in posts])
    for post in posts[:-1]:
        problems.need(b"unexpected keyword argument" in post["reply"], "a refused form names a field", post["reply"])
    told = posts[-1]["json"]["init_info"] if posts else {}
    problems.need(told.get("rank_offset") == 1 and told.get("world_size") == 1 + RANKS, "ranks in init_info", told)
    problems.need(told.get("packed") == (packing == "packed" if numbers(version) >= (0, 28) else None),
                  "packed at init since 0.28", told)
    by_id = meeting == "automatic" and numbers(version) >= (0, 30)
    problems.need(("nccl_unique_id_b64" in told) == by_id != ("master_port" in told), "how ranks meet", told)


def check_round(problems, version, calls, number):
    """The calls of one round as the engine saw them."""
    names = [name for name, _ in calls]
    has_sessions = numbers(version) >= (0, 21)
    inside = ["start", "update", "finish"] if has_sessions else ["update"]
    short = [name for at, name in enumerate(names) if name != "update" or names[at - 1] != "update"]
    problems.need(short == ["pause", *inside, "resume"], f"calls of round {number}", names)
    arguments = dict(calls)
    problems.need(arguments.get("pause", ())[:2] == ("keep", True), "pause keeps requests and clears caches",
                  arguments.get("pause"))
    if has_sessions:
        problems.need(arguments.get("start") is True, "start says checkpoint format", arguments.get("start"))
    if numbers(version) >= (0, 27):
        problems.need(arguments.get("finish") == str(number), "finish names the version", arguments.get("finish"))


def check_updates(problems, version, server, listed, packing):
    """Bodies of the update calls: every parameter once a round, packing where this release reads it."""
    updates = [argument for name, argument in server.engine.calls if name == "update"]
    sent = [row for one in updates for row in zip(one["names"], one["dtype_names"], one["shapes"])]
    wanted = sorted((name, kind, shape) for name, kind, shape in listed)
    for number in range(ROUNDS):
        part = sorted(tuple(row) for row in sent[number * len(listed):(number + 1) * len(listed)])
        problems.need(part == wanted, f"parameters of round {number + 1}", part[:3])
    problems.need(len(sent) == ROUNDS * len(listed), "every parameter once a round", len(sent))
    told_here = numbers(version) < (0, 28) and packing == "packed"
    fields = [sorted(one.keys() - {"names", "dtype_names", "shapes"}) for one in updates]
    wanted = ["packed", "packed_buffer_size_bytes", "packed_num_buffers"] if told_here else []
    problems.need(all(one == wanted for one in fields), f"fields of the update beside the lists: {wanted}", fields[:1])
    problems.need(not told_here or all(one.get("packed") is True for one in updates), "the update says packed")
    posts = server.sent("/update_weights")
    problems.need(len({post["body"] for post in posts}) == len(posts) // ROUNDS, "bodies are the same every round")


def check_requests(problems, version, server):
    """What went over the wire beside what the engine saw."""
    for post in server.requests:
        if post["method"] == "POST" and post["path"] != "/init_weight_transfer_engine":
            problems.need(post["status"] == 200, f"{post['path']} is answered 200", (post["status"], post["reply"]))
    for start in server.sent("/start_weight_update"):
        if start["method"] == "POST":
            problems.need(start["body"] == b"{}" and start["type"].startswith("application/json"),
                          "start has the body {}", (start["type"], start["body"]))
        else:
            problems.need(start["status"] == (405 if numbers(version) >= (0, 21) else 404),
                          "a GET of the start route", start["status"])
    for pause in server.sent("/pause"):
        problems.need(pause["query"] == "mode=keep&clear_cache=true" and not pause["body"],
                      "pause is asked in the query", (pause["query"], pause["body"]))
    info = server.sent("/weight_info")
    there = 200 if numbers(version) >= (0, 27) else 404
    problems.need(info and info[0]["status"] == there, "weight_info is asked for", info[:1])


def trainer_against_routes(folder, version, tool, packing, meeting):
    import vllm_server

    server = vllm_server.Server(folder, version, RANKS)
    problems = Problems()
    problems.need(str(server.routes_from).startswith(str(folder)), "the route file is vLLM's", server.routes_from)
    try:
        status, output = run([tool, "train", server.url, str(ROUNDS), packing, meeting], timeout=60)
    finally:
        server.stop()
    if status != 0:
        return f"our trainer ended with {status}: " + " ".join(re.findall(r"^vllm_tool: .*", output, re.MULTILINE))
    listed = parameters_in(output)
    check_forms(problems, version, server, packing, meeting)
    sent = re.findall(r"^round \d+: .*$", output, re.MULTILINE)
    for rank, came in enumerate(server.engine.said):
        problems.need(len(set(sent)) == ROUNDS and came == sent, f"rank {rank} has what was sent", (sent, came))
    rounds, calls = [], server.engine.calls
    for call in calls:
        if call[0] == "pause":
            rounds.append([])
        if rounds:
            rounds[-1].append(call)
    problems.need(len(rounds) == ROUNDS, "rounds", [name for name, _ in calls])
    for number, one in enumerate(rounds, 1):
        check_round(problems, version, one, number)
    check_updates(problems, version, server, listed, packing)
    check_requests(problems, version, server)
    return "; ".join(problems)


# --- vLLM's process group as rank 0, our store client

def client_against_group(_folder, _version, tool):
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    raw = secrets.token_bytes(128)
    told = []

    def rank_0():  # returns when both ranks have come
        group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2, store_timeout=60)
        group.broadcast_obj(ncclUniqueId.from_buffer_copy(raw), src=0)
        told.append(group)  # the store lives as long as the group

    serving = threading.Thread(target=rank_0, daemon=True)
    serving.start()
    status, output = run([tool, "fetch", "127.0.0.1", str(port)], timeout=60)
    serving.join(60)
    problems = Problems()
    problems.need(status == 0, f"our client ended with {status}: {output[-1000:]}")
    problems.need(f"unique_id {raw.hex()}" in output, "our client has vLLM's id", output)
    problems.need(bool(told), "rank 0 saw both ranks come")
    return "; ".join(problems)


# --- vLLM's trainer, our worker

class Worker:
    """Our worker server as a process."""

    def __init__(self, tool, *arguments):
        self.process = subprocess.Popen([tool, "serve", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def stop(self):
        """Its status and what it said."""
        try:
            said = self.process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            said = self.process.communicate()[1]
        return self.process.returncode, said


def refused(action, *arguments):
    """The status with which the server refused, 0 where it did not."""
    import requests
    try:
        action(*arguments)
        return 0
    except requests.HTTPError as error:
        return error.response.status_code


def versioned_client(url):
    """vLLM's HTTP client, with which the engine's finish names a version."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    class Client(HTTPVLLMWeightSyncClient):
        rounds = 0

        def finish_weight_update(self, weight_version=None):
            self.rounds += 1
            super().finish_weight_update(weight_version=str(self.rounds))

    return Client(url + "/", timeout=30)


def check_refusals(problems, client):
    """Calls out of order, by vLLM's client."""
    empty = {"names": [], "dtype_names": [], "shapes": []}
    problems.need(refused(client.update_weights, empty) == 500, "an update before start is refused")
    problems.need(refused(client.finish_weight_update) == 500, "a finish without a start is refused")
    problems.need(refused(client.init_weight_transfer_engine, {"unknown": 1}) == 500, "an unknown field is refused")


def drive_worker(problems, version, url, listed, packing):
    import torch
    import vllm_trainer
    from weights import Weights

    weights = Weights([(name, getattr(torch, kind), shape) for name, kind, shape in listed], torch.device("cpu"))
    names_version = numbers(version) >= (0, 27)
    client = versioned_client(url) if numbers(version) >= (0, 28) else None
    kind = vllm_trainer.EngineTrainer if client else vllm_trainer.FunctionTrainer
    world = vllm_trainer.call(url, "/get_world_size", method="GET")["world_size"]
    problems.need(world == 1, "world size", world)
    if client:
        check_refusals(problems, client)
        client.rounds = 0
    trainer = kind(url, numbers(version), weights, 1 + world, packing == "packed", 1 << 10,
                   **({"client": client} if client else {}))
    for number in range(1, ROUNDS + 1):
        weights.fill(number)
        trainer.send()
        theirs = vllm_trainer.call(url, "/weight_checker", {"action": "checksum"})["checksums"]
        problems.need(theirs == weights.digests(), f"digests of round {number}", theirs)
        if client and names_version:
            seen = vllm_trainer.call(url, "/weight_info", method="GET")["weight_version"]
            problems.need(seen == str(number), "weight_info after finish", seen)
    if client:
        problems.need(refused(client.finish_weight_update) == 500, "a finish without a start is refused")
    if hasattr(client, "shutdown_weight_transfer_engine"):
        client.shutdown_weight_transfer_engine()


def trainer_against_worker(_folder, version, tool, packing):
    problems = Problems()
    listed = parameters_in(run([tool, "list"], timeout=60)[1])
    worker = Worker(tool)
    try:
        drive_worker(problems, version, worker.url, listed, packing)
    except Exception as error:  # whatever vLLM's code raises, with what the server said
        said = getattr(getattr(error, "response", None), "text", "")
        problems.append(f"{type(error).__name__}: {error} {said}")
    finally:
        status, said = worker.stop()
    problems.need(status == 0, "the worker ends with 0", (status, said))
    return "; ".join(problems)


# --- the runner

def child(pipe, check, folder, version, rest):
    import host_cuda
    warnings.simplefilter("ignore")  # vLLM's, of tensors that are larger than the small buffers here
    try:
        host_cuda.replace_cuda()
        vllm_modules.activate(folder)
        host_cuda.replace_nccl()
        pipe.send(check(folder, version, *rest))
    except BaseException:
        pipe.send(traceback.format_exc())


def run_all(tasks, tool, jobs, timeout=120):
    """The problems of all tasks, in order. A process holds one release of vLLM; each is forked from this one, which has
    one thread, since importing torch takes seconds."""
    forking = multiprocessing.get_context("fork")
    problems = [f"no end after {timeout} s"] * len(tasks)
    waiting, running = list(enumerate(tasks)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            index, (_, check, folder, version, rest) = waiting.pop(0)
            ours, theirs = forking.Pipe(duplex=False)
            process = forking.Process(target=child, args=(theirs, check, folder, version, (tool, *rest)), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (index, process, time.monotonic() + timeout)
        ready = multiprocessing.connection.wait(list(running), timeout=1)
        for pipe in [pipe for pipe in running if pipe in ready or time.monotonic() > running[pipe][2]]:
            index, process, _ = running.pop(pipe)
            if pipe in ready:
                try:
                    problems[index] = pipe.recv()
                except EOFError:
                    problems[index] = "its process died"
            process.kill()
            process.join()
            pipe.close()
    return problems


def checks_of(version):
    yield f"our trainer to vLLM {version}'s routes, packed", trainer_against_routes, ("packed", "automatic")
    yield f"our trainer to vLLM {version}'s routes, unpacked, through the store", trainer_against_routes, (
        "unpacked", "store")
    yield f"our store client to vLLM {version}'s process group", client_against_group, ()
    if numbers(version) >= (0, 21):  # before, a trainer knows no start
        for packing in ("packed", "unpacked"):
            yield f"vLLM {version}'s trainer to our worker, {packing}", trainer_against_worker, (packing,)


def main(description=__doc__, checks_of=checks_of, program="vllm_tool"):
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--programs", required=True, type=pathlib.Path)
    parser.add_argument("--cache", type=pathlib.Path, default=vllm_files.CACHE)
    parser.add_argument("--only", help="a release")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    arguments = parser.parse_args()
    report = Report()
    missing = [name for name in ("torch", "fastapi", "uvicorn", "requests") if importlib.util.find_spec(name) is None]
    if not missing:
        for name in ("torch.distributed", "fastapi", "uvicorn", "requests"):
            importlib.import_module(name)
    tool = os.path.abspath(arguments.programs / program)
    tasks = []
    for version in [arguments.only] if arguments.only else vllm_files.RELEASES:
        try:
            if missing:
                raise vllm_files.Unavailable(f"not installed: {', '.join(missing)}")
            folder = vllm_files.release(version, arguments.cache.absolute())
        except vllm_files.Unavailable as why:
            for name, _, _ in checks_of(version):
                report.skip(name, why)
            continue
        tasks += [(name, check, folder, version, rest) for name, check, rest in checks_of(version)]
    for task, problem in zip(tasks, run_all(tasks, tool, arguments.jobs)):
        report.check(task[0], problem)
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
