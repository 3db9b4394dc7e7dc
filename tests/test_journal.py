"""The journal: all or nothing, every damage named with what is still good, and a repair that adds up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.test_accepted import call, episode
from whale_tui import records as r
from whale_tui.journal import Journal, JournalError, repair
from whale_tui.loop.state import replay
from whale_tui.records import Episode, summarise
from whale_tui.rundir import RunDir


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here pulls the plug: what a killed process wrote is in the kernel's hands, fsync or not."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "one")
    made.create()
    return made


def made(step: int, count: int) -> list[Episode]:
    return [
        episode(
            f"e{step}-{n}", f"task-{n % 5}", call(*range(n % 7 + 1), prompt=(step, n)), step=step, sample=n,
            verdict=("accept", "reject", "invalid")[n % 3], answer=f"answer {n}", reason=f"reason of {step}",
            truncated=n % 4 == 0,
        )
        for n in range(count)
    ]  # fmt: skip


def start() -> r.RunStarted:
    from tests.simulator import Simulator, make_config

    event = Simulator(make_config()).events[0]
    assert isinstance(event, r.RunStarted)
    return event


def fill(run: RunDir, steps: int = 20, per_step: int = 30) -> Journal:
    """A weight phase: each step's episodes in a segment, committed with the event that names it."""
    journal = Journal(run.journal)
    journal.db.execute("PRAGMA synchronous=OFF")
    journal.commit([start(), r.PhaseStarted(cycle=1, phase="weight", reason="")])
    for step in range(1, steps + 1):
        add_step(journal, step, per_step)
    return journal


def add_step(journal: Journal, step: int, per_step: int = 30) -> None:
    episodes = made(step, per_step)
    segment = journal.write_segment(episodes)
    sampled = r.StepSampled(
        step=step, policy="theta-0000", harness="h0000", tasks_drawn=step, batch=summarise(episodes, 1.0),
        segment=segment.name,
    )  # fmt: skip
    journal.commit([sampled], [segment])
    journal.commit([r.StepFinished(step=step, policy="theta-0000", trained=1, trained_tokens=9, loss=0.5, grad_norm=1.0,
                                   seconds=1.0)])  # fmt: skip


def adds_up(journal: Journal) -> int:
    """Events, after asserting that the ledger equals the episode records."""
    events = list(journal.events())
    state = replay(events)
    ledger = {"train": state.ledger["weight/train"].episodes} if "weight/train" in state.ledger else {}
    assert journal.counts() == ledger
    return len(events)


# ------------------------------------------------------------------------------------------------------- round trips


def test_events_and_episodes_come_back_as_they_were(run: RunDir) -> None:
    journal = fill(run, steps=3, per_step=150)  # three frames
    again = Journal(run.journal, read_only=True)
    assert list(again.events()) == list(journal.events())
    assert [type(e) for e in again.events(after=2)][:2] == [r.StepSampled, r.StepFinished]
    for step in (1, 3):
        assert again.segment(f"{step:08d}") == made(step, 150)
    rows = again.page(limit=1000)
    assert len(rows) == 450
    for row in rows[::37]:
        one = again.episode(row)
        assert one == made(row.step, 150)[row.sample]
        assert (row.id, row.verdict, row.truncated, row.calls) == (one.id, one.verdict, one.truncated, 1)
        assert (row.prompt_tokens, row.output_tokens) == (one.prompt_tokens, one.output_tokens)


def test_opening_again_goes_on_where_it_ended(run: RunDir) -> None:
    fill(run, steps=2).close()
    journal = Journal(run.journal)
    assert journal.seq == 6
    add_step(journal, 3)
    assert adds_up(journal) == 8 and len(list(run.episodes.iterdir())) == 3


def test_a_segment_that_no_event_came_to_name_is_written_over(run: RunDir) -> None:
    journal = fill(run, steps=1)
    lost = journal.write_segment(made(9, 5))
    journal.close()
    journal = Journal(run.journal)
    assert journal.write_segment(made(2, 5)).name == lost.name
    assert journal.segment(lost.name) == made(2, 5)


# ------------------------------------------------------------------------------------------------------ filters, pages


@pytest.fixture
def filled(run: RunDir) -> Journal:
    return fill(run, steps=6, per_step=17)


def test_pages_are_newest_first_without_gaps_or_repeats(filled: Journal) -> None:
    seen, before = [], None
    while page := filled.page(before=before, limit=10):
        seen += [row.n for row in page]
        before = page[-1].n
    assert seen == list(range(6 * 17, 0, -1))


