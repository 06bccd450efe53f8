#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our trainer and worker of the cuda_ipc backend against vLLM's own modules of several releases, without a GPU.

vllm_ipc_interop.py --programs FOLDER  where the built tests/support/ipc_vllm_tool.cpp is. For every release of
vllm_files.py that has an `ipc` engine:

- our trainer, of one rank and of two, drives vLLM's route file in front of ranks with vLLM's IPC engine class;
- vLLM's trainer code, of one process and of two that merge their handles, drives our worker; its counters of what has
  not been read fall to 0.

Both sides run the code that describes and reads device memory; the memory is in files, see host_ipc.py and
tests/support/host_ipc_machinery.hpp. Skipped where vllm_interop.py is.
"""
import datetime
import os
import pathlib
import re
import sys
import tempfile
import traceback
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from report import run  # noqa: E402

import vllm_interop  # noqa: E402
from vllm_interop import ROUNDS, Problems, Worker, numbers, parameters_in  # noqa: E402

RANKS = 2  # of what has several
BUFFER = 2500


def prepare():
    """After vllm_interop's own preparation of this process, before vLLM's engine is imported."""
    import host_ipc
    host_ipc.replace_ipc()
    sys.modules.setdefault("ray", types.ModuleType("ray"))  # named by some releases, used for another transport
    import vllm.envs
    vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION = True


# --- our trainer against vLLM's routes

def check_forms(problems, version, server, packed):
    posts = server.sent("/init_weight_transfer_engine")
    lacking = int(numbers(version) < (0, 27))
    problems.need([post["status"] for post in posts] == [500] * lacking + [200], "init calls end 500 until a form fits",
                  [(post["status"], post["reply"]) for post in posts])
    told = posts[-1]["json"]["init_info"] if posts else None
    problems.need(told == ({} if lacking else {"packed": packed}), "init_info", told)


def check_updates(problems, version, server, listed, packed):
    updates = [argument for name, argument in server.engine.calls if name == "update"]
    sent = [row for one in updates for row in zip(one["names"], one["dtype_names"], one["shapes"])]
    wanted = sorted((name, kind, shape if shape or not packed else [1]) for name, kind, shape in listed)
    for number in range(ROUNDS):
        part = sorted(tuple(row) for row in sent[number * len(listed):(number + 1) * len(listed)])
        problems.need(part == wanted, f"parameters of round {number + 1}", part)
    problems.need(len(updates) == ROUNDS if not packed else len(updates) > ROUNDS, "calls", len(updates))
    fields = {tuple(sorted(one.keys() - {"names", "dtype_names", "shapes"})) for one in updates}
    wanted = ["ipc_handles_pickled"] + ["packed"] * (packed and numbers(version) < (0, 27)) + ["tensor_sizes"] * packed
    problems.need(fields == {tuple(wanted)}, f"fields of the update beside the lists: {wanted}", fields)
    posts = server.sent("/update_weights")
    problems.need(len({post["body"] for post in posts}) == len(posts) // ROUNDS, "bodies are the same every round")


def check_arrival(problems, server, output, ranks):
    """Every rank of the worker has, in every round, what the trainer rank on its GPU sent."""
    came = [[] for _ in range(ranks)]
    for rank, line in re.findall(r"^rank (\d+) (round \d+: .*)$", output, re.MULTILINE):
        came[int(rank)].append(line)
    lines = [line for one in came for line in one]
    problems.need(len(set(lines)) == ROUNDS * ranks, "every rank sends other weights in every round", lines)
    for rank in range(ranks):
        problems.need(server.engine.said[rank] == came[rank], f"rank {rank} has what was sent",
                      (server.engine.said[rank], came[rank]))


def check_one_refused(problems, tool, server, form):
    """A server that has not been told to trust pickles says so, and our trainer passes it on."""
    import vllm.envs
    vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION = False
    status, output = run([tool, "train", server.url, "1", form, "1"], timeout=60)
    problems.need(status == 1 and "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in output, "the flag is named", output)
    vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION = True
    problems.need(server.engine.paused is False, "the server was resumed")


def trainer_against_routes(folder, version, tool, form, ranks):
    prepare()
    import host_ipc
    import vllm_server

    packed = form != "unpacked"
    server = vllm_server.Server(folder, version, ranks, "ipc")
    problems = Problems()
    try:
        if form == "pool":
            check_one_refused(problems, tool, server, form)
        status, output = run([tool, "train", server.url, str(ROUNDS), form, str(ranks)], timeout=60)
    finally:
        server.stop()
    if numbers(version) < (0, 22) and packed:
        problems.need(status == 1 and f"vLLM {version} takes no packed handles" in output, "the era is named", output)
        return "; ".join(problems)
    if status != 0:
        return f"our trainer ended with {status}: {output}"
    check_arrival(problems, server, output, ranks)
    problems.need(len(host_ipc.opened) == ranks * (1 if packed else 2), "each allocation, or the ring, was opened once",
                  len(host_ipc.opened))
    if form == "pool":
        return "; ".join(problems)
    check_forms(problems, version, server, packed)
    check_updates(problems, version, server, parameters_in(output), packed)
    rounds, calls = [], server.engine.calls
    for call in calls:
        if call[0] == "pause":
            rounds.append([])
        if rounds:
            rounds[-1].append(call)
    problems.need(len(rounds) == ROUNDS, "rounds", [name for name, _ in calls])
    for number, one in enumerate(rounds, 1):
        vllm_interop.check_round(problems, version, one, number)
    vllm_interop.check_requests(problems, version, server)
    return "; ".join(problems)


# --- vLLM's trainer, our worker

def weights_of(listed):
    """In what this process has instead of a GPU."""
    import host_ipc
    import torch
    from weights import Weights

    weights = Weights([], torch.device("cpu"))
    weights.tensors = {name: host_ipc.device_empty(shape, getattr(torch, kind)) for name, kind, shape in listed}
    return weights


def check_counters(problems, number):
    import host_ipc
    values = host_ipc.counted().values()
    problems.need(values and not any(values), f"counters of round {number} are 0", values)


def seed(number, rank):
    return number * 100 + rank


def send_rounds(problems, version, url, listed, packing, rank, ranks):
    """What one trainer process does."""
    import host_ipc
    import vllm_trainer

    host_ipc.set_device(rank)
    client = vllm_interop.versioned_client(url) if numbers(version) >= (0, 28) else None
    kind = vllm_trainer.IpcEngineTrainer if numbers(version) >= (0, 27) else vllm_trainer.IpcFunctionTrainer
    weights = weights_of(listed)
    copies = [weights_of(listed) for _ in range(ranks if rank == 0 else 0)]
    trainer = kind(url, numbers(version), weights, packing == "packed", BUFFER, rank, client)
    for number in range(1, ROUNDS + 1):
        weights.fill(seed(number, rank))
        trainer.send()
        check_counters(problems, number)
        if rank != 0:
            continue
        theirs = vllm_trainer.call(url, "/weight_checker", {"action": "checksum"})["checksums"]
        for other, copy in enumerate(copies):
            copy.fill(seed(number, other))
            prefix = f"{other}/" if ranks > 1 else ""
            ours = {prefix + name: value for name, value in copy.digests().items()}
            seen = {name: value for name, value in theirs.items() if name in ours}
            wrong = sorted(name for name in ours if seen.get(name) != ours[name])
            problems.need(not wrong, f"digests of round {number}", wrong)
        if client:
            seen = vllm_trainer.call(url, "/weight_info", method="GET")["weight_version"]
            problems.need(seen == str(number), "weight_info after finish", seen)
    if ranks > 1 and numbers(version) >= (0, 30) and packing == "unpacked":
        send_list(problems, client, weights, listed, rank)


def send_list(problems, client, weights, listed, rank):
    """One entry for each rank of the worker, in which only the trainer rank on its GPU is named."""
    import torch
    import vllm_trainer
    from vllm.distributed.weight_transfer import ipc_engine

    number = ROUNDS + 1
    weights.fill(seed(number, rank))
    here = [{ipc_engine.torch.cuda.get_device_properties().uuid: ipc_engine.reduce_tensor(tensor)[1]}
            for tensor in weights.tensors.values()]
    exports = [None] * RANKS
    torch.distributed.all_gather_object(exports, here)
    if rank == 0:
        client.start_weight_update()
        client.update_weights([
            {"names": [name for name, _, _ in listed], "dtype_names": [kind for _, kind, _ in listed],
             "shapes": [shape for _, _, shape in listed], "ipc_handles": handles} for handles in exports])
        client.finish_weight_update()
        theirs = vllm_trainer.call(client.base_url, "/weight_checker", {"action": "checksum"})["checksums"]
        for other in range(RANKS):
            copy = weights_of(listed)
            copy.fill(seed(number, other))
            wrong = [name for name, value in copy.digests().items() if theirs.get(f"{other}/{name}") != value]
            problems.need(not wrong, f"rank {other} takes its entry of a list", wrong)
    torch.distributed.barrier()
    check_counters(problems, number)


def ended_well(action):
    """The problems of `action(problems)`, whatever vLLM's code raises."""
    import host_ipc
    problems = Problems()
    try:
        action(problems)
    except Exception as error:
        said = getattr(getattr(error, "response", None), "text", "")
        problems.append(f"{type(error).__name__}: {error} {said}" if said else traceback.format_exc())
    finally:
        host_ipc.counted().remove()
    return problems


