"""The journal: the append-only record from which all state can be rebuilt.

SQLite in WAL mode. `events` is the record itself, each row chained to the one before by a checksum. `episodes` is an
index for filters and pages; the token-level records lie in compressed segments beside it. An event and the episodes
it speaks of are committed in one transaction, after their segment is on disk: they are all there or none is.
"""

from __future__ import annotations

import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from msgspec import Struct

from whale_tui.records import AnyEvent, Episode, encode_event, event_decoder
from whale_tui.rundir import sync_folder, write_atomic

FRAME = 64
"""Episodes of one compressed frame: small enough to read one quickly, large enough that shared prompts fold away."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, type TEXT NOT NULL, body BLOB NOT NULL,
    chain INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (n INTEGER PRIMARY KEY, id TEXT NOT NULL, segment TEXT NOT NULL,
    frame INTEGER NOT NULL, place INTEGER NOT NULL, cycle INTEGER, phase TEXT, step INTEGER, iteration INTEGER,
    purpose TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER, policy TEXT NOT NULL, harness TEXT NOT NULL,
    verdict TEXT NOT NULL, reason TEXT, truncated INTEGER NOT NULL, answer TEXT, calls INTEGER, prompt_tokens INTEGER,
    output_tokens INTEGER, seconds REAL);
CREATE INDEX IF NOT EXISTS by_verdict ON episodes (verdict, n);
CREATE INDEX IF NOT EXISTS by_task ON episodes (task, n);
CREATE INDEX IF NOT EXISTS by_harness ON episodes (harness, n);
CREATE INDEX IF NOT EXISTS by_pair ON episodes (harness, policy, n);
CREATE INDEX IF NOT EXISTS by_policy ON episodes (policy, n);
CREATE INDEX IF NOT EXISTS by_purpose ON episodes (purpose, n);
CREATE INDEX IF NOT EXISTS by_step ON episodes (step, n);
CREATE INDEX IF NOT EXISTS by_iteration ON episodes (iteration, n);
CREATE INDEX IF NOT EXISTS by_segment ON episodes (segment);
CREATE INDEX IF NOT EXISTS by_id ON episodes (id);
"""
_FILTERS = {"verdict", "task", "policy", "harness", "purpose", "phase", "truncated", "cycle", "step", "iteration"}
_NARROW = ("task", "harness", "policy", "step", "iteration", "verdict", "purpose")
"""Filters with an index, those that leave the fewest rows first: SQLite has no counts to choose by."""

_episodes_decoder = msgspec.msgpack.Decoder(list[Episode])
_encoder = msgspec.msgpack.Encoder()


class JournalError(Exception):
    """The journal can't be read or written; the text names the file, what is still good, and the mend."""


class Row(Struct):
    """One line of the episodes index."""

    n: int
    id: str
    segment: str
    frame: int
    place: int
    cycle: int
    phase: str | None
    step: int
    iteration: int
    purpose: str
    task: str
    sample: int
    policy: str
    harness: str
    verdict: str
    reason: str
    truncated: bool
    answer: str
    calls: int
    prompt_tokens: int
    output_tokens: int
    seconds: float


_COLUMNS = Row.__struct_fields__[1:]


class Segment(Struct):
    """Episodes on disk that no event names yet."""

    name: str
    rows: list[tuple[Any, ...]]


