#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The oracle of recording tensors: 10,000 random chains of views give the same elements on torch and on ours.

Every chain begins at a contiguous parameter whose elements are numbered. Compared are the extents, the contiguity, the
number of pieces, the elements that a copy from the view reads and those that a copy to it writes, and for a chain that
torch refuses, at which operation. Differences that are meant:

- torch's copies (contiguous, reshape, flatten) can be seen in shapes that no strides of the parameter express; ours
  then refuses by `unsupported`. It also does for a few of their parts that happen to be regular, such as two elements
  on both sides of a jump: less than one chain in a thousand. Without a copy it never does.
- torch lets `expand` give an empty tensor a negative extent.
- A copy to a view that torch made by copying, which would not write the parameter, is an error of ours.
"""
import argparse
import collections
import pathlib
import random
import shlex
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import report as reports  # noqa: E402

MOST_ELEMENTS = 1500
MOST_DIMENSIONS = 6  # ours has 8; expand and unsqueeze add some
MAKES_PIECES = ("chunk", "split", "splits", "unbind")
SHRINKING = ("select", "index", "unbind", "narrow", "chunk")
OPERATIONS = ("narrow", "select", "slice", "index", *MAKES_PIECES, "transpose", "permute", "t", "view", "reshape",
              "flatten", "unsqueeze", "squeeze", "expand", "contiguous")
OFTEN = [*OPERATIONS, "narrow", "slice", "transpose", "transpose", "permute", "view", "view", "reshape", "flatten",
         "squeeze", "contiguous", "contiguous"]


def joined(numbers):
    return ",".join(map(str, numbers)) or "-"


def factored(pick, numel, most=5):
    """Extents that multiply to `numel`."""
    extents = []
    for _ in range(pick.randint(0, most - 1)):
        divisors = [d for d in range(1, numel + 1) if numel % d == 0] if numel else [0, 1, 3]
        extents.append(pick.choice(divisors[1:-1] or divisors) if pick.random() < 0.8 else 1)
        numel = numel // extents[-1] if extents[-1] else 0
    extents.append(numel)
    pick.shuffle(extents)
    return extents


class Chains:
    """Random operations that mostly fit a tensor; the others are for refusals."""

    def __init__(self, torch, seed):
        self.torch, self.pick = torch, random.Random(seed)

    def start(self):
        extents = [self.pick.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 9, 12]) for _ in range(self.pick.randint(1, 5))]
        if self.pick.random() < 0.03:
            extents[self.pick.randrange(len(extents))] = 0
        if self.pick.random() < 0.02:
            extents = []
        while len(extents) and self.numel(extents) > MOST_ELEMENTS:
            extents[self.pick.randrange(len(extents))] = 2 if self.pick.random() < 0.7 else 1
        return extents

    @staticmethod
    def numel(extents):
        product = 1
        for extent in extents:
            product *= extent
        return product

    def dimension(self, t, extra=0):
        count = t.dim() + extra
        if self.pick.random() < 0.01:
            return self.pick.choice([-count - 1, count, count + 3])
        return self.pick.randrange(-count, count) if count else self.pick.choice([0, -1])

    def extent(self, t, dimension):
        return t.shape[dimension] if -t.dim() <= dimension < t.dim() else 3

    def index(self, extent):
        """An index of a dimension, seldom outside."""
        if self.pick.random() < 0.02 or not extent:
            return self.pick.choice([-extent - 1, extent, extent + 2])
        return self.pick.randrange(-extent, extent)

    def length(self, most):
        """A length, seldom 0 where it may be more."""
        return self.pick.randint(0 if self.pick.random() < 0.1 else min(1, most), most)

    def operation(self, t):
        """(name, arguments as text)"""
        name = self.pick.choice(OFTEN)
        if t.numel() < 12 and name in SHRINKING and self.pick.random() < 0.8:
            name = self.pick.choice(["view", "reshape", "unsqueeze", "expand", "transpose"])
        if (name in ("unsqueeze", "expand") and t.dim() >= MOST_DIMENSIONS or
                name == "expand" and t.numel() * 3 > MOST_ELEMENTS or
                name == "t" and t.dim() > 2 + (self.pick.random() < 0.05)):
            name = "contiguous"
        d = self.dimension(t)
        return name, getattr(self, f"of_{name}", lambda *_: [])(t, d, self.extent(t, d))

    def of_narrow(self, _, d, extent):
        start = self.pick.randint(0, extent)
        length = self.length(extent - start)
        if self.pick.random() < 0.02:
            length += self.pick.choice([1, -length - 1])
        return [d, start - extent if self.pick.random() < 0.3 and start < extent else start, length]

    def of_select(self, _, d, extent):
        return [d, self.index(extent)]

    def of_index(self, t, *_):
        return [self.index(self.extent(t, 0))]

    def of_slice(self, _, d, extent):
        start, stop = (self.pick.choice(["none", self.pick.randint(-extent - 1, extent + 1)]) for _ in range(2))
        return [d, start, stop, self.pick.choice([1, 1, 1, 2, 2, 3, 4] if self.pick.random() < 0.99 else [0, -1])]

    def of_chunk(self, _, d, extent):
        return [self.pick.choice([1, 2, 2, 3, 4, extent or 1, 7] if self.pick.random() < 0.98 else [0, -1]), d,
                self.pick.randrange(8)]

    def of_split(self, _, d, extent):
        return [self.pick.randint(1, max(1, extent)) if self.pick.random() < 0.98 else self.pick.choice([0, -1]), d,
                self.pick.randrange(8)]

    def of_splits(self, _, d, extent):
        lengths = []
        while sum(lengths) < extent or self.pick.random() < 0.2:
            lengths.append(self.length(extent - sum(lengths)))
        if self.pick.random() < 0.03:
            lengths.append(self.pick.choice([1, -1]))
        return [joined(lengths), d, self.pick.randrange(8)]

    def of_unbind(self, _, d, __):
        return [d, self.pick.randrange(20)]

    def of_transpose(self, t, d, _):
        return [d, self.dimension(t)]

    def of_permute(self, t, *_):
        order = [i - t.dim() if self.pick.random() < 0.3 else i for i in self.pick.sample(range(t.dim()), t.dim())]
        return [joined(order + [0] * (self.pick.random() < 0.02))]

    def of_view(self, t, *_):
        extents = list(t.shape) if self.pick.random() < 0.1 else factored(self.pick, t.numel())
        if self.pick.random() < 0.3 and extents:
            extents[self.pick.randrange(len(extents))] = -1
        if self.pick.random() < 0.02:
            extents.append(self.pick.choice([2, -1, -2, 0]))
        return [joined(extents)]

    of_reshape = of_view

    def of_flatten(self, t, *_):
        ends = [self.dimension(t), self.dimension(t)]
        if self.pick.random() < 0.95:
            ends.sort(key=lambda end: end + t.dim() if end < 0 else end)
        return ends

    def of_unsqueeze(self, t, *_):
        return [self.dimension(t, 1)]

    def of_squeeze(self, _, d, __):
        return [] if self.pick.random() < 0.3 else [d]

    def of_expand(self, t, *_):
        pick = self.pick
        extents = [pick.choice([-1, size]) if size != 1 else pick.choice([1, -1, 1, 2]) for size in t.shape]
        while self.numel([2 if extent == 2 else 1 for extent in extents]) * t.numel() > MOST_ELEMENTS:
            extents[extents.index(2)] = -1
        if pick.random() < 0.2:
            extents.insert(0, pick.choice([1, 2, 3]) if pick.random() < 0.9 else -1)
        if pick.random() < 0.03 and extents:
            # torch lets a negative extent of an empty tensor pass, and makes one of it.
            extents[pick.randrange(len(extents))] = pick.choice([-2, 0, 5] if t.numel() else [0, 5])
        return [joined(extents)]


def numbers_of(text):
    return [] if text == "-" else [int(number) for number in text.split(",")]


def applied(t, name, arguments):
    """Tensor, and the pieces of which it is one, or None."""
    a = [numbers_of(x) if isinstance(x, str) and x != "none" else None if x == "none" else x for x in arguments]
    if name == "slice":
        d = a[0] + t.dim() if a[0] < 0 else a[0]
        if not 0 <= d < t.dim():
            raise IndexError("no such dimension")
        return t[(slice(None),) * d + (slice(a[1], a[2], a[3]),)], None
    if name == "index":
        return t[a[0]], None
    if name in MAKES_PIECES:
        pieces = {"chunk": lambda: t.chunk(a[0], a[1]), "split": lambda: t.split(a[0], a[1]),
                  "splits": lambda: t.split(a[0], a[1]), "unbind": lambda: t.unbind(a[0])}[name]()
        return pieces[a[-1] % len(pieces)] if pieces else None, pieces
    return getattr(t, name)(*a), None


def factors_exist(elements):
    """Whether a dimension's elements, from 0 on, are sums of digits times strides."""
    count = len(elements)
    if count == 1:
        return True
    for inner in (m for m in range(2, count + 1) if count % m == 0):
        if any(elements[i] != i * elements[1] or elements[1] < 0 for i in range(inner)):
            return False
        if all(elements[i] == elements[i - i % inner] + elements[i % inner] for i in range(count)) and \
                factors_exist(elements[::inner]):
            return True
    return False


