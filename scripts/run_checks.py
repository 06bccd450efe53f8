#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds and tests everything that this machine can; scripts/test installs what is missing and calls this.

Counted are doctest's test cases and the PASS, FAIL and SKIP lines of the checking scripts. Every command has a time
limit, so this always ends. Build folders are kept in build-test/ and used again.

Tests mostly wait. So while those of one build run, one build's after the other, this compiles what comes next at a low
priority, and what the network brings comes from the beginning. What is printed says to which build it belongs.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILDS = ROOT / "build-test"
SUMMARY = re.compile(r"\[doctest\] test cases:\s*(\d+)\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed")
LINE = re.compile(r"^(PASS|FAIL|SKIP) (.+)$")
FUZZ_SECONDS = 10
PARTS = {"unit_threads": 4, "fault": 4}  # suites that run in so many processes
PROGRAMS = ["-Dexamples=enabled", "-Dbenchmarks=enabled"]
NO_PROGRAMS = ["-Dexamples=disabled", "-Dbenchmarks=disabled"]
# Suites that the thread sanitizer sees. Not those of killed and stopped processes: they repeat the same threads in
# eight processes, which takes minutes.
THREADED = ("unit_threads", "integration")
# Suites that g++ builds where clang builds all with its sanitizers; alone it builds all. It takes twice clang's time.
WITH_BOTH = ("unit", "protocol", "integration")


def say(text):
    """Prints whole, also from several threads."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Totals:
    """What was counted so far; several threads may count."""

    def __init__(self):
        self.lock = threading.Lock()
        self.passed = 0
        self.failures = []
        self.skips = []

    def passing(self, count=1):
        with self.lock:
            self.passed += count

    def failing(self, name, why=""):
        with self.lock:
            self.failures.append(name)
            say(f"FAIL {name}" + (f": {why}" if why else ""))

    def skipping(self, name, why):
        with self.lock:
            self.skips.append(f"{name}: {why}")
            say(f"SKIP {name}: {why}")


totals = Totals()
began = time.monotonic()


def heading(text):
    say(f"== {text} ({time.monotonic() - began:.0f} s)")


# With a session of its own a command may be in a scheduling group of its own, where nice alone says nothing.
AT_LOW_PRIORITY = ["sh", "-c", '{ echo 10 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 10 "$@"', "sh"]


def run(command, timeout, environment=None, cwd=ROOT, yielding=False):
    """Exit status and output. The command has a session of its own, so that its children end with it. What is
    `yielding` leaves the processors to tests that run meanwhile."""
    command = [*(AT_LOW_PRIORITY if yielding else []), *command]
    process = subprocess.Popen([str(part) for part in command], cwd=cwd, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True, env={**os.environ, **(environment or {})})
    try:
        output, _ = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status, output = 124, output + f"\nno end after {timeout} s\n"
    return status, output


def at_once(function, items):
    """function(item) for all items, as many at a time as there are processors and two more: most tests wait."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)) + 2) as pool:
        list(pool.map(function, items))


def tail(text, lines=60):
    return "\n".join(text.rstrip().splitlines()[-lines:])


def check_script(name, command, timeout, yielding=False):
    """A script that prints PASS, FAIL and SKIP lines."""
    heading(name)
    status, output = run(command, timeout, yielding=yielding)
    passed = failed = skipped = 0
    for line in output.splitlines():
        found = LINE.match(line)
        if not found:
            say("     " + line)
        elif found.group(1) == "PASS":
            passed += 1
        elif found.group(1) == "SKIP":
            what, _, why = found.group(2).partition(": ")
            totals.skipping(what, why)
            skipped += 1
        else:
            failed += 1
            totals.failing(found.group(2).partition(": ")[0], found.group(2).partition(": ")[2])
    totals.passing(passed)
    if (status != 0 and not failed) or (status == 0 and not passed and not skipped):
        say(tail(output))
        totals.failing(name, f"exit status {status}, {passed} checks")
    say(f"   {name}: {passed} passed, {failed} failed")


