#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins test files into a few translation units, which takes a third of the time of one unit each.

    join.py --plan COUNT FILE...    prints COUNT lines or more: the files of one unit each
    join.py --write OUTPUT FILE...  writes a unit: the includes of all files, then each file in a namespace of its own

Files are relative to tests/. As each has a namespace, names in one do not meet those of another. A file that
specializes a template of another namespace, opens a named namespace or includes something under a condition cannot be
in one: it comes last in its unit, and a unit has at most one of them.
"""
import argparse
import os
import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]')
GLOBAL = re.compile(r"^(?:template <>|(?:inline )?namespace [\w:]+ *\{|int main\()", re.MULTILINE)


def includes_of(path):
    """What a file includes, as a unit elsewhere includes it; and whether all of it is unconditional."""
    found, depth, always = [], 0, True
    for line in path.read_text(encoding="utf-8").splitlines():
        directive = re.match(r"\s*#\s*(if|endif)", line)
        if directive:
            depth += 1 if directive.group(1) == "if" else -1
        include = INCLUDE.match(line)
        if include and depth:
            always = False
        elif include and include.group(1) == "<":
            found.append(f"#include <{include.group(2)}>")
        elif include:
            found.append(f'#include "{os.path.relpath(path.parent / include.group(2), TESTS)}"')
    return found, always


def can_be_wrapped(path):
    return not GLOBAL.search(path.read_text(encoding="utf-8")) and includes_of(path)[1]


def plan(count, names):
    """Neighbours share a unit, as they instantiate the same; the units have about the same size."""
    sizes = [(TESTS / name).stat().st_size for name in names]
    units, alone, before = [[] for _ in range(count)], [], 0
    for name, size in zip(names, sizes):
        unit = units[min(count - 1, (2 * before + size) * count // (2 * sum(sizes)))]
        before += size
        if can_be_wrapped(TESTS / name) or all(can_be_wrapped(TESTS / other) for other in unit):
            unit.append(name)
        else:
            alone.append([name])
    return [unit for unit in units if unit] + alone


def unit_of(names):
    paths = sorted((TESTS / name for name in names), key=lambda path: not can_be_wrapped(path))
    includes, bodies = [], []
    for path in paths:
        includes += (line for line in includes_of(path)[0] if line not in includes)
        file = f'#include "{path.relative_to(TESTS).as_posix()}"\n'
        space = re.sub(r"\W", "_", path.stem) + "_cpp"
        bodies.append(f"namespace {space} {{\n{file}}}\n" if can_be_wrapped(path) else file)
    return "\n".join(includes) + "\n" + "".join(bodies)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=int, metavar="COUNT")
    parser.add_argument("--write", type=pathlib.Path, metavar="OUTPUT")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.plan:
        print("\n".join(" ".join(unit) for unit in plan(arguments.plan, arguments.files)))
    if arguments.write:
        arguments.write.write_text(unit_of(arguments.files), encoding="utf-8")


if __name__ == "__main__":
    main()
