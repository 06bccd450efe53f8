# SPDX-License-Identifier: Apache-2.0
"""Weights for the interop tests, and weightwire's digest (core/digest.hpp) in torch.

weights.py [--odd] prints the list of parameters: name, torch's dtype, extents.
"""
import math
import sys

import torch

KEY = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93
WORDS_AT_A_TIME = 1 << 22


def signed(value):
    """`value` modulo 2^64 as torch's int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def terms(words, keys):
    """int64 arithmetic wraps; its right shift keeps the sign, which the masks take away."""
    v = words + keys
    v ^= (v >> 32) & 0xFFFFFFFF
    v *= signed(MULTIPLIER)
    v ^= (v >> 29) & ((1 << 35) - 1)
    return v


def digest(tensor):
    """The 64-bit digest of a tensor's bytes in C order, as an int; works where the tensor is."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = 0
    whole = data.numel() // 8
    for first in range(0, whole, WORDS_AT_A_TIME):
        count = min(WORDS_AT_A_TIME, whole - first)
        part = data[8 * first:8 * (first + count)]
        # A slice of a packed buffer need not begin at a multiple of eight.
        aligned = part.data_ptr() % 8 == 0 and part.storage_offset() % 8 == 0
        words = (part if aligned else part.clone()).view(torch.int64)
        keys = torch.arange(first + 1, first + count + 1, device=data.device, dtype=torch.int64) * signed(KEY)
        total += int(terms(words, keys).sum().item())
    if data.numel() % 8:
        padded = torch.zeros(8, dtype=torch.uint8, device=data.device)
        padded[:data.numel() % 8] = data[8 * whole:]
        total += int(terms(padded.view(torch.int64), signed((whole + 1) * KEY)).sum().item())
    size = torch.tensor([signed(total)], dtype=torch.int64)
    return int(terms(size, signed(data.numel() * KEY)).item()) & ((1 << 64) - 1)


def digest_text(value):
    return f"{value:016x}"


def qwen3_list(layers=2, experts=32, vocabulary=151936 // 8, odd=False):
    """(name, dtype, shape) of Qwen3-30B-A3B with its real names and layer shapes, and fewer layers, experts and words:
    0.83 GB as it stands. `odd` adds tensors that put everything after them at odd offsets of a packed buffer."""
    hidden, head, feed_forward = 2048, 128, 768
    kind = torch.bfloat16
    weights = [("model.embed_tokens.weight", kind, (vocabulary, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights += [(prefix + "input_layernorm.weight", kind, (hidden,)),
                    (prefix + "self_attn.q_proj.weight", kind, (32 * head, hidden)),
                    (prefix + "self_attn.k_proj.weight", kind, (4 * head, hidden)),
                    (prefix + "self_attn.v_proj.weight", kind, (4 * head, hidden)),
                    (prefix + "self_attn.o_proj.weight", kind, (hidden, 32 * head)),
                    (prefix + "self_attn.q_norm.weight", kind, (head,)),
                    (prefix + "self_attn.k_norm.weight", kind, (head,)),
                    (prefix + "post_attention_layernorm.weight", kind, (hidden,)),
                    (prefix + "mlp.gate.weight", kind, (experts, hidden))]
        if odd:
            weights += [(prefix + "mlp.gate.weight_scale", torch.float8_e4m3fn, (7, 3)),
                        (prefix + "mlp.gate.e_score_correction_bias", torch.float32, (experts + 1,))]
        for expert in range(experts):
            for name, shape in (("gate_proj", (feed_forward, hidden)), ("up_proj", (feed_forward, hidden)),
                                ("down_proj", (hidden, feed_forward))):
                weights.append((f"{prefix}mlp.experts.{expert}.{name}.weight", kind, shape))
    return weights + [("model.norm.weight", kind, (hidden,)), ("lm_head.weight", kind, (vocabulary, hidden))]


class Weights:
    """Named tensors whose every byte changes from round to round."""

    def __init__(self, listed, device):
        self.tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype, shape in listed}
        self.generator = torch.Generator(device=device)

    def fill(self, round_number):
        self.generator.manual_seed(round_number)
        for tensor in self.tensors.values():
            tensor.view(-1).view(torch.uint8).random_(0, 256, generator=self.generator)

    def digests(self):
        return {name: digest_text(digest(tensor)) for name, tensor in self.tensors.items()}

    def byte_size(self):
        return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in self.tensors.values())


if __name__ == "__main__":
    for listed, dtype, extents in qwen3_list(odd="--odd" in sys.argv[1:]):
        print(listed, str(dtype).removeprefix("torch."), *extents)