def configure(build, environment, options):
    """Sets the build folder up, again where it is there; files that miss a library are skips, by name."""
    command = ["meson", "setup", build, ROOT, "--wrap-mode=nodownload", "--werror", "-Ddebug=false", "-Dunity=on",
               *options]
    again = ["--reconfigure"] if (build / "build.ninja").exists() else []
    status, output = run([*command, *again], 300, environment)
    if status != 0 and again:
        shutil.rmtree(build)
        status, output = run(command, 300, environment)
    if status != 0:
        say(tail(output))
    for name, needs in re.findall(r"^Message: skipped: (.+?) needs (.+)$", output, re.MULTILINE):
        totals.skipping(f"{name} [{build.name}]", f"needs {needs}")
    return status == 0


def introspect(build, what):
    status, output = run(["meson", "introspect", f"--{what}", build], 60)
    return json.loads(output) if status == 0 else []


def build_all(name, build, jobs, targets=(), timeout=1500):
    """Compiles; what can be compiled is, so that one broken file does not hide the rest."""
    status, output = run(["ninja", "-C", build, "-k", "0", "-j", str(jobs), *targets], timeout, yielding=True)
    if status == 0:
        totals.passing()
        return True
    errors = [line for line in output.splitlines() if re.search(r"error|warning|FAILED|undefined reference", line)]
    say("\n".join((errors or output.splitlines())[:80]))
    totals.failing(f"build [{name}]", "see above")
    return False


def remarks_in(output):
    """Names of the test cases with an error; and {name: why} of those that say MESSAGE("skipped: why"), or print
    `SKIP name: why`, and return, which doctest counts as passed."""
    failed, skipped, test_case = {}, {}, ""
    for line in output.splitlines():
        named, why = re.match(r"TEST CASE:\s*(.+)$", line), re.search(r": MESSAGE: skipped: (.+)$", line)
        printed = re.match(r"SKIP (.+?): (.+)$", line)
        if named:
            test_case = named.group(1)
        elif printed:
            skipped[printed.group(1)] = printed.group(2)
        elif why:
            skipped[test_case] = why.group(1)
        elif re.search(r": (FATAL )?ERROR: ", line):
            failed[test_case] = True
    return list(failed), skipped


