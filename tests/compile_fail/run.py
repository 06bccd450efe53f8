#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that wrong code does not compile, and what its author reads then.

Each .cpp file here is a control: as it stands it must compile. It holds numbered defects,

    #ifndef EXPECT_FAIL_1  // expect: text that the diagnostic must show
    ... what must not be missing ...
    #endif

or `#ifdef EXPECT_FAIL_2` around what must not be there. A defect is switched on alone; then the file must not compile,
the diagnostic must contain the text (blanks compared loosely; several lines `// expect: ` may follow each other), and
be shorter than 60 lines.

What a file includes at its top is precompiled, once a compiler, for all its defects.
"""
import argparse
import pathlib
import re
import shlex
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from report import Report, default_jobs, in_parallel, run  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINE_LIMIT = 60
DEFECT = re.compile(r"^#ifn?def EXPECT_FAIL_(\d+)[ \t]*((?://[ \t]*expect:.*\n?[ \t]*)*)", re.MULTILINE)
EXPECT = re.compile(r"//[ \t]*expect:[ \t]*(.*)")


def loosely(text):
    return " ".join(text.split())


def defects_of(path):
    """[(number, [texts])], in the order of the file."""
    found = {}
    for number, comment in DEFECT.findall(path.read_text(encoding="utf-8")):
        found.setdefault(int(number), []).extend(text.strip() for text in EXPECT.findall(comment))
    return sorted(found.items())


def command_of(compiler):
    return [*compiler, "-std=c++20", f"-I{ROOT / 'include'}", "-fno-diagnostics-color"]


def precompiled(folder, number, compiler, path):
    """The flags with which a compiler reads the includes at the file's top precompiled; none where it cannot."""
    top = re.match(r"(?:[ \t]*(?://.*|#[ \t]*include[ \t]*<.*)?\n)*", path.read_text(encoding="utf-8")).group()
    if "#" not in top:
        return []
    header = folder / f"{path.stem}_{number}.hpp"
    header.write_text(top, encoding="utf-8")
    output = f"{header}.gch"  # clang also looks for this name
    status, _ = run([*command_of(compiler), "-x", "c++-header", str(header), "-o", output], timeout=300)
    return ["-include", str(header)] if status == 0 else []


def problem_of(compiler, flags, path, number, texts):
    command = [*command_of(compiler), "-fsyntax-only", *flags]
    if number:
        command.append(f"-DEXPECT_FAIL_{number}")
    status, output = run([*command, str(path)], timeout=300)
    lines = output.rstrip().splitlines()
    if not number:
        return "" if status == 0 else "the control does not compile\n" + "\n".join(lines[:30])
    if not texts:
        return "the defect has no text to expect"
    if status == 0:
        return "compiles, and should not"
    if status == 124:
        return "the compiler did not end"
    for text in texts:
        if loosely(text) not in loosely(output):
            return f"the diagnostic lacks: {text}\n" + "\n".join(lines[:30])
    if len(lines) >= LINE_LIMIT:
        return f"the diagnostic has {len(lines)} lines, {LINE_LIMIT} or more\n" + "\n".join(lines[:30])
    return ""


def check_files(report, compilers, paths, jobs):
    pairs = [(number, compiler, path) for path in paths for number, compiler in enumerate(compilers)]
    with tempfile.TemporaryDirectory() as folder:
        flags = in_parallel(jobs, lambda pair: precompiled(pathlib.Path(folder), *pair), pairs)
        todo = []
        for (_, compiler, path), with_flags in zip(pairs, flags):
            defects = defects_of(path)
            if not defects:
                report.check(f"{path.name}", "holds no EXPECT_FAIL_n")
            todo.append((compiler, with_flags, path, 0, []))
            todo.extend((compiler, with_flags, path, number, texts) for number, texts in defects)
        problems = in_parallel(jobs, lambda item: problem_of(*item), todo)
    for (compiler, _, path, number, texts), problem in zip(todo, problems):
        what = f"refused: {texts[0] if texts else number}" if number else "control"
        report.check(f"compile_fail {path.stem}, {what} [{pathlib.Path(compiler[-1]).name}]", problem)


def self_test(report, compiler, jobs):
    """Wrong expectations must be seen."""
    cases = {
        "compiles.cpp": "#ifdef EXPECT_FAIL_1  // expect: static\nint harmless;\n#endif\n",
        "other_text.cpp": "#ifdef EXPECT_FAIL_1  // expect: said nowhere\nstatic_assert(false, \"said here\");\n#endif\n",
        "no_text.cpp": "#ifdef EXPECT_FAIL_1\nstatic_assert(false, \"said here\");\n#endif\n",
        "no_defect.cpp": "int x;\n",
        "bad_control.cpp": "#ifdef EXPECT_FAIL_1  // expect: here\nstatic_assert(false, \"here\");\n#endif\nint x = y;\n",
        "long.cpp": "#ifdef EXPECT_FAIL_1  // expect: error\n" + "static_assert(false);\n" * 60 + "#endif\n",
        "right.cpp": "#ifdef EXPECT_FAIL_1  // expect: said here\nstatic_assert(false, \"said here\");\n#endif\n",
    }
    with tempfile.TemporaryDirectory() as folder:
        failed = set()

        class Recorder(Report):
            def check(self, name, problem):
                if problem:
                    failed.add(name.replace("compile_fail ", "").split(",")[0].removesuffix(".cpp") + ".cpp")

        for name, text in cases.items():
            (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")
        check_files(Recorder(), [compiler], [pathlib.Path(folder) / name for name in cases], jobs)
    wanted = set(cases) - {"right.cpp"}
    report.check("the compile_fail runner sees wrong expectations",
                 "" if failed == wanted else f"failed: {sorted(failed)}, wanted: {sorted(wanted)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", action="append", required=True, help="such as g++ or clang++-16")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: all here")
    arguments = parser.parse_args()
    report = Report()
    compilers = [shlex.split(compiler) for compiler in arguments.compiler]
    if not arguments.files:
        self_test(report, compilers[0], arguments.jobs)
    check_files(report, compilers, arguments.files or sorted(HERE.glob("*.cpp")), arguments.jobs)
    report.exit()


if __name__ == "__main__":
    main()
