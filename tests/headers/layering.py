#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each header may include, and how headers look.

- A folder includes only folders below it:
  adapters -> engine -> backends -> {http, rendezvous, fabrics} -> {wire, sources, sinks, nccl_api} -> gpu -> plan ->
  concepts -> core. Folders of one row do not include each other, nor backends their siblings. testing/ may include all
  but adapters/ and is included by nobody; detail/ and version.hpp may be included by all and include only detail/.
  The umbrellas include no opt-in part (http/, adapters/, fmt.hpp, testing/) and are included by nobody.
- core/, concepts/, plan/ and detail/ include the C++ standard library only (detail/ also the system's C headers).
  Other libraries have their places.
- Every header has `#pragma once`, then the SPDX line, at most 500 lines of at most 100 columns, and no absolute path.
- version.hpp names the version of meson.build; every test, fuzz target, example and benchmark is in a meson.build.
"""
import argparse
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from report import Report  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = [
    {"core"}, {"concepts"}, {"plan"}, {"gpu"}, {"wire", "sources", "sinks", "nccl_api"},
    {"http", "rendezvous", "fabrics"}, {"backends"}, {"engine"}, {"adapters"},
]
RANK = {folder: row for row, folders in enumerate(ROWS) for folder in folders}
UMBRELLAS = {"weightwire.hpp", "trainer.hpp", "worker.hpp", "customization.hpp"}
OPT_IN = {"http", "adapters", "testing", "fmt.hpp"}
PURE = {"core", "concepts", "plan"}
FORBIDDEN = {"iostream", "regex", "filesystem"}

# C++20's library headers, without those that no compiler of ours has.
STANDARD = set("""
algorithm any array atomic barrier bit bitset charconv chrono codecvt compare complex concepts condition_variable
coroutine deque exception execution forward_list fstream functional future initializer_list iomanip ios iosfwd
istream iterator latch limits list locale map memory memory_resource mutex new numbers numeric optional ostream queue
random ranges ratio scoped_allocator semaphore set shared_mutex source_location span sstream stack stdexcept
stop_token streambuf string string_view strstream syncstream system_error thread tuple type_traits typeindex typeinfo
unordered_map unordered_set utility valarray variant vector version
cassert cctype cerrno cfenv cfloat cinttypes climits clocale cmath csetjmp csignal cstdarg cstddef cstdint cstdio
cstdlib cstring ctime cuchar cwchar cwctype iostream regex filesystem
""".split())
# Library -> the folders and files that may include it; the first prefix that fits counts.
LIBRARIES = [
    ("nlohmann/", {"wire", "sources", "engine", "backends", "testing"}),
    ("curl/", {"http"}),
    ("boost/", {"http"}),
    ("openssl/", {"http"}),
    ("fmt/", {"fmt.hpp", "adapters"}),
    ("range/v3/", {"adapters"}),
    ("cuda", {"gpu", "nccl_api", "fabrics", "backends"}),
    ("nvrtc.h", {"gpu"}),
    ("nccl", {"nccl_api", "fabrics"}),
    ("ucp/", {"fabrics"}),
    ("ucs/", {"fabrics"}),
]
# The system's C headers: <fcntl.h>, <sys/mman.h>, ...; whoever talks to the system, and none of the pure folders.
SYSTEM = re.compile(r"^(sys|netinet|arpa|linux|net)/[\w.]+\.h$|^[a-z_]+\.h$")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
ABSOLUTE = re.compile(r'["\'`\s(]/(?:home|root|work|usr|opt|tmp|mnt|srv)/')
FIRST_LINES = "#pragma once\n// SPDX-License-Identifier: Apache-2.0\n"


def place(name):
    """`weightwire/core/shape.hpp` -> `core`; a header at the root is its own place."""
    return name.split("/")[1]


def own_include_problem(name, other):
    here, there = place(name), place(other)
    if there in ("detail", "version.hpp"):
        return ""
    if there in UMBRELLAS:
        return "" if here in UMBRELLAS else f"includes the umbrella {other}"
    if here in UMBRELLAS:
        return f"is an umbrella and includes the opt-in {other}" if there in OPT_IN else ""
    if here in ("detail", "version.hpp"):
        return f"includes {other}; {here} may include only detail/"
    if here == there:
        if here == "backends" and name.split("/")[2] != other.split("/")[2]:
            return f"includes {other}, of a sibling backend"
        return ""
    if here == "testing":
        return f"includes {other}; testing/ may not include adapters/" if there in ("adapters", "fmt.hpp") else ""
    if there == "testing":
        return f"includes {other}; only tests include testing/"
    above, below = ("adapters" if part == "fmt.hpp" else part for part in (here, there))
    for part in (above, below):
        if part not in RANK:
            return f"is in, or includes, the unknown folder {part}/"
    if above == below or RANK[below] < RANK[above]:
        return ""
    return f"includes {other}; {above}/ is not above {below}/"


def library_include_problem(name, other):
    here = place(name)
    if other in FORBIDDEN:
        return f"includes <{other}>, which no public header may"
    if other in STANDARD:
        return ""
    for prefix, places in LIBRARIES:
        if other.startswith(prefix):
            return "" if here in places else f"includes <{other}>, which belongs in {', '.join(sorted(places))}"
    if SYSTEM.match(other) and here not in PURE:
        return ""
    return f"includes <{other}>; {here} may not"


def problems_of(include, name):
    text = (include / name).read_text(encoding="utf-8")
    lines = text.split("\n")
    if not text.startswith(FIRST_LINES):
        yield "begins not with #pragma once and the SPDX line"
    if len(lines) - 1 > 500:
        yield f"has {len(lines) - 1} lines, more than 500"
    if not text.endswith("\n"):
        yield "ends without a newline"
    for number, line in enumerate(lines, 1):
        if len(line) > 100:
            yield f"line {number} has {len(line)} columns, more than 100"
        if "\t" in line or line != line.rstrip():
            yield f"line {number} has a tab, or blanks at its end"
        if ABSOLUTE.search(line):
            yield f"line {number} has an absolute path"
    for bracket, other in INCLUDE.findall(text):
        if bracket == '"':
            yield f'includes "{other}"; use <weightwire/...>'
        elif other.startswith("weightwire/"):
            problem = own_include_problem(name, other)
            if not (include / other).is_file():
                problem = f"includes {other}, which does not exist"
            if problem:
                yield problem
        else:
            problem = library_include_problem(name, other)
            if problem:
                yield problem


def version_problem(root):
    meson = re.search(r"^  version: '([^']+)'", (root / "meson.build").read_text(encoding="utf-8"), re.MULTILINE)
    header = (root / "include/weightwire/version.hpp").read_text(encoding="utf-8")
    text = re.search(r'version_string\[\] = "([^"]+)"', header)
    numbers = [re.search(rf"WEIGHTWIRE_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    if not meson or not text or not all(numbers):
        return "a version is not written as expected"
    found = {meson.group(1), text.group(1), ".".join(number.group(1) for number in numbers)}
    return "" if len(found) == 1 else f"they differ: {sorted(found)}"


def unlisted(root):
    """Programs that no meson.build names, so that nobody would notice that they are never built."""
    suites = ("static", "unit", "protocol", "integration", "fault", "gpu")
    for folder, pattern, meson, listed_as in [
        *((f"tests/{suite}", "*.cpp", "tests", f"{suite}/{{stem}}.cpp") for suite in suites),
        ("tests/fuzz", "*_fuzz.cpp", "tests", "{stem}"),
        ("examples", "*.cpp", "examples", "{stem}"),
        ("benchmarks", "*.cpp", "benchmarks", "{stem}"),
    ]:
        text = (root / meson / "meson.build").read_text(encoding="utf-8")
        for path in sorted((root / folder).glob(pattern)):
            if f"'{listed_as.format(stem=path.stem.removesuffix('_fuzz'))}'" not in text:
                yield path.relative_to(root).as_posix()


def check_tree(report, include):
    names = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.hpp"))
    for name in names:
        report.check(f"layering {name}", "; ".join(problems_of(include, name)))
    others = sorted(path.relative_to(include).as_posix() for path in include.rglob("*")
                    if path.is_file() and path.suffix != ".hpp")
    report.check("only .hpp files are public", ", ".join(others))


def self_test(report):
    """Every rule must refuse a header that breaks it, and allow one that does not."""
    def head(*includes):
        return FIRST_LINES + "\n" + "".join(f"#include <{include}>\n" for include in includes)

    wrong = {
        "core/up.hpp": head("weightwire/plan/a.hpp"),
        "core/json.hpp": head("nlohmann/json.hpp"),
        "core/posix.hpp": head("unistd.h"),
        "plan/socket.hpp": head("sys/socket.h"),
        "wire/sideways.hpp": head("weightwire/sources/a.hpp"),
        "wire/curl.hpp": head("curl/curl.h"),
        "sinks/json.hpp": head("nlohmann/json.hpp"),
        "http/up.hpp": head("weightwire/engine/a.hpp"),
        "backends/x/sibling.hpp": head("weightwire/backends/y/a.hpp"),
        "engine/tests.hpp": head("weightwire/testing/a.hpp"),
        "engine/adapted.hpp": head("weightwire/adapters/a.hpp"),
        "engine/all.hpp": head("weightwire/trainer.hpp"),
        "engine/formatted.hpp": head("fmt/format.h"),
        "testing/adapted.hpp": head("weightwire/adapters/a.hpp"),
        "trainer.hpp": head("weightwire/http/a.hpp"),
        "detail/up.hpp": head("weightwire/core/a.hpp"),
        "nowhere/a.hpp": head("weightwire/core/a.hpp"),
        "core/streams.hpp": head("iostream"),
        "core/quoted.hpp": FIRST_LINES + '#include "a.hpp"\n',
        "core/gone.hpp": head("weightwire/core/gone_too.hpp"),
        "core/guarded.hpp": "#ifndef GUARD\n#define GUARD\n#endif\n",
        "core/unlicensed.hpp": "#pragma once\n",
        "core/long.hpp": head() + "//\n" * 500,
        "core/wide.hpp": head() + "//" + "x" * 99 + "\n",
        "core/path.hpp": head() + '// see "/home/me/x"\n',
    }
    right = {
        "core/a.hpp": head("vector"), "plan/a.hpp": head("weightwire/core/a.hpp"),
        "concepts/a.hpp": head("weightwire/core/a.hpp"), "sources/a.hpp": head("nlohmann/json.hpp", "sys/mman.h"),
        "http/a.hpp": head("curl/curl.h", "boost/beast.hpp", "weightwire/wire/a.hpp"), "wire/a.hpp": head(),
        "backends/y/a.hpp": head("weightwire/fabrics/a.hpp"), "fabrics/a.hpp": head("unistd.h"),
        "engine/a.hpp": head("weightwire/backends/y/a.hpp"), "testing/a.hpp": head("weightwire/engine/a.hpp"),
        "adapters/a.hpp": head("range/v3/view.hpp", "weightwire/engine/a.hpp"), "fmt.hpp": head("fmt/format.h"),
        "worker.hpp": head("weightwire/engine/a.hpp"), "detail/a.hpp": head("vector", "unistd.h"),
    }
    with tempfile.TemporaryDirectory() as folder:
        include = pathlib.Path(folder)
        for name, text in {**right, **wrong}.items():
            path = include / "weightwire" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        missed = [name for name in wrong if not list(problems_of(include, "weightwire/" + name))]
        refused = [name for name in right if list(problems_of(include, "weightwire/" + name))]
        for name, listed in {"tests/unit/a.cpp": "'unit/b.cpp'", "examples/a.cpp": "'a'", "benchmarks/a.cpp": ""}.items():
            (include / name).parent.mkdir(parents=True, exist_ok=True)
            (include / name).touch()
            (include / name.split("/")[0] / "meson.build").write_text(listed, encoding="utf-8")
        forgotten = list(unlisted(include))
    report.check("the layering test finds programs that are not built",
                 "" if forgotten == ["tests/unit/a.cpp", "benchmarks/a.cpp"] else f"{forgotten}")
    report.check("the layering test refuses planted defects", f"not {missed}" if missed else "")
    report.check("the layering test allows a right tree", f"not {refused}" if refused else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    root = parser.parse_args().root.resolve()
    report = Report()
    self_test(report)
    check_tree(report, root / "include")
    report.check("every program is in a meson.build", ", ".join(unlisted(root)))
    report.check("version.hpp equals meson.build", version_problem(root))
    report.exit()


if __name__ == "__main__":
    main()
