"""One episode as a conversation: what the policy was given and what it sampled, the tools, the verdict and why."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from textual.content import Content

from whale_tui.records import Call, Episode
from whale_tui.tui.compare import duration
from whale_tui.tui.look import Look
from whale_tui.tui.plain import line, plain, plain_lines

if TYPE_CHECKING:
    from whale_tui.policy.chat import ChatTokenizer

UNLIKELY = 0.2
"""Sampled tokens that the policy gave less than this are underlined."""
MOST_TOKENS = 6_000
"""Tokens of one call that are decoded for the screen."""

VERDICTS = {
    "accept": "accept: it is kept, and trained on where its purpose is train",
    "reject": "reject: it counts as a failure; nothing is learnt from it",
    "invalid": "invalid: the machinery failed; it has no reward and enters no average",
}


class Turn(Struct):
    """One call: the prompt beyond what the call before showed, and the sampled tokens with their probabilities."""

    shared: int
    prompt: str
    sampled: list[tuple[str, float]]


class Turns(Struct):
    turns: list[Turn]
    note: str = ""
    """Why the text is not there, where it is not."""


@lru_cache(maxsize=2)
def _tokenizer(folder: Path) -> ChatTokenizer:
    """Imported late: it is not needed for the first screen."""
    from whale_tui.policy.chat import ChatTokenizer

    return ChatTokenizer(folder)


def read_turns(episode: Episode, folder: Path) -> Turns:
    """Decode an episode's token ids with the run's own tokenizer."""
    try:
        tokenizer = _tokenizer(folder)
    except Exception as error:
        return Turns([], f"the run's tokenizer can't be read, so its tokens can't be shown as text: {error}")
    turns: list[Turn] = []
    seen: list[int] = []
    for call in episode.calls:
        shared = _shared(seen, call.prompt_ids)
        prompt = "".join(tokenizer.decode_each(call.prompt_ids[shared:][:MOST_TOKENS]))
        pieces = tokenizer.decode_each(call.output_ids[:MOST_TOKENS])
        sampled = [(piece, math.exp(p)) for piece, p in zip(pieces, call.logprobs, strict=False)]
        turns.append(Turn(shared, prompt, sampled))
        seen = [*call.prompt_ids, *call.output_ids]
    return Turns(turns)


def _shared(before: list[int], now: list[int]) -> int:
    """How many ids a prompt has in common with all that was there before."""
    return next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))


def transcript(episode: Episode, turns: Turns, width: int, look: Look) -> list[Content]:
    """The whole conversation in lines of at most `width` cells."""
    out = _head(episode, width, look)
    tools = iter(sorted(episode.tools, key=lambda tool: tool.after_call))
    tool = next(tools, None)
    for number in range(len(episode.calls) + 1):
        while tool is not None and tool.after_call <= number:
            out += tool_lines(tool.name, tool.args, tool.result, tool.seconds, width, look)
            tool = next(tools, None)
        if number < len(episode.calls):
            turn = turns.turns[number] if number < len(turns.turns) else None
            out += _call(number, episode.calls[number], turn, width, look)
    while tool is not None:
        out += tool_lines(tool.name, tool.args, tool.result, tool.seconds, width, look)
        tool = next(tools, None)
    if turns.note:
        out += line((plain(turns.note, 400), look("warning"))).wrap(width)
    return out + _verdict(episode, width, look)


def _head(episode: Episode, width: int, look: Look) -> list[Content]:
    dot = look.glyphs.dot
    where = f"step {episode.step}" if episode.step else f"iteration {episode.iteration}" if episode.iteration else ""
    facts = [f"{episode.purpose} episode {plain(episode.id, 120)}", f"cycle {episode.cycle}", where]
    facts += [f"{len(episode.calls)} call{'' if len(episode.calls) == 1 else 's'}", duration(episode.seconds)]
    legend = line(
        (look.glyphs.sampled, look("good")), (" sampled by the policy", look("muted")), ("   ", ""),
        ("underlined", look("unlikely")), (f" under {UNLIKELY:.0%} likely", look("muted")),
    )  # fmt: skip
    pair = line(
        (episode.policy, look("phase-weight")), (f" {look.glyphs.times} ", look("muted")),
        (episode.harness, look("phase-harness")), (f"   {episode.verdict}", _verdict_style(episode, look)),
    )  # fmt: skip
    return [
        *pair.wrap(width),
        *line((f" {dot} ".join(f for f in facts if f), look("muted"))).wrap(width),
        *legend.wrap(width),
        Content(""),
    ]


def _call(number: int, call: Call, turn: Turn | None, width: int, look: Look) -> list[Content]:
    out = [line((f"call {number + 1}", look("title")), (f"  {len(call.prompt_ids)} prompt tokens", look("muted")))]
    if turn is not None:
        if turn.shared:
            words = f"  ({turn.shared} tokens as in the call before)"
            out.append(line((words, look("faint"))))
        for text in plain_lines(turn.prompt):
            out += line(("  ", ""), (text, look("muted"))).wrap(width) if text else [Content("")]
        out += sampled_lines(turn.sampled, width, look)
    end = "stopped by itself" if call.finish_reason == "stop" else f"cut off at {call.max_tokens} tokens"
    role = "muted" if call.finish_reason == "stop" else "warning"
    return [*out, line((f"  {len(call.output_ids)} sampled tokens, {end}", look(role))), Content("")]


def sampled_lines(tokens: list[tuple[str, float]], width: int, look: Look) -> list[Content]:
    """Sampled text behind a bar in the margin, unlikely tokens underlined; wrapped by hand so that the bar stays."""
    gutter = line((f"{look.glyphs.sampled} ", look("good")))
    rows: list[list[str | tuple[str, str]]] = [[]]
    for piece, probability in tokens:
        style = look("unlikely") if probability < UNLIKELY else look("sampled")
        for n, part in enumerate(piece.split("\n")):
            if n:
                rows.append([])
            rows[-1].append((plain(part), style))
    out: list[Content] = []
    for row in rows:
        content = line(*row)
        wrapped = content.wrap(max(4, width - 2)) if content.plain else [content]
        out += [Content("").join([gutter, part]) for part in wrapped]
    return out


def tool_lines(name: str, args: str, result: str, seconds: float, width: int, look: Look) -> list[Content]:
    head = line(
        (f"{look.glyphs.arrow} {plain(name, 60)}", look("phase-harness")), (f" {plain(args, 400)}", ""),
        (f"  {seconds * 1000:.0f} ms", look("muted")),
    )  # fmt: skip
    out = head.wrap(width)
    for text in plain_lines(result, most=40):
        out += line(("    ", ""), (text, look("muted"))).wrap(width) if text else [Content("")]
    return [*out, Content("")]


def _verdict(episode: Episode, width: int, look: Look) -> list[Content]:
    out = [line(("answer   ", look("muted")), (plain(episode.answer, 600) or "(none)", look("title")))]
    out.append(line(("verdict  ", look("muted")), (VERDICTS[episode.verdict], _verdict_style(episode, look))))
    out.append(line(("why      ", look("muted")), (plain(episode.reason, 2000), "")))
    if episode.truncated:
        out.append(
            line(
                (
                    "truncated: a length limit cut it off; it is not trained on unless the config says so",
                    look("warning"),
                )
            )
        )
    return [row for content in out for row in content.wrap(width)]


def _verdict_style(episode: Episode, look: Look) -> str:
    return look({"accept": "good", "reject": "bad"}.get(episode.verdict, "invalid"))
