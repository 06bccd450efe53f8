# SPDX-License-Identifier: Apache-2.0
"""One rank of a vLLM worker: vLLM's own engine class of one release and backend, and a model that keeps digests."""
import importlib
import inspect
import threading
import types

import torch

from weights import digest, digest_text


class Model:
    """What the engine loads into: digests of what came. The layerwise reload of vLLM is stood in for by these calls."""

    def __init__(self):
        self.digests = {}
        self.bytes = 0

    def initialize_reload(self):
        self.digests, self.bytes = {}, 0

    def finalize_reload(self):
        pass

    def load_weights(self, weights):
        for name, tensor in weights:
            self.digests[name] = digest(tensor)
            self.bytes += tensor.numel() * tensor.element_size()


class Worker:
    """The engine class and the order of calls that vLLM's worker keeps around it."""

    def __init__(self, device, has_sessions, say, rank=0, ranks=1, backend="nccl"):
        from vllm.config.weight_transfer import WeightTransferConfig

        module = importlib.import_module(f"vllm.distributed.weight_transfer.{backend}_engine")
        kind = getattr(module, f"{backend.upper()}WeightTransferEngine")
        parallel = types.SimpleNamespace(rank=rank, world_size=ranks, world_size_across_dp=ranks,
                                         data_parallel_rank=0, data_parallel_index=0)
        self.model = Model()
        self.device = device
        given = {"config": WeightTransferConfig(backend=backend), "parallel_config": parallel, "device": device,
                 "vllm_config": types.SimpleNamespace(parallel_config=parallel, model_config=None),
                 "model": self.model}
        wanted = inspect.signature(kind.__init__).parameters
        self.engine = kind(**{name: given[name] for name in wanted if name in given})
        receiving = inspect.signature(kind.receive_weights).parameters
        self.loads_itself = "load_weights" not in receiving  # since 0.25
        self.lock = threading.Lock()  # vLLM's engine runs one call at a time
        self.active = False
        self.has_sessions = has_sessions
        self.say = say
        self.rounds = 0

    def call(self, name, *arguments):
        """One of the calls below. torch keeps the current device by thread, and every request has its own."""
        with self.lock:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return getattr(self, name)(*arguments)

    def init(self, info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start(self):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active. "
                               "Call finish_weight_update first.")
        self.active = True
        if self.loads_itself:
            self.engine.start_weight_update()
        else:
            self.model.initialize_reload()

    def update(self, info):
        if self.has_sessions and not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        if not self.has_sessions:
            self.model.initialize_reload()
        try:
            if self.loads_itself:
                self.engine.update_weights(info)
            else:
                typed = self.engine.parse_update_info(info)
                self.engine.receive_weights(typed, load_weights=self.model.load_weights)
                torch.cuda.synchronize()
        except Exception:
            self.active = False
            raise
        if not self.has_sessions:
            self.tell()

    def finish(self):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        if self.loads_itself:
            self.engine.finish_weight_update()
        else:
            self.model.finalize_reload()
        self.active = False
        self.tell()

    def tell(self):
        self.rounds += 1
        total = sum(self.model.digests.values()) % 2**64
        self.say(f"round {self.rounds}: {len(self.model.digests)} tensors, {self.model.bytes} bytes, "
                 f"digest {digest_text(total)}")
