#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every public header in two translation units and links them.

With the last compiler every header has a unit of its own that includes it alone, twice: it needs nothing before it, so
no order, and may come again. One that holds nothing but includes of ours has none: it cannot need more than these. With
every compiler one unit includes all headers in order; with the others another does in reverse. Two such units are
linked into one executable, so a function or variable that is not inline is a duplicate symbol.

What many headers include takes most of the time. With clang some of it is precompiled, each such header alone and
twice; a header whose includes reach one of these is compiled after it. That hides nothing: it includes it anyway.

With an nvcc, the headers that trainer.hpp and worker.hpp may reach (all but http/, adapters/, fmt.hpp and what includes
them) are also compiled as one CUDA source.

A header whose library is absent is skipped by name.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from find_nvidia_wheel import find, places  # noqa: E402
from report import Report, default_jobs, in_parallel, run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wnon-virtual-dtor", "-Wpedantic", "-Werror"]
# Include of a library -> its name, and what a compiler needs to use it without linking it.
LIBRARIES = {
    "curl/": ("libcurl", "curl/curl.h"),
    "boost/": ("Boost", "boost/version.hpp"),
    "range/v3/": ("range-v3", "range/v3/version.hpp"),
    "fmt/": ("fmt", "fmt/core.h"),
    "nlohmann/": ("nlohmann/json", "nlohmann/json.hpp"),
    "cuda_runtime": ("the CUDA runtime", "cuda_runtime_api.h"),
    "nccl.h": ("NCCL", "nccl.h"),
    "ucp/": ("UCX", "ucp/api/ucp.h"),
}
NOT_FOR_NVCC = ("weightwire/http/", "weightwire/adapters/", "weightwire/fmt.hpp", "curl/", "boost/", "range/", "fmt/")
HUBS = 32  # headers that clang precompiles
WRITING = 0.3  # what writing a precompiled header takes, as a part of compiling it
LARGE = {"nlohmann": 40, "boost": 10}  # libraries whose header takes as long as so many of ours
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# A header of `#pragma once`, comments and includes.
ONLY_INCLUDES = re.compile(r"#pragma once\n(?:[ \t]*(?://.*|#[ \t]*include[ \t]*<.*)?\n)*")


class Tree:
    """The headers of an include directory, and all that each reaches."""

    def __init__(self, include):
        self.include = include
        self.headers = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.hpp"))
        self.direct = {name: INCLUDE.findall((include / name).read_text(encoding="utf-8")) for name in self.headers}

    def only_includes(self, name):
        """Whether it holds nothing but includes of headers of the tree."""
        text = (self.include / name).read_text(encoding="utf-8")
        return bool(ONLY_INCLUDES.fullmatch(text)) and all(other in self.direct for other in self.direct[name])

    def reach(self, name):
        seen, todo = set(), [name]
        while todo:
            for other in self.direct.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    def cost(self, name):
        """About how long a header takes to compile: the files that it reaches; a large library counts as many."""
        return sum(LARGE.get(other.split("/")[0], 1) for other in self.reach(name))

    def hubs(self, count):
        """The headers whose precompiling spares most."""
        reached = {name: self.reach(name) for name in self.headers}
        cost = {name: self.cost(name) for name in self.headers}
        spared = dict.fromkeys(self.headers, 0)  # header -> what the hubs so far spare it
        chosen = []

        def gain(hub):
            users = (name for name in self.headers if name not in chosen and name != hub and hub in reached[name])
            return sum(max(0, cost[hub] - spared[name]) for name in users) - spared[hub] - WRITING * cost[hub]

        while len(chosen) < count:
            best = max((name for name in self.headers if name not in chosen), key=gain, default=None)
            if best is None or gain(best) <= 0:
                break
            chosen.append(best)
            for name in self.headers:
                if best in reached[name]:
                    spared[name] = max(spared[name], cost[best])
        return chosen

    def libraries(self, name):
        return sorted({prefix for prefix in LIBRARIES for other in self.reach(name) if other.startswith(prefix)})


def nccl_include():
    """Where NCCL's header is, when it is in a wheel."""
    found = find("nccl.h", "libnccl.so", places())
    return ["-isystem", str(found[0])] if found else []


