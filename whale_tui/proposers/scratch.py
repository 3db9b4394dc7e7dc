"""The scratch folder: all that a proposer's session may read, as files, and the one place where it writes candidates.

    brief.md  contract.md  feedback.md  check  candidates/
    archive/index.md  archive/h0007/{harness.py, about.md, results.tsv, episodes/0001-reject.md}

It holds D_harness tasks only, no reference answer unless the config shows them, and nothing else of the run. What
comes back out of it was written by a stranger: links, devices, sizes, counts and encodings are all suspect.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from whale_tui.harness import checks, contract, fst
from whale_tui.proposers.base import Request
from whale_tui.records import Archived, ArchivedEpisode, Proposal

PACKAGES = Path(__file__).parents[2]
"""The folder that `import whale_tui` comes from."""
MOST_FILES = 200
"""Names in candidates/ that are looked at; a session that makes more gets no more."""
NOTE_BYTES = 4_000
LINE_CHARS = 300
EPISODE_CHARS = 20_000
NOTES_SHOWN = 12

INSTRUCTIONS = """\
You improve a harness: one Python file that drives a small language model (the policy) through tasks. Its weights are \
fixed; only the harness changes. Work in the current folder, {folder}, and nowhere else.

Read
  brief.md            the domain: what a task is, the tools, what counts as solved, worked examples
  contract.md         what a harness must define, what it is given and what it may import
  archive/index.md    every harness so far with its score; archive/<id>/ has its source (harness.py), hypothesis and
                      outcome (about.md), per-task results (results.tsv) and episodes as text (episodes/)
  feedback.md         why people vetoed candidates, and why candidates failed: take it up, do not repeat it

Write
  {candidates} to candidates/<name>.py: a whole harness each, different from all of the archive and from each other.
  The docstring of the file begins with the hypothesis in one line (what changes, and why it should score higher), and \
has a line `parent: <id>` naming the harness it starts from ({incumbent} if it has none).
{fst}
Run ./check when a candidate is written (`./check candidates/<name>.py` for one): it runs the same checks as the run \
does, and a candidate that fails them is not evaluated. Mend what it names.

