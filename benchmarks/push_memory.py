#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much memory does push_checkpoint take? Peak of its anonymous plus shared resident memory, less the packed ring.

    benchmarks/push_memory.py BUILD CHECKPOINT

Samples /proc while the program sends a checkpoint to one serve_worker, in both modes; every round's bytes are verified
by digest at the worker. The bound is 64 MB.
"""
import pathlib
import re
import subprocess
import sys

BUFFER, BUFFERS, ROUNDS = 48 << 20, 2, 40


def cpu():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    return re.search(r"model name\s*: (.*)", text).group(1)


def resident(process):
    """Anonymous plus shared resident bytes of a process, 0 once it has ended."""
    try:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


def peak(build, checkpoint, url, first, *options):
    process = subprocess.Popen([build / "examples/push_checkpoint", checkpoint, "--server", url, "--rounds", str(ROUNDS),
                                "--version-from", str(first), "--vary", "1", *options], stdout=subprocess.DEVNULL)
    highest = 0
    while process.poll() is None:
        highest = max(highest, resident(process))
    if process.returncode != 0:
        sys.exit(f"push_checkpoint ended with {process.returncode}")
    return highest


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    build, checkpoint = map(pathlib.Path, sys.argv[1:])
    worker = subprocess.Popen([build / "examples/serve_worker", "--port", "0", "--model", checkpoint],
                              stdout=subprocess.PIPE, text=True)
    url = next(re.search(r"http://\S+", line).group() for line in worker.stdout if "http://" in line)
    ring = BUFFER * BUFFERS
    packed = peak(build, checkpoint, url, 1, "--packed", "--buffer-bytes", str(BUFFER), "--buffers", str(BUFFERS))
    single = peak(build, checkpoint, url, 1000)
    worker.terminate()
    worker.wait()
    print(f"command: benchmarks/push_memory.py BUILD {checkpoint.name}")
    print(f"machine: {cpu()}")
    print(f"checkpoint: {checkpoint.stat().st_size} bytes, {ROUNDS} rounds each; MB are 10^6 bytes, the bound is 64\n")
    print(f"{'':<20}{'peak':>10}{'ring':>10}{'beside it':>12}")
    print(f"{'packed':<20}{packed / 1e6:>10.1f}{ring / 1e6:>10.1f}{(packed - ring) / 1e6:>12.1f}")
    print(f"{'tensor by tensor':<20}{single / 1e6:>10.1f}{0:>10.1f}{single / 1e6:>12.1f}")


main()
