# SPDX-License-Identifier: Apache-2.0
"""What every checking script prints: one line a check, `PASS name`, `FAIL name: why` or `SKIP name: why`.

scripts/test counts these lines; a script exits with 1 when a check failed, or when there was none.
"""
import concurrent.futures
import os
import subprocess
import sys


class Report:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, name, problem):
        """`problem` is empty where the check holds; else it says what is wrong, perhaps in many lines."""
        if problem:
            self.failed += 1
            print(f"FAIL {name}: {problem}", flush=True)
        else:
            self.passed += 1
            print(f"PASS {name}", flush=True)

    def skip(self, name, why):
        self.skipped += 1
        print(f"SKIP {name}: {why}", flush=True)

    def exit(self):
        sys.exit(1 if self.failed or not self.passed else 0)


def run(command, timeout=300, **options):
    """Exit status and both outputs as one text; a command that takes too long has status 124."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=timeout, text=True, errors="replace", check=False, **options)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return 124, f"{late.stdout or ''}\nno end after {timeout} s"


def in_parallel(jobs, function, items):
    """function(item) for every item, at most `jobs` at a time; results in the items' order."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return list(pool.map(function, items))


def default_jobs():
    return len(os.sched_getaffinity(0))
