#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What of the wire between two GPUs does vLLM's own Python use? The counterpart of nccl_broadcast.cpp.

    benchmarks/nccl_broadcast_python.py --vllm FOLDER [--layers N] [--rounds N]

FOLDER holds vllm/ of one release (0.30 or newer), as tests/interop/vllm_files.py puts it there. One process a GPU;
vLLM's communicator, packed producer and packed consumer over the list of the C++ benchmark. "copied" gives the consumer
a function that copies each tensor to its place, as a model's loader does; "dropped" one that does nothing. "unpacked"
is one broadcast a tensor, by the loops of vLLM's engine classes. A transfer counts from when the worker begins to when
it has drained its streams. The weights change in every round; the worker's memory is overwritten before each transfer
and compared after it. The order of the rows turns in every round. The library is VLLM_NCCL_SO_PATH's, else torch's.
"""
import argparse
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "interop"), str(TESTS / "gpu")]

WARM_UPS = 3
PLACED = ("copied", "unpacked")  # what leaves the weights in their places
MIB = 1 << 20
# name, what, bytes of a chunk, buffers, row of the raw form
WAYS = [("raw, 1024 MiB", "raw", 1024 * MIB, 0, 0),
        ("raw, 256 MiB", "raw", 256 * MIB, 0, 1),
        ("copied, 2 x 1024 MiB", "copied", 1024 * MIB, 2, 0),
        ("copied, 2 x 256 MiB", "copied", 256 * MIB, 2, 1),
        ("dropped, 2 x 1024 MiB", "dropped", 1024 * MIB, 2, 0),
        ("unpacked, copied", "unpacked", 0, 0, 0)]


class Weights:
    """The list in one piece of device memory."""

    def __init__(self, listed, device):
        import torch
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in listed]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.keys = torch.arange(1, 2 * (32 * MIB), 2, dtype=torch.int64, device=device)
        parts = self.memory.split(sizes)
        self.tensors = {name: part.view(dtype).view(shape) for (name, dtype, shape), part in zip(listed, parts)}

    def fill(self, number):
        import torch
        words = self.memory.view(torch.int64)
        generator = torch.Generator(device=words.device)
        generator.manual_seed(number)
        words.random_(generator=generator)

    def digest(self):
        """Of all bytes and where they are; equal only if, but for chance, all are."""
        import torch
        total = torch.zeros((), dtype=torch.int64, device=self.memory.device)
        for part in self.memory.view(torch.int64).split(self.keys.numel()):
            total = total * 31 + (part * self.keys[:part.numel()]).sum()
        return int(total.item())


def transfer(what, chunk, buffers, group, weights, sends):
    """One transfer on one rank; its work is done when it returns."""
    import torch
    from vllm.distributed.weight_transfer import packed_tensor
    if what == "raw":
        size = weights.memory.numel()
        for at in range(0, size, chunk):
            group.broadcast(weights.scratch[:min(chunk, size - at)], src=0)
    elif what == "unpacked":  # the loops of vLLM's engine classes
        stream = torch.cuda.current_stream()
        for tensor in weights.tensors.values():
            one = tensor if sends else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            group.broadcast(one, src=0, stream=stream)
            if not sends:
                tensor.copy_(one)
    elif sends:
        packed_tensor.packed_nccl_broadcast_producer(
            iterator=iter(weights.tensors.items()), group=group, src=0, post_iter_func=lambda item: item[1],
            buffer_size_bytes=chunk, num_buffers=buffers)
    else:
        def copied(loaded):
            for name, tensor in loaded:
                weights.tensors[name].copy_(tensor)

        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=((name, (tensor.shape, tensor.dtype)) for name, tensor in weights.tensors.items()), group=group,
            src=0, post_unpack_func=copied if what == "copied" else lambda loaded: None, buffer_size_bytes=chunk,
            num_buffers=buffers, device=weights.memory.device)
    torch.cuda.synchronize()


def join(pipe, rank, device):
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    if rank == 0:
        pipe.send(bytes(NCCLLibrary().ncclGetUniqueId().internal))
        name = pipe.recv()
    else:
        name = pipe.recv()
        pipe.send(name)
    return PyNcclCommunicator.from_unique_id_bytes(name, rank=rank, world_size=2, device=device)


def rank_of_two(rank, pipe, arguments):
    import torch
    import vllm_modules
    from weights import qwen3_list
    vllm_modules.activate(str(arguments.vllm))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    listed = qwen3_list(layers=arguments.layers, experts=128, vocabulary=151936)
    weights = Weights(listed, device)
    weights.scratch = torch.empty(max(way[2] for way in WAYS), dtype=torch.uint8, device=device)
    group = join(pipe, rank, device)
    (trainer if rank == 0 else worker)(pipe, arguments, group, weights)


def in_turn(arguments):
    for number in range(WARM_UPS + arguments.rounds):
        for row in range(len(WAYS)) if number % 2 == 0 else reversed(range(len(WAYS))):
            yield number, row


def worker(pipe, arguments, group, weights):
    import torch
    for _, row in in_turn(arguments):
        _, what, chunk, buffers, _ = WAYS[row]
        weights.memory.fill_(0xEE)
        torch.cuda.synchronize()
        pipe.recv()  # the trainer is ready
        began = time.monotonic()
        pipe.send(True)
        transfer(what, chunk, buffers, group, weights, sends=False)
        seconds = time.monotonic() - began
        pipe.send((seconds, weights.digest() if what in PLACED else None))


def trainer(pipe, arguments, group, weights):
    taken, own, wrong, filled, expected = [[] for _ in WAYS], [[] for _ in WAYS], 0, None, None
    for number, row in in_turn(arguments):
        _, what, chunk, buffers, _ = WAYS[row]
        if filled != number:
            weights.fill(number)
            filled, expected = number, weights.digest()
        pipe.send(True)
        pipe.recv()
        began = time.monotonic()
        transfer(what, chunk, buffers, group, weights, sends=True)
        mine = time.monotonic() - began
        seconds, found = pipe.recv()
        wrong += what in PLACED and found != expected
        if number >= WARM_UPS:
            taken[row].append(seconds * 1e3)
            own[row].append(mine * 1e3)
    size = weights.memory.numel()
    print(f"Qwen3-30B-A3B list of {arguments.layers} layers: {len(weights.tensors)} tensors, {size / 1e9:.1f} GB; "
          f"medians of {arguments.rounds} rounds after {WARM_UPS}")
    print(f"{'way':<24} {'ms':>9} {'fastest':>9} {'slowest':>9} {'GB/s':>7} {'of raw':>7} {'trainer ms':>11}")
    for (name, what, _, _, against), times, mine in zip(WAYS, taken, own):
        middle = statistics.median(times)
        share = "-" if what == "raw" else f"{statistics.median(taken[against]) / middle * 100:.1f} %"
        print(f"{name:<24} {middle:>9.3f} {min(times):>9.3f} {max(times):>9.3f} {size / middle / 1e6:>7.1f} {share:>7} "
              f"{statistics.median(mine):>11.3f}")
    print("what was put in place was equal after every transfer" if wrong == 0 else f"{wrong} transfers DIFFER")
    sys.exit(1 if wrong else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    import interop_nccl
    os.environ.setdefault("VLLM_NCCL_SO_PATH", interop_nccl.torch_nccl())
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_NCCL_SO_PATH"] = interop_nccl.library_for_vllm(pathlib.Path(folder))
        context = multiprocessing.get_context("spawn")
        pipes = context.Pipe()
        ranks = [context.Process(target=rank_of_two, args=(rank, pipes[rank], arguments)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        while all(rank.exitcode is None or rank.exitcode == 0 for rank in ranks) and any(r.is_alive() for r in ranks):
            time.sleep(0.05)
        for rank in ranks:  # where one has failed the other waits for it
            if rank.is_alive():
                rank.kill()
            rank.join()
        sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    main()