def cuda_include():
    """Where the headers of CUDA are, for a compiler that is not nvcc: in a toolkit or in a wheel."""
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root and pathlib.Path(root, "include", "cuda_runtime_api.h").is_file():
            return ["-isystem", f"{root}/include"]
    found = find("cuda_runtime_api.h", "libcudart.so", places())
    return ["-isystem", str(found[0])] if found else []


def last_lines(text, count=40):
    lines = text.strip().splitlines()
    errors = [line for line in lines if "error" in line or "warning" in line]
    return "\n".join((errors or lines)[:count])


def compile_one(command, source, text, keep=True, timeout=300):
    source.write_text(text)
    wanted = ["-c", "-o", source.name + ".o"] if keep else ["-fsyntax-only"]
    status, output = run([*command, *wanted, source.name], timeout, cwd=source.parent)
    return "" if status == 0 else last_lines(output)


def check_host_compiler(report, tree, compiler, flags, jobs, work, alone=True):
    label = pathlib.Path(compiler[-1]).name
    command = [*compiler, "-std=c++20", "-O0", *WARNINGS, f"-I{tree.include}", *cuda_include(), *nccl_include(),
               "-DFMT_HEADER_ONLY", *flags]
    absent = {}
    for prefix, (library, probe) in LIBRARIES.items():
        if compile_one(command, work / "probe.cpp", f"#include <{probe}>\n"):
            absent[prefix] = library
    present = []
    for name in tree.headers:
        missing = [absent[prefix] for prefix in tree.libraries(name) if prefix in absent]
        if missing:
            report.skip(f"header {name} [{label}]", "needs " + ", ".join(missing))
        else:
            present.append(name)

    def compiled(job):
        name, headers = job
        return compile_one(command, work / name, "".join(f"#include <{header}>\n" for header in headers))

    precompiled = {}  # hub -> its file
    cached = pathlib.Path(command[0]).name == "ccache"  # which keeps no precompiled header
    without_cache = command[1:] if cached else command

    def compiled_alone(name):
        flat = name.replace("/", "__")
        within = [hub for hub in precompiled if hub in tree.reach(name)]
        first = max(within, key=tree.cost, default=None)
        after = ["-include-pch", precompiled[first]] if first else []
        return compile_one([*without_cache, *after], work / (flat + ".cpp"), f"#include <{name}>\n" * 2, keep=False)

    def precompile(name):
        header = work / (name.replace("/", "__") + ".hpp")
        header.write_text(f"#include <{name}>\n" * 2)
        status, output = run([*without_cache, "-fpch-instantiate-templates", "-x", "c++-header", header.name, "-o",
                              header.name + ".pch"], cwd=work)
        return (header.name + ".pch", "") if status == 0 else ("", last_lines(output))

    good, units = present, []
    if alone:
        hubs = [name for name in tree.hubs(HUBS) if name in present] if "clang" in label else []
        problems = {}
        for name, (file, problem) in zip(hubs, in_parallel(jobs, precompile, hubs)):
            problems[name] = problem
            if file:
                precompiled[name] = file
        others = [name for name in present if name not in hubs and not tree.only_includes(name)]
        problems.update(zip(others, in_parallel(jobs, compiled_alone, others)))
        for name in present:  # those of includes alone
            problems.setdefault(name, next((f"includes {other}, see there" for other in tree.direct[name]
                                            if problems.get(other)), ""))
        for name in present:
            report.check(f"header {name} [{label}]", problems[name])
        good = [name for name in present if not problems[name]]
    # Compiled alone, no header needs an order: the second unit is the first once more.
    jobs_all = [("in_order.cpp", good)] + ([] if alone else [("in_reverse.cpp", good[::-1])])
    for (unit, _), problem in zip(jobs_all, in_parallel(jobs, compiled, jobs_all)):
        report.check(f"{len(good)} headers in one unit, {unit[:-4].replace('_', ' ')} [{label}]", problem)
        if not problem:
            units.append(unit + ".o")
    if alone and units:
        units.append("once_more.o")
        shutil.copy(work / units[0], work / units[1])
    (work / "main.cpp").write_text("int main() {}\n")
    # A library's own symbols may stay open: nothing is run.
    status, output = run([*compiler, "-pthread", "main.cpp", *units,
                          "-Wl,--unresolved-symbols=ignore-all", "-o", "all"], cwd=work)
    report.check(f"no duplicate symbol over {len(units)} units [{label}]", last_lines(output) if status else
                 "" if units else "there is no unit")


