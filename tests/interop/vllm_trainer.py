# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer code for NCCL and for IPC over our tensors.

From 0.28 on (IPC: 0.27) that is vLLM's trainer engine class with vLLM's HTTP client; before it, vLLM's sending function
with the calls around it that its examples make.
"""
import concurrent.futures
import functools
import json
import socket
import urllib.error
import urllib.request

import torch


def call(url, path, body=None, method="POST", timeout=120):
    """One request; its reply as JSON. A status of 400 or more is raised with what the server said."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method,
                                     headers={"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as refused:
        raise RuntimeError(f"{path}: {refused.code} {refused.read().decode(errors='replace')}") from None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def source_over(weights):
    """vLLM's WeightSource over our tensors, in the form of its release."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    listed = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.tensors.items()]
    if hasattr(WeightSource, "iter_full"):  # 0.33
        class Source(WeightSource):
            @functools.cached_property
            def metadata(self):
                return listed

            def iter_full(self):
                yield from weights.tensors.items()
    else:
        class Source(WeightSource):
            def metadata(self):
                return listed

            def __iter__(self):
                return iter(weights.tensors.items())
    return Source()


class EngineTrainer:
    """0.28 and newer: vLLM's engine class does everything."""

    def __init__(self, url, release, weights, world_size, packed, buffer, client=None):
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=world_size,
                                   packed=packed, packed_buffer_size_bytes=buffer)
        self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client or HTTPVLLMWeightSyncClient(url), source=source_over(weights))

    def send(self):
        self.engine.send_weights()


class FunctionTrainer:
    """Before 0.28: vLLM's functions join and send; the calls are made as in its examples."""

    def __init__(self, url, release, weights, world_size, packed, buffer, client=None):
        from vllm.distributed.weight_transfer import nccl_engine

        self.module, self.url, self.weights = nccl_engine, url, weights
        self.has_sessions = release >= (0, 21)
        self.packing = {"packed": packed, "packed_buffer_size_bytes": buffer, "packed_num_buffers": 2}
        init = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": world_size}
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            joining = beside.submit(call, url, "/init_weight_transfer_engine", {"init_info": init})
            self.group = nccl_engine.NCCLWeightTransferEngine.trainer_init(dict(init))
            joining.result()

    def send(self):
        tensors = self.weights.tensors.items()
        update = {"names": [name for name, _ in tensors],
                  "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                  "shapes": [list(tensor.shape) for _, tensor in tensors], **self.packing}
        url = self.url
        if self.has_sessions:
            call(url, "/start_weight_update", {"is_checkpoint_format": True})
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            updating = beside.submit(call, url, "/update_weights", {"update_info": update})
            send = self.module.NCCLWeightTransferEngine.trainer_send_weights
            options = {"group": self.group, "src": 0, **self.packing}
            if hasattr(self.module, "NCCLTrainerSendWeightsArgs"):
                send(iter(tensors), self.module.NCCLTrainerSendWeightsArgs(**options))
            else:
                send(iter(tensors), **options)
            torch.cuda.synchronize()
            updating.result()
        if self.has_sessions:
            call(url, "/finish_weight_update")


class IpcEngineTrainer:
    """IPC, 0.27 and newer: one rank of a trainer; rank 0 speaks."""

    def __init__(self, url, release, weights, packed, buffer, rank=0, client=None):
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        info = IPCTrainerInitInfo(rank=rank, packed=packed, packed_buffer_size_bytes=buffer)
        self.engine = IPCTrainerWeightTransferEngine.trainer_init(
            info, client=client or HTTPVLLMWeightSyncClient(url), source=source_over(weights))

    def send(self):
        self.engine.send_weights()


class IpcFunctionTrainer:
    """IPC, before 0.27: vLLM's function exports and makes the update calls."""

    def __init__(self, url, release, weights, packed, buffer, rank=0, client=None):
        from vllm.distributed.weight_transfer import ipc_engine

        self.url, self.weights, self.rank = url, weights, rank
        self.sender = ipc_engine.IPCWeightTransferEngine
        if release >= (0, 22):
            self.options = ipc_engine.IPCTrainerSendWeightsArgs(send_mode="http", url=url, packed=packed,
                                                                packed_buffer_size_bytes=buffer)
        else:
            self.options = ipc_engine.IPCTrainerSendWeightsArgs(mode="http", url=url)
        if rank == 0:
            call(url, "/init_weight_transfer_engine", {"init_info": {}})

    def send(self):
        if self.rank == 0:
            call(self.url, "/start_weight_update", {"is_checkpoint_format": True})
        self.sender.trainer_send_weights(iter(self.weights.tensors.items()), self.options)
        if self.rank == 0:
            call(self.url, "/finish_weight_update")
