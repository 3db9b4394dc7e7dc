"""Lichess puzzles: rows of the database as tasks. The FEN of a row is before the opponent's move, which comes first."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import chess
from msgspec import Struct

from whale_tui.domains.base import DomainError
from whale_tui.domains.tables import Drop, Row
from whale_tui.records import Task

NEEDED = ("PuzzleId", "FEN", "Moves")
"""Columns of every layout. `Rating` and `Themes` are asked for by the filters alone; others are not looked at."""


class Filter(Struct, frozen=True):
    """Which puzzles are taken. 0 and empty: no limit. `plies` count the moves of both sides from the solver's first."""

    rating_min: int = 0
    rating_max: int = 0
    themes_any: Collection[str] = ()
    themes_all: Collection[str] = ()
    plies_min: int = 0
    plies_max: int = 0

    def misses(self, row: Row) -> str:
        """Why a row is left out, in words; empty where it is taken."""
        if self.rating_min or self.rating_max:
            rating = _rating(row)
            if rating < self.rating_min or (self.rating_max and rating > self.rating_max):
                return "another rating"
        if self.themes_any or self.themes_all:
            themes = {theme.casefold() for theme in _words(row, "Themes")}
            if self.themes_any and themes.isdisjoint(theme.casefold() for theme in self.themes_any):
                return "other themes"
            if not themes.issuperset(theme.casefold() for theme in self.themes_all):
                return "other themes"
        plies = len(_words(row, "Moves")) - 1
        if plies < self.plies_min or (self.plies_max and plies > self.plies_max):
            return "another length"
        return ""


def reader(wanted: Filter) -> Callable[[Row], Task]:
    """What turns a row into a task: Drop where the filter leaves it out, DomainError where the row is broken."""

    def make(row: Row) -> Task:
        if why := wanted.misses(row):
            raise Drop(why)
        return task(row)

    return make


def task(row: Row) -> Task:
    """A whole row as a task: public the position that the solver meets, private the line from there, in UCI."""
    key, fen, moves = _text(row, "PuzzleId"), _text(row, "FEN"), _words(row, "Moves")
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise _broken(row, f"the FEN {fen!r} can't be read ({error})") from error
    if not board.is_valid():
        raise _broken(row, f"the FEN {fen!r} is no position of a game")
    if len(moves) < 2 or len(moves) % 2:
        raise _broken(row, f"Moves has {len(moves)} moves; it begins with the opponent's and ends with the solver's")
    line = list(_played(row, board, moves))
    board = chess.Board(fen)
    board.push_uci(line[0])
    return Task(key, {"fen": board.fen()}, {"line": " ".join(line[1:])})


def _played(row: Row, board: chess.Board, moves: list[str]) -> Iterator[str]:
    """The moves as python-chess writes them, each legal where it stands."""
    for place, text in enumerate(moves, 1):
        try:
            move = board.push_uci(text.lower())
        except ValueError as error:
            raise _broken(row, f"move {place} of {' '.join(moves)!r} is not legal: {text}") from error
        if not move:
            raise _broken(row, f"move {place} of {' '.join(moves)!r} is none: {text}")
        yield move.uci()


def _rating(row: Row) -> int:
    value = _value(row, "Rating")
    try:
        return round(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise _broken(row, f"Rating is {value!r}, not a number") from error


def _words(row: Row, column: str) -> list[str]:
    """The words of a column that holds a text or a list of texts."""
    value = _value(row, column)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return list(value)
    if isinstance(value, str):
        return re.findall(r"\w+", value)
    raise _broken(row, f"{column} is {value!r}, not a text or a list of texts")


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise _broken(row, f"{column} is {value!r}, not a text")
    return value.strip()


def _value(row: Row, column: str) -> Any:
    if column not in row.values:
        raise DomainError(
            f"{row.where}: no column {column}; Lichess puzzles have {', '.join((*NEEDED, 'Rating', 'Themes'))}, this "
            f"file has {', '.join(row.values)}"
        )
    return row.values[column]


def _broken(row: Row, what: str) -> DomainError:
    return DomainError(f"{row.where}: {what}; mend the row or delete it")