def parts_of(executables, environment=None, launcher=()):
    """(executable, arguments) of what may run side by side: long suites in several parts."""
    for executable in executables:
        parts = PARTS.get(executable.name, 1)
        counted = re.search(r"filters: (\d+)", run([*launcher, executable, "--count"], 60, environment)[1]) \
            if parts > 1 and executable.exists() else None
        if not counted:
            yield executable, None
            continue
        bounds = [int(counted.group(1)) * part // parts for part in range(parts + 1)]
        for first, last in zip(bounds, bounds[1:]):
            yield executable, range(first + 1, last + 1)


def run_suite(label, executable, timeout, environment=None, launcher=(), part=None):
    """One doctest executable, or the test cases of a range; they are counted."""
    name = f"{executable.name} [{label}]"
    if not executable.exists():
        totals.failing(name, "was not built")
        return
    start = time.monotonic()
    arguments = [f"--first={part[0]}", f"--last={part[-1]}"] if part else []
    with tempfile.TemporaryDirectory() as folder:  # tests run from any directory
        status, output = run([*launcher, executable, *arguments], timeout, environment, folder)
    summaries = SUMMARY.findall(output)
    named, skipped = remarks_in(output)
    for test_case, why in skipped.items():
        totals.skipping(f"{test_case} [{label}]", why)
    if not summaries:
        say(tail(output))
        totals.failing(name, f"ended with status {status} before its summary")
        return
    total, passed, failed = (int(number) for number in summaries[-1])
    if part:  # doctest's sum takes all for passed that are not in the range
        total, passed = len(part), len(part) - failed
    totals.passing(passed - len(skipped))
    for number in range(failed):
        totals.failing(f"{name}: {named[number] if number < len(named) else 'another test case'}", "see below")
    if status != 0 and not failed:
        totals.failing(name, f"exit status {status} though no test case failed")
    if total == 0:
        totals.failing(name, "it ran no test case")
    if status != 0:
        say(tail(output, 150))
    say(f"   {name}: {passed} of {total} test cases passed in {time.monotonic() - start:.1f} s")


def suites_of(build, gpu=False):
    paths = [pathlib.Path(test["cmd"][0]) for test in introspect(build, "tests")]
    return [path for path in paths if path.name.startswith("gpu") == gpu]


def chosen_suites(build, suites):
    return [path for path in suites_of(build) if suites is None or path.name in suites]


def targets_of(build, suites):
    """What ninja must make for some suites: their executables and the programs that their tests start."""
    files = {target["id"]: target["filename"] for target in introspect(build, "targets")}
    wanted = []
    for test in introspect(build, "tests"):
        if pathlib.Path(test["cmd"][0]).name in suites:
            wanted += [test["cmd"][0], *(name for needed in test["depends"] for name in files.get(needed, []))]
    return sorted({str(pathlib.Path(name).relative_to(build)) for name in wanted})


def count_static(label, build):
    """The static suite is its compilation: one check a file."""
    for target in introspect(build, "targets"):
        if target["name"] == "static":
            sources = [file for group in target["target_sources"] for file in group.get("sources", [])]
            built = all(pathlib.Path(name).exists() for name in target["filename"])
            if built:
                totals.passing(len(sources))
            else:
                totals.failing(f"static [{label}]", "was not built")
            say(f"   static [{label}]: {len(sources) if built else 0} of {len(sources)} files hold")


def without_collections(jobs):
    """An argument of g++ that spares it an eighth of its time: it collects no garbage before it has 2 GB. So it takes
    up to a third more memory, which must be there."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "--param=ggc-min-heapsize=1000000" if memory >= jobs * 4_000_000_000 else ""


def with_gcc(jobs, programs, tests, suites=None):
    """Builds; `tests` is called with what runs the suites, all or those named."""
    heading("g++: build")
    build = BUILDS / "gcc"
    environment = {"CC": "gcc", "CXX": "ccache g++" if shutil.which("ccache") else "g++"}
    # Not optimized: that takes two thirds of the time to compile.
    if not configure(build, environment, ["-Doptimization=0", f"-Dcpp_args={without_collections(jobs)}",
                                          "-Dtests=enabled", "-Dfuzz=disabled", *programs]):
        totals.failing("configuration [g++]")
        return
    executables = chosen_suites(build, suites)
    build_all("g++", build, jobs, [] if suites is None else [*targets_of(build, suites), "tests/libstatic.a"])

    def run_suites():
        heading("g++: tests")
        count_static("g++", build)
        at_once(lambda part: run_suite("g++", part[0], 400, part=part[1]), parts_of(executables))

    tests(run_suites)


def programs_with_clang(clang, jobs, programs):
    """Examples, benchmarks, the tests' own programs, what needs a GPU and the static suite: they are built without a
    sanitizer, and of clang, which takes half of the time of g++."""
    heading("clang: examples and benchmarks")
    build = BUILDS / "programs"
    environment = {"CC": "clang", "CXX": f"ccache {clang}" if shutil.which("ccache") else clang}
    if configure(build, environment, ["-Doptimization=0", "-Dtests=enabled", "-Dfuzz=disabled", *programs]):
        targets = introspect(build, "targets")
        wanted = [str(pathlib.Path(name).relative_to(build)) for target in targets for name in target["filename"]]
        wanted = [name for name in wanted
                  if re.match(r"examples/|benchmarks/|tests/(gpu|test_store|.*libstatic)", name)]
        wanted += [target["name"] for target in targets if target["name"] == "test_programs"]
        build_all("examples and benchmarks", build, jobs, wanted)
        count_static("clang", build)
    else:
        totals.failing("configuration [examples and benchmarks]")


def sanitizer_launcher(clang, sanitizer, folder):
    """How to start a program with this sanitizer: some kernels lay out memory so that it needs `setarch -R`."""
    source = folder / "probe.cpp"
    source.write_text("int main() {}\n")
    probe = folder / f"probe_{sanitizer.replace(',', '_')}"
    status, output = run([clang, f"-fsanitize={sanitizer}", source, "-o", probe], 60)
    if status != 0:
        return None, "the compiler has no runtime for it: " + tail(output, 1)
    for launcher in ([], ["setarch", "-R"]):
        if (not launcher or shutil.which(launcher[0])) and all(run([*launcher, probe], 30)[0] == 0 for _ in range(3)):
            return launcher, ""
    return None, "an empty program with it does not run here"


def configured_with(clang, label, sanitizer, fuzz=False):
    """(build folder, how to start its programs) of a build with `sanitizer`; None where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        launcher, why = sanitizer_launcher(clang, sanitizer, pathlib.Path(folder))
    if launcher is None:
        totals.skipping(f"everything with {label}", why)
        return None
    build = BUILDS / label.lower().replace("+", "-")
    environment = {"CC": "clang", "CXX": f"ccache {clang}" if shutil.which("ccache") else clang}
    # Not optimized: with sanitizers that takes a third of the time to compile, and most tests wait, not compute. No
    # line tables: they take a quarter; reports name functions, and -Dcpp_args=-g1 by hand adds the lines.
    options = [f"-Db_sanitize={sanitizer}", "-Db_lundef=false", "-Doptimization=0", "-Dcpp_args=", "-Dtests=enabled",
               *NO_PROGRAMS, "-Dfuzz=auto" if fuzz else "-Dfuzz=disabled"]
    if not configure(build, environment, options):
        totals.failing(f"configuration [{label}]")
        return None
    return build, launcher


def with_clang(label, build, launcher, jobs, tests, suites=None, fuzz=False):
    """Builds; `tests` is called with what runs the suites, all or those named, and with `fuzz` the fuzz targets."""
    heading(f"clang with {label}: build")
    executables = chosen_suites(build, suites)
    build_all(label, build, jobs, [] if suites is None else targets_of(build, suites))
    environment = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0",
    }

    def run_suites():
        heading(f"clang with {label}: tests")
        at_once(lambda part: run_suite(label, part[0], 600, environment, launcher, part[1]),
                parts_of(executables, environment, launcher))
        if fuzz:
            run_fuzz_targets(build, launcher, environment)

    tests(run_suites)


