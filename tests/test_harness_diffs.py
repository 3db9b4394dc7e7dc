"""Diffs as data: whatever the two sources are, the rows hold both of them, and say no more than what changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whale_tui.harness.diffs import Hunk, Line, Row, changed_lines, side_by_side, unified

LINES = st.lists(
    st.sampled_from(["", "a = 1", "a = 2", "b = a + 1", "    return a", "    return b", "x", "ü€ 漢字"]), max_size=14
)
SOURCES = LINES.map("\n".join) | st.text(alphabet="ab \n", max_size=40)


def lines(source: str) -> list[str]:
    return source.removesuffix("\n").split("\n")


def apply(old: str, hunks: list[Hunk]) -> str:
    """What a unified diff makes of the old source."""
    out, at, source = [], 0, lines(old)
    for hunk in hunks:
        start = hunk.old_start - (1 if hunk.old_count else 0)
        out += source[at:start]
        for line in hunk.lines:
            if line.kind != "added":
                assert line.old is not None
                assert source[line.old - 1] == line.text
            if line.kind != "removed":
                out.append(line.text)
                assert line.new == len(out)
        at = start + hunk.old_count
    return "\n".join(out + source[at:])


@given(SOURCES, SOURCES)
def test_rows_hold_both_sides(old, new):
    rows = side_by_side(old, new)
    assert [row.old_text for row in rows if row.old is not None] == lines(old)
    assert [row.new_text for row in rows if row.new is not None] == lines(new)
    assert [row.old for row in rows if row.old is not None] == list(range(1, len(lines(old)) + 1))
    assert [row.new for row in rows if row.new is not None] == list(range(1, len(lines(new)) + 1))
    for row in rows:
        assert (row.kind == "same") == (row.old is not None and row.new is not None and row.old_text == row.new_text)
        assert (row.kind == "added") == (row.old is None)
        assert (row.kind == "removed") == (row.new is None)


@given(SOURCES, SOURCES)
def test_spans_cover_exactly_what_differs(old, new):
    def rest(text: str, spans: list[tuple[int, int]]) -> str:
        for start, end in reversed(spans):
            assert 0 <= start < end <= len(text)
            text = text[:start] + text[end:]
        return text

    for row in side_by_side(old, new):
        if row.kind == "changed":
            assert row.old_spans or row.new_spans
            assert rest(row.old_text, row.old_spans) == rest(row.new_text, row.new_spans)
        else:
            assert row.old_spans == row.new_spans == []


@given(SOURCES, SOURCES, st.integers(0, 4))
def test_a_unified_diff_turns_old_into_new(old, new, context):
    hunks = unified(old, new, context)
    assert apply(old, hunks) == new.removesuffix("\n")
    for hunk in hunks:
        assert hunk.old_count == sum(line.kind != "added" for line in hunk.lines)
        assert hunk.new_count == sum(line.kind != "removed" for line in hunk.lines)
        edges = 0
        for line in hunk.lines:
            if line.kind != "same":
                break
            edges += 1
        assert edges <= context


@given(SOURCES, SOURCES)
def test_changed_lines_are_those_that_are_not_kept(old, new):
    kept = {row.new for row in side_by_side(old, new) if row.kind == "same"}
    assert changed_lines(old, new) == set(range(1, len(lines(new)) + 1)) - kept


@given(SOURCES)
def test_equal_sources_have_no_change(source):
    assert unified(source, source) == []
    assert changed_lines(source, source) == set()
    assert all(row.kind == "same" for row in side_by_side(source, source))


def test_a_changed_prompt_is_one_row_with_its_words_marked():
    old = 'SYSTEM = "Answer shortly."\nX = 1\n'
    new = 'SYSTEM = "Answer very shortly."\nX = 1\n'
    first, second = side_by_side(old, new)
    assert first == Row("changed", 1, old.split("\n")[0], 1, new.split("\n")[0], [], [(17, 22)])
    assert second.kind == "same"
    assert changed_lines(old, new) == {1}


def test_hunks_are_apart_when_their_changes_are():
    old = "\n".join(f"line {n}" for n in range(1, 41))
    new = old.replace("line 5\n", "line five\n").replace("line 30\n", "")
    first, second = unified(old, new)
    assert first.header == "@@ -2,7 +2,7 @@"
    assert second.header == "@@ -27,7 +27,6 @@"
    assert [line.kind for line in first.lines] == ["same"] * 3 + ["removed", "added"] + ["same"] * 3
    assert second.lines[3] == Line("removed", "line 30", 30, None)


def test_a_long_rewrite_is_quick():
    old = "\n".join(f"value_{n} = compute({n})" for n in range(1500))
    new = "\n".join(f"result_{n} = derive({n}, {n})" for n in range(1500))
    rows = side_by_side(old, new)
    assert sum(row.new is not None for row in rows) == 1500