def expressible(t):
    """Whether strides of the parameter say which element is where."""
    if t.numel() == 0:
        return True
    total = t.flatten()[0]
    for d in range(t.dim()):
        profile = t[(0,) * d + (slice(None),) + (0,) * (t.dim() - d - 1)] - t.flatten()[0]
        if not factors_exist(profile.tolist()):
            return False
        total = total + profile.reshape([-1] + [1] * (t.dim() - d - 1))
    return bool((total == t).all())


def chain_of(torch, chains):
    """(line for our tool, what torch says of it)"""
    extents = chains.start()
    root = torch.arange(chains.numel(extents), dtype=torch.int64).reshape(extents)
    line, counts, steps, t, copied = [joined(extents)], [], [], root, False
    for step in range(chains.pick.choice([1, 2, 3, 4, 5, 6, 8, 10])):
        name, arguments = chains.operation(t)
        line.append(" ".join(map(str, [name, *arguments])))
        before = t
        try:
            t, pieces = applied(t, name, arguments)
        except (RuntimeError, IndexError, ValueError):
            return ";".join(line), {"counts": counts, "error": step, "copied": copied, "steps": steps}
        if pieces is not None:
            counts.append(len(pieces))
        if t is None:
            return ";".join(line), {"counts": counts, "none": True, "copied": copied, "steps": steps}
        copied = copied or t.untyped_storage().data_ptr() != root.untyped_storage().data_ptr()
        steps.append(pieces or [t])
        if t.numel() == 0 and before.numel() > 0 and chains.pick.random() < 0.5:
            break
    repeats = any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride())) and t.numel() > 0
    return ";".join(line), {"counts": counts, "shape": list(t.shape), "contiguous": t.is_contiguous(),
                            "elements": t.reshape(-1).tolist(), "copied": copied, "steps": steps, "repeats": repeats}


