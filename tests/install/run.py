#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds and runs two consumer projects outside this tree.

vendored/ has weightwire as a Meson subproject, a copy of the tracked and untracked files here; installed/ finds it by
pkg-config in an installation under a fresh prefix.
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "support"))
from report import Report, run  # noqa: E402

WHAT_A_USER_GETS = ["include", "subprojects", "scripts", "tests", "examples", "benchmarks", "meson.build",
                    "meson_options.txt", "LICENSE"]


def steps(report, name, folder, commands, environment=None):
    """Runs one command after the other; the first that fails is the finding."""
    for command in commands:
        status, output = run([str(part) for part in command], timeout=300, cwd=folder,
                             env={**os.environ, **(environment or {})})
        if status != 0:
            report.check(name, f"{' '.join(str(part) for part in command[:3])} failed\n"
                         + "\n".join(output.rstrip().splitlines()[-40:]))
            return False
    report.check(name, "")
    return True


def build_and_run(folder):
    """The commands after `meson setup`; the test prints its line, a missing one would be an empty test list."""
    return [["ninja", "-C", folder], [folder / "round"]]


def check_vendored(report, folder):
    project = folder / "vendored"
    shutil.copytree(HERE / "vendored", project)
    vendored = project / "subprojects" / "weightwire"
    vendored.mkdir(parents=True)
    for name in WHAT_A_USER_GETS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, vendored / name, ignore=shutil.ignore_patterns("weightwire-*", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, vendored / name)
    build = folder / "build-vendored"
    good = steps(report, "a project that vendors weightwire sends weights through its own backend", folder,
                 [["meson", "setup", "--wrap-mode=nodownload", "--force-fallback-for=weightwire", build, project],
                  *build_and_run(build)])
    if good:
        status, output = run(["meson", "introspect", "--targets", str(build)])
        names = {target["name"] for target in json.loads(output)} if status == 0 else set()
        report.check("a subproject builds no tests and no examples", "" if names == {"round"} else f"{sorted(names)}")


def check_installed(report, folder):
    prefix, build = folder / "prefix", folder / "build-weightwire"
    installed = steps(report, "installation", folder, [
        ["meson", "setup", "--wrap-mode=nodownload", "--prefix", prefix, "-Dtests=disabled", "-Dexamples=disabled",
         "-Dbenchmarks=disabled", build, ROOT],
        ["meson", "install", "-C", build]])
    if not installed:
        return
    packages = prefix / "share" / "pkgconfig"
    found = sorted(path.name for path in packages.glob("*.pc"))
    report.check("pkg-config files are where no architecture matters",
                 "" if "weightwire.pc" in found else f"found {found}")
    if "weightwire-http.pc" in found:
        status, output = run(["pkg-config", "--cflags", "--libs", "weightwire-http"],
                             env={**os.environ, "PKG_CONFIG_PATH": str(packages)})
        report.check("weightwire-http adds libcurl", "" if status == 0 and "-lcurl" in output else output)
    headers = {path.relative_to(ROOT / "include") for path in (ROOT / "include").rglob("*.hpp")}
    copies = {path.relative_to(prefix / "include") for path in (prefix / "include").rglob("*.hpp")}
    report.check("every public header is installed", "" if headers == copies else f"{sorted(headers ^ copies)}")
    project, consumer = folder / "installed", folder / "build-installed"
    shutil.copytree(HERE / "installed", project)
    steps(report, "a project that uses the installed weightwire sends weights through its own backend", folder,
          [["meson", "setup", "--wrap-mode=nodownload", consumer, project], *build_and_run(consumer)],
          {"PKG_CONFIG_PATH": f"{packages}:{os.environ.get('PKG_CONFIG_PATH', '')}"})


def main():
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        check_vendored(report, pathlib.Path(folder))
        check_installed(report, pathlib.Path(folder))
    report.exit()


if __name__ == "__main__":
    main()
