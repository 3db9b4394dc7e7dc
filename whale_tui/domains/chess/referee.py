"""The referee: one puzzle as an environment. python-chess knows the rules; the puzzle's line decides what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import chess
from msgspec import Struct

from whale_tui.domains.base import Tool

WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9=+#-]{2,12}(?![A-Za-z0-9])")
"""What can be a move in a text. Long enough for `e7e8q`, `Qd6xh2+` and `O-O-O`."""


class Play(Struct, frozen=True):
    """A legal move that was played, in the position that it was played in."""

    fen: str
    uci: str


class Referee(dict[str, Tool]):
    """The tools of one episode, by name, and the game behind them. They take and return JSON values.

    `line` holds the solver's moves and the opponent's replies in turn, in UCI. `retries` is how many
    moves that are illegal or no moves at all an episode is forgiven.
    """

    def __init__(self, fen: str, line: Sequence[str], retries: int) -> None:
        super().__init__(board=self.board, legal_moves=self.legal_moves, move=self.move)
        self._board, self._line, self._retries = chess.Board(fen), list(line), retries
        self.status: Literal["open", "solved", "lost"] = "open"
        self.reason = ""
        self.plays: list[Play] = []

    def board(self) -> dict[str, Any]:
        """The position: FEN, an ASCII board with ranks and files, the side to move, the accepted moves and replies."""
        return {
            "fen": self._board.fen(),
            "board": drawn(self._board),
            "to_move": chess.COLOR_NAMES[self._board.turn],
            "played": [move.uci() for move in self._board.move_stack],
            "status": self.status,
        }

    def legal_moves(self) -> list[dict[str, Any]]:
        """Every legal move, sorted by UCI: {uci, san, check, capture, promotion}. None once the puzzle is over.

        A mate is written as the check that it is: a `#` would give the answer to every mate in one.
        """
        board = self._board
        return [
            {
                "uci": move.uci(),
                "san": board.san(move).replace("#", "+"),
                "check": board.gives_check(move),
                "capture": board.is_capture(move),
                "promotion": move.promotion is not None,
            }
            for move in sorted(board.legal_moves if self.status == "open" else (), key=chess.Move.uci)
        ]

    def move(self, uci: str) -> dict[str, Any]:
        """Play a move. {result: "accepted" | "solved" | "lost", played, san, reply, reply_san, fen}; the opponent's
        reply is null once the puzzle is over.

        A move that is none, or illegal, raises ValueError; it may be tried again until the retries are used up.
        """
        if self.status != "open":
            raise ValueError(f"the puzzle is over: {self.status}")
        move = self._legal(uci)
        wanted, board = self._line[2 * len(self.plays)], self._board
        self.plays.append(Play(board.fen(), move.uci()))
        said = {"played": move.uci(), "san": board.san(move), "reply": None, "reply_san": None}
        board.push(move)
        if board.is_checkmate():
            self.status, self.reason = "solved", "checkmate"
        elif move.uci() != wanted:
            self.status, self.reason = "lost", f"{said['san']} is legal and not the solution"
        elif 2 * len(self.plays) > len(self._line):
            self.status, self.reason = "solved", "the whole line was played"
        else:
            reply = chess.Move.from_uci(self._line[2 * len(self.plays) - 1])
            said |= {"reply": reply.uci(), "reply_san": board.san(reply)}
            board.push(reply)
        result = "accepted" if self.status == "open" else self.status
        return {"result": result, **said, "fen": board.fen()}

    def _legal(self, uci: object) -> chess.Move:
        """The move, or ValueError and one retry fewer."""
        shown = repr(uci)[:60]
        problem = f"{shown} is no move in UCI, such as e2e4 or e7e8q"
        if isinstance(uci, str):
            try:
                move = self._board.parse_uci(uci.strip().lower())
                if move:  # not the null move, which python-chess reads as one
                    return move
            except chess.IllegalMoveError:
                problem = f"{shown} is not legal here"
            except chess.InvalidMoveError:
                pass
        if self._retries == 0:
            self.status, self.reason = "lost", f"{problem}, and no retry is left"
            raise ValueError(f"{problem}; that was the last retry: the puzzle is lost")
        self._retries -= 1
        raise ValueError(f"{problem}; {self._retries + 1} more to try")


def losing(fen: str, line: Sequence[str]) -> str | None:
    """The first legal move, by UCI, that loses a puzzle; None where every one wins it."""
    legal = (move["uci"] for move in Referee(fen, line, 0).legal_moves())
    return next((uci for uci in legal if Referee(fen, line, 0).move(uci)["result"] == "lost"), None)


def drawn(board: chess.Board) -> str:
    """The board as text, white's pieces upper case, ranks at the left and files below."""
    rows = zip("87654321", str(board).split("\n"), strict=True)
    return "\n".join([*(f"{rank} {row}" for rank, row in rows), "  a b c d e f g h"])


def written(play: Play, text: str) -> bool:
    """Whether a text names the move, in UCI or in SAN as the position of the play reads it."""
    board = chess.Board(play.fen)
    for word in {word.strip("-=+#") for word in WORD.findall(text)}:
        if re.sub("[-=]", "", word.lower()) == play.uci:
            return True
        try:
            if board.parse_san(word).uci() == play.uci:
                return True
        except ValueError:
            continue
    return False