def difference(theirs, line, seen):
    """What differs, in words, or empty; counts what was seen."""
    counts, kind, *rest = line.split(";")
    if kind.startswith("error"):
        _, step, word, *_ = kind.split(" ", 3)
        if "error" not in theirs or int(step) < theirs["error"]:
            if word == "unsupported" and theirs["copied"]:
                by_chance = all(map(expressible, theirs["steps"][int(step)]))
                seen["refused though expressible" if by_chance else "inexpressible"] += 1
                return ""
            return f"ours refuses what torch does: {line}"
        seen["refused by both"] += 1
        return "" if word == "usage" and int(step) == theirs["error"] else f"torch refuses at {theirs['error']}: {line}"
    if "error" in theirs:
        return f"torch refuses at operation {theirs['error']}, ours does not: {line[:200]}"
    if numbers_of(counts) != theirs["counts"]:
        return f"{theirs['counts']} pieces there, {counts} here"
    if "none" in theirs:
        return "" if kind == "none" else "no pieces there"
    if kind == "none" or len(rest) < 3:
        return f"unexpected {line[:200]}"
    if numbers_of(kind) != theirs["shape"]:
        return f"shape {theirs['shape']} there, {kind} here"
    if (rest[0] == "1") != theirs["contiguous"]:
        return f"contiguous: {theirs['contiguous']} there, {rest[0]} here"
    if numbers_of(rest[1]) != theirs["elements"]:
        return f"elements {theirs['elements'][:50]} there, {rest[1][:200]} here"
    seen["same elements"] += 1
    seen["of those from a copy"] += theirs["copied"]
    writable = not theirs["repeats"] and not theirs["copied"]
    seen["written through"] += writable and bool(theirs["elements"])
    if writable != (rest[2] == "same") and theirs["elements"]:
        return f"writing: {writable} there, {rest[2][:300]} here"
    return ""


