#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pickled handles of vLLM's `ipc` backend: we read what Python's own pickle module writes, and it loads ours.

Both are compared item by item, with their types. The objects inside are torch's own where torch is installed; else
stand-ins of the same names that pickle to the same texts.
"""
import argparse
import itertools
import json
import pathlib
import pickle
import pickletools
import shlex
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import report as reports  # noqa: E402

GPUS = ["483a70e0-d92f-0d9a-9ea7-7078be2a51b9", "00000000-0000-0000-0000-00000000000f"]
DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16",
          "int32", "int64", "bool", "complex64"]


class Size(tuple):
    """A stand-in for torch.Size."""

    def __reduce__(self):
        return Size, (tuple(self),)


class Type:
    """A stand-in for torch.dtype: pickled as a global, by its name."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name

    def __repr__(self):
        return f"torch.{self.name}"


def stand_in_modules():
    """Modules named like torch's, with what a handle names of them."""
    torch, storage, reductions, multiprocessing = (
        types.ModuleType(name) for name in ("torch", "torch.storage", "torch.multiprocessing.reductions",
                                            "torch.multiprocessing"))
    torch.Size, torch.Tensor, storage.TypedStorage = Size, type("Tensor", (), {}), type("TypedStorage", (), {})
    reductions.rebuild_cuda_tensor = types.FunctionType((lambda: None).__code__, {}, "rebuild_cuda_tensor")
    reductions.rebuild_cuda_tensor.__qualname__ = "rebuild_cuda_tensor"
    for thing, module in [(Size, torch), (torch.Tensor, torch), (storage.TypedStorage, storage),
                          (reductions.rebuild_cuda_tensor, reductions)]:
        thing.__module__ = module.__name__
    for name in ["uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
                 "float4_e2m1fn_x2", "complex128", *DTYPES]:
        made = Type(name)
        made.__module__ = "torch"
        setattr(torch, name, made)
    torch.storage, torch.multiprocessing, multiprocessing.reductions = storage, multiprocessing, reductions
    sys.modules.update({"torch": torch, "torch.storage": storage, "torch.multiprocessing": multiprocessing,
                        "torch.multiprocessing.reductions": reductions})


def bytes_from(seed, count):
    return bytes((seed * 31 + i * 7) & 0xFF for i in range(count))


def arguments(torch, seed, dtype, size, prefix=b"\x02c", **changed):
    """The 15 arguments, as torch's reduce_tensor gives them; bytes are new objects, as there."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.insert(0, step)
        step *= max(extent, 1)
    items = [torch.Tensor, torch.Size(size), tuple(stride), seed * 3, torch.storage.TypedStorage,
             getattr(torch, dtype), seed % 8, prefix + bytes_from(seed, 64), 1 << (22 + seed % 20), seed * 512, False,
             f"/torch_{4000 + seed}_{seed * 7919}_{seed}".encode(), seed % 10000, bytes_from(seed + 1, 64),
             seed % 2 == 1]
    for place, value in changed.items():
        items[int(place[1:])] = value
    return tuple(items)


def examples(torch):
    """{name: handle object}, of every form that has been on the wire."""
    rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
    shapes = [(7,), (300, 70), (2, 3, 4), (1, 2, 3, 4, 5), (0, 5), (), (1,) * 8, (255, 256, 1)]
    each = [arguments(torch, i, dtype, size) for i, (dtype, size) in enumerate(itertools.product(DTYPES, shapes))]
    empty = {"_7": None, "_8": 0, "_11": None, "_12": 0, "_13": None, "_14": None}
    one = arguments(torch, 5, "bfloat16", (4, 4))
    return {
        "args": [{GPUS[0]: args} for args in each],
        "pairs": [{GPUS[0]: (rebuild, args)} for args in each],
        "two GPUs": [{gpu: (*args[:6], i, *args[7:]) for i, gpu in enumerate(GPUS)} for args in each],
        "packed": {gpu: arguments(torch, i, "uint8", (1 << 20,)) for i, gpu in enumerate(GPUS)},
        "bare handles": [{GPUS[0]: arguments(torch, i, "float32", (9,), prefix=b"")} for i in range(3)],
        "torch's empty storage": [{GPUS[0]: arguments(torch, 2, "float32", (0, 3), **empty)}],
        "one object twice": [{GPUS[0]: one, GPUS[1]: one}, {GPUS[1]: one}],
        "3000 tensors": [{GPUS[0]: arguments(torch, i, "bfloat16", (64, 32))} for i in range(3000)],
        "no tensors": [],
        "a GPU nowhere": [{}],
    }


def described(args):
    """What our tool prints of a tensor, from Python's own object."""
    handle, size_bytes, counter, event = args[7], args[8], args[11], args[13]
    handle = b"" if handle is None or size_bytes == 0 else handle if len(handle) == 64 else handle[2:]
    return {"size": list(args[1]), "stride": list(args[2]), "offset": args[3], "dtype": str(args[5]).split(".")[-1],
            "device": args[6], "handle": handle.hex(), "storage_bytes": size_bytes if handle else 0,
            "storage_offset": args[9], "ref_counter": (counter or b"").hex(), "ref_slot": args[12],
            "event": (event or bytes(64)).hex(), "event_sync": bool(args[14])}