def compiled_as_cuda(tree, nvcc):
    """The headers that NCCL is needed for and is not there, those compiled, and what is wrong with them."""
    command = [*nvcc, "-std=c++20", "-O0", f"-I{tree.include}", *nccl_include(), "-Xcompiler", "-Wall", "-Werror",
               "all-warnings"]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        lacks_nccl = bool(compile_one(command, work / "probe.cu", "#include <nccl.h>\n"))
        skipped = [name for name in tree.headers if lacks_nccl and "nccl.h" in tree.libraries(name)]
        present = [name for name in tree.headers if name not in skipped and
                   not any(other.startswith(NOT_FOR_NVCC) for other in {name, *tree.reach(name)})]
        text = "".join(f"#include <{name}>\n" for name in present)
        return skipped, present, compile_one(command, work / "all.cu", text, timeout=900)


def self_test(report, compiler, flags, jobs):
    """A tree with one header of every defect must be refused, each for its own reason."""
    with tempfile.TemporaryDirectory() as folder:
        include = pathlib.Path(folder) / "include"
        (include / "weightwire").mkdir(parents=True)
        bad = {
            "needs_a_predecessor": "#pragma once\ninline std::size_t f(std::size_t n) { return n; }\n",
            "not_once": "struct twice {};\n",
            "not_inline": "#pragma once\nint everywhere() { return 1; }\n",
            "warns": "#pragma once\ninline int g(long value) { return value; }\n",
        }
        for name, text in bad.items():
            (include / "weightwire" / (name + ".hpp")).write_text(text)
        work = pathlib.Path(folder) / "work"
        work.mkdir()
        seen = []

        class Recorder(Report):
            def check(self, name, problem):
                seen.append((name, bool(problem)))

            def skip(self, name, why):
                seen.append((name, None))

        check_host_compiler(Recorder(), Tree(include), compiler, flags, jobs, work)
        failed = {name.split()[1].split("/")[-1][:-4] for name, problem in seen if problem and name.startswith("header")}
        duplicate = any(problem for name, problem in seen if name.startswith("no duplicate"))
        wanted = {"needs_a_predecessor", "not_once", "warns"}
        report.check("the header test finds planted defects",
                     "" if failed == wanted and duplicate else f"found {sorted(failed)}, duplicate: {duplicate}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", action="append", default=[], help="such as g++ or 'ccache clang++-16'")
    parser.add_argument("--nvcc", help="also compile as .cu with this nvcc")
    parser.add_argument("--flags", default="", help="more flags for the host compilers")
    parser.add_argument("--include", type=pathlib.Path, default=ROOT / "include")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    arguments = parser.parse_args()
    report = Report()
    tree = Tree(arguments.include.resolve())
    flags = shlex.split(arguments.flags)
    # nvcc takes one processor for a minute: beside it the host compilers run.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        cuda = beside.submit(compiled_as_cuda, tree, shlex.split(arguments.nvcc)) if arguments.nvcc else None
        for number, compiler in enumerate(arguments.compiler):
            with tempfile.TemporaryDirectory() as work:
                check_host_compiler(report, tree, shlex.split(compiler), flags, arguments.jobs, pathlib.Path(work),
                                    alone=number + 1 == len(arguments.compiler))
        if arguments.compiler:
            self_test(report, shlex.split(arguments.compiler[0]), flags, arguments.jobs)
        if cuda:
            skipped, present, problem = cuda.result()
            for name in skipped:
                report.skip(f"header {name} as .cu [nvcc]", "needs NCCL")
            report.check(f"{len(present)} headers as .cu [nvcc]", problem)
    report.exit()


if __name__ == "__main__":
    main()
