#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds a header and a shared library in NVIDIA's Python wheels.

usage: find_nvidia_wheel.py HEADER LIBRARY    (such as: nccl.h libnccl.so)

Prints two lines, the include directory and the library's file, or nothing. The wheels carry only versioned names
(libnccl.so.2), which a linker does not find by itself. Wheels of CUDA 13 keep everything in nvidia/cu13, older ones
have a folder a library; the newest one that has both wins.
Looks where this Python looks, and into the environment that VIRTUAL_ENV names.
"""
import os
import pathlib
import sys


def places():
    environment = os.environ.get("VIRTUAL_ENV")
    inside = pathlib.Path(environment).glob("lib/python3*/site-packages") if environment else []
    return [*map(str, inside), *sys.path]


def find(header, library, roots):
    for root in roots:
        for include in sorted(pathlib.Path(root).glob("nvidia/*/include"), reverse=True):
            files = sorted((include.parent / "lib").glob(library + "*"))
            if (include / header).is_file() and files:
                return include, files[0]
    return None


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found = find(sys.argv[1], sys.argv[2], places())
    if found:
        print(found[0])
        print(found[1])
