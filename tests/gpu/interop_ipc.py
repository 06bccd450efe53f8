#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Over CUDA IPC on one GPU: our trainer to vLLM's worker engine class, vLLM's trainer to our worker, ours to ours.

interop_ipc.py --vllm FOLDER --program PATH [--releases V,V] [--only vllm,ours,sanitizer,memory]

FOLDER holds releases as vllm_files.py puts them there, PATH is the built interop_ipc_program.cpp. Ten rounds of weights
that change in every byte; in each the digests of all tensors must be equal on both sides. Prints PASS, FAIL and SKIP
lines.

- vllm: vLLM's IPC engine classes with the real torch, packed and unpacked. A torch process's memory must not grow from
  the third round on, and its counters of exports that were not read must be 0 after every round.
- ours: C++ to C++ in the three commit modes, from where tensors lie, packed, strided, with a
  third of the tensors in a pool that cannot be exported, and float32 to bfloat16.
- sanitizer: the same in place under compute-sanitizer's memcheck, with a list of 84 MB. Skipped where the tool does
  not know the device.
- memory: 1,000 rounds of a small list; the memory of both processes and of the device after 100 and after 1,000.

The script is also vLLM's side of the first kind: --role worker, --role trainer.
"""
import argparse
import glob
import http.server
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "interop"), str(HERE.parent / "support")]
from interop_nccl import ROUND, Server, drive  # noqa: E402
from report import Report  # noqa: E402

BUFFER = 128 << 20  # of the packed form; larger than the largest tensor
SMALL_BUFFER = 20 << 20  # likewise, of the small list
COUNTERS_BEGIN = 64  # in the file where torch counts who still reads what it exported
MEMORY = re.compile(r"^memory after round (\d+): (\d+) allocated, (\d+) reserved, (\d+) resident$", re.MULTILINE)
RESIDENT_SLACK = 64 << 20


class Skipped(str):
    """Why a check cannot be made here."""


def numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


# --- vLLM's side

def activate(folder):
    import vllm_modules
    vllm_modules.activate(str(folder))
    sys.modules.setdefault("ray", type(sys)("ray"))  # named by some releases, used for another transport
    import vllm.envs
    vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION = True


def say(text):
    print(text, flush=True)


def tell_memory(number):
    import torch
    torch.cuda.synchronize()
    with open("/proc/self/statm", encoding="ascii") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    say(f"memory after round {number}: {torch.cuda.memory_allocated()} allocated, "
        f"{torch.cuda.memory_reserved()} reserved, {resident} resident")


def unread_exports():
    """How many exports of this torch process are not read yet, by torch's own counters, and how many files count."""
    unread, files = 0, glob.glob(f"/dev/shm/torch_{os.getpid()}_*")
    for name in files:
        with open(name, "rb") as file:
            counts = file.read()[COUNTERS_BEGIN:]
        values = struct.unpack(f"<{len(counts) // 8}q", counts[:len(counts) // 8 * 8])
        unread += sum(value != 0 for value in values)
    return unread, len(files)


def worker_role(arguments):
    """vLLM's worker engine class behind vLLM's routes, until the input ends."""
    activate(arguments.vllm)
    import torch
    from interop_nccl_worker import Routes
    from vllm_worker import Worker

    rounds = 0

    def told(text):
        nonlocal rounds
        rounds += 1
        say(text)
        tell_memory(rounds)

    Routes.version, Routes.release = arguments.version, numbers(arguments.version)
    Routes.worker = Worker(torch.device("cuda", 0), has_sessions=Routes.release >= (0, 21), say=told, backend="ipc")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(server.server_address[1])
    sys.stdin.read()


def trainer_role(arguments):
    """vLLM's trainer code, driving our worker; what the worker has is asked of it."""
    activate(arguments.vllm)
    import torch
    import vllm_trainer
    from weights import Weights, qwen3_list

    torch.cuda.set_device(0)
    weights = Weights(qwen3_list(odd=True), torch.device("cuda", 0))
    kind = vllm_trainer.IpcEngineTrainer if numbers(arguments.version) >= (0, 27) else vllm_trainer.IpcFunctionTrainer
    trainer = kind(arguments.url, numbers(arguments.version), weights, arguments.packing == "packed", BUFFER)
    wrong = 0
    for number in range(1, arguments.rounds + 1):
        weights.fill(number)
        torch.cuda.synchronize()
        began = time.monotonic()
        trainer.send()
        seconds = time.monotonic() - began
        torch.cuda.ipc_collect()
        unread, files = unread_exports()
        theirs = vllm_trainer.call(arguments.url, "/weight_checker", {"action": "checksum"})["checksums"]
        ours = weights.digests()
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        # What is still exported has a counter.
        wrong += bool(differing) or bool(unread) or (arguments.packing == "unpacked" and not files)
        verdict = f"{len(differing)} differ, first {differing[0]}" if differing else "all digests equal"
        say(f"round {number}: {seconds:.3f} s, {verdict}, {unread} exports not read, in {files} files of counters")
        tell_memory(number)
    sys.exit(1 if wrong else 0)


# --- checks against vLLM

def growth(output, rounds):
    """What is wrong with the memory that a torch process told of."""
    told = {int(number): tuple(map(int, rest)) for number, *rest in MEMORY.findall(output)}
    if rounds < 4 or 3 not in told or rounds not in told:
        return f"memory was told of rounds {sorted(told)}"
    early, late = told[3], told[rounds]
    if late[0] > early[0] or late[1] > early[1] or late[2] > early[2] + RESIDENT_SLACK:
        return f"memory grew: (allocated, reserved, resident) were {early} after round 3, {late} after {rounds}"
    return ""


def our_trainer(arguments, version, packing):
    worker = [sys.executable, __file__, "--role", "worker", "--vllm", arguments.vllm / version, "--version", version]
    server = Server(worker, "worker", arguments.logs / "interop_ipc_server.log")
    command = [arguments.program, "train", arguments.list, server.url, str(arguments.rounds), packing]
    status, output, theirs = drive(server, command, arguments.timeout)
    sent, came = ROUND.findall(output), ROUND.findall(theirs)
    if status != 0:
        return f"our trainer ended with {status}: {output[-1500:]} {theirs[-1500:]}"
    if len(came) != arguments.rounds or len(set(came)) != len(came):
        return f"{len(came)} rounds came, wanted {arguments.rounds} different ones: {theirs[-1500:]}"
    return growth(theirs, arguments.rounds) if sent == came else f"digests differ: sent {sent}, came {came}"


def our_worker(arguments, version, packing):
    server = Server([arguments.program, "serve", arguments.list, "in_place"], "worker",
                    arguments.logs / "interop_ipc_server.log")
    command = [sys.executable, __file__, "--role", "trainer", "--vllm", arguments.vllm / version, "--version", version,
               "--url", server.url, "--rounds", str(arguments.rounds), "--packing", packing]
    status, output, theirs = drive(server, command, arguments.timeout)
    equal = output.count("all digests equal, 0 exports not read")
    if status != 0 or equal != arguments.rounds:
        return f"vLLM's trainer ended with {status} after {equal} good rounds: {output[-1500:]} {theirs[-1500:]}"
    return growth(output, arguments.rounds)


def vllm_checks(arguments):
    releases = arguments.releases.split(",") if arguments.releases else sorted(p.name for p in arguments.vllm.iterdir())
    for version in releases:
        if numbers(version) < (0, 17):
            continue
        for packing in ("unpacked", "packed") if numbers(version) >= (0, 22) else ("unpacked",):
            yield (f"our trainer to vLLM {version}'s worker engine, {packing}",
                   lambda version=version, packing=packing: our_trainer(arguments, version, packing))
            if numbers(version) >= (0, 21):  # before, a trainer knows no start
                yield (f"vLLM {version}'s trainer to our worker, {packing}",
                       lambda version=version, packing=packing: our_worker(arguments, version, packing))


# --- checks of ours against ours

FORMS = {"unpacked": ("unpacked", "bytes"), "packed": ("packed", "bytes"), "strided": ("unpacked", "strided"),
         "packed from strided": ("packed", "strided"), "a third in a pool": ("unpacked", "pool"),
         "float32 to bfloat16": ("unpacked", "f32")}


def pair(arguments, mode, form, listed, rounds, every=1, buffer=BUFFER, watch=False, under=()):
    """Our trainer and our worker, two processes; `under` is what both are started with."""
    packing, weights = FORMS[form]
    convert = ["--convert"] if weights == "f32" else []
    server = Server([*under, arguments.program, "serve", listed, mode, *convert], "worker",
                    arguments.logs / "interop_ipc_server.log")
    command = [*under, arguments.program, "train", listed, server.url, str(rounds), packing, "--form", weights,
               "--check", str(every), "--buffer", str(buffer)]
    if watch:
        command += ["--watch", str(server.process.pid)]
    status, output, theirs = drive(server, command, arguments.timeout)
    print("\n".join(line for line in output.splitlines() if line.startswith("memory")), end="\n" if watch else "")
    equal, wanted = output.count("all digests equal"), rounds // every
    if status != 0 or equal != wanted:
        return f"our trainer ended with {status} after {equal} of {wanted}: {output[-1500:]} {theirs[-1500:]}"
    if weights == "pool" and "memory of a pool" not in output:
        return f"the trainer does not say what goes through the ring: {output[-1500:]}"
    ended = server.process.returncode
    return "" if ended == 0 else f"our worker ended with {ended}: {theirs[-1500:]}"


def our_checks(arguments):
    for mode in ("in_place", "flip", "copy_in"):
        for form, (_, weights) in FORMS.items():
            listed = arguments.small_list if weights == "f32" else arguments.list  # those are made on the host
            yield (f"ours to ours, {mode}, {form}",
                   lambda mode=mode, form=form, listed=listed: pair(arguments, mode, form, listed, arguments.rounds))


def sanitized(arguments, form):
    for old in arguments.logs.glob("interop_ipc_sanitizer_*.log"):
        old.unlink()
    # %p: each process writes a file of its own.
    under = [arguments.sanitizer, "--tool", "memcheck", "--error-exitcode", "99", "--log-file",
             str(arguments.logs / "interop_ipc_sanitizer_%p.log")]
    try:
        problem = pair(arguments, "in_place", form, arguments.small_list, 3, buffer=SMALL_BUFFER, under=under)
    except FileNotFoundError:
        return Skipped(f"there is no {arguments.sanitizer}")
    except RuntimeError as failed:  # the worker did not come up
        problem = str(failed)
    said = [log.read_text(errors="replace") for log in arguments.logs.glob("interop_ipc_sanitizer_*.log")]
    if any("Device not supported" in text for text in said) or "Device not supported" in problem:
        return Skipped("the tool does not know this device")
    clean = sum("ERROR SUMMARY: 0 errors" in text for text in said)
    if problem or clean != 2:
        return f"{clean} of 2 processes are clean; {problem} {' '.join(text[-1500:] for text in said)}"
    return ""


def sanitizer_checks(arguments):
    for form in FORMS:
        yield f"compute-sanitizer, {form}", lambda form=form: sanitized(arguments, form)


def memory_checks(arguments):
    for form in ("unpacked", "packed"):
        yield (f"{arguments.many_rounds} rounds, memory, {form}",
               lambda form=form: pair(arguments, "flip", form, arguments.small_list, arguments.many_rounds,
                                      every=max(1, arguments.many_rounds // 10), buffer=SMALL_BUFFER, watch=True))


KINDS = {"vllm": vllm_checks, "ours": our_checks, "sanitizer": sanitizer_checks, "memory": memory_checks}


def write_list(path, rows):
    with open(path, "w", encoding="ascii") as listed:
        for name, dtype, extents in rows:
            print(name, str(dtype).removeprefix("torch."), *extents, file=listed)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, required=True)
    parser.add_argument("--program", type=pathlib.Path)
    parser.add_argument("--releases", help="of those in the folder; default: all")
    parser.add_argument("--only", help="kinds of checks, " + ", ".join(KINDS) + "; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--many-rounds", type=int, default=1000)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for the rounds of one check")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer")
                        or "/usr/local/cuda/bin/compute-sanitizer")
    parser.add_argument("--role", choices=("worker", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--version", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--packing", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        (worker_role if arguments.role == "worker" else trainer_role)(arguments)
        return
    if arguments.program is None:
        parser.error("the built program has to be named: --program")
    from weights import qwen3_list
    arguments.program = arguments.program.absolute()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    arguments.list = write_list(arguments.logs / "interop_ipc_list.txt", qwen3_list(odd=True))
    arguments.small_list = write_list(arguments.logs / "interop_ipc_small_list.txt",
                                      qwen3_list(layers=1, experts=4, vocabulary=1000, odd=True))
    report = Report()
    for kind in arguments.only.split(",") if arguments.only else KINDS:
        for what, check in KINDS[kind](arguments):
            began = time.monotonic()
            try:
                problem = check()
            except (RuntimeError, OSError, subprocess.SubprocessError) as failed:
                problem = str(failed)
            seconds = time.monotonic() - began
            if isinstance(problem, Skipped):
                report.skip(what, problem)
            else:
                report.check(f"{what} ({seconds:.1f} s)", problem)
            sys.stdout.flush()
    report.exit()


if __name__ == "__main__":
    main()
