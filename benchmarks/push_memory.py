#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much memory does push_checkpoint take? Peaks of its resident memory, anonymous and shared.

    benchmarks/push_memory.py BUILD CHECKPOINT

Samples /proc while the program sends a checkpoint to one serve_worker, in both modes; every round's bytes are verified
by digest at the worker. The bound of 64 MB is for what comes beside the packed ring: anonymous memory, and shared
memory that the ring cannot account for.
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
    """Anonymous and shared resident bytes of a process, 0 once it has ended."""
    try:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return 0, 0
    found = [re.search(rf"Rss{kind}:\s+(\d+) kB", status) for kind in ("Anon", "Shmem")]
    return tuple(int(one.group(1)) << 10 if one else 0 for one in found)  # a zombie has no such lines


def peak(build, checkpoint, url, first, ring, *options):
    """Peaks of anonymous memory, of shared memory, and of both beside a ring of this size."""
    process = subprocess.Popen([build / "examples/push_checkpoint", checkpoint, "--server", url, "--rounds", str(ROUNDS),
                                "--version-from", str(first), "--vary", "1", *options], stdout=subprocess.DEVNULL)
    highest = (0, 0, 0)
    while process.poll() is None:
        private, shared = resident(process)
        highest = tuple(map(max, highest, (private, shared, private + max(0, shared - ring))))
    if process.returncode != 0:
        sys.exit(f"push_checkpoint ended with {process.returncode}")
    return highest


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    build, checkpoint = map(pathlib.Path, sys.argv[1:])
    worker = subprocess.Popen([build / "examples/serve_worker", "--port", "0", "--model", checkpoint],
                              stdout=subprocess.PIPE, text=True)
    try:
        url = next(re.search(r"http://[^\s;,]+", line).group() for line in worker.stdout if "http://" in line)
        ring = BUFFER * BUFFERS
        rows = [("packed", ring, peak(build, checkpoint, url, 1, ring, "--packed", "--buffer-bytes", str(BUFFER),
                                      "--buffers", str(BUFFERS))),
                ("tensor by tensor", 0, peak(build, checkpoint, url, 1000, 0))]
    finally:
        worker.terminate()
        worker.wait()
    print(f"command: benchmarks/push_memory.py BUILD {checkpoint.name}")
    print(f"machine: {cpu()}")
    print(f"checkpoint: {checkpoint.stat().st_size} bytes, {ROUNDS} rounds each; MB are 10^6 bytes, the bound is 64\n")
    print(f"{'':<20}{'anonymous':>10}{'shared':>10}{'ring':>10}{'beside it':>12}")
    for name, size, peaks in rows:
        print(f"{name:<20}{peaks[0] / 1e6:>10.1f}{peaks[1] / 1e6:>10.1f}{size / 1e6:>10.1f}{peaks[2] / 1e6:>12.1f}")
    if any(peaks[2] > 64e6 for _, _, peaks in rows):
        sys.exit("over the bound")


main()
