#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer code over NCCL, driving our worker: weights that change every round, digests compared after each.

interop_nccl_trainer.py --vllm FOLDER --url URL [--rounds N] [--unpacked]

From 0.28 on that is vLLM's trainer engine class with vLLM's HTTP client; before it, vLLM's sending function with the
calls around it that its examples make. What the worker has is asked of it with `POST /weight_checker`.
"""
import argparse
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "interop"))
import vllm_modules  # noqa: E402
from vllm_trainer import EngineTrainer, FunctionTrainer, call  # noqa: E402
from weights import Weights, qwen3_list  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, help="folder that holds vllm/ of the release")
    parser.add_argument("--version", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--unpacked", action="store_true")
    parser.add_argument("--buffer", type=int, default=64 << 20, help="packed_buffer_size_bytes")
    parser.add_argument("--odd", action="store_true", help="tensors that put others at odd offsets")
    parser.add_argument("--device", type=int, default=0)
    arguments = parser.parse_args()
    arguments.release = tuple(int(part) for part in arguments.version.split(".")[:2])
    vllm_modules.activate(arguments.vllm)
    torch.cuda.set_device(arguments.device)
    weights = Weights(qwen3_list(odd=arguments.odd), torch.device("cuda", arguments.device))
    world_size = 1 + call(arguments.url, "/get_world_size", method="GET")["world_size"]
    kind = EngineTrainer if arguments.release >= (0, 28) else FunctionTrainer
    trainer = kind(arguments.url, arguments.release, weights, world_size, packed=not arguments.unpacked,
                   buffer=arguments.buffer)
    print(f"vLLM {arguments.version} ({kind.__name__}), {'unpacked' if arguments.unpacked else 'packed'}, "
          f"{len(weights.tensors)} tensors, {weights.byte_size()} bytes, world size {world_size}", flush=True)
    wrong = 0
    for number in range(1, arguments.rounds + 1):
        weights.fill(number)
        torch.cuda.synchronize()
        began = time.monotonic()
        trainer.send()
        seconds = time.monotonic() - began
        theirs = call(arguments.url, "/weight_checker", {"action": "checksum"})["checksums"]
        ours = weights.digests()
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        wrong += bool(differing)
        verdict = f"{len(differing)} differ, first {differing[0]}" if differing else "all digests equal"
        print(f"round {number}: {seconds:.3f} s, {verdict}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
