"""What the `rules` proposer knows of chess puzzles: forms of a move, which moves are listed, a vote that plays on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_tui.proposers.edits import DomainRules, Edit, Format, Kit, Sign, Source, set_constants
from whale_tui.records import ArchivedEpisode, Demonstration

TAGS = Format(
    words="the move in tags",
    turns=(
        "You are solving a chess puzzle. Find the best move for {side}.\nFEN: {fen}\n{board}\nLegal moves: {moves}\n"
        "Moves so far: {played}\nReply with your move in UCI inside <move> and </move>.",
        "FEN: {fen}\n{side} to move. Legal moves: {moves}\nReply in this form: <move>the move in UCI</move>",
    ),
    shown="<move>{answer}</move>",
    parse="""
def parse(text, tools):
    for pattern in (r"<move>(.*?)</move>", r"\\[(.*?)\\]", r"\\b([a-h][1-8][a-h][1-8][nbrq]?)\\b"):
        found = re.findall(pattern, text, re.DOTALL)
        if found:
            return found[-1].strip()
    return ""
""",
)
FIRST = Format(
    words="the first legal move in the reply",
    turns=(
        "FEN: {fen}\n{side} to move. Moves: {moves}\nBest move:",
        "{board}\nFEN: {fen}\n{side} to move. Moves: {moves}\nBest move:",
        "FEN: {fen}\nFind the move for {side} that wins. Choose one of: {moves}",
    ),
    shown="{answer}",
    parse="""
def parse(text, tools):
    names = {}
    for move in tools.legal_moves():
        names[move["uci"]] = names[move["san"].rstrip("+")] = move["uci"]
    found = [names[word] for word in re.findall(r"[A-Za-z0-9=-]+", text) if word in names]
    return found[0] if found else ""
""",
    stop=("\n",),
)
SAN = Format(
    words="the bare move in SAN on the first line",
    turns=(
        "FEN: {fen}\n{side} to move. Moves: {moves}\nBest move in SAN:",
        "{board}\nFEN: {fen}\n{side} to move. Moves: {moves}\nBest move in SAN:",
    ),
    shown="{san}",
    parse="""
def parse(text, tools):
    word = text.strip().split("\\n")[0].strip().rstrip(".!?+#")
    return next((move["uci"] for move in tools.legal_moves() if move["san"].rstrip("+") == word), "")
""",
    stop=("\n",),
)
VOTE = """
def choose(chat, model, tools):
    legal = [move["uci"] for move in tools.legal_moves()]
    answers = []
    while len(answers) < VOTES and (not answers or model.remaining.calls != 0):
        answers.append(attempt(chat, model, tools))
    found = [answer for answer in answers if answer in legal] or [answer for answer in answers if answer]
    return max(found, key=found.count) if found else ""
"""


def _vote(count: int) -> Edit:
    def change(source: Source, kit: Kit) -> Source | None:
        if not {"attempt", "choose"} <= source.functions().keys() or source.constants().get("VOTES") == count:
            return None
        return source.with_constants(VOTES=count).with_function(VOTE)

    return Edit("vote", f"a vote over {count} moves", change)


def fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    """What TURN and a format need of a demonstration, the moves listed as the harness lists them (`LISTED`, `MOVE`)."""
    position, legal = shown.tools[0]["result"], shown.tools[1]["result"]
    wanted = {"all": (), "checks": ("check",), "forcing": ("check", "capture", "promotion")}[constants["LISTED"]]
    moves = [move for move in legal if any(move[kind] for kind in wanted)] or legal
    return {
        "side": position["to_move"],
        "fen": position["fen"],
        "board": position["board"],
        "moves": ", ".join(constants["MOVE"].format(uci=move["uci"], san=move["san"]) for move in moves),
        "played": " ".join(position["played"]) or "none",
        "answer": shown.answer,
        "san": next(move["san"] for move in legal if move["uci"] == shown.answer),
    }


def _illegal(episode: ArchivedEpisode, constants: Mapping[str, Any]) -> bool:
    return any(use.name == "move" and "is not legal" in use.result for use in episode.tools)


RULES = DomainRules(
    formats=(TAGS, FIRST, SAN),
    systems=(
        "You play chess. Reply with one move.",
        "You solve chess puzzles: first look for a check that is mate.",
    ),
    edits=(
        Edit("search", "the checks alone listed", set_constants(LISTED="checks")),
        Edit("search", "checks, captures and promotions listed", set_constants(LISTED="forcing")),
        Edit("search", "moves listed in UCI alone", set_constants(MOVE="{uci}"), "illegal", 0.7),
        Edit("search", "moves listed in SAN alone", set_constants(MOVE="{san}"), "illegal", 0.3),
        *map(_vote, (3, 5)),
    ),
    signs={"illegal": Sign("tried an illegal move", _illegal)},
    fields=fields,
)