class Journal:
    """One writer (the engine), any number of readers (`read_only`)."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.segments = path.parent / "episodes"
        try:
            if read_only:
                self.db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5, check_same_thread=False)
            else:
                self.db = sqlite3.connect(path, timeout=5, isolation_level=None)
                self.db.execute("PRAGMA journal_mode=WAL")
                self.db.execute("PRAGMA synchronous=FULL")
                self.db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
                last = self.db.execute("SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1").fetchone() or (0, 0)
                self.seq, self._chain = int(last[0]), int(last[1])
                self._segment = int(self.db.execute("SELECT max(segment) FROM episodes").fetchone()[0] or 0)
        except sqlite3.OperationalError as error:
            raise JournalError(f"{path}: can't be opened: {error}") from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise JournalError(_broken(path, _count_good(path), str(error))) from None

    @property
    def empty(self) -> bool:
        """A reader may come before the writer has made the tables."""
        return not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone()

    def close(self) -> None:
        self.db.close()

    # -------------------------------------------------------------------------------------------------- writing

    def write_segment(self, episodes: Sequence[Episode], name: str = "") -> Segment:
        """Put the token-level records on disk. After a restart, segments that no event came to name are overwritten.

        Raises JournalError; there is no half segment.
        """
        if not name:
            self._segment += 1
            name = f"{self._segment:08d}"
        compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        data, places = bytearray(), []
        for start in range(0, len(episodes), FRAME):
            chunk = episodes[start : start + FRAME]
            places += [(name, len(data), place) for place in range(len(chunk))]
            data += compressor.compress(_encoder.encode(chunk))
        path = self.segments / f"{name}.msgpack.zst"
        try:
            write_atomic(path, bytes(data))
        except OSError as error:
            raise JournalError(_unwritten(path, error.strerror or str(error))) from error
        return Segment(name=name, rows=[_index(e, *p) for e, p in zip(episodes, places, strict=True)])

    def commit(self, events: Sequence[AnyEvent], segments: Iterable[Segment] = ()) -> None:
        """Append events and index their episodes, in one transaction. Raises JournalError; nothing is half there."""
        now, seq, chain = time.time(), self.seq, self._chain
        values = []
        for event in events:
            event.at = event.at or now
            body = encode_event(event)
            seq, chain = seq + 1, zlib.crc32(body, chain)
            values.append((seq, event.at, type(event).__struct_config__.tag, body, chain))
        try:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                for segment in segments:
                    self.db.executemany(
                        f"INSERT INTO episodes ({','.join(_COLUMNS)}) VALUES ({','.join('?' * len(_COLUMNS))})",
                        segment.rows,
                    )
                self.db.executemany("INSERT INTO events VALUES (?,?,?,?,?)", values)
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise JournalError(_unwritten(self.path, str(error))) from error
        self.seq, self._chain = seq, chain

    # -------------------------------------------------------------------------------------------------- reading

    def events(self, after: int = 0) -> Iterator[AnyEvent]:
        """Events with a sequence number above `after`, checked against the chain. Raises JournalError."""
        good = after
        try:
            if self.empty:
                return
            row = self.db.execute("SELECT chain FROM events WHERE seq = ?", (after,)).fetchone()
            chain = row[0] if row and isinstance(row[0], int) else 0  # a damaged page may show an event 0
            for seq, body, expected in self.db.execute(
                "SELECT seq, body, chain FROM events WHERE seq > ? ORDER BY seq", (after,)
            ):
                chain = zlib.crc32(body, chain) if isinstance(body, bytes) else -1
                if seq != good + 1 or chain != expected:
                    raise JournalError(_broken(self.path, good, f"event {good + 1} does not match its checksum"))
                yield event_decoder.decode(body)
                good = seq
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise JournalError(_broken(self.path, good, str(error))) from None

    def verify(self) -> None:
        """Read every page. Raises JournalError naming what is broken and the last good state."""
        try:
            problem = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            problem = str(error)
        if problem != "ok":
            raise JournalError(_broken(self.path, _count_good(self.path), problem))

    def page(self, *, before: int | None = None, limit: int = 100, text: str = "", **filters: Any) -> list[Row]:
        """Rows of the index, newest first, below row `before`. Filters are equalities on index columns."""
        unknown = set(filters) - _FILTERS
        if unknown:
            raise ValueError(f"no filter {sorted(unknown)[0]!r}; there are {', '.join(sorted(_FILTERS))}")
        where: list[str] = ["n < ?"]
        values: list[Any] = [before if before is not None else 1 << 62]
        by = next((key for key in _NARROW if key in filters), "")
        for key, value in filters.items():
            indexed = key == by or (by == "harness" and key == "policy")
            where.append(f"{key if indexed else '+' + key} = ?")  # the plus keeps SQLite from taking that one's index
            values.append(value)
        if text:
            where.append(r"(answer LIKE ? ESCAPE '\' OR reason LIKE ? ESCAPE '\' OR task LIKE ? ESCAPE '\')")
            values += ["%" + re.sub(r"([%_\\])", r"\\\1", text) + "%"] * 3
        query = f"SELECT n, {', '.join(_COLUMNS)} FROM episodes WHERE {' AND '.join(where)} ORDER BY n DESC LIMIT ?"
        try:
            if self.empty:
                return []
            found = self.db.execute(query, (*values, limit)).fetchall()
            return [msgspec.convert(dict(zip(Row.__struct_fields__, r, strict=True)), Row, strict=False) for r in found]
        except (sqlite3.Error, msgspec.ValidationError) as error:
            raise JournalError(_broken(self.path, _count_good(self.path), f"its index: {error}")) from None

    def counts(self) -> dict[str, int]:
        """Episode records by purpose: what the ledger must add up to."""
        return {} if self.empty else dict(self.db.execute("SELECT purpose, count(*) FROM episodes GROUP BY purpose"))

    def rewards(self, segment: str) -> dict[str, list[float]]:
        """Task -> rewards of a segment's non-invalid episodes, in their order: from the index alone."""
        query = "SELECT task, verdict = 'accept' FROM episodes WHERE segment = ? AND verdict != 'invalid' ORDER BY n"
        found: dict[str, list[float]] = {}
        try:
            for task, reward in self.db.execute(query, (segment,)):
                found.setdefault(task, []).append(float(reward))
        except sqlite3.Error as error:
            raise JournalError(_broken(self.path, _count_good(self.path), f"its index: {error}")) from None
        return found

    def segment(self, name: str) -> list[Episode]:
        """Every episode of a segment. Raises JournalError naming the file when it is missing or broken."""
        path = self.segments / f"{name}.msgpack.zst"
        out: list[Episode] = []
        for data in _frames(path):
            out += _decode(path, data)
        return out

    def episode(self, row: Row) -> Episode:
        """The token-level record behind a row of the index."""
        path = self.segments / f"{row.segment}.msgpack.zst"
        try:
            with path.open("rb") as file:
                file.seek(row.frame)
                frame, data = zstandard.ZstdDecompressor().decompressobj(), b""
                while not frame.eof and (piece := file.read(1 << 16)):
                    data += frame.decompress(piece)
        except (OSError, zstandard.ZstdError) as error:
            raise JournalError(f"{path}: can't be read: {error}") from None
        return _decode(path, data)[row.place]