Harness {incumbent} is the one to beat. A score is the share of tasks solved; a difference inside the intervals is \
luck. Read episodes that failed before you write: find what goes wrong most often, and change that. The tasks you see \
are a sample: an answer or a task's text written into a harness is a leak that people see, and does not help. When \
your candidates pass the checks, you are done.
"""
FST = """
Only prompts may change in this run: outside the module-level prompt constants {names}, a candidate must be h0000, to \
the syntax tree.
"""
CHECK = """\
import sys
sys.path.insert(0, {packages!r})
from pathlib import Path
from whale_tui.proposers.scratch import check_files
raise SystemExit(check_files(Path({folder!r}), [Path(name) for name in sys.argv[1:]]))
"""


class Scratch:
    """Written once, from a request, into a folder that must not exist yet."""

    def __init__(self, folder: Path, request: Request) -> None:
        """Write all files. Raises OSError."""
        self.folder, self.request = folder.resolve(), request
        self.refused: list[str] = []
        self.candidates = self.folder / "candidates"
        folder.mkdir(parents=True, mode=0o700)
        self.candidates.mkdir()
        self.instructions = _instructions(self.folder, request)
        self._write("brief.md", _brief(request))
        self._write("contract.md", contract.CONTRACT)
        self._write("feedback.md", _feedback(request.notes))
        self._write("rules.json", json.dumps({"fst": request.fst, "candidates": request.candidates}))
        self._write("archive/index.md", _index(request))
        for archived in request.archive:
            self._write_archived(archived)
        self._write(".check.py", CHECK.format(packages=str(PACKAGES), folder=str(self.folder)))
        self._write("check", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I "$(dirname "$0")/.check.py" "$@"\n')
        (self.folder / "check").chmod(0o700)

    def check(self, source: str) -> checks.Checked:
        """The checks of the run, without those that need its secrets (reference answers) or its policy."""
        fst_base = next((a.source for a in self.request.archive if not a.parent), None) if self.request.fst else None
        return checks.check(source, archive_hashes=_hashes(a.source for a in self.request.archive), fst_base=fst_base)

    def read_candidates(self, *, whole_only: bool = False) -> list[Proposal]:
        """The candidates of candidates/, by name, at most as many as were asked for.

        Broken code is kept: the checks give its reason. `whole_only` leaves it out, where a session was cut while it
        may have been writing. What is no plain file (a link, a device) is left out; `refused` names it.
        """
        known = {a.id for a in self.request.archive}
        found: list[Proposal] = []
        self.refused = []
        for name, source, note in _candidate_files(self.candidates, self.refused):
            if len(found) == self.request.candidates:
                break
            hypothesis, parent, others = _header(source, note)
            if whole_only and not _parses(source):
                continue
            parent = parent if parent in known else self.request.incumbent
            also = [other for other in others if other in known and other != parent]
            found.append(Proposal(source, parent, hypothesis or f"{name}: no hypothesis given", also))
        return found

    def _write_archived(self, archived: Archived) -> None:
        at = f"archive/{archived.id}"
        self._write(f"{at}/harness.py", archived.source)
        self._write(f"{at}/about.md", _about(archived))
        if archived.results:
            lines = [f"{key}\t{reward:g}" for key, reward in sorted(archived.results.items())]
            self._write(f"{at}/results.tsv", "\n".join(["task\treward", *lines, ""]))
        for number, episode in enumerate(archived.episodes, 1):
            answers = self.request.answers.get(episode.key, ())
            self._write(f"{at}/episodes/{number:04d}-{episode.verdict}.md", _episode(episode, answers))

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))


# --------------------------------------------------------------------------------------------------- what is written


def _instructions(folder: Path, request: Request) -> str:
    h0 = next((a.source for a in request.archive if not a.parent), "")
    count = f"{request.candidates} candidates" if request.candidates > 1 else "1 candidate"
    names = ", ".join(sorted(fst.prompts(ast.parse(h0)))) if request.fst else ""
    text = INSTRUCTIONS.format(
        folder=folder, candidates=count, incumbent=request.incumbent, fst=FST.format(names=names) if request.fst else ""
    )
    if request.notes:
        text += "\nThe newest of feedback.md:\n" + "".join(f"- {_one_line(n)}\n" for n in request.notes[-NOTES_SHOWN:])
    return text


def _brief(request: Request) -> str:
    brief = request.brief
    tools = "".join(f"- {text}\n" for text in brief.tools.values()) or "none\n"
    parts = [brief.text.strip(), "\n## Tools\n", tools]
    for demonstration in brief.demonstrations:
        uses = "".join(
            f"- {use.get('name')}({use.get('args')}) -> {use.get('result')}\n" for use in demonstration.tools
        )
        parts.append(f"## Worked example\n{_fields(demonstration.task)}{uses}answer: {demonstration.answer}\n")
    return "\n".join(parts)


def _feedback(notes: Sequence[str]) -> str:
    return "# Vetoes and failures, oldest first\n\n" + ("".join(f"- {_one_line(n, 2000)}\n" for n in notes) or "none\n")


def _index(request: Request) -> str:
    lines = [
        "# The archive",
        "",
        "A score without a policy's name was measured under the current policy. One with a name is of older weights:",
        "it can't be compared with a current one.",
        "",
        "| id | parent | author | outcome | score [95% interval] | calls | tokens | hypothesis |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for a in request.archive:
        mark = " (the one to beat)" if a.id == request.incumbent else ""
        cells = (
            a.id + mark, a.parent or "-", a.proposer or "-", a.outcome or "-", _score(a), str(a.calls), str(a.tokens),
            _one_line(a.hypothesis).replace("|", "/"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _score(a: Archived) -> str:
    if a.mean is not None:
        return f"{a.mean:.1%}{_interval(a, a.policy)}"
    if not a.older_means:
        return "-"
    policy, mean = list(a.older_means.items())[-1]
    return f"{mean:.1%}{_interval(a, policy)} under {policy}"


def _interval(a: Archived, policy: str) -> str:
    low, high = a.intervals.get(policy, (None, None))
    return f" [{low:.1%}, {high:.1%}]" if low is not None and high is not None else ""


def _about(a: Archived) -> str:
    lines = [f"# {a.id}", "", f"hypothesis: {a.hypothesis}", f"parent: {a.parent or 'none'}", f"author: {a.proposer}"]
    lines += [f"cycle {a.cycle}, iteration {a.iteration}", f"outcome: {a.outcome or 'not decided yet'}"]
    if a.reason:
        lines.append(f"reason: {a.reason}")
    lines += [f"warning: {_one_line(text)}" for text in a.warnings]
    if a.mean is not None:
        lines.append(f"score under the current policy ({a.policy}): {a.mean:.1%}{_interval(a, a.policy)}")
    for policy, mean in a.older_means.items():
        lines.append(f"score under the older policy {policy}, not comparable: {mean:.1%}{_interval(a, policy)}")
    if a.calls:
        lines.append(f"{a.calls} calls and {a.tokens} sampled tokens an episode")
    return "\n".join(lines) + "\n"


def _episode(episode: ArchivedEpisode, answers: Sequence[str]) -> str:
    """The task, then replies and tool uses in the order in which they came, then the end."""
    parts = [f"verdict: {episode.verdict} ({episode.reason})\n", "## task\n", _fields(episode.task)]
    if answers:
        parts.append(f"reference answer: {' or '.join(answers)}\n")
    for number, output in enumerate(["", *episode.outputs]):
        parts += [f"\n## reply {number}\n{output}\n"] if number else []
        parts += [f"\n## tool {u.name}({u.args})\n{u.result}\n" for u in episode.tools if u.after_call == number]
    parts.append(f"\n## answer{' (cut at a length limit)' if episode.truncated else ''}\n{episode.answer}\n")
    text = "".join(parts)
    return text if len(text) <= EPISODE_CHARS else text[:EPISODE_CHARS] + "\n(cut here)\n"


def _fields(values: dict[str, object]) -> str:
    return "".join(
        f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n" for k, v in values.items()
    )


def _one_line(text: str, most: int = LINE_CHARS) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# ------------------------------------------------------------------------------------------------ what is read back


def _candidate_files(folder: Path, refused: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, source, note) of every candidates/<name>.py. No link is followed, at no level."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        with os.scandir(at) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(MOST_FILES), strict=False))
        for name in names:
            if name.endswith(".py") and not name.startswith("."):
                stem = _one_line(name[:-3], 60)
                source = _read_plain(at, name, contract.SOURCE_BYTES + 1)
                note = _read_plain(at, f"{name[:-3]}.md", NOTE_BYTES) if f"{name[:-3]}.md" in names else b""
                if isinstance(source, str):
                    refused.append(f"candidates/{stem}.py is {source}")
                    continue
                words = note.decode("utf-8", "replace") if isinstance(note, bytes) else ""
                yield stem, source.decode("utf-8", "replace"), words
    finally:
        os.close(at)


def _read_plain(folder: int, name: str, most: int) -> bytes | str:
    """At most `most` bytes of a plain file, or in words what it is instead."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        return f"not readable as a plain file ({error.strerror})"
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
            return "not a plain file of its own"
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(most)
    except OSError as error:
        return f"not readable ({error.strerror})"
    finally:
        os.close(fd)


