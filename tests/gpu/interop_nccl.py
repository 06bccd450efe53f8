#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Over real NCCL on one GPU: our trainer to vLLM's worker engine class, vLLM's trainer to our worker.

interop_nccl.py --vllm FOLDER --program PATH [--releases V,V]

FOLDER holds releases as vllm_files.py puts them there, PATH is the built interop_nccl_program.cpp. Ten rounds of
weights that change in every byte; in each the digests of all tensors must be equal on both sides. Prints PASS and FAIL
lines. Every process has its own NCCL_HOSTID, so that NCCL takes two ranks on one device, and speaks through the
loopback interface; all use the libnccl that torch brought, or VLLM_NCCL_SO_PATH.
"""
import argparse
import contextlib
import ctypes
import os
import pathlib
import re
import selectors
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from report import Report  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ROUND = re.compile(r"^round (\d+)\b.*\bdigest ([0-9a-f]{16})$", re.MULTILINE)


def environment(name):
    shared = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **shared, "NCCL_HOSTID": name}


def torch_nccl():
    """The libnccl that torch brought: the one that vLLM uses, and that our programs have to use too."""
    code = ("import torch; torch.cuda.is_available(); "
            "print(next(l.split()[-1] for l in open('/proc/self/maps') if 'libnccl.so' in l))")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    return done.stdout.strip()


def library_for_vllm(folder):
    """The libnccl that vLLM loads. Its wrapper wants functions that NCCL has from 2.29.7 on and that weight transfer
    does not call: an older libnccl gets stand-ins for them."""
    library = os.environ["VLLM_NCCL_SO_PATH"]
    if hasattr(ctypes.CDLL(library), "ncclCommSuspend"):
        return library
    made = folder / "libnccl_without_suspend.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, HERE / "nccl_without_suspend.c",
                    "-Wl,--no-as-needed", library, f"-Wl,-rpath,{os.path.dirname(library)}"], timeout=60, check=True)
    print(f"vLLM loads it with stand-ins for functions that it lacks and that no transfer calls: {made.name}")
    return str(made)


class Server:
    """A process that prints its port and ends when its input does."""

    def __init__(self, command, name, log):
        self.log = open(log, "w+")  # closed by stop
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                        text=True, env=environment(name))
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if ready.select(90) else ""
        if not line.strip().isdigit():
            raise RuntimeError(f"no port from {command[0]}: {self.stop()[-2000:]}")
        self.url = f"http://127.0.0.1:{line.strip()}"

    def stop(self):
        """Its whole output. A rank that waits in NCCL does not end by itself: it is killed after a while."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        output = self.process.stdout.read()
        self.process.wait()
        self.log.seek(0)
        errors = self.log.read()
        self.log.close()
        return output + errors


def drive(server, command, timeout):
    """Runs a trainer against `server`; its status and output, and the server's output."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=timeout, text=True, errors="replace", env=environment("trainer"), check=False)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = "no end", (late.stdout or b"").decode(errors="replace")
    return status, output, server.stop()


def our_trainer(arguments, version, packing, log):
    worker = [sys.executable, HERE / "interop_nccl_worker.py", "--vllm", arguments.vllm / version, "--version", version]
    server = Server(worker, "worker", log)
    command = [arguments.program, "train", arguments.list, server.url, str(arguments.rounds), packing]
    status, output, theirs = drive(server, command, arguments.timeout)
    sent, came = ROUND.findall(output), ROUND.findall(theirs)
    if status != 0:
        return f"our trainer ended with {status}: {output[-1500:]} {theirs[-1500:]}"
    if len(came) != arguments.rounds or len(set(came)) != len(came):
        return f"{len(came)} rounds came, wanted {arguments.rounds} different ones: {theirs[-1500:]}"
    return "" if sent == came else f"digests differ: sent {sent}, came {came}"


def our_worker(arguments, version, packing, log):
    server = Server([arguments.program, "serve", arguments.list], "worker", log)
    trainer = [sys.executable, HERE / "interop_nccl_trainer.py", "--vllm", arguments.vllm / version, "--version",
               version, "--url", server.url, "--rounds", str(arguments.rounds), "--odd"]
    trainer += ["--unpacked"] if packing == "unpacked" else []
    status, output, theirs = drive(server, trainer, arguments.timeout)
    equal = output.count("all digests equal")
    if status != 0 or equal != arguments.rounds:
        return f"vLLM's trainer ended with {status} after {equal} equal rounds: {output[-1500:]} {theirs[-1500:]}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, required=True)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--releases", help="of those in the folder; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for the rounds of one check")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp"))
    arguments = parser.parse_args()
    if "VLLM_NCCL_SO_PATH" not in os.environ:
        os.environ["VLLM_NCCL_SO_PATH"] = torch_nccl()
    print(f"libnccl: {os.environ['VLLM_NCCL_SO_PATH']}")
    # Our programs look beside the real one.
    for_ours = os.path.dirname(os.environ["VLLM_NCCL_SO_PATH"])
    os.environ["LD_LIBRARY_PATH"] = ":".join([for_ours, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    os.environ["VLLM_NCCL_SO_PATH"] = library_for_vllm(arguments.logs)
    releases = arguments.releases.split(",") if arguments.releases else sorted(p.name for p in arguments.vllm.iterdir())
    arguments.program = arguments.program.absolute()
    arguments.list = arguments.logs / "interop_nccl_list.txt"
    with open(arguments.list, "w") as listed:
        subprocess.run([sys.executable, HERE.parent / "interop" / "weights.py", "--odd"], stdout=listed, timeout=120,
                       check=True)
    report = Report()
    for version in releases:
        for packing in ("packed", "unpacked"):
            checks = [(f"our trainer to vLLM {version}'s worker engine", our_trainer)]
            if tuple(map(int, version.split(".")[:2])) >= (0, 21):  # before, a trainer knows no start
                checks.append((f"vLLM {version}'s trainer to our worker", our_worker))
            for what, check in checks:
                began = time.monotonic()
                try:
                    problem = check(arguments, version, packing, arguments.logs / "interop_nccl_server.log")
                except (RuntimeError, OSError) as failed:
                    problem = str(failed)
                report.check(f"{what}, {packing} ({time.monotonic() - began:.1f} s)", problem)
    report.exit()


if __name__ == "__main__":
    main()
