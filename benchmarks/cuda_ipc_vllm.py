#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What of a device's memory does vLLM's own Python use over CUDA IPC? The counterpart of cuda_ipc_round.cpp.

    benchmarks/cuda_ipc_vllm.py --vllm FOLDER [--program PATH] [--layers N] [--rounds N]

FOLDER holds vllm/ of one release (0.27 or newer), as tests/interop/vllm_files.py puts it there; PATH is the built
cuda_ipc_round, which is run after it with the same list, and the ratios of the two are printed. Two processes on one
GPU: vLLM's trainer engine class with its HTTP client, and its worker engine class behind its routes. Every tensor is
torch's own, as a module's parameters are, on both sides; the worker copies each to its place, as a model's loader does.
Whole send_weights() calls are timed. The weights change in every round; the worker's are overwritten before it and
compared after it.
"""
import argparse
import http.server
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "interop"), str(TESTS / "support")]

MIB = 1 << 20
PACKINGS = ("packed", "unpacked")
RESULT = re.compile(r"^result: (\w+) median ([0-9.]+) ms", re.MULTILINE)
OURS = re.compile(r"^result: data phase ([0-9.]+) ms, send_weights\(\) ([0-9.]+) ms", re.MULTILINE)


class Weights:
    """The list's tensors, each by itself."""

    def __init__(self, listed):
        import torch
        self.tensors = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, dtype, shape in listed}
        self.words = [tensor.view(-1).view(torch.int64) for tensor in self.tensors.values()]
        self.keys = torch.arange(1, 2 * (32 * MIB), 2, dtype=torch.int64, device="cuda")
        self.byte_size = 8 * sum(words.numel() for words in self.words)

    def fill(self, number):
        import torch
        generator = torch.Generator(device="cuda")
        generator.manual_seed(number)
        for words in self.words:
            words.random_(generator=generator)
        torch.cuda.synchronize()

    def overwrite(self):
        import torch
        for words in self.words:
            words.fill_(-1)
        torch.cuda.synchronize()

    def digest(self):
        """Of all bytes and where they are; equal only if, but for chance, all are."""
        import torch
        total = torch.zeros((), dtype=torch.int64, device="cuda")
        for words in self.words:
            for part in words.split(self.keys.numel()):
                total = total * 31 + (part * self.keys[:part.numel()]).sum()
        return int(total.item())


class PlacedModel:
    """What vLLM's engine loads into: every tensor is copied to its place."""

    def __init__(self, weights):
        self.weights = weights
        self.digests, self.bytes = {}, 0  # told after every round by whoever wants them; nobody does

    def initialize_reload(self):
        pass

    def finalize_reload(self):
        import torch
        torch.cuda.synchronize()  # the call ends when the weights are in place, as ours does

    def load_weights(self, loaded):
        for name, tensor in loaded:
            self.weights.tensors[name].copy_(tensor)


def start_torch(arguments):
    import interop_ipc
    import torch
    from weights import qwen3_list
    interop_ipc.activate(arguments.vllm)
    torch.cuda.set_device(0)
    return Weights(qwen3_list(layers=arguments.layers, experts=128, vocabulary=151936))


def worker_role(arguments):
    weights = start_torch(arguments)
    import torch
    import vllm_worker
    from interop_nccl_worker import Routes

    class BenchmarkRoutes(Routes):
        version, release = "", (0, 33)

        def post_overwrite(self, _):
            weights.overwrite()
            return {}

        def post_digest(self, _):
            return {"digest": weights.digest()}

    vllm_worker.Model = lambda: PlacedModel(weights)
    Routes.worker = vllm_worker.Worker(torch.device("cuda", 0), has_sessions=True, say=lambda text: None,
                                       backend="ipc")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BenchmarkRoutes)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


def trainer_role(arguments):
    weights = start_torch(arguments)
    import torch
    from vllm_trainer import IpcEngineTrainer, call
    wrong = 0
    print(f"Qwen3-30B-A3B list of {arguments.layers} layers: {len(weights.tensors)} tensors, "
          f"{weights.byte_size / 1e9:.1f} GB; vLLM's engine classes over HTTP, medians of {arguments.rounds} rounds "
          f"after {arguments.warm_ups}", flush=True)
    for packing in PACKINGS:
        trainer = IpcEngineTrainer(arguments.url, (0, 33), weights, packing == "packed", 1024 * MIB)
        taken = []
        for number in range(arguments.warm_ups + arguments.rounds):
            weights.fill(1 + number + 1000 * PACKINGS.index(packing))
            call(arguments.url, "/overwrite", {})
            torch.cuda.synchronize()
            began = time.monotonic()
            trainer.send()
            seconds = time.monotonic() - began
            if call(arguments.url, "/digest", {})["digest"] != weights.digest():
                wrong += 1
                print(f"{packing}: DIFFERS in round {number + 1}")
            if number >= arguments.warm_ups:
                taken.append(seconds * 1e3)
        middle = statistics.median(taken)
        print(f"result: {packing} median {middle:.3f} ms, fastest {min(taken):.3f}, slowest {max(taken):.3f}, "
              f"{weights.byte_size / middle / 1e6:.1f} GB/s", flush=True)
    print("what was put in place was equal after every round" if wrong == 0 else f"{wrong} rounds DIFFER")
    sys.exit(1 if wrong else 0)


def role_command(arguments, role, *more):
    return [sys.executable, __file__, "--role", role, "--vllm", arguments.vllm, "--layers", str(arguments.layers),
            "--rounds", str(arguments.rounds), "--warm-ups", str(arguments.warm_ups), *more]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, required=True)
    parser.add_argument("--program", type=pathlib.Path, help="cuda_ipc_round, to be compared with")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--role", choices=("worker", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        (worker_role if arguments.role == "worker" else trainer_role)(arguments)
        return
    from interop_nccl import Server, drive
    with tempfile.TemporaryDirectory() as folder:
        server = Server(role_command(arguments, "worker"), "worker", pathlib.Path(folder) / "worker.log")
        status, output, theirs = drive(server, role_command(arguments, "trainer", "--url", server.url), 450)
    print(output, end="")
    if status != 0:
        sys.exit(f"vLLM's trainer ended with {status}: {theirs[-3000:]}")
    if arguments.program is None:
        return
    done = subprocess.run([arguments.program.absolute(), "--layers", str(arguments.layers), "--check-every", "4"],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    print(done.stdout, end="")
    ours = OURS.search(done.stdout)
    if ours is None or done.returncode != 0:
        sys.exit(f"cuda_ipc_round ended with {done.returncode}")
    for packing, milliseconds in RESULT.findall(output):
        print(f"vLLM {packing}: {float(milliseconds) / float(ours[2]):.1f} times our send_weights()")


if __name__ == "__main__":
    main()