def test_pages_do_not_shift_while_episodes_come_in(filled: Journal) -> None:
    first = filled.page(limit=10)
    add_step(filled, 7, 5)
    assert [row.n for row in filled.page(before=first[-1].n, limit=10)] == list(range(92, 82, -1))


@pytest.mark.parametrize(
    ("filters", "keep"),
    [
        ({"verdict": "accept"}, lambda e: e.verdict == "accept"),
        ({"verdict": "invalid", "step": 3}, lambda e: e.verdict == "invalid" and e.step == 3),
        ({"task": "task-2"}, lambda e: e.task == "task-2"),
        ({"truncated": True}, lambda e: e.truncated),
        ({"truncated": False, "policy": "theta-0000"}, lambda e: not e.truncated),
        ({"harness": "h0009"}, lambda e: False),
        ({"text": "answer 16"}, lambda e: e.answer == "answer 16"),
        ({"text": "ANSWER 16"}, lambda e: e.answer == "answer 16"),
        ({"text": "reason of 4", "phase": "weight", "purpose": "train"}, lambda e: e.step == 4),
        ({"text": "task-1"}, lambda e: e.task == "task-1"),
        ({"text": "%"}, lambda e: False),
        ({"text": "answer_16"}, lambda e: False),
        ({"text": "\\"}, lambda e: False),
        ({"text": "' OR 1 --"}, lambda e: False),
    ],
)
def test_filters(filled: Journal, filters: dict[str, Any], keep: Any) -> None:
    wanted = [e.id for step in range(6, 0, -1) for e in reversed(made(step, 17)) if keep(e)]
    assert [row.id for row in filled.page(limit=1000, **filters)] == wanted


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ({}, ""),
        ({"harness": "h0000"}, "by_harness"),
        ({"harness": "h0000", "verdict": "accept", "purpose": "train"}, "by_harness"),
        ({"harness": "h0000", "policy": "theta-0000", "verdict": "accept"}, "by_pair"),
        ({"policy": "theta-0000", "purpose": "train"}, "by_policy"),
        ({"task": "task-1", "harness": "h0000"}, "by_task"),
        ({"step": 3, "verdict": "accept"}, "by_step"),
        ({"iteration": 3}, "by_iteration"),
        ({"verdict": "accept"}, "by_verdict"),
    ],
)
def test_a_filter_goes_by_its_narrowest_index_and_sorts_nothing(
    filled: Journal, filters: dict[str, Any], index: str
) -> None:
    asked: list[str] = []
    filled.db.set_trace_callback(asked.append)
    filled.page(**filters)
    filled.db.set_trace_callback(None)
    (plan,) = (row[3] for row in filled.db.execute(f"EXPLAIN QUERY PLAN {asked[-1]}"))
    assert (f"USING INDEX {index} " if index else "USING INTEGER PRIMARY KEY") in plan


def test_an_unknown_filter_is_named(filled: Journal) -> None:
    with pytest.raises(ValueError, match=r"no filter 'colour'; there are cycle, harness"):
        filled.page(colour="red")


# ------------------------------------------------------------------------------------------- readers beside the writer


def test_a_reader_sees_whole_commits_while_the_writer_goes_on(run: RunDir) -> None:
    writer = fill(run, steps=1)
    reader = Journal(run.journal, read_only=True)
    for step in range(2, 8):
        add_step(writer, step)
        assert adds_up(reader) == 2 + 2 * step
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.db.execute("DELETE FROM events")


def test_a_reader_that_came_before_the_tables_sees_what_is_written_later(run: RunDir) -> None:
    sqlite3.connect(run.journal).execute("PRAGMA journal_mode=WAL")
    reader = Journal(run.journal, read_only=True)
    assert list(reader.events()) == [] and reader.page() == [] and reader.counts() == {}
    fill(run, steps=1)
    assert adds_up(reader) == 4 and len(reader.page()) == 30