def plain(handles):
    """{packed, entries} of a handle object, tuple or pair."""
    entries = [handles] if isinstance(handles, dict) else handles
    return {"packed": isinstance(handles, dict),
            "entries": [[[gpu, described(held if len(held) == 15 else held[1])] for gpu, held in entry.items()]
                        for entry in entries]}


def first_difference(ours, theirs, path="$"):
    """Where two JSON values differ, in words; empty where they do not."""
    if type(ours) is not type(theirs):
        return f"{path}: {ours!r} here, {theirs!r} there"
    if isinstance(ours, (list, dict)):
        if len(ours) != len(theirs) or isinstance(ours, dict) and set(ours) != set(theirs):
            return f"{path}: {len(ours)} here, {len(theirs)} there, or other keys"
        for key in ours if isinstance(ours, dict) else range(len(ours)):
            problem = first_difference(ours[key], theirs[key], f"{path}[{key!r}]")
            if problem:
                return problem
        return ""
    return "" if ours == theirs else f"{path}: {ours!r} here, {theirs!r} there"


def reading_problem(tool, path, text, handles):
    path.write_bytes(text)
    status, output = reports.run([tool, "read", path], timeout=60)
    if status != 0:
        return output.strip()
    return first_difference(json.loads(output), plain(handles))


def type_problem(torch, args):
    """Types that rebuild_cuda_tensor and vLLM need."""
    kinds = [type, tuple, tuple, int, type, type(torch.float32), int, (bytes, type(None)), int, int, bool, bytes, int,
             bytes, bool]
    if type(args) is not tuple or len(args) != 15:
        return f"no tuple of 15: {type(args)}"
    wrong = [i for i, kind in enumerate(kinds)
             if not isinstance(args[i], kind) or kind is int and isinstance(args[i], bool)]
    wrong += [i for i in (1, 2) if any(type(number) is not int for number in args[i])]
    if args[0] is not torch.Tensor or args[4] is not torch.storage.TypedStorage or args[10] is not False:
        wrong.append("a class or requires_grad")
    return f"items {wrong} of {args!r}" if wrong else ""


def loading_problem(torch, tool, path, kind):
    status, output = reports.run([tool, "write", path, kind], timeout=60)
    if status != 0:
        return output.strip()
    handles = pickle.loads(path.read_bytes())
    pairs = []
    for entry in [handles] if isinstance(handles, dict) else handles:
        for held in entry.values():
            if kind == "pairs":
                if type(held) is not tuple or held[0] is not torch.multiprocessing.reductions.rebuild_cuda_tensor:
                    return f"no pair of the function and its arguments: {held!r}"
                held = held[1]
            pairs.append(held)
    for args in pairs:
        if type_problem(torch, args):
            return type_problem(torch, args)
    return first_difference(json.loads(output), plain(handles))


def refusal_problem(tool, path, handles, words):
    path.write_bytes(pickle.dumps(handles))
    status, output = reports.run([tool, "read", path], timeout=60)
    return "" if status == 1 and words in output else f"status {status}, expected {words!r}: {output.strip()}"


