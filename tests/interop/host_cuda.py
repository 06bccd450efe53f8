# SPDX-License-Identifier: Apache-2.0
"""vLLM's NCCL engine classes without a GPU: torch's CUDA calls over ordinary memory, and a group over sockets.

replace_cuda() before vLLM is imported, replace_nccl() after. The group speaks as tests/support/host_machinery.hpp does,
so the other ranks may be our programs: what vLLM packs, cuts and unpacks goes through its own code.
"""
import contextlib
import importlib
import secrets
import socket
import struct

import torch

GREETING = struct.Struct("<Qiii4x")  # nonce, rank, world size, NCCL version
PLACE = struct.Struct("<QQH6x")  # magic, nonce, port: the begin of an id
MAGIC = 0x7473_6F68_6C63_636E
VERSION = 22809
PATIENCE = 60


class Stream:
    """Work is done when it is asked for, so there is never anything to wait for."""

    def __init__(self, *_, **__):
        self.cuda_stream = 0

    def synchronize(self):
        pass

    def wait_event(self, _):
        pass

    def wait_stream(self, _):
        pass


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass


def on_host(make):
    """`torch.empty` and its like, with ordinary memory for a device's."""
    def made(*arguments, **options):
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*arguments, **options)
    return made


def replace_cuda():
    torch.empty, torch.zeros = on_host(torch.empty), on_host(torch.zeros)
    torch.Event = Event
    torch.Tensor.record_stream = lambda *_: None
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    for module in (torch.cuda, torch.accelerator):
        module.current_stream = lambda *_: Stream()
        module.synchronize = lambda *_: None
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0


def replace_nccl():
    importlib.import_module("vllm.distributed.device_communicators.pynccl").PyNcclCommunicator = HostCommunicator


def take(connection, count):
    """Exactly so many bytes."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("another rank has hung up")
        view = view[got:]
    return data


class HostCommunicator:
    """Stands in for vLLM's PyNcclCommunicator, as far as weight transfer uses it."""

    def __init__(self, group, device):
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        self.rank, self.world_size = group.rank, group.world_size
        self.store_group = group  # whose store this process may serve
        listener, unique_id = self.listen(ncclUniqueId) if self.rank == 0 else (None, None)
        self.join(bytes(group.broadcast_obj(unique_id, src=0)), listener)

    @classmethod
    def from_unique_id_bytes(cls, unique_id_bytes, rank, world_size, device):
        self = cls.__new__(cls)
        self.rank, self.world_size, self.store_group = rank, world_size, None
        self.join(unique_id_bytes, None)
        return self

    def listen(self, kind):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        place = PLACE.pack(MAGIC, secrets.randbits(64), listener.getsockname()[1])
        return listener, kind.from_buffer_copy(place.ljust(128, b"\0"))

    def join(self, unique_id, listener):
        magic, nonce, port = PLACE.unpack(unique_id[:PLACE.size])
        if magic != MAGIC:
            raise ValueError("this is no id of a group")
        if self.rank == 0:
            self.accept_all(listener, nonce)
        else:
            self.others = [socket.create_connection(("127.0.0.1", port), PATIENCE)]
            self.others[0].settimeout(PATIENCE)
            self.others[0].sendall(GREETING.pack(nonce, self.rank, self.world_size, VERSION))
            if take(self.others[0], 1) != b"g":
                raise ConnectionError("the root does not go on")
        self.warm_up()

    def accept_all(self, listener, nonce):
        by_rank = {}
        listener.settimeout(PATIENCE)
        while len(by_rank) < self.world_size - 1:
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE)
            theirs, rank, world_size, version = GREETING.unpack(take(connection, GREETING.size))
            if (theirs, world_size, version) != (nonce, self.world_size, VERSION):
                raise ConnectionError(f"rank {rank} belongs to another group, or has another version")
            by_rank[rank] = connection
        listener.close()
        self.others = [by_rank[rank] for rank in sorted(by_rank)]
        for connection in self.others:
            connection.sendall(b"g")

    def warm_up(self):
        """vLLM's one-element all-reduce, as these sockets have it."""
        if self.rank != 0:
            self.others[0].sendall(b"w")
            take(self.others[0], 1)
            return
        for connection in self.others:
            take(connection, 1)
        for connection in self.others:
            connection.sendall(b"w")

    def broadcast(self, tensor, src, stream=None):
        data = tensor.view(-1).view(torch.uint8).numpy()
        if data.nbytes == 0:
            return  # as NCCL: nothing is sent
        if self.rank == src:
            for connection in self.others:
                if struct.unpack("<Q", take(connection, 8))[0] != data.nbytes:
                    raise ConnectionError("a rank waits for another number of bytes")
                connection.sendall(data)
            return
        self.others[0].sendall(struct.pack("<Q", data.nbytes))
        data[:] = memoryview(take(self.others[0], data.nbytes))

    def destroy(self):
        for connection in self.others:
            connection.close()