def test_a_second_writer_waits_and_a_locked_journal_is_an_error_without_loss(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = fill(run, steps=1)
    other = sqlite3.connect(run.journal, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.db.execute("PRAGMA busy_timeout = 50")
    with pytest.raises(JournalError, match=r"can't be written .*locked.*nothing was lost"):
        add_step(journal, 2)
    other.execute("ROLLBACK")
    add_step(journal, 2)
    assert adds_up(journal) == 6


# --------------------------------------------------------------------------------------------------------- atomicity


def test_a_failing_commit_leaves_nothing(run: RunDir) -> None:
    journal = fill(run, steps=1)
    segment = journal.write_segment(made(2, 4))
    segment.rows[2] = segment.rows[2][:-1]  # one value too few: fails in the middle of the segment's rows
    with pytest.raises(JournalError):
        journal.commit([r.Warned(text="x")], [segment])
    assert adds_up(journal) == 4 and journal.seq == 4
    add_step(journal, 2)
    assert adds_up(Journal(run.journal, read_only=True)) == 6


WRITER = """
import sys
from pathlib import Path
from tests.test_journal import add_step
from whale_tui.journal import Journal
journal = Journal(Path(sys.argv[1]))
print("ready", flush=True)
step = 2
while True:
    add_step(journal, step, 300)
    step += 1
"""


@pytest.mark.parametrize("after", [0.05, 0.13, 0.31])
def test_a_writer_killed_at_any_moment_leaves_whole_commits(run: RunDir, after: float) -> None:
    fill(run, steps=1, per_step=300).close()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run.journal)], stdout=subprocess.PIPE,
                              cwd=Path(__file__).parent.parent)  # fmt: skip
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    time.sleep(after)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    journal = Journal(run.journal)
    journal.verify()
    events = adds_up(journal)
    assert events >= 4
    for segment in {row.segment for row in journal.page(limit=100_000)}:
        assert len(journal.segment(segment)) == 300
    add_step(journal, events, 7)
    assert adds_up(journal) == events + 2
    writer.stdout.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.test_journal import add_step, adds_up, made
from whale_tui.journal import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
add_step(journal, 2)
log = Path(sys.argv[1] + "-wal").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (100 if sys.argv[2] == "segment" else log + 9000, resource.RLIM_INFINITY))
failure, step = "", 2
while not failure:
    step += 1
    try:
        add_step(journal, step)
    except JournalError as error:
        failure = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert adds_up(journal) == journal.seq
if journal.seq % 2 == 0:
    add_step(journal, step)