def what_it_can_send(tool, version, packing):
    """The parameters, and the words that make our worker expect these: before 0.32 vLLM packs no scalar."""
    listed = parameters_in(run([tool, "list"], timeout=60)[1])
    if packing == "packed" and numbers(version) < (0, 32):
        return [parameter for parameter in listed if parameter[2]], ["flat"]
    return listed, []


def with_worker(problems, tool, words, send):
    worker = Worker(tool, *words)
    try:
        problems += ended_well(lambda found: send(found, worker.url))
    finally:
        status, said = worker.stop()
    problems.need(status == 0, "the worker ends with 0", (status, said))


def trainer_against_worker(_folder, version, tool, packing):
    prepare()
    listed, words = what_it_can_send(tool, version, packing)
    problems = Problems()
    with_worker(problems, tool, ["1", *words],
                lambda found, url: send_rounds(found, version, url, listed, packing, 0, 1))
    return "; ".join(problems)


def two_trainers_against_worker(_folder, version, tool, packing):
    """Two processes, each with weights of its own, on two GPUs; our worker has a rank on each."""
    import torch
    prepare()
    listed, words = what_it_can_send(tool, version, packing)
    problems = Problems()
    with tempfile.TemporaryDirectory() as folder:
        def join(rank):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank,
                                                 world_size=RANKS, timeout=datetime.timedelta(seconds=60))

        def send(found, url, rank):
            join(rank)
            send_rounds(found, version, url, listed, packing, rank, RANKS)

        told, tell = os.pipe()
        other = os.fork()  # before there are threads
        if other == 0:
            found = ended_well(lambda found: send(found, "http://127.0.0.1:1", 1))
            os.write(tell, "; ".join(found).encode()[:4000])
            os._exit(0)
        os.close(tell)
        with_worker(problems, tool, [str(RANKS), *words], lambda found, url: send(found, url, 0))
        if problems:
            os.kill(other, 9)
        os.waitpid(other, 0)
        for left in pathlib.Path("/dev/shm").glob(f"torch_{other}_*"):
            left.unlink()
        with os.fdopen(told, "rb") as said:
            theirs = said.read().decode()
        problems.need(not theirs, "rank 1 is content", theirs)
    return "; ".join(problems)


def checks_of(version):
    if numbers(version) < (0, 17):
        return
    routes = f"our ipc trainer to vLLM {version}'s routes"
    yield f"{routes}, unpacked", trainer_against_routes, ("unpacked", 1)
    yield f"{routes}, packed", trainer_against_routes, ("packed", 1)
    yield f"{routes}, two ranks", trainer_against_routes, ("unpacked", RANKS)
    if numbers(version) >= (0, 22):
        yield f"{routes}, two ranks, packed", trainer_against_routes, ("packed", RANKS)
    if numbers(version) >= (0, 33):
        yield f"{routes}, memory that cannot be exported", trainer_against_routes, ("pool", 1)
    if numbers(version) < (0, 21):  # a trainer knows no start
        return
    for packing in ("unpacked", "packed") if numbers(version) >= (0, 22) else ("unpacked",):
        yield f"vLLM {version}'s ipc trainer to our worker, {packing}", trainer_against_worker, (packing,)
        if numbers(version) >= (0, 22):
            yield (f"vLLM {version}'s ipc trainer of two ranks to our worker, {packing}", two_trainers_against_worker,
                   (packing,))


if __name__ == "__main__":
    vllm_interop.main(__doc__, checks_of, "ipc_vllm_tool")
