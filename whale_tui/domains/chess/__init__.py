"""Chess puzzles of Lichess, played move by move under python-chess as the referee."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from whale_tui.domains import tables
from whale_tui.domains.base import DomainError, Known, Tool, read_brief, read_h0
from whale_tui.domains.chess import puzzles
from whale_tui.domains.chess.edits import RULES
from whale_tui.domains.chess.referee import Referee, losing, written
from whale_tui.records import Demonstration, Episode, Split, Task, Verdict

GET = (
    "Lichess gives its puzzles away at database.lichess.org: fetch lichess_db_puzzle.csv.zst, it need not be unpacked, "
    "and name it in domain.options.puzzles"
)
Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1)]


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[domain.options] of the chess puzzles."""

    puzzles: Path = Path("data/lichess_db_puzzle.csv.zst")
    """The puzzle database of Lichess or a part of it: .csv, .csv.zst or .parquet."""
    rating_min: Count = 0
    """Least rating of a puzzle that is taken."""
    rating_max: Count = 0
    """Greatest rating. 0: no limit."""
    themes_any: list[str] = []
    """Puzzles with at least one of these themes, e.g. ["mateIn1", "mateIn2"]. Empty: any."""
    themes_all: list[str] = []
    """Puzzles with every one of these themes."""
    plies_min: Count = 0
    """Least moves of both sides from the solver's first to its last: a mate in two has 3."""
    plies_max: Count = 0
    """Most such moves. 0: no limit."""
    number: Count = 20_000
    """Puzzles taken, the first of the file that fit. 0: all, which takes a while: the database has millions."""
    seed: int = 0
    """Of the cut into splits."""
    weight: Count = 0
    """Tasks of D_weight. 0: all that the other two leave."""
    harness: Size = 128
    """Tasks of D_harness."""
    test: Size = 256
    """Tasks of D_test."""
    retries: Count = 1
    """Illegal or unreadable moves that an episode is forgiven; the next one loses the puzzle."""


class Chess:
    name = "chess"
    edits = RULES

    def __init__(self, options: Options) -> None:
        self._retries, self.report = options.retries, tables.Report()
        wanted = puzzles.Filter(
            rating_min=options.rating_min, rating_max=options.rating_max, plies_min=options.plies_min,
            plies_max=options.plies_max, themes_any=options.themes_any, themes_all=options.themes_all,
        )  # fmt: skip
        counts = self.report.of(options.puzzles.name)
        found = tables.convert(tables.read_rows(options.puzzles, GET), puzzles.reader(wanted), counts)
        taken = tables.distinct(itertools.islice(found, options.number or None), counts)
        sizes: dict[Split, int | float | None] = {
            "test": options.test, "harness": options.harness, "weight": options.weight or None
        }  # fmt: skip
        try:
            splits = tables.cut(taken, sizes, options.seed)
        except DomainError as error:
            read = "; ".join(self.report.lines())
            raise DomainError(f"{options.puzzles}: {error} ({read}); ask for fewer or filter less") from error
        self._tasks = tables.assemble(splits, self.report)
        self.h0 = read_h0(__file__)
        self.brief = read_brief(
            __file__,
            tools={
                "board": "board() -> {'fen', 'board' (ASCII, with ranks and files), 'to_move', 'played', 'status'}: "
                "the position now; played holds accepted moves and replies in UCI, status is open, solved or lost",
                "legal_moves": "legal_moves() -> [{'uci', 'san', 'check', 'capture', 'promotion'}, ...] by UCI",
                "move": "move(uci) -> {'result', 'played', 'san', 'reply', 'reply_san', 'fen'}: plays a move; result "
                "is accepted (the opponent has replied), solved or lost; ToolError for an illegal move or none",
            },
            demonstrations=list(map(_worked, WORKED)),
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return Referee(task.public["fen"], task.private["line"].split(), self._retries)

    def verify(
        self,
        task: Task,
        answer: str,
        episode: Episode,
        *,
        sampled: Sequence[str] = (),
        tools: Mapping[str, Tool] | None = None,
    ) -> Verdict:
        """The referee's word, for moves that the policy wrote before they were played. `answer` does not matter."""
        if not isinstance(tools, Referee):
            raise TypeError("verify needs the tools of the episode: the game is in them")
        uses = [use for use in episode.tools if use.name == "move" and not use.result.startswith("ToolError: ")]
        for number, (play, use) in enumerate(zip(tools.plays, uses, strict=True), 1):
            if not written(play, "\n".join(sampled[: use.after_call])):
                return Verdict("reject", f"move {number}, {play.uci}, stands in nothing that the policy wrote before")
        if tools.status == "solved":
            return Verdict("accept", tools.reason)
        if tools.status == "lost":
            return Verdict("reject", f"move {len(tools.plays)}: {tools.reason}")
        played = f"{len(tools.plays)} of {len(task.private['line'].split()) // 2 + 1} moves"
        return Verdict("reject", f"the puzzle was left open after {played}")

    def known_answers(self) -> Iterator[Known]:
        """Some puzzles played out, left open, lost by another move, and won by moves that the policy never wrote."""
        for task in self._tasks["weight"][:4]:
            line = task.private["line"].split()
            uses = [("move", [move]) for move in line[::2]]
            yield Known(task, "", "accept", [" ".join(line)], uses)
            yield Known(task, "", "reject", [" ".join(line)], uses[:-1])
            yield Known(task, "", "reject", ["I win."], uses)
            wrong = losing(task.public["fen"], line)
            if wrong is not None:
                yield Known(task, "", "reject", [wrong], [("move", [wrong])])


def build(options: Options) -> Chess:
    return Chess(options)


WORKED = (
    ("r4rk1/ppp2p1p/6pQ/8/8/2B5/PP3PPP/6K1 w - - 0 1", "h6g7"),
    ("6k1/pp3p1p/8/8/3q4/2b5/1P3PPP/6K1 b - - 0 1", "d4d1"),
    ("6rk/6pp/8/6N1/8/8/8/6K1 w - - 0 1", "g5f7"),
    ("6k1/8/8/8/8/8/RR6/6K1 w - - 0 1", "a2a7 g8f8 b2b8"),
    ("6k1/5ppp/8/8/8/8/q4PPP/3R2K1 w - - 0 1", "d1d8"),
    ("rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2", "d8h4"),
    ("7k/8/5K2/8/8/8/6Q1/8 w - - 0 1", "g2g7"),
    ("6k1/1P3ppp/8/8/8/8/5PPP/6K1 w - - 0 1", "b7b8q"),
    ("8/8/8/8/8/1k6/7r/K7 b - - 0 1", "h2h1"),
    ("6k1/5p1p/6pP/8/8/2B5/PP6/1K2R3 w - - 0 1", "e1e8"),
    ("7k/R7/8/8/8/8/1R4PP/6K1 w - - 0 1", "b2b8"),
    ("6k1/8/6K1/8/8/8/8/3R4 w - - 0 1", "d1d8"),
)
"""Made for these pages: a position and the line that wins it."""


def _worked(puzzle: tuple[str, str]) -> Demonstration:
    """A position solved, its tools' results as they are."""
    fen, line = puzzle
    referee, moves = Referee(fen, line.split(), 0), line.split()[::2]
    uses: list[dict[str, Any]] = [
        {"name": "board", "args": {}, "result": referee.board()},
        {"name": "legal_moves", "args": {}, "result": referee.legal_moves()},
    ]
    uses += [{"name": "move", "args": {"uci": move}, "result": referee.move(move)} for move in moves]
    return Demonstration({"fen": fen}, uses, moves[0])
