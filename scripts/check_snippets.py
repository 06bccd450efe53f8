#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ code blocks of README.md and docs/*.md, as they stand in the text.

A block that includes something is a file. Any other block is statements: it needs a prelude, a comment that a reader
of the page does not see,

    <!-- prelude
    #include <weightwire/trainer.hpp>
    my_source make_source();
    -->

before it. The prelude serves the following blocks until the next one; a block becomes the body of a function after it.
In README.md every block must be one or the other; in docs/ blocks that are neither are sketches and left alone.

What two blocks or more include of UMBRELLAS is precompiled once, and read before a block that includes it: that hides
nothing which the block lacks.
"""
import argparse
import pathlib
import re
import shlex
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
sys.path.insert(0, str(ROOT / "tests" / "headers"))
from check_headers import cuda_include, nccl_include  # noqa: E402
from report import Report, default_jobs, in_parallel, run  # noqa: E402

UMBRELLAS = ("weightwire/trainer.hpp", "weightwire/worker.hpp")
PART = re.compile(r"<!-- prelude\n(?P<prelude>.*?)-->|^```(?:cpp|c\+\+)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)


def snippets_of(text):
    """[(line, file text or None)] of every C++ block; None: neither a file nor after a prelude."""
    prelude = None
    for part in PART.finditer(text):
        if part.group("code") is None:
            prelude = part.group("prelude")
            continue
        code, line = part.group("code"), text.count("\n", 0, part.start()) + 2
        if re.search(r"^\s*#\s*include", code, re.MULTILINE):
            yield line, code
        elif prelude is not None:
            yield line, f"{prelude}\nvoid the_block_of_line_{line}() {{\n{code}}}\n"
        else:
            yield line, None


def needs_nccl(text):
    return "weightwire/backends/nccl/" in text


def command_of(compiler):
    return [*compiler, "-std=c++20", "-Wall", "-Wextra", "-Wno-unused", "-DFMT_HEADER_ONLY", f"-I{ROOT / 'include'}",
            *cuda_include(), *nccl_include()]


def umbrella_of(text):
    """The umbrella that a block includes, or nothing."""
    return next((name for name in UMBRELLAS if f"#include <{name}>" in text), "")


def precompiled(compiler, umbrella, folder):
    """The flags with which a compiler reads an umbrella precompiled; none where it cannot."""
    header = folder / umbrella.replace("/", "__")
    header.write_text(f"#include <{umbrella}>\n", encoding="utf-8")
    # clang also looks for this name.
    status, _ = run([*command_of(compiler), "-x", "c++-header", header, "-o", f"{header}.gch"])
    return ["-include", header] if status == 0 else []


def compile_problem(compiler, text, flags=()):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "snippet.cpp"
        source.write_text(text, encoding="utf-8")
        status, output = run([*command_of(compiler), "-fsyntax-only", *flags, source])
    return "" if status == 0 else "\n".join(output.strip().splitlines()[:30])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    arguments = parser.parse_args()
    report = Report()
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        name = page.relative_to(ROOT).as_posix()
        for line, text in snippets_of(page.read_text(encoding="utf-8")) if page.is_file() else ():
            if text is not None:
                found.append((f"snippet {name}:{line}", text))
            elif name == "README.md":
                report.check(f"snippet {name}:{line}", "the block has neither an #include nor a prelude")
    compiler = shlex.split(arguments.compiler)
    if compile_problem(compiler, "#include <nccl.h>\n"):
        for name, _ in [item for item in found if needs_nccl(item[1])]:
            report.skip(name, "needs the headers of CUDA and NCCL")
        found = [item for item in found if not needs_nccl(item[1])]
    with tempfile.TemporaryDirectory() as folder:
        texts = [text for _, text in found]
        shared = [name for name in UMBRELLAS if sum(umbrella_of(text) == name for text in texts) > 1]
        flags = dict(zip(shared, in_parallel(arguments.jobs,
                                             lambda name: precompiled(compiler, name, pathlib.Path(folder)), shared)))
        problems = in_parallel(arguments.jobs,
                               lambda text: compile_problem(compiler, text, flags.get(umbrella_of(text), ())), texts)
        for (name, _), problem in zip(found, problems):
            report.check(name, problem)
    report.check("a wrong snippet is seen", "" if compile_problem(compiler, "int x = y;\n") else "it compiled")
    report.exit()


if __name__ == "__main__":
    main()