def refusals(torch):
    """{name: (object, words of the refusal)}"""
    def with_item(place, value):
        return [{GPUS[0]: arguments(torch, 1, "float32", (4, 4), **{f"_{place}": value})}]

    return {
        "an expandable segment": (with_item(7, b"\x02e" + bytes(100)), "expandable_segments"),
        "a handle of another type": (with_item(7, b"\x02x" + bytes(64)), "item 7"),
        "a bool where a number is due": (with_item(8, True), "item 8"),
        "a tensor beyond its storage": (with_item(3, 1 << 40), "beyond its storage"),
        "a class of somebody's": (with_item(0, pathlib.PurePosixPath), "nothing is called"),
        "an object": (with_item(0, pathlib.PurePosixPath("x")), "nothing is called"),
        "14 arguments": ([{GPUS[0]: arguments(torch, 1, "float32", (4,))[:14]}], "a tuple of 14"),
        "no dict": ([[]], "a second list"),
        "a float": (with_item(3, 1.5), "opcode 0x47"),
    }


def check_both_ways(report, torch, tool, folder, whose):
    for protocol in (2, 3, 4, 5):
        for name, handles in examples(torch).items():
            text = pickle.dumps(handles, protocol)
            problem = reading_problem(tool, folder / "theirs", text, handles)
            if not problem and name != "3000 tensors":  # pickletools are slow
                problem = reading_problem(tool, folder / "theirs", pickletools.optimize(text), handles)
            if not problem:
                slow = pickle._dumps(handles, protocol)  # pylint: disable=protected-access
                problem = reading_problem(tool, folder / "theirs", slow, handles)
            report.check(f"interop: we read protocol {protocol} of {whose}, {name}", problem)
    for kind in ("list", "pairs", "packed", "none"):
        report.check(f"interop: {whose} loads ours, {kind}", loading_problem(torch, tool, folder / "ours", kind))
    for name, (handles, words) in refusals(torch).items():
        report.check(f"interop: {name} of {whose} is refused", refusal_problem(tool, folder / "theirs", handles, words))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++", help="such as g++ or 'ccache g++'")
    parser.add_argument("--include", default=str(HERE.parents[1] / "include"))
    parser.add_argument("--examples", type=pathlib.Path, help="only write small examples into this folder")
    parsed = parser.parse_args()
    report = reports.Report()
    try:
        import torch  # pylint: disable=import-outside-toplevel
        import torch.multiprocessing.reductions  # pylint: disable=import-outside-toplevel
        whose = f"Python {sys.version_info[0]}.{sys.version_info[1]} with torch {torch.__version__}"
    except ImportError:
        stand_in_modules()
        import torch  # pylint: disable=import-outside-toplevel
        whose = f"Python {sys.version_info[0]}.{sys.version_info[1]} with stand-ins for torch"
        report.skip("interop of IPC pickles with torch's own objects", "python package `torch` is not installed")
    if parsed.examples:
        two = [{gpu: arguments(torch, i, "bfloat16", (4, 3)) for i, gpu in enumerate(GPUS)},
               {GPUS[0]: arguments(torch, 2, "float32", ())}]
        for protocol in (2, 3, 4, 5):
            (parsed.examples / f"python_{protocol}").write_bytes(pickle.dumps(two, protocol))
        pairs = [{GPUS[0]: (torch.multiprocessing.reductions.rebuild_cuda_tensor,
                            arguments(torch, 3, "float8_e4m3fn", (9,)))}]
        (parsed.examples / "python_pairs").write_bytes(pickle.dumps(pairs, 4))
        packed = {GPUS[0]: arguments(torch, 0, "uint8", (1 << 20,))}
        (parsed.examples / "python_packed").write_bytes(pickle.dumps(packed, 4))
        (parsed.examples / "expandable").write_bytes(pickle.dumps(refusals(torch)["an expandable segment"][0], 4))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tool = folder / "ipc_pickle_tool"
        status, output = reports.run([*shlex.split(parsed.compiler), "-std=c++20", "-O1", f"-I{parsed.include}",
                                      HERE / "ipc_pickle_tool.cpp", "-o", tool])
        report.check("interop: ipc_pickle_tool compiles", output if status else "")
        if not status:
            check_both_ways(report, torch, tool, folder, whose)
    report.exit()


if __name__ == "__main__":
    main()
