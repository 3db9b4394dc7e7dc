"""The one registry of what a person can do. Keys, help, palette, the key bar and the tests all read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whale_tui.loop.state import RunState

PAGES = ("home", "run", "inbox", "episodes", "lineage", "ledger", "play", "help")
RUN_PAGES = ("run", "inbox", "episodes", "lineage", "ledger")
ALL_BUT_HOME = (*RUN_PAGES, "play", "help")


@dataclass(frozen=True)
class Context:
    """Where the person is: the page, the run's state (None at Home), the candidate or cell under the cursor."""

    page: str
    state: RunState | None = None
    live: bool = False
    candidate: str = ""
    servers: bool = False
    """The run samples from servers, and their pane is there."""


def _always(_: Context) -> str:
    return ""


def _run(c: Context) -> str:
    return "" if c.state is not None else "open a run first"


def _servers(c: Context) -> str:
    return _run(c) or ("" if c.servers else "this run samples from no servers")


def _engine(c: Context) -> str:
    """Why a control can't be sent now; empty where it can."""
    if c.state is None:
        return "open a run first"
    if c.state.status in ("finished", "stopped"):
        return f"the run is {c.state.status}"
    return "" if c.live else "no engine runs: A starts it again"


def _phase(c: Context) -> str:
    return _engine(c) or ("" if c.state and c.state.phase else "no phase is running")


def _candidate(c: Context) -> str:
    return _engine(c) or ("" if c.candidate else "no candidate under the cursor")


def _undecided(c: Context) -> str:
    """Only what is still open can be approved or vetoed."""
    if reason := _candidate(c):
        return reason
    found = c.state.harnesses.get(c.candidate) if c.state else None
    return "" if found is None or found.outcome in (None, "scored") else f"{c.candidate} is {found.outcome}"


def _has_candidate(c: Context) -> str:
    return _run(c) or ("" if c.candidate else "no candidate under the cursor")


def _pinned(c: Context) -> str:
    return _engine(c) or ("" if c.state and c.state.pinned else "nothing is pinned")


def _no_engine(c: Context) -> str:
    if c.state is None:
        return "open a run first"
    if c.state.status == "finished":
        return "the run is finished"
    return "the engine is running" if c.live and c.state.status != "stopped" else ""


@dataclass(frozen=True)
class Action:
    """`id` is `group.verb`; `does` names the method that does it, on the page or else on the app."""

    id: str
    key: str
    help: str
    does: str
    command: str = ""
    """The control that it sends, where it sends one."""
    pages: tuple[str, ...] = PAGES
    when: Callable[[Context], str] = _always
    """Empty where it is available, else why not."""
    short: str = ""
    """Its word in the key bar; empty: not shown there."""

    @property
    def name(self) -> str:
        group, _, verb = self.id.partition(".")
        return f"{group}: {verb.replace('-', ' ')}"

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


_NAMES = {
    "question_mark": "?", "dollar_sign": "$", "right_square_bracket": "]", "left_square_bracket": "[", "slash": "/",
    "comma": ",", "colon": ":", "escape": "esc", "ctrl+p": "^p", "ctrl+c": "^c", "shift+tab": "S-tab",
}  # fmt: skip


def show_key(keys: str) -> str:
    """Keys as a person reads them: `^p :`."""
    return " ".join(_NAMES.get(key.strip(), key.strip()) for key in keys.split(","))


_CARDS = ("run", "inbox")
_CELLS = ("run", "inbox", "lineage")