def _index(e: Episode, segment: str, frame: int, place: int) -> tuple[Any, ...]:
    """The index line of an episode, in the order of Row's columns after `n`."""
    return (
        e.id, segment, frame, place, e.cycle, e.phase, e.step, e.iteration, e.purpose, e.task, e.sample, e.policy,
        e.harness, e.verdict, e.reason[:200], e.truncated, e.answer[:200], len(e.calls), e.prompt_tokens,
        e.output_tokens, e.seconds,
    )  # fmt: skip


def _frames(path: Path) -> Iterator[bytes]:
    try:
        data = path.read_bytes()
        while data:
            decompressor = zstandard.ZstdDecompressor().decompressobj()
            yield decompressor.decompress(data)
            data = decompressor.unused_data
    except (OSError, zstandard.ZstdError) as error:
        raise JournalError(f"{path}: can't be read: {error}") from None


def _decode(path: Path, data: bytes) -> list[Episode]:
    try:
        return _episodes_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise JournalError(f"{path}: not a segment of episodes: {error}") from None


def repair(path: Path) -> int:
    """Keep the good events and the episodes they name; the broken file stays beside as .broken. Returns events kept.

    An event whose segment is gone, or holds other than the episodes it counts, ends what is good.
    """
    if not path.exists():
        raise JournalError(f"{path}: there is no journal to repair")
    beside, broken = path.with_suffix(".sqlite.repaired"), path.with_suffix(".sqlite.broken")
    for stale in (beside, broken):
        for suffix in ("", "-wal", "-shm"):
            Path(f"{stale}{suffix}").unlink(missing_ok=True)
    old, new, kept = Journal(path, read_only=True), Journal(beside), 0
    new.db.execute(
        "PRAGMA synchronous=NORMAL"
    )  # on disk with the checkpoint below, before it takes the old one's place
    try:
        for event in old.events():
            score = getattr(event, "score", None)
            name = getattr(event, "segment", "") or getattr(score, "segment", "")
            episodes = new.segment(name) if name else []
            batch = getattr(event, "batch", None) or getattr(event, "smoke", None) or getattr(score, "batch", None)
            if batch is not None and batch.episodes != len(episodes):
                break
            new.commit([event], [new.write_segment(episodes, name)] if name else [])
            kept += 1
    except JournalError:
        pass  # the end of what is good: that is what was asked for
    new.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    old.close()
    broken.hardlink_to(path)
    if Path(f"{path}-wal").exists():
        Path(f"{path}-wal").replace(f"{broken}-wal")
    Path(f"{path}-shm").unlink(missing_ok=True)
    beside.replace(path)
    sync_folder(path.parent)
    return kept


def _count_good(path: Path) -> int:
    """How many events from the first on are good."""
    journal, good = Journal(path, read_only=True), 0
    try:
        for _ in journal.events():
            good += 1
    except JournalError:
        pass
    finally:
        journal.close()
    return good


def _unwritten(path: Path, problem: str) -> str:
    return f"{path}: can't be written ({problem}); nothing was lost: free space and resume"


def _broken(path: Path, good: int, problem: str) -> str:
    return (
        f"{path}: damaged after event {good} ({problem}); the first {good} events are good: "
        f"`whale-tui repair {path.parent.name}` goes back to them and keeps the broken file"
    )
