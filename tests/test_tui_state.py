"""What the terminal makes of state and text, without a screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.content import Content

from tests.scripted import SAMPLING, Script, write_run
from whale_tui.loop.state import Candidate, RunState
from whale_tui.records import Batch, Score
from whale_tui.tui import chart, code, compare, keep, plain, themes
from whale_tui.tui.actions import ACTIONS, BY_ID, Context, available, show_key
from whale_tui.tui.look import ASCII, ROLES, UNICODE, Look
from whale_tui.tui.pages.episodes import BadFilter, find, parse_filter
from whale_tui.tui.pages.lineage import grid_of
from whale_tui.tui.panes import card_of, waiting_for
from whale_tui.tui.terminal import osc52
from whale_tui.tui.transcript import read_turns, transcript


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return write_run(tmp_path_factory.mktemp("run") / "told", until="finished")


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return write_run(tmp_path_factory.mktemp("run") / "told", until="waiting")


@pytest.fixture
def ascii_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ascii_only", True)


# ------------------------------------------------------------------------------------------------------ plain text


def test_controls_become_visible_and_nothing_is_markup() -> None:
    shown = plain.plain("\x1b[31mred\x07 [/bold] \u202e \x9b2J \n")
    assert shown == "␛[31mred␇ [/bold] \\u202e \\u009b2J ␊"
    assert plain.line((shown, "bold")).plain == shown


def test_a_long_line_is_cut_and_says_how_long_it_was() -> None:
    shown = plain.plain("x" * 1_000_000)
    assert len(shown) < 2_100
    assert shown.endswith("(1,000,000 characters)")


def test_many_lines_are_cut_and_say_so() -> None:
    shown = plain.plain_lines("line\n" * 100_000, most=50)
    assert len(shown) == 51
    assert "500,000 characters" in shown[-1]


def test_a_heap_of_combining_marks_stays_in_its_cell() -> None:
    assert plain.plain("a" + "\u0301" * 50) == "a\u0301\u0301"


def test_ascii_mode_writes_everything_else_as_escapes(ascii_mode: None) -> None:
    assert plain.plain("né 鯨 \x1b") == "n\\xe9 \\u9be8 \\x1b"
    assert plain.fit("abcdef", 4) == "abc~"


@pytest.mark.parametrize("text", ["鯨鯨鯨鯨", "abc鯨", "", "a" * 30, "e\u0301e\u0301e\u0301"])
def test_fit_is_exact_in_cells(text: str) -> None:
    assert cell_len(plain.fit(plain.plain(text), 7)) == 7


# ------------------------------------------------------------------------------------------------------ the chart


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("size", [(24, 5), (74, 9), (90, 20), (200, 40)])
def test_the_chart_keeps_to_its_box(
    finished: Script, glyphs: object, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "ascii_only", glyphs is ASCII)
    width, height = size
    rows = chart.draw(finished.state.points, 3, width, height, Look(glyphs=glyphs))  # type: ignore[arg-type]
    assert len(rows) == height
    assert all(row.cell_length <= width for row in rows)
    if glyphs is ASCII:
        assert all(row.plain.isascii() for row in rows)


def test_the_chart_marks_switches_acceptances_tests_and_phases(finished: Script) -> None:
    text = "\n".join(row.plain for row in chart.draw(finished.state.points, 3, 120, 24, Look()))
    for mark in (
        UNICODE.switch,
        UNICODE.accepted,
        UNICODE.test,
        UNICODE.iteration,
        UNICODE.raw,
        "weight 1",
        "harness 1",
    ):
        assert mark in text
    accepted = finished.state.accepted[1]
    assert accepted in text


def test_the_chart_before_the_first_step() -> None:
    assert "no step has finished yet" in "\n".join(r.plain for r in chart.draw([], 1, 60, 12, Look()))


# ------------------------------------------------------------------------------------------------------ comparison


def score(results: dict[str, list[float]]) -> Score:
    return Score(
        policy="theta-0000", policy_hash="p0", harness_hash="x", tasks_hash="d", sampling=SAMPLING,
        batch=Batch(episodes=len(results), accepted=int(sum(v[0] for v in results.values() if v))), results=results,
    )  # fmt: skip


def test_a_candidate_is_compared_on_the_same_tasks() -> None:
    parent = score({"a": [0.0], "b": [1.0], "c": [0.0], "only-parent": [1.0]})
    child = score({"a": [1.0], "b": [1.0], "c": [0.0], "only-child": [1.0], "empty": []})
    c = compare.paired(child, parent)
    assert c is not None
    assert (c.won, c.lost, c.tied) == (1, 0, 2)
    assert c.difference == pytest.approx(1 / 3)
    assert c.low < 1 / 3 < c.high


def test_no_common_task_is_no_comparison() -> None:
    assert compare.paired(score({"a": [1.0]}), score({"b": [1.0]})) is None


def test_a_comparison_never_crosses_policies() -> None:
    state = RunState(harnesses={"h0": Candidate(id="h0", source_hash="0", scores={"p0": score({"a": [0.0]})})})
    child = Candidate(id="h1", source_hash="1", parent="h0", scores={"p1": score({"a": [1.0]})})
    assert compare.against_parent(state, child) is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "3 s"), (75, "1 min 15 s"), (700, "11 min"), (7300, "2 h 1 min"), (180_000, "2 d 2 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert compare.duration(seconds) == words


# ------------------------------------------------------------------------------------------------------ who waits


def test_only_undecided_checked_candidates_wait(waiting: Script) -> None:
    assert [c.id for c in waiting_for(waiting.state)] == ["h0009", "h0010"]
    assert waiting_for(RunState()) == []


def test_before_accept_asks_about_the_leader_alone(tmp_path: Path) -> None:
    s = Script(tmp_path / "run")
    s.start(approval="before-accept")
    s.weight_phase(2, "first")
    s.begin_search()
    made = s.propose("read two passages", "allow longer answers")
    s.bonus.update(zip(made, (0.8, 0.1), strict=True))
    s.check(*made)
    assert waiting_for(s.state) == []
    s.score(*made)
    assert [c.id for c in waiting_for(s.state)] == [made[0]]
    s.command("approve", harness=made[0])
    assert waiting_for(s.state) == []


def test_the_card_says_what_a_veto_was_for(waiting: Script) -> None:
    card = card_of(waiting.state, waiting.state.harnesses["h0003"])
    assert "vetoed" in card
    assert "the title is the answer in a third of the tasks" in card


# ------------------------------------------------------------------------------------------------------ code


def test_diff_lines_carry_their_signs_and_hunks() -> None:
    rows, starts = code.diff_lines("a = 1\nb = 2\n", "a = 1\nb = 3\n", Look())
    text = [row.plain for row in rows]
    assert starts == [0]
    assert any("- b = 2" in row for row in text)
    assert any("+ b = 3" in row for row in text)


@pytest.mark.parametrize("width", [40, 81, 160])
def test_side_by_side_halves_are_aligned(width: int) -> None:
    rows, starts = code.side_by_side_lines("a = 1\nx = '鯨'\n", "a = 2\nx = '鯨'\ny = 0\n", width, Look())
    assert starts
    half = (width - 3) // 2
    assert {cell_len(row.plain.split(f" {UNICODE.bar} ")[0]) for row in rows} == {half}
    assert all(row.cell_length <= width for row in rows)


def test_a_source_with_escapes_is_shown_without_offsets_going_wrong() -> None:
    rows = code.source_lines("s = '\x1b[2J'\ndef run(): pass\n", {2}, Look())
    assert "␛[2J" in rows[0].plain
    assert "+" in rows[1].plain


def test_colours_come_with_the_lexer_and_say_what_is_what() -> None:
    code.warm()
    (row,) = code.highlighted("def run(x): return 'tin'  # why", Look())
    styles = {row.plain[span.start : span.end]: span.style for span in row.spans}
    assert styles["run"] == ROLES["code-function"]
    assert styles["return"] == ROLES["code-keyword"]
    assert styles["# why"] == ROLES["code-comment"]
    assert "tin" in "".join(text for text, style in styles.items() if style == ROLES["code-string"])


def test_changed_lines_are_marked_by_a_sign_too() -> None:
    rows = code.source_lines("a = 1\nb = 2", {2}, Look(glyphs=ASCII))
    assert "+" not in rows[0].plain
    assert "+" in rows[1].plain


# ------------------------------------------------------------------------------------------------------ episodes


def test_filters_are_words() -> None:
    assert parse_filter("verdict=reject h=h0003 theta=theta-0001 cycle=2 outcome=vetoed two words") == (
        {"verdict": "reject", "harness": "h0003", "policy": "theta-0001", "cycle": 2}, "vetoed", "two words",
    )  # fmt: skip
    with pytest.raises(BadFilter, match="no filter 'colour'"):
        parse_filter("colour=red")
    assert parse_filter("verdict:reject h:h0003 colour:red") == (
        {"verdict": "reject", "harness": "h0003"}, "", "colour:red",
    )  # fmt: skip
    with pytest.raises(BadFilter, match="takes a number"):
        parse_filter("step=two")


def test_find_pages_by_outcome_and_text(finished: Script) -> None:
    rows = find(finished.journal, finished.state, "outcome=accepted verdict=accept", None, limit=20)
    accepted = set(finished.state.accepted)
    assert rows
    assert {row.harness for row in rows} <= accepted
    assert [row.n for row in rows] == sorted((row.n for row in rows), reverse=True)
    more = find(finished.journal, finished.state, "outcome=accepted verdict=accept", rows[-1].n, limit=20)
    assert more and more[0].n < rows[-1].n
    assert all("tin" in (row.answer + row.reason) for row in find(finished.journal, finished.state, "tin", None))


def test_a_conversation_marks_sampled_tokens_and_explains_the_verdict(finished: Script) -> None:
    row = finished.journal.page(limit=1, verdict="accept")[0]
    episode = finished.journal.episode(row)
    turns = read_turns(episode, finished.rundir.path / "tokenizer")
    assert "".join(piece for piece, _ in turns.turns[0].sampled) == "<answer>slate</answer><|im_end|>"
    text = [content.plain for content in transcript(episode, turns, 70, Look())]
    assert f"{UNICODE.sampled} <answer>slate</answer><|im_end|>" in text
    assert any("search" in row for row in text)
    assert any(row.startswith("why") and "one of the references" in row for row in text)


def test_a_run_without_its_tokenizer_says_so(finished: Script, tmp_path: Path) -> None:
    episode = finished.journal.episode(finished.journal.page(limit=1)[0])
    turns = read_turns(episode, tmp_path / "nothing")
    assert "tokenizer can't be read" in turns.note
    assert any("tokenizer" in row.plain for row in transcript(episode, turns, 70, Look()))


def test_the_lineage_holds_each_measured_pair_with_its_n(finished: Script) -> None:
    versions, rows, current, _, best = grid_of(finished.state)
    assert [name for name, is_current in versions if is_current] == [finished.state.policy]
    cells = {(row[0], versions[n][0]): cell for row in rows for n, cell in enumerate(row[1]) if cell}
    for candidate in finished.state.harnesses.values():
        for policy_hash in candidate.scores:
            name = next(v.name for v in finished.state.versions.values() if v.hash == policy_hash)
            batch = candidate.scores[policy_hash].batch
            assert cells[candidate.id, name] == (candidate.mean(policy_hash), batch.episodes - batch.invalid)
    assert current == finished.state.harness
    assert cells[best[0], versions[best[1]][0]][0] == max(mean for mean, _ in cells.values())


# ------------------------------------------------------------------------------------------------------ registry


def test_every_key_is_free_of_what_multiplexers_and_flow_control_take() -> None:
    for action in ACTIONS:
        for key in action.key.split(","):
            assert key not in {f"ctrl+{c}" for c in "absjq"} | {"shift+enter", "ctrl+enter", "enter"}, action.id


def test_keys_are_unique_on_every_page() -> None:
    for page in ("home", "run", "inbox", "episodes", "lineage", "ledger", "help"):
        keys = [key for action in available(page) for key in action.key.split(",")]
        assert len(keys) == len(set(keys)), page
        assert not {"j", "k", "up", "down", "space"} & set(keys), "the lists' own keys"


def test_every_control_of_the_engine_has_an_action() -> None:
    from whale_tui.loop.control import CONTROLS

    sent = {action.command for action in ACTIONS} | {"resume"}  # pause sends resume while paused
    assert set(CONTROLS) <= sent


def test_actions_say_why_they_are_not_available(finished: Script) -> None:
    assert BY_ID["run.pause"].when(Context("run")) == "open a run first"
    assert "finished" in BY_ID["run.pause"].when(Context("run", finished.state, live=True))
    assert show_key("ctrl+p,colon") == "^p :"


# ------------------------------------------------------------------------------------------------------ themes, keeping


def test_the_shipped_themes_are_whole() -> None:
    found = themes.load(themes.shipped_folder())
    assert not found.notices
    assert {"whale-dark", "whale-light", "high-contrast", "ansi-dark", "ansi-light"} <= set(found.found)
    for loaded in found.found.values():
        assert set(loaded.roles) == set(ROLES)


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("primary = '#12'", "primary"),
        ("primary = 'red'\n[roles]\nfancy = 'red'", "no role 'fancy'"),
        ("primary = 'red'\n[roles]\nmuted = 'pinkish'", "muted"),
        ("primary = 'red'\ncolour = 'x'", "no field 'colour'"),
        ("primary = 'red'\n[variables]\nborder = 'pinkish'", "border"),
        ("dark = true", "primary is missing"),
        ("not toml", "theme bad.toml"),
    ],
)
def test_a_bad_theme_is_one_notice(tmp_path: Path, text: str, notice: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "good.toml").write_text("primary = '#123456'\n[roles]\nmuted = 'italic #999999'")
    found = themes.load(tmp_path)
    assert list(found.found) == ["good"]
    assert len(found.notices) == 1
    assert notice in found.notices[0]


def test_preferences_name_keys_by_action(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('theme = "ansi-dark"\n[keys]\n"run: pause" = "f5"\n"no such" = "x"\n')
    read = keep.read_preferences(tmp_path)
    assert read.keys == {"run.pause": "f5"}
    assert read.theme == "ansi-dark"
    assert len(read.notices) == 1
    (tmp_path / "config.toml").write_text("keys = [")
    assert len(keep.read_preferences(tmp_path).notices) == 1


def test_the_layout_survives_and_a_broken_one_is_forgotten(tmp_path: Path) -> None:
    keep.write_layout(tmp_path, keep.Layout(pane="events", maximised=True))
    assert keep.read_layout(tmp_path) == keep.Layout(pane="events", maximised=True)
    (tmp_path / "layout.json").write_text("{")
    assert keep.read_layout(tmp_path) == keep.Layout()


def test_osc52_is_wrapped_for_tmux_and_bounded() -> None:
    assert osc52("hi", {}) == "\x1b]52;c;aGk=\x07"
    assert osc52("hi", {"TMUX": "x"}) == "\x1bPtmux;\x1b\x1b]52;c;aGk=\x07\x1b\\"
    assert osc52("x" * 100_000, {}) == ""


def test_sides_never_exceed_the_width() -> None:
    for width in range(1, 40):
        assert plain.sides(Content("left side"), Content("right side"), width).cell_length <= width
