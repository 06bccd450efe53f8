#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch's own TCPStore client against our server, and our client against torch's two servers.

tcp_store_interop.py --program PATH of the built tests/support/test_store.cpp. Skipped where torch is not installed.
"""
import argparse
import datetime
import pathlib
import subprocess
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from report import Report, run  # noqa: E402


def wrong(checks):
    """The names of the checks that do not hold."""
    return ", ".join(name for name, holds in checks if not holds)


def torch_client(store_type, port):
    limit = datetime.timedelta(seconds=20)
    one, two = (store_type("127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False)
                for _ in range(2))
    one.set("key", "value")
    checks = [("set and get", one.get("key") == b"value"),
              ("add", (two.add("count", 2), one.add("count", 3)) == (2, 5)),
              ("add keeps decimal text", one.get("count") == b"5"),
              ("check", one.check(["key"]) and not one.check(["key", "missing"])),
              ("compare_set", one.compare_set("fresh", "", "first") == b"first"
               and two.compare_set("fresh", "other", "second") == b"first"),
              ("num_keys", one.num_keys() - two.num_keys() == 0 and one.num_keys() >= 3),
              ("delete_key", one.delete_key("fresh") and not one.delete_key("fresh"))]
    one.append("key", "+more")
    one.multi_set(["p", "q"], ["1", ""])
    checks += [("append", two.get("key") == b"value+more"),
               ("multi_get", two.multi_get(["p", "q"]) == [b"1", b""])]
    waited = []
    waiter = threading.Thread(target=lambda: waited.append(two.get("late")))
    waiter.start()
    one.set("late", b"\x80\x04N.")
    waiter.join(20)
    checks.append(("a get that waits", waited == [b"\x80\x04N."]))
    try:
        one.wait(["never"], datetime.timedelta(milliseconds=200))
        checks.append(("a wait ends at its timeout", False))
    except Exception:  # its type has changed between versions
        checks.append(("a wait ends at its timeout", True))
    large = bytes(range(256)) * (32 * 1024 - 1)
    one.set("large", large)
    checks += [("use after a cancelled wait", one.get("key") == b"value+more"),
               ("a value of nearly 8 MiB", two.get("large") == large)]
    return wrong(checks)


def against_our_server(store_type, program):
    server = subprocess.Popen([program, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        problem = torch_client(store_type, int(server.stdout.readline()))
    finally:
        server.stdin.close()
        try:
            status = server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            status = "no end"
    return problem or ("" if status == 0 else f"the server ended with {status}")


def against_torch_server(store_type, program, use_libuv):
    store = store_type("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv,
                       timeout=datetime.timedelta(seconds=20))
    store.set("greeting", "hello")
    status, output = run([program, "ask", "127.0.0.1", str(store.port)], timeout=60)
    if status != 0:
        return output
    return wrong([("what our client has set", store.get("done") == b"yes" and store.get("x") == b"42")])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    program = parser.parse_args().program
    names = ["torch's store client to our server", "our store client to torch's server",
             "our store client to torch's libuv server"]
    report = Report()
    try:
        from torch.distributed import TCPStore
    except ImportError:
        for name in names:
            report.skip(name, "torch is not installed")
        sys.exit(0)
    report.check(names[0], against_our_server(TCPStore, program))
    report.check(names[1], against_torch_server(TCPStore, program, False))
    report.check(names[2], against_torch_server(TCPStore, program, True))
    report.exit()


if __name__ == "__main__":
    main()