def _header(source: str, note: str) -> tuple[str, str, list[str]]:
    """(hypothesis, parent, further parents) from the docstring, else the leading comments, else the note beside it."""
    text = _leading_text(source) or note
    lines = [line.strip().strip("#").strip() for line in text.splitlines()]
    parents = next((m[1] for line in lines if (m := re.match(r"(?i)parents?\s*:\s*(.+)", line))), "")
    ids = re.findall(r"\bh\d{4,}\b", parents)
    first = next((line for line in lines if line and not re.match(r"(?i)parents?\s*:", line)), "")
    hypothesis = re.sub(r"(?i)^hypothesis\s*:\s*", "", first)
    return _one_line(hypothesis), ids[0] if ids else "", ids[1:]


def _leading_text(source: str) -> str:
    """The docstring or first comments of a file that need not parse."""
    head = source[:8000].lstrip("\ufeff \t\r\n")
    docstring = re.match(r"[rRuU]?(\"\"\"|''')(.*?)\1", head, re.DOTALL) or re.match(r"[rRuU]?([\"'])([^\n]*?)\1", head)
    if docstring:
        return docstring[2]
    comments = re.match(r"(?:#[^\n]*\n?)+", head)
    return "\n".join(line for line in comments[0].splitlines() if not line.startswith("#!")) if comments else ""


def _parses(source: str) -> bool:
    try:
        checks.source_hash(source)
        return True
    except (SyntaxError, ValueError):
        return False


def _hashes(sources: Iterator[str]) -> set[str]:
    return {checks.source_hash(source) for source in sources if _parses(source)}


def check_files(folder: Path, files: Sequence[Path]) -> int:
    """What `./check` does: one line for each candidate, or for the files named. Status 1 where one fails."""
    rules = json.loads((folder / "rules.json").read_text())
    sources = {path.parent.name: path.read_text("utf-8") for path in sorted(folder.glob("archive/*/harness.py"))}
    known = _hashes(iter(sources.values()))
    files = files or sorted((folder / "candidates").glob("*.py"))
    failed = False
    for file in files:
        try:
            if not file.is_file():
                raise FileNotFoundError("no plain file")
            source = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            print(f"{file.name}: can't be read: {error}")
            failed = True
            continue
        checked = checks.check(source, archive_hashes=known, fst_base=sources.get("h0000") if rules["fst"] else None)
        hypothesis, parent, _ = _header(source, "")
        known.add(checked.source_hash)
        failed |= not checked.ok
        words = "ok" if checked.ok else f"FAILS: {checked.reason}"
        hint = "" if hypothesis else " (no hypothesis: begin the docstring with one)"
        hint += "" if parent else " (no `parent: <id>` line)"
        print(f"{file.name}: {words}{hint}")
    if not files:
        print(f"no candidate in {folder / 'candidates'} yet")
    elif len(files) > rules["candidates"]:
        print(f"{len(files)} candidates; the first {rules['candidates']} by name are taken")
    return int(failed or not files)