ACTIONS: tuple[Action, ...] = (
    Action("run.pause", "p", "pause at the next safe point, or go on", "pause", "pause", RUN_PAGES, _engine, "pause"),
    Action("run.switch", "s", "end the phase at the next safe point", "switch", "switch", RUN_PAGES, _phase, "switch"),
    Action("run.switch-now", "S", "end the phase at once; episodes in flight are dropped", "switch_now", "switch",
           RUN_PAGES, _phase),
    Action("run.set", "comma", "change a setting for the phases to come: schedule, patience, M, budget, approval",
           "set", "set", RUN_PAGES, _engine, "set"),
    Action("run.stop", "X", "stop the run, resumable; asked twice", "stop", "stop", RUN_PAGES, _engine),
    Action("run.start-engine", "A", "start the engine again, where the run left off", "start_engine", "", RUN_PAGES,
           _no_engine),
    Action("candidate.approve", "a", "let the candidate go on", "approve", "approve", _CARDS, _undecided, "approve"),
    Action("candidate.veto", "x", "refuse the candidate, with a reason for the proposer", "veto", "veto", _CARDS,
           _undecided, "veto"),
    Action("candidate.edit", "E", "edit it in $EDITOR and submit the result as your own", "edit", "propose", _CELLS,
           _candidate, "edit"),
    Action("candidate.diff", "d", "its diff against its parent, or the current source", "diff", "", ("run",),
           _run, "diff"),
    Action("candidate.side-by-side", "v", "the diff side by side, or unified", "beside", "", _CARDS, _run),
    Action("candidate.next-hunk", "right_square_bracket", "to the next hunk", "next_hunk", "", _CARDS, _run),
    Action("candidate.previous-hunk", "left_square_bracket", "to the hunk before", "previous_hunk", "", _CARDS, _run),
    Action("candidate.parent", "u", "look at its parent", "parent", "", _CARDS, _has_candidate),
    Action("candidate.sort", "o", "best first, or newest first", "sort", "", ("run",), _run),
    Action("harness.pin", "P", "keep a harness in place", "pin", "pin", _CELLS, _engine, "pin"),
    Action("harness.unpin", "U", "let the search change the harness again", "unpin", "unpin", _CELLS, _pinned),
    Action("pair.roll-back", "B", "go on from an earlier pair", "roll_back", "rollback", _CELLS, _engine),
    Action("pair.evaluate", "V", "measure the pair on D_test at the next safe point; no decision uses it", "evaluate",
           "evaluate", ("lineage",), _engine, "evaluate"),
    Action("pair.export", "O", "write the pair as a folder that answers tasks by itself", "export", "", ("lineage",),
           _run, "export"),
    Action("episodes.filter", "slash", "filter: verdict=, task=, policy=, harness=, phase=, purpose=, or any text",
           "filter", "", ("episodes",), _run, "filter"),
    Action("episodes.flips", "c", "the same task under another pair, side by side", "flips", "", ("episodes",), _run,
           "flips"),
    Action("home.start", "n", "start a run from a sample config", "start_sample", "", ("home",), _always, "new run"),
    Action("home.refresh", "r", "look again for runs on this machine", "refresh", "", ("home",), _always, "refresh"),
    Action("play.task", "t", "give the pair a task of yours, and watch it", "task", "", ("play",), _run, "a task"),
    Action("play.example", "x", "give it a task of D_test; it is not judged", "example", "", ("play",), _run,
           "an example"),
    Action("play.greedy", "z", "take the likeliest token, or sample as the run does", "greedy", "", ("play",), _run,
           "greedy"),
    Action("view.maximise", "m", "the pane in focus alone, or all again", "maximise", "", ("run",), _run, "max"),
    Action("view.jump", "f", "jump to a pane by its letter", "jump"),
    Action("view.next-pane", "tab", "to the next pane", "next_pane"),
    Action("view.previous-pane", "shift+tab", "to the pane before", "previous_pane"),
    Action("view.success", "1", "to the success rate", "pane_success", "", ("run",), _run),
    Action("view.patience", "2", "to patience", "pane_patience", "", ("run",), _run),
    Action("view.harness", "3", "to the harness", "pane_harness", "", ("run",), _run),
    Action("view.candidates", "4", "to the candidates", "pane_candidates", "", ("run",), _run),
    Action("view.events", "5", "to the events", "pane_events", "", ("run",), _run),
    Action("view.servers", "6", "to the servers that sample", "pane_servers", "", ("run",), _servers),
    Action("view.copy", "y", "copy what the pane in focus shows (OSC 52, and a file)", "copy"),
    Action("view.screenshot", "w", "write a picture of the screen (SVG)", "screenshot"),
    Action("view.theme", "T", "choose a theme, seen as you move", "choose_theme"),
    Action("go.run", "R", "the run", "go_run", when=_run, short="run"),
    Action("go.inbox", "i", "candidates that wait for you", "go_inbox", "", ALL_BUT_HOME, _run, "inbox"),
    Action("go.episodes", "e", "every episode, filtered", "go_episodes", "", ALL_BUT_HOME, _run, "episodes"),
    Action("go.lineage", "l", "harnesses by policy versions", "go_lineage", "", ALL_BUT_HOME, _run, "lineage"),
    Action("go.ledger", "dollar_sign", "what was spent", "go_ledger", "", ALL_BUT_HOME, _run, "ledger"),
    Action("go.play", "t", "play: the pair solves a task of yours; nothing of it is a score", "go_play", "",
           (*RUN_PAGES, "help"), _run),
    Action("go.home", "H", "the runs on this machine", "go_home"),
    Action("go.back", "escape", "back", "back"),
    Action("go.help", "question_mark", "this help", "go_help", short="help"),
    Action("go.palette", "ctrl+p,colon", "every action by name", "palette", short="palette"),
    Action("go.quit", "q,ctrl+c", "leave; the run goes on", "leave", short="quit"),
)  # fmt: skip

BY_ID = {action.id: action for action in ACTIONS}


def available(page: str) -> list[Action]:
    """The actions of a page, in the registry's order."""
    return [action for action in ACTIONS if page in action.pages]
