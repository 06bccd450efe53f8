#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of the original safetensors library are read by weightwire with equal digests, and the other way round.

Needs the PyPI package `safetensors` in the interpreter that runs this; without it that part is skipped by name.
"""
import argparse
import ctypes
import json
import pathlib
import shlex
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import report as reports  # noqa: E402

WORD = (1 << 64) - 1
KEY = 0x9E3779B97F4A7C15


def digest_term(word, key):
    value = (word + key) & WORD
    value ^= value >> 32
    value = value * 0xD6E8FEB86659FD93 & WORD
    return value ^ value >> 29


def digest(data):
    """core/digest.hpp's formula, written a second time."""
    total = sum(digest_term(int.from_bytes(data[at:at + 8], "little"), (at // 8 + 1) * KEY & WORD)
                for at in range(0, len(data), 8)) & WORD
    return f"{digest_term(total, len(data) * KEY & WORD):016x}"


def listed(tool, path):
    """{name: (dtype, torch dtype, shape, digest)} as weightwire reads a checkpoint."""
    status, output = reports.run([tool, "list", path], timeout=60)
    if status != 0:
        raise RuntimeError(output.strip())
    rows = [line.split("\t") for line in output.splitlines()]
    return {name: (dtype, torch, json.loads(shape), text) for name, dtype, torch, shape, text in rows}


def serialize(library, tensors, metadata):
    """`tensors` as the library writes them; its way to be given raw bytes differs between versions."""
    kept, described = [], {}
    for name, (dtype, shape, data) in tensors.items():
        if hasattr(library, "TensorSpec"):
            buffer = ctypes.create_string_buffer(data, len(data))
            kept.append(buffer)
            described[name] = library.TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffer),
                                                 data_len=len(data))
        else:
            described[name] = {"dtype": dtype, "shape": shape, "data": data}
    return bytes(library.serialize(described, metadata))


def ours_read_by_it(library, tool, path):
    ours = listed(tool, path)
    theirs = {name: (entry["dtype"], entry["shape"], digest(bytes(entry["data"])))
              for name, entry in library.deserialize(path.read_bytes())}
    if set(ours) != set(theirs):
        return f"the names differ: {sorted(set(ours) ^ set(theirs))}"
    wrong = [f"{name}: {ours[name]} here, {theirs[name]} there" for name in ours
             if (ours[name][0], ours[name][2], ours[name][3]) != theirs[name]]
    with library.safe_open(str(path), framework="np") as opened:
        if opened.metadata() != {"format": "pt", "note": 'a "quoted" line\n'}:
            wrong.append(f"metadata: {opened.metadata()}")
    return "; ".join(wrong)


def its_read_by_us(library, tool, folder, dtypes):
    """One tensor of every dtype that the library takes; at least those that every version takes."""
    tensors, refused = {}, []
    for number, (dtype, torch, header_shape, _) in enumerate(dtypes):
        sizes = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
                 "I16": 16, "U16": 16, "F4": 4}
        count = header_shape[0] * header_shape[1]
        data = bytes((number * 11 + i * 7) & 0xFF for i in range(count * sizes.get(dtype, 8) // 8))
        shape = [3, 8] if dtype == "F4" else header_shape  # torch's shape, of pairs
        try:
            serialize(library, {"w": (torch, shape, data)}, None)
        except Exception as problem:  # pylint: disable=broad-except
            refused.append(f"{torch}: {problem}")
            continue
        tensors[dtype] = (torch, shape, data)
    missing = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"} - set(tensors)
    if missing:
        return f"the library refused {missing}: {refused}"
    path = folder / "theirs.safetensors"
    path.write_bytes(serialize(library, tensors, {"format": "pt"}))
    ours = listed(tool, path)
    wrong = [f"{dtype}: {ours.get(dtype)}, expected {digest(data)}" for dtype, (_, _, data) in tensors.items()
             if dtype not in ours or ours[dtype][0] != dtype or ours[dtype][3] != digest(data)]
    return "; ".join(wrong) or ("" if len(ours) == len(tensors) else "we read more tensors than were written")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++", help="such as g++ or 'ccache g++'")
    parser.add_argument("--include", default=str(HERE.parents[1] / "include"))
    arguments = parser.parse_args()
    report = reports.Report()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tool = folder / "safetensors_tool"
        status, output = reports.run([*shlex.split(arguments.compiler), "-std=c++20", "-O1", f"-I{arguments.include}",
                                      HERE / "safetensors_tool.cpp", "-o", tool])
        report.check("interop: safetensors_tool compiles", output if status else "")
        if status:
            report.exit()
        path = folder / "ours.safetensors"
        status, output = reports.run([tool, "write", path], timeout=60)
        ours = listed(tool, path) if status == 0 else {}
        report.check("interop: our reader reads our writer's file", output if status else "" if ours else "no tensors")
        try:
            import safetensors  # pylint: disable=import-outside-toplevel
        except ImportError:
            report.skip("interop with the safetensors library", "python package `safetensors` is not installed")
            report.exit()
        version = safetensors.__version__
        report.check(f"interop: safetensors {version} reads our file", ours_read_by_it(safetensors, tool, path))
        dtypes = [row for row in ours.values() if row[1] and len(row[2]) == 2 and row[2][0] == 3]
        report.check(f"interop: we read the file of safetensors {version}",
                     its_read_by_us(safetensors, tool, folder, dtypes))
    report.exit()


if __name__ == "__main__":
    main()
