"""The policy worker: the process that holds the model. `python -m whale_tui.policy.worker --fd N`.

One thread reads the channel, so that an interrupt is seen and a closed channel (the engine is gone) ends the process
at once, whatever the other thread computes. Results go over the channel, everything printed to the log that stdout and
stderr are.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from whale_tui.policy import wire
from whale_tui.policy.protocol import PolicyFailure, is_out_of_memory


class Channel:
    """The worker's end of the socket. `interrupted` is read by the computing thread between its steps."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self.asks: queue.SimpleQueue[wire.Ask] = queue.SimpleQueue()
        self.current = 0
        self._abandoned = 0
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, reply: wire.Reply) -> None:
        self._socket.sendall(wire.frame(reply))

    def interrupted(self) -> bool:
        return self.current <= self._abandoned

    def note(self, text: str) -> None:
        self.send(wire.Note(number=self.current, text=text))

    def _read(self) -> None:
        while True:
            ask = wire.decode_ask(self._exactly(wire.HEADER.unpack(self._exactly(wire.HEADER.size))[0]))
            if isinstance(ask, wire.Interrupt):
                self._abandoned = max(self._abandoned, ask.number)
            else:
                self.asks.put(ask)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except OSError:
                part = b""
            if not part:
                os._exit(0)
            data += part
        return bytes(data)


def serve(channel: Channel, serve_ask: Callable[[wire.Ask], wire.Reply]) -> None:
    """Answer calls, one after the other, for ever. A call that fails is answered with why."""
    while True:
        ask = channel.asks.get()
        channel.current = ask.number
        try:
            reply = serve_ask(ask)
        except PolicyFailure as failure:
            reply = wire.Failed(number=ask.number, kind=failure.kind, detail=failure.detail)
        except Exception as error:
            if _kind(error) != "interrupted":
                traceback.print_exc()
            reply = wire.Failed(number=ask.number, kind=_kind(error), detail=f"{type(error).__name__}: {error}")
        try:
            channel.send(reply)
        except OSError:
            os._exit(0)


def _kind(error: Exception) -> str:
    if type(error).__name__ == "Interrupted":
        return "interrupted"
    if is_out_of_memory(error):
        return "out-of-memory"
    return "worker-error"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel(parser.parse_args().fd)
    os.nice(5)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Threads that spin long at a barrier starve the one they wait for when anything else runs on the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    started = time.perf_counter()
    from whale_tui.policy.held import HeldPolicy  # torch is loaded here, while the channel is already being read

    print(f"policy worker {os.getpid()}: libraries loaded in {time.perf_counter() - started:.1f} s")
    serve(channel, HeldPolicy(channel.note, channel.interrupted).answer)


if __name__ == "__main__":
    main()
