"""The program inside a sealed worker: `python -I -S inside.py`, three pipes, an empty environment.

The engine sends one JSON line to set it up, then one per event; it answers in JSON lines. It imports what its harness
names, seals itself, and only then runs the harness, a thread for every episode. Beside it lies seal.py, all it needs.
Nothing here protects the engine: what leaves this process is hostile to it, and worker.py believes none of it.
"""

import _thread
import builtins
import importlib
import json
import os
import sys
from _queue import SimpleQueue

FILE = "harness.py"
DETAIL_CHARS = 4_000
CODECS = ("ascii", "latin_1", "utf_16", "utf_32", "unicode_escape", "raw_unicode_escape", "cp1252")
"""Text encodings that a harness may name; others can't be loaded behind the seal."""


class ToolError(Exception):
    """A tool refused; the text says why."""


class EpisodeStopped(BaseException):
    """The engine ended this episode. Not an Exception: a harness's retry has no use for it."""


class Task(dict):
    """A task's public fields, read-only all the way down, as items and as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the task has no field {name!r}; it has: {', '.join(self)}") from None

    def _refuse(self, *args, **kwargs):
        raise TypeError("a task is read-only")

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


def read_only(value):
    if isinstance(value, dict):
        return Task({key: read_only(item) for key, item in value.items()})
    return tuple(map(read_only, value)) if isinstance(value, list) else value


class Remaining:
    def __init__(self, calls, tokens):
        self.calls, self.tokens = calls, tokens

    def __repr__(self):
        return f"Remaining(calls={self.calls}, tokens={self.tokens})"


class Reply:
    def __init__(self, fields):
        self.__dict__.update(fields)

    def __repr__(self):
        return f"Reply({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Model:
    def __init__(self, ask, remaining):
        self._ask, self.remaining = ask, remaining

    def chat(self, messages, *, max_tokens=None, stop=None, thinking=None):
        fields = self._ask(type="chat", messages=list(messages), max_tokens=max_tokens, stop=stop, thinking=thinking)
        self.remaining = Remaining(fields.pop("remaining_calls"), fields.pop("remaining_tokens"))
        return Reply(fields)


class Tools:
    def __init__(self, ask, names):
        self._ask, self._names = ask, names

    def __dir__(self):
        return self._names or []

    def __getattr__(self, name):
        if self._names is not None and name not in self._names:
            raise AttributeError(f"there is no tool {name!r}; there are: {', '.join(self._names) or 'none'}")
        return lambda *args, **kwargs: self._ask(type="tool", name=name, args=args, kwargs=kwargs)


class Log:
    """Where print() goes: the pipe of fd 2, up to a limit, then nowhere. It never blocks a harness for long."""

    encoding = "utf-8"

    def __init__(self, limit):
        self.left = limit

    def write(self, text):
        if self.left > 0:
            data = text.encode("utf-8", "replace")[: self.left]
            self.left -= len(data)
            os.write(2, data if self.left else data + b"\n... the rest of the output was dropped\n")
        return len(text)

    def flush(self):
        pass


def describe(error, source) -> str:
    """The traceback as far as it is the harness's own, bounded, however hostile the exception."""
    try:
        lines, frame, text = source.splitlines(), error.__traceback__, str(error)
        name = type(error).__name__
        if isinstance(error, SyntaxError) and error.filename == FILE:
            return f"  File {FILE!r}, line {error.lineno}\n    {(error.text or '').strip()}\n{name}: {error.msg}"[
                -DETAIL_CHARS:
            ]
        shown = []
        while frame is not None:
            code, line = frame.tb_frame.f_code, frame.tb_lineno
            if code.co_filename == FILE and line:
                at = lines[line - 1].strip()[:200] if line <= len(lines) else ""
                shown.append(f'  File "{FILE}", line {line}, in {code.co_name}\n    {at}\n')
            frame = frame.tb_next
        if len(shown) > 12:
            shown[6:-6] = [f"  ... {len(shown) - 12} more frames ...\n"]
        return "".join(shown)[: DETAIL_CHARS // 2] + f"{name}: {text}"[: DETAIL_CHARS // 2]
    except BaseException as worse:
        return f"{type(error).__name__}, and no more to say of it: {type(worse).__name__}"


class Inside:
    """One harness, its open episodes, and the pipe."""

    def __init__(self, setup):
        self.setup, self.inboxes, self.writing = setup, {}, _thread.allocate_lock()

    def send(self, **message) -> None:
        line = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )
        if len(line) >= self.setup["message_bytes"]:
            raise ValueError(f"a message of {len(line):,} bytes; at most {self.setup['message_bytes']:,}")
        left = memoryview(line + b"\n")
        with self.writing:
            while left:
                left = left[os.write(1, left) :]

    def load(self) -> None:
        """Compile the harness and try its module body once."""
        allowed = {*self.setup["modules"], *self.setup["lazy"]}  # C code imports late in the harness's name
        parents = {name.rpartition(".")[0] for name in allowed}
        find = builtins.__import__

        def guarded(name, globals=None, locals=None, fromlist=(), level=0):
            if level or (name not in allowed and name not in parents):
                raise ImportError(f"a harness can't import {name!r}")
            return find(name, globals, locals, fromlist, 0)

        self.builtins = {**vars(builtins), "__import__": guarded, "ToolError": ToolError}
        for name in ("open", "input", "breakpoint"):
            del self.builtins[name]
        self.code = compile(self.setup["source"], FILE, "exec")
        if not callable(self.module().get("run")):
            raise TypeError("the harness defines no function run(task, model, tools)")

    def module(self) -> dict:
        """The harness as a module of its own, so that episodes share no state by accident."""
        names = {"__name__": "harness", "__builtins__": self.builtins}
        exec(self.code, names)
        return names

    def episode(self, number, start, inbox) -> None:
        """One episode, in a thread of its own."""
        stopped: list[bool] = []

        def ask(**message):
            if stopped or not inbox.empty():
                stopped.append(True)
                raise EpisodeStopped
            self.send(ep=number, **message)
            answer = inbox.get()
            if "value" in answer:
                return answer["value"]
            if "error" in answer:
                raise {"ToolError": ToolError, "TypeError": TypeError}[answer["error"]](answer["text"])
            stopped.append(True)
            raise EpisodeStopped

        try:
            self.send(type="begin", ep=number, thread=_thread.get_native_id())
            task, remaining = read_only(start["task"]), Remaining(start["remaining_calls"], start["remaining_tokens"])
            answer = self.module()["run"](task, Model(ask, remaining), Tools(ask, start["tools"]))
            if not isinstance(answer, str):
                raise TypeError(f"run() must return a str, not {type(answer).__name__}")
            if len(answer) > self.setup["answer_chars"]:
                raise ValueError(f"an answer of {len(answer):,} characters; at most {self.setup['answer_chars']:,}")
            last = {"type": "done", "answer": answer}
        except BaseException as error:
            last = {"type": "fail", "detail": describe(error, self.setup["source"])}
        self.inboxes.pop(number, None)
        self.send(ep=number, **last)

    def serve(self) -> None:
        """Start episodes and hand on replies until the engine closes the pipe."""
        for line in sys.stdin.buffer:
            message = json.loads(line)
            number, start = message["ep"], message.get("start")
            if start is None:
                if number in self.inboxes:
                    self.inboxes[number].put(message)
                continue
            inbox: SimpleQueue = SimpleQueue()
            self.inboxes[number] = inbox
            try:
                _thread.start_new_thread(self.episode, (number, start, inbox))
            except (RuntimeError, MemoryError):
                del self.inboxes[number]
                self.send(type="refuse", ep=number, detail="no memory left for the thread of another episode")


def main() -> None:
    os.environ.clear()  # Python itself put LC_CTYPE there
    setup = json.loads(sys.stdin.buffer.readline())
    sys.path.extend([os.path.dirname(os.path.abspath(__file__)), *setup["path"]])  # noqa: PTH100, PTH120
    from seal import seal

    for name in [*setup["modules"], *setup["lazy"], *(f"encodings.{name}" for name in CODECS)]:
        importlib.import_module(name)
    sys.stdout = sys.stderr = Log(setup["log_bytes"])
    _thread.stack_size(setup["stack_bytes"])
    seal(setup)
    for names in (sys.path, sys.meta_path, sys.path_hooks):
        names.clear()
    for name in ("ctypes", "_ctypes", "ctypes._endian", "seal", "resource", "importlib"):
        if name not in setup["modules"]:
            sys.modules.pop(name, None)
    inside = Inside(setup)
    inside.send(type="sealed")
    try:
        inside.load()
    except BaseException as error:
        inside.send(type="unloadable", detail=describe(error, setup["source"]))
        os._exit(1)
    inside.send(type="loaded")
    inside.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
