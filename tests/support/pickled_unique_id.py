#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CPython's side of the pickled NCCL id, all in hexadecimal: `write PROTOCOL ID` prints the pickle, `read PICKLE` the id.

The class is a ctypes structure of the same name, module and size as vLLM's, which is all that a pickle says of it.
"""
import ctypes
import pickle
import sys
import types

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


ncclUniqueId.__module__ = MODULE
parts = MODULE.split(".")
for count in range(1, len(parts) + 1):
    name = ".".join(parts[:count])
    sys.modules[name] = types.ModuleType(name)
sys.modules[MODULE].ncclUniqueId = ncclUniqueId

if sys.argv[1] == "write":
    print(pickle.dumps(ncclUniqueId.from_buffer_copy(bytes.fromhex(sys.argv[3])), int(sys.argv[2])).hex())
else:
    loaded = pickle.loads(bytes.fromhex(sys.argv[2]))
    assert type(loaded) is ncclUniqueId, type(loaded)
    print(bytes(loaded).hex())
