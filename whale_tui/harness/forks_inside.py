"""The program of a fork server: what takes long is imported once, then each job is a fork (`python -s -S -P` runs it).

The engine sends one JSON line to set it up, then one per job; it answers in JSON lines. The server runs only code of
this package: modules, then `warm()` of a program file. Each job runs `run(payload)` of that file in a child of its own,
sealed (seal.py) before it sees the payload, with limits on processor time, wall time, memory and output. So no job sees
what another did, each starts from the same state (the random generators' too), and a child that hangs costs itself.
"""

import gc
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import random
import resource
import selectors
import signal
import sys
import time

CODECS = ("ascii", "latin_1", "utf_16", "utf_32", "unicode_escape", "raw_unicode_escape", "cp1252")


class Out:
    """Where print() goes in a child: the pipe to the server, at once, so that a cut loses nothing that was said."""

    encoding, errors, closed = "utf-8", "replace", False

    def write(self, text):
        left = memoryview(str(text).encode("utf-8", "replace"))
        while left:
            left = left[os.write(1, left) :]
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


class Child:
    def __init__(self, number, pid, pipe, deadline):
        self.number, self.pid, self.pipe, self.deadline = number, pid, pipe, deadline
        self.output, self.killed = bytearray(), ""


def load(setup):
    """Import everything that a job may need: nothing can be imported behind the seal."""
    for name in setup["modules"]:
        found = importlib.import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            for module in pkgutil.walk_packages(found.__path__, found.__name__ + "."):
                if not any(part in module.name for part in setup["skip"]):
                    importlib.import_module(module.name)
    for name in (*(f"encodings.{codec}" for codec in CODECS), "linecache", "traceback", "warnings", "_strptime"):
        importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("program", setup["program"])
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.warm()
    return program


def become_child(job, setup, program, seal, write_end):
    """The rest of a child's life."""
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        sys.stdin, sys.stdout = io.StringIO(""), Out()
        sys.stderr = sys.stdout
        seal(setup["seal"])
    except BaseException as error:
        os.write(write_end, f"not sealed: {type(error).__name__}: {error}".encode()[:1000])
        os._exit(77)
    for names in (sys.path, sys.meta_path, sys.path_hooks):
        names.clear()
    for name in ("ctypes", "_ctypes", "ctypes._endian", "seal", "resource", "importlib"):
        sys.modules.pop(name, None)
    try:
        program.run(job["payload"])
    except BaseException as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


class Server:
    def __init__(self, setup, program, seal):
        self.setup, self.program, self.seal = setup, program, seal
        self.children, self.waiting = {}, []
        self.poll = selectors.DefaultSelector()

    def send(self, **message):
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            left = left[os.write(1, left) :]

    def start(self, job):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            become_child(job, self.setup, self.program, self.seal, write_end)
        os.close(write_end)
        os.set_blocking(read_end, False)
        child = Child(job["n"], pid, read_end, time.monotonic() + self.setup["wall_seconds"])
        self.children[job["n"]] = child
        self.poll.register(read_end, selectors.EVENT_READ, child)

    def kill(self, child, why):
        if not child.killed:
            child.killed = why
            os.kill(child.pid, signal.SIGKILL)  # not reaped before its pipe's end is read: the pid is still its own

    def read(self, child):
        limit = self.setup["output_bytes"]
        try:
            data = os.read(child.pipe, 65536)
        except BlockingIOError:
            return
        child.output += data[: limit + 1 - len(child.output)]
        if len(child.output) > limit:
            self.kill(child, "output")
        if not data:
            self.finish(child)

    def finish(self, child):
        """A sealed child can't close its pipe, so the pipe's end is the child's."""
        self.poll.unregister(child.pipe)
        os.close(child.pipe)
        _, status, used = os.wait4(child.pid, 0)
        del self.children[child.number]
        code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if child.killed in ("output", "wall"):
            kind = child.killed
        elif code in (-signal.SIGXCPU, -signal.SIGKILL) and seconds >= 0.5 * self.setup["seal"]["limits"]["CPU"]:
            kind = "cpu"
        else:
            kind = {0: "done", 77: "unsealed"}.get(code, "died")
        output = bytes(child.output[: self.setup["output_bytes"]]).decode("utf-8", "replace")
        self.send(n=child.number, kind=kind, code=code, output=output, seconds=round(seconds, 4))

    def serve(self):
        self.poll.register(0, selectors.EVENT_READ, None)
        unread = bytearray()
        while True:
            now = time.monotonic()
            for child in self.children.values():
                if child.deadline <= now:
                    self.kill(child, "wall")
            wait = min((c.deadline for c in self.children.values() if not c.killed), default=now + 3600) - now
            for key, _ in self.poll.select(max(0.0, wait)):
                if key.data is not None:
                    self.read(key.data)
                    continue
                data = os.read(0, 1 << 20)
                if not data:
                    os._exit(0)  # the engine is done; the children die with this process
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    job = json.loads(line)
                    if "stop" not in job:
                        self.start(job)
                    elif job["stop"] in self.children:
                        self.kill(self.children[job["stop"]], "stopped")


def own_memory():
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: no seal either
        return 0


def main():
    setup = b""
    while not setup.endswith(b"\n"):
        setup += os.read(0, 1)
    setup = json.loads(setup)
    os.environ.clear()
    sys.path[:] = [os.path.dirname(os.path.abspath(__file__)), *setup["path"]]  # noqa: PTH100, PTH120
    said = os.dup(1)
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    try:
        from seal import seal

        program = load(setup)
    except BaseException as error:
        os.write(said, json.dumps({"n": 0, "kind": "failed", "output": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.dup2(said, 1)
    os.close(said)
    setup["seal"]["limits"]["AS"] += own_memory()  # the limit is of address space, which a child begins with
    setup["seal"]["parent"] = os.getpid()
    random.seed(0)
    gc.collect()
    gc.freeze()  # pages of what is imported stay shared with the children
    server = Server(setup, program, seal)
    server.send(n=0, kind="ready", output="")
    server.serve()


if __name__ == "__main__":
    main()