def with_sanitizers(clang, jobs, tests):
    """Returns whether every suite was built by clang."""
    threads = configured_with(clang, "TSan", "thread")
    addresses = configured_with(clang, "ASan+UBSan", "address,undefined", fuzz=True)
    # Of a build all waits for its precompiled header. So both are made at once; what fails of the second, its build
    # tells.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        made = beside.submit(run, ["ninja", "-C", addresses[0], "-j", "1", "tests/joined.pch", "tests/joined.o"], 900,
                             yielding=True) if addresses else None
        if threads:  # whose tests take longest
            with_clang("TSan", *threads, jobs, tests, suites=THREADED)
        if made:
            made.result()
    if addresses:
        with_clang("ASan+UBSan", *addresses, jobs, tests, fuzz=True)
    return bool(addresses)


def run_fuzz_targets(build, launcher, environment):
    heading(f"fuzz targets, {FUZZ_SECONDS} s each")
    targets = sorted((build / "tests").glob("*_fuzz"))
    if not targets:
        totals.skipping("fuzz targets", "this clang has no libFuzzer")

    def fuzz(target):
        name = target.name.removesuffix("_fuzz")
        with tempfile.TemporaryDirectory() as folder:
            corpus = pathlib.Path(folder) / "corpus"
            kept = ROOT / "tests" / "fuzz" / "corpus" / name
            shutil.copytree(kept, corpus) if kept.is_dir() else corpus.mkdir()
            status, output = run([*launcher, target, f"-max_total_time={FUZZ_SECONDS}", "-timeout=10",
                                  "-rss_limit_mb=2048", "-print_final_stats=1", corpus],
                                 FUZZ_SECONDS + 60, environment, folder)
        runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", output)
        if status != 0 or not runs or int(runs.group(1)) == 0:
            say(tail(output))
            totals.failing(f"fuzz {name}", f"exit status {status}")
        else:
            totals.passing()
            say(f"   fuzz {name}: {runs.group(1)} inputs, none failed")

    at_once(fuzz, targets)


def version_of(compiler):
    status, output = run([compiler, "-dumpversion"], 30)
    found = re.match(r"(\d+)", output)
    return int(found.group(1)) if status == 0 and found else 0


def find_nvcc():
    """nvcc, where it knows C++20 and our CUDA version; else why not."""
    nvcc = shutil.which("nvcc") or next(iter(sorted(map(str, pathlib.Path("/").glob("usr/local/cuda*/bin/nvcc")))), "")
    if not nvcc:
        return None, "there is no nvcc"
    found = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"], 30)[1])
    if not found or (int(found.group(1)), int(found.group(2))) < (12, 8):
        return None, "nvcc is older than CUDA 12.8"
    return nvcc, ""