def check_chains(report, torch, tool, seed, count):
    chains = Chains(torch, seed)
    lines, theirs = zip(*(chain_of(torch, chains) for _ in range(count)))
    path = tool.with_suffix(".txt")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, output = reports.run([tool, path], timeout=120)
    ours = output.splitlines()
    if status or len(ours) != count:
        report.check(f"interop: {count} chains run on recording tensors", f"status {status}, {len(ours)} lines: "
                     f"{output[-500:]}")
        return
    seen = collections.Counter()
    problems = [f"{chain}: {problem}" for chain, expected, line in zip(lines, theirs, ours)
                if (problem := difference(expected, line, seen))]
    report.check(f"interop: {count} random chains of views, seed {seed}, are torch {torch.__version__}'s",
                 f"{len(problems)} differ:\n" + "\n".join(problems[:10]) if problems else "")
    print("  " + ", ".join(f"{number} {what}" for what, number in sorted(seen.items())), flush=True)
    operations = collections.Counter(word.split(" ")[0] for line in lines for word in line.split(";")[1:])
    rare = [name for name in OPERATIONS if operations[name] < count // 100]
    report.check("interop: every view operation was tried often", f"seldom: {rare}" if rare else "")
    least = {"same elements": 0.77, "of those from a copy": 0.1, "written through": 0.2, "refused by both": 0.05}
    seldom = [what for what, part in least.items() if seen[what] < part * count]
    report.check("interop: chains end in every way", f"seldom: {seldom} of {dict(seen)}" if seldom else "")
    few = {"inexpressible": 0.05, "refused though expressible": 0.001}
    many = [f"{seen[what]} {what}" for what, part in few.items() if seen[what] > part * count]
    report.check("interop: few chains are refused that torch runs", f"{many} of {count}" if many else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++", help="such as g++ or 'ccache g++'")
    parser.add_argument("--include", default=str(HERE.parents[1] / "include"))
    parser.add_argument("--chains", type=int, default=13000,
                        help="a fifth of them end at an operation that torch refuses")
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    report = reports.Report()
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except ImportError:
        report.skip("interop of recording tensors", "python package `torch` is not installed")
        report.exit()
    begin = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tool = pathlib.Path(name) / "recording_tool"
        status, output = reports.run([*shlex.split(parsed.compiler), "-std=c++20", "-O1", f"-I{parsed.include}",
                                      HERE / "recording_tool.cpp", "-o", tool])
        report.check("interop: recording_tool compiles", output if status else "")
        if not status:
            check_chains(report, torch, tool, parsed.seed, parsed.chains)
    print(f"  {time.monotonic() - begin:.1f} s", flush=True)
    report.exit()


if __name__ == "__main__":
    main()
