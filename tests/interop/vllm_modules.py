# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's own files importable without the rest of vLLM.

activate(folder) puts the package `vllm` of one release (see vllm_files.py) on the module path of this process. What is
not there is what these files only touch: a logger, environment variables, platform questions, type names. That is
stood in for here, by name; anything else is an ImportError. No file under test is changed or replaced.
"""
import base64
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import typing


class Logger(logging.LoggerAdapter):
    """vLLM's loggers can say a thing once."""

    def __init__(self, name):
        super().__init__(logging.getLogger(name), {})

    def info_once(self, *arguments, **_):
        self.info(*arguments)

    def debug_once(self, *arguments, **_):
        self.debug(*arguments)

    def warning_once(self, *arguments, **_):
        self.warning(*arguments)


class Platform:
    device_type = "cuda"

    def is_rocm(self):
        return False

    def is_cuda(self):
        return True

    def is_cuda_alike(self):
        return True

    def is_xpu(self):
        return False

    def fp8_dtype(self):
        import torch
        return torch.float8_e4m3fn


class Metrics:
    @contextlib.contextmanager
    def record(self, _operation):
        yield


def current_stream():
    import torch
    return torch.cuda.current_stream()


def config(cls=None, **_):
    """vLLM's decorator makes a dataclass that validates; what it is used on here has one defaulted field."""
    return dataclasses.dataclass(cls) if cls else dataclasses.dataclass


def names(*words):
    """Type names of which nothing is used."""
    return {word: type(word, (), {}) for word in words}


STAND_INS = {
    "vllm.envs": {"VLLM_SERVER_DEV_MODE": True, "VLLM_DISABLE_PYNCCL": False,
                  "VLLM_NCCL_SO_PATH": os.environ.get("VLLM_NCCL_SO_PATH"), "VLLM_NCCL_INCLUDE_PATH": None,
                  "VLLM_ALLOW_INSECURE_SERIALIZATION": False},
    "vllm.logger": {"init_logger": Logger},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.config.utils": {"config": config},
    "vllm.config.parallel": names("ParallelConfig"),
    "vllm.engine.protocol": names("EngineClient"),
    "vllm.v1.engine": {"PauseMode": typing.Literal["abort", "wait", "keep"]},
    "vllm.utils.network_utils": {"get_tcp_uri": lambda host, port: f"tcp://{host}:{port}"},
    "vllm.utils.system_utils": {"suppress_stdout": contextlib.nullcontext},
    "vllm.utils.torch_utils": {"current_stream": current_stream},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": lambda model, *_: model.initialize_reload(),
        "finalize_layerwise_reload": lambda model, *_: model.finalize_reload()},
    "vllm.model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": contextlib.nullcontext},
    "vllm.entrypoints.rl.online.metrics": {"weight_operation_metrics": Metrics},
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so a file of vLLM's own comes first."""

    def find_spec(self, name, path=None, target=None):
        package = any(other.startswith(name + ".") for other in STAND_INS)
        if name in STAND_INS or (package and name.startswith("vllm.")):
            return importlib.machinery.ModuleSpec(name, self, is_package=package)
        return None

    def exec_module(self, module):
        vars(module).update(STAND_INS.get(module.__name__, {}))


def activate(folder):
    """`folder` holds `vllm/`. Once a process: modules of two releases do not mix."""
    if "vllm" in sys.modules:
        raise RuntimeError("a process holds one release of vLLM")
    package = types.ModuleType("vllm")
    package.__path__ = [os.path.join(folder, "vllm")]
    sys.modules["vllm"] = package
    sys.meta_path.append(StandIns())
    if importlib.util.find_spec("pybase64") is None:  # the standard library's module under a faster name
        sys.modules["pybase64"] = base64


def file_of(module):
    """Where a module came from; a check that it is vLLM's own."""
    return sys.modules[module].__file__
