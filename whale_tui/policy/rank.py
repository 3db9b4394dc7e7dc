"""One of several processes that train together: `python -m whale_tui.policy.rank --fd N`, started by ranks.py.

A thread reads the connection, so that an interrupt is seen, and a closed one (the worker is gone) ends the process at
once, whatever it computes.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Inbox:
    def __init__(self, end: Connection) -> None:
        self._end = end
        self.asks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.interrupted = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                ask = self._end.recv()
            except (EOFError, OSError):
                os._exit(0)
            if ask == "interrupt":
                self.interrupted = True
            else:
                self.asks.put(ask)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    end = Connection(parser.parse_args().fd)
    inbox = Inbox(end)
    os.nice(5)
    import torch

    from whale_tui.policy.protocol import PolicyFailure, is_out_of_memory
    from whale_tui.policy.shards import Shards
    from whale_tui.policy.trainer import Interrupted, Trainer

    setup = inbox.asks.get()
    torch.set_num_threads(setup["threads"])
    trainer: Trainer | None = None
    name: str = "load"
    args: tuple[Any, ...] = ()
    while True:
        try:
            value: Any = None
            if trainer is None:
                device = torch.device(setup["device"])
                shards = Shards(setup["rank"], setup["size"], device, Path(setup["meeting"]))
                trainer = Trainer(Path(setup["folder"]), device, shards=shards, **setup["options"])
                value = (trainer.numbers, trainer.trained_parameters)
            elif name == "train":
                value = trainer.train(args[0], lambda: inbox.interrupted, lambda text: end.send(("note", text)))
            elif name == "restore":
                trainer.restore(args[0], with_optimizer=args[1])
            elif name == "probe":
                value = trainer.probe(args[0]).tolist()
            else:
                value = getattr(trainer, name)(*args)
            end.send(("done", value if setup["rank"] == 0 else None))
        except Interrupted:
            end.send(("interrupted", None))
        except PolicyFailure as failure:
            end.send(("failed", (failure.kind, failure.detail, 0)))
        except Exception as error:
            traceback.print_exc()
            kind = "out-of-memory" if is_out_of_memory(error) else "worker-error"
            end.send(("failed", (kind, f"{type(error).__name__}: {error}", trainer.alone if trainer else 0)))
        name, args = inbox.asks.get()
        inbox.interrupted = False


if __name__ == "__main__":
    main()
