"""`whale-tui play`: a pair solves a task of yours, on the screen or as lines. Nothing of it is recorded or a score."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from whale_tui import opening
from whale_tui.evaluate import resolve
from whale_tui.loop import control
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import discovery
from whale_tui.service.player import Ask, Ended, Player, Prompted, Said, Used, task_of


def pair_of(rundir: RunDir, text: str) -> tuple[str, str]:
    """The pair that a word of the command line means, where it can be played. Raises RunDirError."""
    state = discovery.read_state(rundir)
    if state.settings is None:
        raise RunDirError(f"{rundir.name} has not started: it has no pair yet")
    try:
        pair = resolve(state, text)
    except control.Refused as refusal:
        raise RunDirError(str(refusal)) from None
    discovery.weights_of(rundir, state, *pair)
    return pair


def headless(rundir: RunDir, pair: tuple[str, str], question: str, json: Path | None, *, greedy: bool) -> int:
    """Play one task, or those of stdin, as lines. Returns the exit status."""
    given = [json.read_text(encoding="utf-8")] if json else [question] if question else sys.stdin
    return asyncio.run(_headless(Player(rundir, *pair), given, greedy=greedy))


async def _headless(player: Player, texts: Iterable[str], *, greedy: bool) -> int:
    """Play each text and print what happens. 1: one of them came to no answer."""
    failed = False
    try:
        async for note in player.start():
            print(shown(note.text), file=sys.stderr, flush=True)
        assert player.ready is not None
        for text in texts:
            if not text.strip():
                continue
            try:
                ask = Ask(task=task_of(text.strip(), player.ready), greedy=greedy)
            except ValueError as error:
                print(f"whale-tui: {error}", file=sys.stderr)
                failed = True
                continue
            async for message in player.play(ask):
                print(told(message), flush=True)
                failed |= isinstance(message, Ended) and bool(message.problem)
    finally:
        await player.close()
    return opening.FAILED if failed else 0


def told(message: Prompted | Said | Used | Ended) -> str:
    """One thing that happened, as lines."""
    match message:
        case Prompted():
            again = f", {message.shared} as in the call before" if message.shared else ""
            return f"call {message.call}: {message.tokens} prompt tokens{again}\n{_indented(message.text, '  | ')}"
        case Said():
            cut = "" if message.finish_reason == "stop" else ", cut off by the length limit"
            return f"sampled {message.tokens} tokens{cut}\n{_indented(message.text, '  > ')}"
        case Used():
            return f"{message.name}({shown(message.args)})\n{_indented(message.result, '  = ')}"
    answer = f"answer: {shown(message.answer)}" if not message.problem else f"no answer: {shown(message.problem)}"
    return f"{answer}  ({message.seconds:.1f} s; not judged, not recorded)"


def _indented(text: str, mark: str) -> str:
    return "\n".join(mark + shown(line) for line in text.split("\n"))


def shown(text: str) -> str:
    """Text of a model or a tool for a terminal: what is not printable as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