assert adds_up(journal) == journal.seq
print(failure)
"""


@pytest.mark.parametrize(("what", "named"), [("journal", "journal.sqlite"), ("segment", "00000003.msgpack.zst")])
def test_a_full_disk_is_one_error_with_nothing_half(run: RunDir, what: str, named: str) -> None:
    """The kernel refuses to let a file grow, at a segment or at the journal itself; with room again, it goes on."""
    fill(run, steps=1).close()
    done = subprocess.run([sys.executable, "-c", FULL, str(run.journal), what], capture_output=True, text=True,
                          cwd=Path(__file__).parent.parent, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    problem = rf"{re.escape(named)}: can't be written \(.+\); nothing was lost: free space and resume"
    assert re.search(problem, done.stdout)
    journal = Journal(run.journal)
    journal.verify()
    adds_up(journal)
    assert not [p for p in run.episodes.iterdir() if p.name.startswith(".")]  # no half segment beside


# ------------------------------------------------------------------------------------------------------------ damage


def test_a_flipped_byte_in_an_event_is_found_and_what_is_before_it_is_good(run: RunDir) -> None:
    journal = fill(run, steps=5)
    body = bytearray(journal.db.execute("SELECT body FROM events WHERE seq = 7").fetchone()[0])
    place = body.index(b'"segment":"0') + 11
    body[place] ^= 1  # still valid JSON, and a segment that could exist
    journal.db.execute("UPDATE events SET body = ? WHERE seq = 7", (bytes(body),))
    with pytest.raises(JournalError, match=r"after event 6 \(event 7 does not match its checksum\); the first 6"):
        list(journal.events())
    assert len(list(journal.events(after=7))) == 5  # those after it are chained to the right one


@pytest.mark.parametrize("change", ["body = 'text'", "body = NULL", "body = 5", "chain = 'x'", "seq = 99"])
def test_a_row_of_another_kind_is_damage_not_a_crash(run: RunDir, change: str) -> None:
    journal = fill(run, steps=5)
    journal.db.executescript("CREATE TABLE loose (seq INTEGER PRIMARY KEY, at, type, body, chain);"
                             "INSERT INTO loose SELECT * FROM events; DROP TABLE events;"
                             "ALTER TABLE loose RENAME TO events;")  # fmt: skip
    journal.db.execute(f"UPDATE events SET {change} WHERE seq = 7")
    with pytest.raises(JournalError, match="after event 6"):
        list(journal.events())
    journal.close()
    assert repair(run.journal) == 6
    assert adds_up(Journal(run.journal)) == 6


def test_a_dropped_event_is_found(run: RunDir) -> None:
    journal = fill(run, steps=3)
    journal.db.execute("DELETE FROM events WHERE seq = 5")
    with pytest.raises(JournalError, match="damaged after event 4"):
        list(journal.events())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("whole") / "one")
    run.create()
    journal = fill(run, steps=12)
    journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal.close()
    return run


@limits(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), length=st.sampled_from([1, 40, 4096, 20_000]), filler=st.sampled_from([0, 255, 65]))
@example(place=0.564453125, length=4096, filler=0)
def test_overwritten_bytes_anywhere_end_in_an_error_or_a_whole_journal(
    tmp_path_factory: pytest.TempPathFactory, whole: RunDir, place: float, length: int, filler: int
) -> None:
    """Nothing but JournalError may come out; a repair keeps a prefix that adds up, and can be gone on with."""
    run = RunDir(tmp_path_factory.mktemp("damaged") / "one")
    shutil.copytree(whole.path, run.path)
    good = list(Journal(run.journal, read_only=True).events())
    size = run.journal.stat().st_size
    with run.journal.open("r+b") as file:
        file.seek(int(place * (size - 1)))
        file.write(bytes([filler]) * min(length, size - file.tell()))
    problem = ""
    try:
        opened = Journal(run.journal)
        opened.verify()
        assert list(opened.events()) == good
        opened.page(limit=1000)
        opened.close()
    except JournalError as error:
        problem = str(error)
        assert str(run.journal) in problem
        assert "whale-tui repair one" in problem or "can't be opened" in problem
    kept = repair(run.journal)
    assert run.journal.with_suffix(".sqlite.broken").exists()
    mended = Journal(run.journal)
    mended.verify()
    assert adds_up(mended) == kept
    assert list(mended.events()) == good[:kept]
    if not problem:
        assert kept == len(good)
    if kept >= 2 and kept % 2 == 0:  # between two steps
        add_step(mended, 99)
        assert adds_up(mended) == kept + 2
    mended.close()


def test_damage_is_named_with_the_last_good_state_and_the_mend(run: RunDir) -> None:
    journal = fill(run, steps=20)
    journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    root = journal.db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'episodes'").fetchone()[0]
    journal.close()
    with run.journal.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(JournalError) as error:
        Journal(run.journal).verify()
    assert f"{run.journal}: damaged" in str(error.value)
    assert "the first 42 events are good: `whale-tui repair one`" in str(error.value)
    assert repair(run.journal) == 42  # the index is made again from the segments
    assert adds_up(Journal(run.journal)) == 42


def test_a_file_that_is_no_journal(run: RunDir) -> None:
    run.journal.write_bytes(b"not a database at all, " * 400)
    with pytest.raises(JournalError, match="the first 0 events are good"):
        Journal(run.journal)
    with pytest.raises(JournalError):
        list(Journal(run.journal, read_only=True).events())
    assert repair(run.journal) == 0
    assert list(Journal(run.journal).events()) == []


def test_repair_of_nothing_says_so(run: RunDir) -> None:
    with pytest.raises(JournalError, match="no journal to repair"):
        repair(run.journal)


def test_repair_takes_what_is_only_in_the_write_ahead_log(run: RunDir) -> None:
    journal = fill(run, steps=3)  # open: nothing is checkpointed
    assert repair(run.journal) == 8
    journal.close()
    assert adds_up(Journal(run.journal)) == 8


def test_a_missing_segment_is_named_and_ends_what_is_good(run: RunDir) -> None:
    journal = fill(run, steps=5)
    lost = run.episodes / "00000003.msgpack.zst"
    lost.unlink()
    with pytest.raises(JournalError, match=f"{lost}: can't be read"):
        journal.segment("00000003")
    row = next(row for row in journal.page(limit=1000) if row.segment == "00000003")
    with pytest.raises(JournalError, match=f"{lost}: can't be read"):
        journal.episode(row)
    journal.close()
    assert repair(run.journal) == 2 + 2 * 2
    assert adds_up(Journal(run.journal)) == 6


def test_a_flipped_byte_anywhere_in_a_segment_is_found(run: RunDir) -> None:
    """Most would decompress to other token ids without a word: each frame has a checksum."""
    journal = fill(run, steps=1, per_step=130)
    path = run.episodes / "00000001.msgpack.zst"
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(JournalError, match=r"00000001\.msgpack\.zst"):
            journal.segment("00000001")
    path.write_bytes(whole)
    assert journal.segment("00000001") == made(1, 130)


def test_a_segment_cut_between_two_frames_does_not_pass_a_repair(run: RunDir) -> None:
    journal = fill(run, steps=1, per_step=130)
    second = sorted({row.frame for row in journal.page(limit=1000)})[1]
    os.truncate(run.episodes / "00000001.msgpack.zst", second)
    journal.close()
    assert repair(run.journal) == 2
    assert adds_up(Journal(run.journal)) == 2
