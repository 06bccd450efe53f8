# SPDX-License-Identifier: Apache-2.0
"""vLLM's IPC engine classes without a GPU: what they take for a device's memory is in files that other processes map.

replace_ipc() after host_cuda.replace_cuda() and before vLLM's engine is imported. Handles are those of
tests/support/host_ipc_machinery.hpp, so what is exported here our programs open, and the other way. torch's own code
rebuilds tensors; only what it would ask of CUDA is stood in for.
"""
import fcntl
import functools
import itertools
import mmap
import os
import secrets
import struct
import threading
import types

import torch
import torch.multiprocessing.reductions as reductions

HANDLE = struct.Struct("<5Q24x")  # process, descriptor, the process's start time, offset, length
ALIGNMENT = 512  # of what torch's allocator cuts out of an allocation
ALLOCATION = 1 << 16
COUNTERS_BEGIN, COUNTERS = 64, 10_000
opened = {}  # handle: what was mapped
current = threading.local()  # torch keeps the current device by thread


def uuid_of(device):
    return f"a0000000-0000-0000-0000-{device:012d}"


def current_device():
    return getattr(current, "device", 0)


def set_device(device):
    current.device = device.index if isinstance(device, torch.device) else int(device)


def start_time_of(process):
    with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


# --- exporting

class Allocation:
    """What one call of cudaMalloc gives: a file that can neither grow nor shrink."""
    all = []

    def __init__(self, size):
        self.size, self.used = size, ALIGNMENT  # what lies here lies behind something else
        self.file = os.memfd_create("interop", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.file, size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mmap.mmap(self.file, size)
        self.begin = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.handle = HANDLE.pack(os.getpid(), self.file, start_time_of(os.getpid()), 0, size)
        Allocation.all.append(self)

    def take(self, size):
        """A tensor of so many bytes with a storage of its own."""
        taken = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=self.used)
        self.used += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return taken


def device_empty(shape, dtype):
    """A tensor in an allocation. It has a neighbour in its storage, as a view has, and others in its allocation."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    front = 8 * dtype.itemsize
    last = Allocation.all[-1] if Allocation.all else None
    if last is None or last.size - last.used < front + size:
        last = Allocation(max(ALLOCATION, front + size + 2 * ALIGNMENT))
    return last.take(front + size).view(dtype)[8:].view(tuple(shape))


class Counters:
    """The file in which torch counts who still reads what this process has exported."""

    def __init__(self):
        self.name = f"/torch_{os.getpid()}_{secrets.randbits(31)}_0"
        self.process, self.used = os.getpid(), 0
        with open("/dev/shm" + self.name, "x+b") as file:
            file.truncate(COUNTERS_BEGIN + 8 * COUNTERS)
            self.memory = mmap.mmap(file.fileno(), 0)

    def take(self):
        """The number of a counter, which is 1 until the export has been read."""
        slot, self.used = self.used, self.used + 1
        struct.pack_into("<q", self.memory, COUNTERS_BEGIN + 8 * slot, 1)
        return slot

    def values(self):
        return list(struct.unpack_from(f"<{self.used}q", self.memory, COUNTERS_BEGIN))

    def remove(self):
        os.unlink("/dev/shm" + self.name)


counters = None


def counted():
    """This process's counters."""
    global counters
    if counters is None or counters.process != os.getpid():
        counters = Counters()
    return counters


forms = itertools.cycle((b"", b"\x01c", b"\x02c", b"\x03c"))  # of the handle in torch's releases
waiting = itertools.cycle((False, True))  # whether the reader has to wait for the event


def reduce_tensor(tensor):
    """torch's, for a tensor on a GPU."""
    storage = tensor._typed_storage()
    size = storage._untyped_storage.nbytes()
    handle, offset, name, slot, event, event_sync = None, 0, None, 0, None, None
    if size:
        address = storage._untyped_storage.data_ptr()
        allocation = next((one for one in Allocation.all if 0 <= address - one.begin < one.size), None)
        if allocation is None:
            raise RuntimeError("this tensor is in no device memory")
        handle, offset = next(forms) + allocation.handle, address - allocation.begin
        name, slot, event, event_sync = counted().name.encode(), counted().take(), bytes(64), next(waiting)
    return reductions.rebuild_cuda_tensor, (
        type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), type(storage), tensor.dtype,
        current_device(), handle, size, offset, tensor.requires_grad, name, slot, event, event_sync)


# --- importing

def open_shared(_cls, device, handle, size, offset, counter, slot, event, event_sync):
    """torch's `_new_shared_cuda`: types are as strictly looked at as there."""
    kinds = ((device, int), (handle, bytes), (size, int), (offset, int), (counter, bytes), (slot, int), (event, bytes),
             (event_sync, bool))
    if not all(type(value) is kind for value, kind in kinds):
        raise TypeError(f"_new_shared_cuda: {[type(value).__name__ for value, _ in kinds]}")
    if len(handle) != 64 and not (len(handle) == 66 and handle[0] <= 3 and handle[1:2] == b"c"):
        raise RuntimeError(f"a handle of {len(handle)} bytes")
    if event_sync and len(event) != 64:
        raise RuntimeError(f"an event of {len(event)} bytes")
    key = handle[-64:]
    if key not in opened:
        process, file, started, begin, length = HANDLE.unpack(key)
        if start_time_of(process) != started:
            raise RuntimeError("the exporting process is another one")
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        opened[key] = mmap.mmap(descriptor, begin + length, prot=mmap.PROT_READ), begin, length
        os.close(descriptor)
    memory, begin, length = opened[key]
    if offset + size > length:
        raise RuntimeError(f"{size} bytes at {offset} of an allocation of {length}")
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin + offset).untyped_storage()


def rebuild_on_host(real):
    """torch's own, but that a tensor of no bytes is nowhere instead of on a GPU."""
    @functools.wraps(real)  # so that it is pickled by the same name
    def rebuild_cuda_tensor(*arguments):
        if arguments[7] is None or arguments[8] == 0:
            arguments = (*arguments[:6], "cpu", *arguments[7:])
        return real(*arguments)
    return rebuild_cuda_tensor


def empty_on_device(make):
    def made(*shape, **options):
        if str(options.get("device", "")).startswith("cuda"):
            sizes = shape[0] if isinstance(shape[0], (tuple, list)) else shape
            return device_empty(sizes, options.get("dtype", torch.float32))
        return make(*shape, **options)
    return made


def replace_ipc():
    reductions.rebuild_cuda_tensor = rebuild_on_host(reductions.rebuild_cuda_tensor)
    reductions.reduce_tensor = reduce_tensor
    torch.storage.TypedStorage._new_shared_cuda = classmethod(open_shared)
    torch.storage.TypedStorage._release_ipc_counter = classmethod(lambda *_, **__: None)
    torch.empty = empty_on_device(torch.empty)
    torch.cuda._lazy_init = torch.cuda.ipc_collect = lambda: None
    torch.cuda.set_device = set_device
    torch.cuda.current_device = torch.accelerator.current_device_index = current_device
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        uuid=uuid_of(current_device() if device is None else int(device)))
