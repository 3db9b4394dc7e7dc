"""Chess: Lichess rows in every layout, the referee against the whole real file, moves that the policy wrote."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import pytest
import zstandard

from tests.tiny import CHATML, _tokenizer
from whale_tui.config import Rollout
from whale_tui.domains import base
from whale_tui.domains.base import DomainError
from whale_tui.domains.chess import WORKED, Chess
from whale_tui.domains.chess.puzzles import task as as_task
from whale_tui.domains.chess.referee import Play, Referee, written
from whale_tui.domains.tables import read_rows
from whale_tui.harness import checks
from whale_tui.harness.worker import can_seal
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import Sampled, SampleRequest
from whale_tui.proposers.edits import Kit, Source, generic
from whale_tui.records import Episode, Sampling, Task, ToolUse, Verdict

REAL = Path(__file__).parents[2] / "shared" / "data" / "lichess_puzzles.csv"
real_file = pytest.mark.skipif(not REAL.is_file(), reason="shared/data/lichess_puzzles.csv is not here")

COLUMNS = ["PuzzleId", "FEN", "Moves", "Rating", "RatingDeviation", "Popularity", "NbPlays", "Themes", "GameUrl",
           "OpeningTags"]  # fmt: skip
ROWS = [
    ["m1", "5rk1/5ppp/8/8/8/8/5PPP/R5K1 b - - 0 1", "f8b8 a1a8", "600", "80", "95", "100", "mate mateIn1 backRankMate",
     "https://lichess.org/x#1", ""],
    ["m2", "5k2/8/8/8/8/8/RR6/6K1 b - - 0 1", "f8g8 a2a7 g8f8 b2b8", "900", "80", "95", "100", "mate mateIn2", "u", ""],
    ["pr", "8/1P4k1/8/8/8/8/8/6K1 b - - 0 1", "g7h6 b7b8q", "1200", "80", "95", "100", "promotion crushing", "u", ""],
    ["ca", "3k4/7p/8/8/8/8/8/4K2R b K - 0 1", "d8e8 e1g1", "1500", "80", "95", "100", "castling", "u", "Some_Opening"],
    ["ep", "4k3/3p4/8/4P3/8/8/8/4K3 b - - 0 1", "d7d5 e5d6", "1800", "80", "95", "100", "enPassant endgame", "u", ""],
    ["r6", "6k1/7p/8/8/8/8/8/R6K b - - 0 1", "h7h6 a1a6", "2000", "80", "95", "100", "endgame crushing", "u", ""],
]  # fmt: skip
SMALL = {"harness": 1, "test": 1}


def write_csv(file: Path, rows: Sequence[Sequence[str]] = ROWS, columns: Sequence[str] = COLUMNS) -> Path:
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([columns, *rows])
    return file


def load(file: Path, **options: Any) -> Any:
    return base.load("chess", {"puzzles": str(file), **SMALL, **options})


def tasks_of(domain: Any) -> dict[str, Task]:
    return {task.key: task for split in ("weight", "harness", "test") for task in domain.tasks(split)}


def an_episode(uses: Sequence[ToolUse]) -> Episode:
    return Episode(
        id="", cycle=0, phase=None, step=0, iteration=0, purpose="test", task="", task_hash="", sample=0, policy="",
        policy_hash="", harness="", harness_hash="", tokenizer_hash="", sampling=Sampling(), calls=[], tools=list(uses),
        answer="", verdict="reject", reason="", truncated=False, reward=None, seconds=0,
    )  # fmt: skip


def played(domain: Any, task: Task, moves: Sequence[str], said: str | None = None) -> Verdict:
    """The verdict over these moves, each tried and recorded as rollouts do; the policy said `said`, or every move."""
    tools, uses = domain.tools(task), []
    for move in moves:
        try:
            result = json.dumps(tools["move"](move))
        except ValueError as refusal:
            result = f"ToolError: {refusal}"
        uses.append(ToolUse("move", repr(move), result, 0.0, after_call=1))
    sampled = [" ".join(map(str, moves)) if said is None else said]
    return domain.verify(task, "nothing", an_episode(uses), sampled=sampled, tools=tools)


# --------------------------------------------------------------------------------------------------------- the layouts


def test_csv_zst_and_parquet_give_the_same_tasks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    plain = write_csv(tmp_path / "puzzles.csv")
    packed = tmp_path / "puzzles.csv.zst"
    packed.write_bytes(zstandard.compress(plain.read_bytes()))
    newer = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    for row in newer:
        row |= {"GameId": row.pop("GameUrl"), "Themes": row["Themes"].split(), "Rating": int(row["Rating"]), "More": 1}  # type: ignore[dict-item]
    parquet.write_table(pyarrow.Table.from_pylist(newer), tmp_path / "puzzles.parquet")
    spelt = write_csv(
        tmp_path / "spelt.csv",
        [[*row[:7], str(row[7].split()), *row[8:], "2024"] for row in ROWS],
        [*COLUMNS[:8], "GameId", "OpeningTags", "DailyDate"],
    )
    hashes = set()
    for file in (plain, packed, tmp_path / "puzzles.parquet", spelt):
        domain = load(file, themes_any=["endgame", "MATE"], rating_max=1999)
        assert sorted(tasks_of(domain)) == ["ep", "m1", "m2"]
        hashes.add(tuple(task.hash for split in ("weight", "harness", "test") for task in domain.tasks(split)))
    assert len(hashes) == 1
    task = tasks_of(load(plain))["m2"]
    assert task.public == {"fen": "6k1/8/8/8/8/8/RR6/6K1 w - - 1 2"} and task.private == {"line": "a2a7 g8f8 b2b8"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"rating_min": 1500}, "ca ep r6"),
        ({"rating_min": 900, "rating_max": 1500}, "ca m2 pr"),
        ({"themes_all": ["endgame", "crushing"], "themes_any": []}, "r6"),
        ({"themes_any": ["endgame", "crushing"]}, "ep pr r6"),
        ({"plies_min": 2}, "m2"),
        ({"plies_max": 1}, "ca ep m1 pr r6"),
        ({"number": 3}, "m1 m2 pr"),
    ],
)
def test_filters(tmp_path: Path, options: dict[str, Any], kept: str) -> None:
    file = write_csv(tmp_path / "puzzles.csv")
    if len(kept.split()) < 3:  # three splits need three puzzles
        with pytest.raises(DomainError, match=rf"{len(kept.split())} tasks are too few.*from 6 rows"):
            load(file, **options)
    else:
        assert sorted(tasks_of(load(file, **options))) == kept.split()


def test_the_report_says_what_was_left_out_and_the_cut_follows_the_seed(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "puzzles.csv", [*ROWS, ROWS[0]])
    domain = load(file, rating_max=1900)
    said = "\n".join(domain.report.lines())
    assert "puzzles.csv: 5 tasks, from 7 rows, 1 duplicates dropped, 1 dropped: another rating (first at" in said
    assert "puzzles.csv:7)" in said and "D_weight: 3 tasks" in said

    def cut(rows: Sequence[Sequence[str]], seed: int) -> list[set[str]]:
        again = load(write_csv(file, rows), seed=seed)
        return [{task.key for task in again.tasks(split)} for split in ("weight", "harness", "test")]

    assert cut(ROWS, 0) == cut(ROWS[::-1], 0)
    assert any(cut(ROWS, 0) != cut(ROWS, seed) for seed in range(1, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({1: "not a position"}, "the FEN 'not a position' can't be read"),
        ({1: "8/8/8/8/8/8/8/K7 w - - 0 1"}, "the FEN '8/8/8/8/8/8/8/K7 w - - 0 1' is no position of a game"),
        ({1: ""}, "FEN is '', not a text"),
        ({2: "f8b8"}, "Moves has 1 moves"),
        ({2: "f8b8 a1a8 b8a8"}, "Moves has 3 moves"),
        ({2: "f8b8 a1h8"}, "move 2 of 'f8b8 a1h8' is not legal: a1h8"),
        ({2: "f8b8 zz"}, "move 2 of 'f8b8 zz' is not legal"),
        ({2: "0000 a1a8"}, "move 1 of '0000 a1a8' is none"),
        ({3: "strong"}, "Rating is 'strong', not a number"),
        ({0: ""}, "PuzzleId is ''"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path: Path, change: dict[int, str], words: str) -> None:
    broken = [change.get(place, value) for place, value in enumerate(ROWS[0])]
    file = write_csv(tmp_path / "puzzles.csv", [*ROWS[1:], broken])
    with pytest.raises(DomainError, match=re.escape(f"{file}:7: {words}")) as caught:
        load(file, rating_min=1)
    assert "mend the row or delete it" in str(caught.value)


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"nowhere\.csv: no such file; .*lichess_db_puzzle\.csv\.zst"):
        load(tmp_path / "nowhere.csv")
    file = write_csv(tmp_path / "puzzles.csv", [row[:2] for row in ROWS], COLUMNS[:2])
    with pytest.raises(DomainError, match=r"puzzles\.csv:2: no column Moves; .*this file has PuzzleId, FEN"):
        load(file)
    with pytest.raises(DomainError, match=r"number_of.*did you mean number\?"):
        load(file, number_of=3)


# --------------------------------------------------------------------------------------------------------- the referee


def other_move(board: chess.Board, right: chess.Move) -> chess.Move | None:
    """A legal move that is neither the right one nor mate."""
    for move in sorted(board.legal_moves, key=chess.Move.uci):
        if move != right:
            board.push(move)
            mate = board.is_checkmate()
            board.pop()
            if not mate:
                return move
    return None


@pytest.fixture(scope="module")
def whole() -> Any:
    return base.load("chess", {"puzzles": str(REAL)})


@real_file
def test_every_real_line_is_accepted_and_with_any_one_move_changed_it_is_rejected(whole: Any) -> None:
    tasks, changed = tasks_of(whole), 0
    assert len(tasks) == 1499
    for task in tasks.values():
        line = task.private["line"].split()
        own = line[::2]
        assert played(whole, task, own).decision == "accept", task.key
        board = chess.Board(task.public["fen"])
        for number, move in enumerate(own):
            wrong = other_move(board, chess.Move.from_uci(move))
            if wrong is not None:
                verdict = played(whole, task, [*own[:number], wrong.uci(), *own[number + 1 :]])
                assert verdict.decision == "reject", (task.key, wrong)
                assert verdict.reason.startswith(f"move {number + 1}: "), verdict
                changed += 1
            for each in line[2 * number : 2 * number + 2]:
                board.push_uci(each)
        if len(own) > 1:
            verdict = played(whole, task, own[:-1])
            assert verdict.decision == "reject" and "left open" in verdict.reason
    assert changed > 2500


@real_file
def test_every_other_mate_solves_the_real_mates_in_one(whole: Any) -> None:
    others = 0
    for task in tasks_of(whole).values():
        board = chess.Board(task.public["fen"])
        line = task.private["line"].split()
        for move in list(board.legal_moves) if len(line) == 1 else ():
            board.push(move)
            if board.is_checkmate() and move.uci() != line[0]:
                assert played(whole, task, [move.uci()]) == Verdict("accept", "checkmate")
                others += 1
            board.pop()
    assert others > 10


@real_file
def test_no_worked_example_is_a_real_puzzle_and_the_tools_give_no_mate_away(whole: Any) -> None:
    tasks = tasks_of(whole)
    assert not {fen.split()[0] for fen, _ in WORKED} & {task.public["fen"].split()[0] for task in tasks.values()}
    for task in list(tasks.values())[:200]:
        tools = whole.tools(task)
        legal = tools["legal_moves"]()
        assert "#" not in json.dumps([legal, tools["board"]()]) and legal == sorted(legal, key=lambda m: m["uci"])
        board = chess.Board(task.public["fen"])
        assert {move["uci"] for move in legal} == {move.uci() for move in board.legal_moves}
        for move in legal:
            assert board.parse_san(move["san"]).uci() == move["uci"]


def domain_of(tmp_path: Path, **options: Any) -> tuple[Any, dict[str, Task]]:
    domain = load(write_csv(tmp_path / "puzzles.csv"), **options)
    return domain, tasks_of(domain)


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [("pr", "b7b8q", "b7b8n"), ("ca", "e1g1", "e1f1"), ("ep", "e5d6", "e5e6"), ("r6", "a1a6", "a1a8")],
)
def test_promotion_castling_and_en_passant(tmp_path: Path, key: str, right: str, wrong: str) -> None:
    domain, tasks = domain_of(tmp_path)
    legal = {move["uci"]: move for move in domain.tools(tasks[key])["legal_moves"]()}
    assert {right, wrong} <= legal.keys()
    assert played(domain, tasks[key], [right]) == Verdict("accept", "the whole line was played")
    assert played(domain, tasks[key], [f" {right.upper()} "]).decision == "accept"
    assert "is legal and not the solution" in played(domain, tasks[key], [wrong]).reason
    assert legal[right]["promotion"] == (key == "pr") and legal[right]["capture"] == (key == "ep")
    if key == "pr":
        assert played(domain, tasks[key], ["b7b8"]).reason == "the puzzle was left open after 0 of 1 moves"
        assert played(domain, tasks[key], ["b7b8", "b7b8q"]).decision == "accept"


def test_moves_and_replies_as_the_tools_tell_them(tmp_path: Path) -> None:
    domain, tasks = domain_of(tmp_path)
    tools = domain.tools(tasks["m2"])
    before = tools["board"]()
    assert before["to_move"] == "white" and before["played"] == [] and before["status"] == "open"
    assert before["board"].splitlines()[-1] == "  a b c d e f g h" and "2 R R . . . . . ." in before["board"]
    first = tools["move"]("a2a7")
    assert {k: first[k] for k in ("result", "played", "san", "reply", "reply_san")} == {
        "result": "accepted", "played": "a2a7", "san": "Ra7", "reply": "g8f8", "reply_san": "Kf8",
    }  # fmt: skip
    assert tools["board"]()["played"] == ["a2a7", "g8f8"] and tools["board"]()["fen"] == first["fen"]
    last = tools["move"]("b2b8")
    assert last["result"] == "solved" and last["reply"] is None and last["san"] == "Rb8#"
    assert tools["legal_moves"]() == [] and tools["board"]()["status"] == "solved"
    with pytest.raises(ValueError, match="the puzzle is over: solved"):
        tools["move"]("g1h1")


BAD = ["a1h8", "e2e5", "0000", "--", "", "Ra8", "e7e8k", "a1a8a1a8", "\0", "a" * 9999, None, 7, ["a1a8"], "P@e4"]


@pytest.mark.parametrize("move", BAD)
def test_a_bad_move_is_refused_and_the_retries_are_bounded(tmp_path: Path, move: Any) -> None:
    domain, tasks = domain_of(tmp_path, retries=2)
    tools = domain.tools(tasks["m1"])
    for left in (2, 1):
        with pytest.raises(ValueError, match=f"{left} more to try") as caught:
            tools["move"](move)
        assert len(str(caught.value)) < 200
    assert tools["board"]()["status"] == "open"
    with pytest.raises(ValueError, match="the puzzle is lost"):
        tools["move"](move)
    with pytest.raises(ValueError, match="the puzzle is over: lost"):
        tools["move"]("a1a8")
    verdict = domain.verify(tasks["m1"], "a1a8", an_episode([]), sampled=["a1a8"], tools=tools)
    assert verdict.decision == "reject" and "no retry is left" in verdict.reason


def test_a_retry_that_is_right_still_counts_and_a_legal_wrong_move_is_final(tmp_path: Path) -> None:
    domain, tasks = domain_of(tmp_path)
    assert played(domain, tasks["m2"], ["zz", "a2a7", "b2b8"]).decision == "accept"
    assert played(domain, tasks["m2"], ["zz", "a2a7", "zz", "b2b8"]).decision == "reject"
    assert played(domain, tasks["m2"], ["b2b7", "a2a7", "b2b8"]).reason == "move 1: Rb7 is legal and not the solution"
    assert played(domain, tasks["m2"], []).reason == "the puzzle was left open after 0 of 2 moves"


# ------------------------------------------------------------------------------------------- the moves are the policy's


@pytest.mark.parametrize(
    ("fen", "uci", "said", "stands"),
    [
        ("m1", "a1a8", "I play <move>a1a8</move>", True),
        ("m1", "a1a8", "[A1A8]", True),
        ("m1", "a1a8", "1. Ra8#", True),
        ("m1", "a1a8", "1.Ra8! wins", True),
        ("m1", "a1a8", "**Ra1-a8**", True),
        ("m1", "a1a8", "a1-a8", True),
        ("m1", "a1a8", "Rook takes the back rank, a1a81", False),
        ("m1", "a1a8", "xa1a8x", False),
        ("m1", "a1a8", "a8", False),
        ("m1", "a1a8", "Ra7", False),
        ("m1", "a1a8", "", False),
        ("pr", "b7b8q", "b8=Q", True),
        ("pr", "b7b8q", "b7-b8=Q+", True),
        ("pr", "b7b8q", "b8Q", True),
        ("pr", "b7b8q", "b7b8", False),
        ("pr", "b7b8q", "b8=N", False),
        ("ca", "e1g1", "O-O", True),
        ("ca", "e1g1", "castle with 0-0!", True),
        ("ca", "e1g1", "O-O-O", False),
        ("ep", "e5d6", "exd6 e.p.", True),
        ("ep", "e5d6", "d6 is weak", False),
    ],
)
def test_a_move_stands_in_a_text_in_uci_or_san(tmp_path: Path, fen: str, uci: str, said: str, stands: bool) -> None:
    _, tasks = domain_of(tmp_path)
    assert written(Play(tasks[fen].public["fen"], uci), said) is stands


def test_a_move_that_the_policy_did_not_write_is_rejected_however_right(tmp_path: Path) -> None:
    domain, tasks = domain_of(tmp_path)
    assert played(domain, tasks["m2"], ["a2a7", "b2b8"], "Ra7, and then Rb8").decision == "accept"
    verdict = played(domain, tasks["m2"], ["a2a7", "b2b8"], "Ra7 wins")
    assert verdict.decision == "reject" and verdict.reason.startswith("move 2, b2b8, stands in nothing")
    with pytest.raises(TypeError):
        domain.verify(tasks["m2"], "", an_episode([]))


def test_known_answers_get_their_verdicts(tmp_path: Path) -> None:
    domain, _ = domain_of(tmp_path)
    known = list(domain.known_answers())
    assert {case.decision for case in known} == {"accept", "reject"} and len(known) == 16
    for case in known:
        moves = [args[0] for _, args in case.uses]
        assert played(domain, case.task, moves, " ".join(case.sampled)).decision == case.decision, case


class Says:
    """A policy that gives every call the same text."""

    def __init__(self, chat: ChatTokenizer, text: str) -> None:
        self.ids = [*chat.encode(text), chat.stop_ids[0]]

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        future.set_result(Sampled(self.ids, [0.0] * len(self.ids), "stop"))
        return future

    def flush(self) -> None: ...

    async def drop(self) -> None: ...


ASK = "model.chat([{'role': 'user', 'content': 'Move?'}])"
HARNESSES = {
    "asks, then plays": f"def run(task, model, tools):\n    {ASK}\n    return tools.move('a1a8')['result']",
    "plays, then asks": f"def run(task, model, tools):\n    tools.move('a1a8')\n    return {ASK}.text",
    "never asks": "def run(task, model, tools):\n    return tools.move('a1a8')['result']",
    "claims": f"def run(task, model, tools):\n    {ASK}\n    return 'a1a8 solved accept'",
    "raises after": f"def run(task, model, tools):\n    {ASK}\n    tools.move('a1a8')\n    return 1 / 0",
    "goes on": f"def run(task, model, tools):\n    {ASK}\n    for m in ('zz', 'a1a8', 'zz', 'zz'):\n        try:\n"
    "            tools.move(m)\n        except ToolError:\n            pass\n    return ''",
}


def run_harnesses(tmp_path: Path, sources: Mapping[str, str], said: str) -> dict[str, Episode]:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    chat = ChatTokenizer(folder)
    domain, tasks = domain_of(tmp_path)
    rollouts = Rollouts(Says(chat, said), chat, domain, Rollout(), Sampling())  # type: ignore[arg-type]
    jobs = [Job(tasks["m1"], Subject(name, name, source), 0) for name, source in sources.items()]
    episodes = asyncio.run(rollouts.run(jobs, Where(0, None, 0, 0, "test", "theta-0000", "", 0)))
    return dict(zip(sources, episodes, strict=True))


@pytest.mark.skipif(not can_seal()[0], reason="no seal here")
def test_in_a_real_episode_only_a_move_written_before_it_was_played_counts(tmp_path: Path) -> None:
    ended = run_harnesses(tmp_path, HARNESSES, "The rook mates: Ra8#")
    verdicts = {name: episode.verdict for name, episode in ended.items()}
    accepted = {name for name, verdict in verdicts.items() if verdict == "accept"}
    assert accepted == {"asks, then plays", "goes on"} and "invalid" not in verdicts.values(), ended
    assert "stands in nothing" in ended["plays, then asks"].reason and "stands in nothing" in ended["never asks"].reason
    assert ended["claims"].reason == "the puzzle was left open after 0 of 1 moves"


# ----------------------------------------------------------------------------------------------------- h0 and the rules


@pytest.mark.skipif(not can_seal()[0], reason="no seal here")
@pytest.mark.parametrize(
    ("said", "decision", "calls"),
    [
        ("<move>a1a8</move>", "accept", 1),
        ("b1b2, no: <move> a1a8 </move> [g1f1]", "accept", 1),
        ("b1b2, no: [a1a8] g1f1", "accept", 1),
        ("I take a1a8.", "accept", 1),
        ("<move>g1f1</move>", "reject", 1),
        ("<move>Ra8</move>", "reject", 2),  # refused twice: no more than one illegal move is forgiven
        ("checkmate!", "reject", 2),  # asked once more for the form
    ],
)
def test_h0_parses_tags_then_brackets_then_a_bare_move(tmp_path: Path, said: str, decision: str, calls: int) -> None:
    h0 = domain_of(tmp_path)[0].h0
    assert checks.check(h0).ok
    episode = run_harnesses(tmp_path, {"h0": h0}, said)["h0"]
    assert (episode.verdict, len(episode.calls)) == (decision, calls), episode.reason


@pytest.mark.skipif(not can_seal()[0], reason="no seal here")
def test_every_edit_gives_a_harness_that_plays_what_its_own_examples_show(tmp_path: Path) -> None:
    """A policy that answers as the example does is understood: all edits, each with an example of its own form."""
    domain, _ = domain_of(tmp_path)
    kit, h0 = Kit(domain.edits, domain.brief), Source(domain.h0)
    edits = {edit.words: edit for edit in generic(kit)}
    sources = {"h0": h0} | {words: new for words, edit in edits.items() if (new := edit.change(h0, kit)) is not None}
    assert {
        "the checks alone listed",
        "a vote over 3 moves",
        "the bare move in SAN on the first line",
    } <= sources.keys()
    assert "a vote over 3 answers" not in sources  # the generic vote plays nothing
    mate, shown = {}, kit.brief.demonstrations[:3]
    for words, source in sources.items():
        checked = checks.check(source.text, given=str(domain.brief.demonstrations))
        assert checked.ok and not checked.warnings, (words, checked)
        with_examples = edits["3 worked examples"].change(source, kit) or source
        pairs = with_examples.constants()["EXAMPLES"]
        for (user, assistant), demonstration in zip(pairs, shown, strict=False):
            position = demonstration.tools[0]["result"]
            assert position["fen"] in user and assistant
        san = "SAN on" in words
        mate[words] = ("Ra8+" if san else "<move>a1a8</move>", with_examples.text)
    for said in {said for said, _ in mate.values()}:
        folder = tmp_path / said.strip("</>")[:4]
        folder.mkdir()
        ended = run_harnesses(folder, {words: text for words, (each, text) in mate.items() if each == said}, said)
        assert {words: (e.verdict, e.reason) for words, e in ended.items() if e.verdict != "accept"} == {}


def test_worked_examples_are_won_by_their_lines_and_differ() -> None:
    assert len({fen for fen, _ in WORKED}) == len(WORKED) >= 12
    for fen, line in WORKED:
        board, moves = chess.Board(fen), line.split()
        assert board.is_valid() and len(moves) % 2
        referee = Referee(fen, moves, 0)
        for move in moves[::2]:
            referee.move(move)
        assert referee.status == "solved" and referee.reason == "checkmate"


def test_a_row_is_read_with_the_opponents_move_first(tmp_path: Path) -> None:
    row = next(read_rows(write_csv(tmp_path / "puzzles.csv")))
    assert as_task(row).public["fen"] == "1r4k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 1 2"
    assert isinstance(domain_of(tmp_path)[0], Chess)