def python_with(name, packages, modules):
    """An interpreter that has these packages, in an environment of its own; else this one."""
    environment = BUILDS / name
    interpreter = environment / "bin" / "python"
    needs = [interpreter, "-c", f"import {', '.join(modules)}"]
    if interpreter.exists() and run(needs, 60)[0] == 0:
        return interpreter
    commands = [[sys.executable, "-m", "venv", "--clear", environment],
                [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
                needs]
    return interpreter if all(run(command, 600, yielding=True)[0] == 0 for command in commands) else sys.executable


def python_with_safetensors():
    return python_with("python", ["safetensors", "numpy"], ["safetensors", "numpy"])


def python_with_torch():
    return python_with("python-torch", ["torch==2.13.0", "numpy", "fastapi", "uvicorn", "requests"],
                       ["torch", "fastapi", "uvicorn", "requests"])


def nvidia_wheels():
    """NCCL and NVRTC from NVIDIA's wheels, and the CUDA runtime where there is no toolkit: an environment that builds
    and programs find. What cannot be had makes skips by name."""
    wheels = ["nvidia-nccl-cu13==2.28.9", "nvidia-cuda-nvrtc==13.0.88"]
    if not any(pathlib.Path("/usr/local").glob("cuda*/include/cuda_runtime_api.h")):
        wheels += ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"]
    environment = BUILDS / "python-nvidia"
    if python_with(environment.name, wheels, ["nvidia.nccl", "nvidia.cu13"]) == sys.executable:
        totals.skipping("NVIDIA's wheels", "they cannot be installed here")
        return
    os.environ["VIRTUAL_ENV"] = str(environment)


def interop(safetensors, torch, programs):
    """Our programs against the originals of torch, vLLM and safetensors; the arguments are futures of interpreters that
    have them, and the build of what vLLM meets."""
    check_script("interop with safetensors", [safetensors.result(), "tests/interop/safetensors_interop.py"], 300)
    python = torch.result()
    check_script("interop with torch", [python, "tests/interop/tcp_store_interop.py", "--program",
                                        programs / "tests" / "test_store"], 300)
    check_script("interop with vLLM", [python, "tests/interop/vllm_interop.py", "--programs", programs / "tests",
                                       "--cache", BUILDS / "vllm"], 600)
    check_script("interop with vLLM over ipc", [python, "tests/interop/vllm_ipc_interop.py", "--programs",
                                                programs / "tests", "--cache", BUILDS / "vllm"], 600)
    check_script("interop of recording tensors", [python, "tests/interop/recording_interop.py"], 300)
    check_script("interop of IPC pickles", [python, "tests/interop/ipc_pickle_interop.py"], 300)


def reference_pages():
    """Doxygen over the headers and documents: a warning is a failure."""
    heading("reference pages")
    if not shutil.which("doxygen"):
        totals.skipping("reference pages", "there is no doxygen")
        return
    pages = BUILDS / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    settings = pages / "Doxyfile"
    settings.write_text((ROOT / "docs" / "Doxyfile").read_text() + f'\nOUTPUT_DIRECTORY = "{pages}"\n')
    status, output = run(["doxygen", settings], 300, yielding=True)
    if status == 0 and (pages / "html" / "index.html").exists():
        totals.passing()
        return
    warnings = len(re.findall(r": (?:warning|error): ", output))
    say(tail(output, 150))
    totals.failing("reference pages", f"doxygen ended with {status} and {warnings} warnings")


def gpu_tests():
    heading("tests that need a GPU")
    status, output = run(["nvidia-smi", "-L"], 30) if shutil.which("nvidia-smi") else (1, "")
    if status != 0 or "GPU" not in output:
        totals.skipping("GPU tests", "this machine shows no NVIDIA GPU")
        return
    sources = sorted((ROOT / "tests" / "gpu").glob("*.cpp"))
    if not sources:
        totals.skipping("GPU tests", "this version has none")
        return
    build = BUILDS / "gpu"
    if not configure(build, {"CXX": "g++"}, ["-Doptimization=2", "-Dgpu=enabled", "-Dtests=enabled",
                                             "-Dexamples=disabled", "-Dbenchmarks=disabled"]):
        totals.failing("configuration [gpu]")
        return
    gpu_suites = suites_of(build, gpu=True)
    build_all("gpu", build, len(os.sched_getaffinity(0)), targets_of(build, [path.name for path in gpu_suites]))
    for executable in gpu_suites:  # one at a time: they share the device's memory
        run_suite("gpu", executable, 600)


def all_tests(arguments):
    # One thread runs tests, so that those of two builds do not meet; the other two fetch. This one compiles.
    with concurrent.futures.ThreadPoolExecutor(1) as tester, concurrent.futures.ThreadPoolExecutor(2) as fetcher:
        begun = []
        compile_and_check(arguments, lambda *call: begun.append(tester.submit(*call)), fetcher)
        for each in begun:
            each.result()  # what one raised


def compile_and_check(arguments, tests, fetcher):
    """All of it; what runs for long and mostly waits is given to `tests`."""
    python = [sys.executable]
    # Without these ccache keeps nothing that uses a precompiled header; ninja knows what each is made of.
    os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros,include_file_mtime,include_file_ctime")
    jobs = arguments.jobs
    check_script("layering", [*python, "tests/headers/layering.py"], 60)
    nvidia_wheels()
    clang = arguments.clang or shutil.which("clang++")
    if clang and version_of(clang) < 16:
        clang = None
    sanitizers = clang and not arguments.quick
    have_gcc = shutil.which("g++") and version_of("g++") >= 12
    if have_gcc:
        interpreters = [fetcher.submit(python_with_safetensors), fetcher.submit(python_with_torch)]
    else:
        totals.failing("g++", "there is no g++ of 12 or newer")
    compilers = (["g++"] if have_gcc else []) + ([clang] if sanitizers else [])
    each = [part for compiler in compilers for part in ("--compiler", compiler)]
    seen = False  # all suites, by clang
    if arguments.quick:
        totals.skipping("clang and its sanitizers, fuzz targets, install tests", "--quick")
    elif not clang:
        totals.skipping("clang and its sanitizers, fuzz targets", "there is no clang of 16 or newer")
    else:
        seen = with_sanitizers(clang, jobs, tests)
    if have_gcc:
        with_gcc(jobs, NO_PROGRAMS if sanitizers else PROGRAMS, tests, suites=WITH_BOTH if seen else None)
    if sanitizers:
        programs_with_clang(clang, jobs, PROGRAMS)
    if have_gcc:
        tests(interop, *interpreters, BUILDS / ("programs" if sanitizers else "gcc"))
    nvcc, why = find_nvcc()
    if not nvcc:
        totals.skipping("headers as .cu", why)
    cached = [f"ccache {part}" if shutil.which("ccache") and part in compilers else part for part in each]
    check_script("headers", [*python, "tests/headers/check_headers.py", *cached, "--jobs", jobs,
                             *(["--nvcc", nvcc] if nvcc else [])], 1200, yielding=True)
    check_script("compile_fail", [*python, "tests/compile_fail/run.py", *each, "--jobs", jobs], 900, yielding=True)
    reference_pages()
    check_script("code in the documents", [*python, "scripts/check_snippets.py", *each[-2:], "--jobs", jobs], 600,
                 yielding=True)
    if not arguments.quick:
        check_script("install and subproject", [*python, "tests/install/run.py"], 900, yielding=True)


def main():
    parser = argparse.ArgumentParser(prog="scripts/test", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="g++ only, without sanitizers, fuzz and install tests")
    parser.add_argument("--gpu", action="store_true", help="the tests that need a GPU, and only these")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clang", help="a clang++ of 16 or newer")
    arguments = parser.parse_args()
    if arguments.gpu:
        gpu_tests()
    else:
        all_tests(arguments)
    heading("done")
    for skip in totals.skips:
        print(f"skipped: {skip}")
    for failure in totals.failures:
        print(f"failed: {failure}")
    print(f"{totals.passed} passed, {len(totals.failures)} failed, {len(totals.skips)} skipped", flush=True)
    if totals.failures:
        sys.exit(1)
    if totals.passed == 0:
        sys.exit(77 if arguments.gpu else 1)


if __name__ == "__main__":
    main()
