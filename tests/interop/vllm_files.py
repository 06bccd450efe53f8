#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Python files, of the releases that the interop tests speak to.

vllm_files.py FOLDER [VERSION...] puts them under FOLDER/VERSION/vllm: the few files that the tests import, read out of
the middle of the release's wheel with pip's own partial reader, so that hundreds of megabytes of compiled code stay
where they are. Each file is compared with the digest in the wheel's record. They are vLLM's, under its licence: they
are kept outside the source tree's tracked files and are never part of weightwire.
"""
import base64
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / "build-test" / "vllm"

# One or two releases of every form that the wire has had.
RELEASES = {
    "0.16.0": "an update is a session of its own",
    "0.20.2": "the last without start and finish",
    "0.21.0": "start parses a JSON body",
    "0.24.0": "the route file has moved to dev/",
    "0.25.1": "start takes no body",
    "0.27.1": "finish takes a weight version",
    "0.28.0": "packed is told at init",
    "0.30.0": "a unique id can be told at init",
    "0.32.0": "the route file has moved to rl/online/, bodies are declared",
    "0.33.0": "an update may say: as before",
}
WANTED = re.compile(
    r"vllm/(distributed/(weight_transfer/(__init__|base|clients|factory|ipc_engine|nccl_common|nccl_engine"
    r"|packed_tensor)"
    r"|device_communicators/pynccl(_wrapper)?|utils)"
    r"|utils/nccl|config/weight_transfer"
    r"|entrypoints/(serve/rlhf|serve/dev/rlhf|rl/online)/api_router)\.py")


class Unavailable(Exception):
    """A release's files cannot be had here and now; the text says why."""


def release(version, folder=CACHE, timeout=120):
    """The folder to put on the module path for `vllm` of this version. Fetched once; raises Unavailable."""
    there = folder / version
    if not complete(there):
        try:
            done = subprocess.run([sys.executable, __file__, folder, version], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, text=True,
                                  errors="replace", check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"the registry gave no answer in {timeout} s") from None
        if done.returncode != 0 or not complete(there):
            last = done.stdout.strip().splitlines()[-1:] or ["pip gave no reason"]
            raise Unavailable(f"not in the cache, and the registry does not give it: {last[0]}")
    return there


def complete(there):
    """Whether all that was wanted is there: the list is written last."""
    try:
        record = json.loads((there / "files.json").read_text())
    except (OSError, ValueError):
        return False
    return record["wanted"] == WANTED.pattern and all((there / name).is_file() for name in record["files"])


def recorded_digests(archive):
    """{name: sha256} out of the wheel's RECORD."""
    record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    digests = {}
    for line in archive.read(record).decode().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        digests[name] = digest.removeprefix("sha256=")
    return digests


def unpack(archive, there):
    digests = recorded_digests(archive)
    names = [name for name in archive.namelist() if WANTED.fullmatch(name)]
    for name in names:
        content = archive.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if digest != digests.get(name):
            sys.exit(f"{name} has another digest than the wheel's record says")
        target = there / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (there / "files.json").write_text(json.dumps({"wanted": WANTED.pattern, "files": names}))
    print(f"{there}: {len(names)} files")


def fetch(versions, folder):
    """Runs in a process of its own: these parts of pip are not promised to stay."""
    from zipfile import ZipFile

    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command = create_command("download")
    with command.main_context():
        options, _ = command.parse_args(["--no-deps", "--only-binary=:all:", "--quiet"])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)
        offered = {str(candidate.version): candidate.link for candidate in finder.find_all_candidates("vllm")}
        for version in versions:
            if version not in offered:
                sys.exit(f"the registry offers no vllm {version} for this machine")
            there = folder / version
            shutil.rmtree(there, ignore_errors=True)
            with LazyZipOverHTTP(offered[version].url_without_fragment, session) as wheel, ZipFile(wheel) as archive:
                unpack(archive, there)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    fetch(sys.argv[2:] or list(RELEASES), pathlib.Path(sys.argv[1]))
