"""The command line. Each command loads only what it needs, so that help and errors come at once.

Exit codes: 0 done; 1 it failed (the message says what and the mend); 2 the command line is wrong; 3 a control was
refused; 4 no engine runs; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from whale_tui import __version__, opening
from whale_tui.opening import REFUSED, WRONG

app = App(
    name="whale-tui",
    help="Alternate fine-tuning a small language model with searching the code of its harness: watch, steer, resume.",
    version=__version__,
    help_format="plaintext",
)


def _run_names(context: Any) -> list[str]:
    """For shell completion."""
    from whale_tui.service import discovery

    return [run.name for run in discovery.list_runs()]


RunName = Annotated[str, Parameter(completer=_run_names)]

app.command(
    "whale_tui.doctor.command:doctor",
    name="doctor",
    help="Check whether a run may start, with a mend for each failure.",
)


def main() -> None:
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(tokens: list[str]) -> int:
    """Run a command."""
    return opening.guarded(lambda: int(app(tokens, result_action="return_value") or 0))


@app.default
def home(*, ascii: bool = False, mouse: bool = True, theme: str | None = None) -> int:
    """Open the terminal application: runs on this machine, sample configs, attach and resume.

    ascii: draw with ASCII characters only. mouse: let the terminal report the mouse. theme: name of a theme.
    """
    if not opening.is_terminal():
        return list_()
    return opening.open_screen(None, ascii=ascii, mouse=mouse, theme=theme)


@app.command
def run(
    target: Path,
    *,
    set: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    new: bool = False,
    headless: bool = False,
    detach: bool = False,
    ascii: bool = False,
    mouse: bool = True,
    theme: str | None = None,
) -> int:
    """Start a run, or go on with one: TARGET is a config file, a folder that `init` wrote, or a run, by name or path.

    set: change a config value, e.g. --set run.seed=1 (may be repeated). new: start anew under the next free name.
    headless: print progress lines instead of opening the application (also where output is no terminal); Ctrl-C stops
    the run, resumable. detach: start the engine and return at once.
    """
    from whale_tui.service import discovery, launch

    rundir = launch.prepare(target, set or [], new=new)
    state = discovery.read_state(rundir)
    if state.status == "finished":
        from whale_tui.service import lines

        print(f"{rundir.name} is finished: {state.reason}. For another one: whale-tui run {target} --new")
        print(lines.result(state))
        return 0
    screen = opening.is_terminal() and not headless and not detach
    if not screen:
        print(f"run {rundir.name} in {rundir.path}", flush=True)
    pid = launch.start_engine(rundir)
    if detach:
        print(f"engine {pid} runs; watch it with: whale-tui attach {rundir.name}")
        return 0
    if screen:
        return opening.open_screen(rundir.path, ascii=ascii, mouse=mouse, theme=theme)
    return opening.follow(rundir, stop_on_interrupt=True)


@app.command
def init(folder: Path, *, force: bool = False) -> int:
    """Write a working folder for tasks of your own: config, ten tasks, verifier, harness, brief, and what each is.

    FOLDER is also the name of its run. force: write into a folder that is not empty; files of the same names are lost.
    """
    from whale_tui import starter

    for file in starter.write(folder, force=force):
        print(f"wrote {file}")
    print(f"next: whale-tui doctor {folder}, then whale-tui run {folder}; {folder / 'README.md'} says what to change")
    return 0


@app.command
def attach(
    run: RunName = "", *, headless: bool = False, ascii: bool = False, mouse: bool = True, theme: str | None = None
) -> int:
    """Watch a run; leaving it changes nothing. Without RUN: the one that runs, or the newest.

    headless: print lines instead of opening the application.
    """
    return opening.attach(run, headless=headless, ascii=ascii, mouse=mouse, theme=theme)


@app.command
def ctl(
    run: RunName, command: str, *args: str, json: bool = False, dry_run: bool = False, id: str = "", now: bool = False
) -> int:
    """Send a control to a run, e.g. `ctl quickstart veto harness=h0003 reason="reads the clock"`.

    Commands: status, pause, resume, switch [--now], pin [HARNESS], unpin, approve HARNESS, veto HARNESS REASON,
    propose FILE [parent=.. hypothesis=..], rollback policy=.. harness=.., evaluate [POLICY HARNESS SAMPLES],
    set KEY=VALUE.., stop.
    json: print the reply as JSON. dry_run: only say what would happen. id: idempotency key; the same one twice has
    one effect.
    """
    import asyncio

    import msgspec

    from whale_tui.service.client import RunClient

    rundir = opening.find(run)
    try:
        values = _control_args(command, list(args))
    except ValueError as error:
        print(f"whale-tui: {error}", file=sys.stderr)
        return WRONG
    if now:
        values["now"] = True
    reply = asyncio.run(RunClient(rundir, opening.who()).command(command, values, dry_run=dry_run, id=id))
    if json:
        print(msgspec.json.encode(reply).decode())
    else:
        again = " (taken before; not done again)" if reply.repeated else ""
        print(
            f"{'would: ' if dry_run and reply.ok else ''}{reply.effect}{again}", file=None if reply.ok else sys.stderr
        )
    return 0 if reply.ok else REFUSED


@app.command
def propose(run: RunName, file: Path, *, parent: str = "", hypothesis: str = "") -> int:
    """Put a harness of yours, FILE, into the archive of a run; its next harness iteration evaluates it.

    parent: the harness that it starts from (the current one). hypothesis: one line that says why it should do better.
    """
    import tomli_w

    given = {"file": str(file), "parent": parent, "hypothesis": hypothesis}
    return ctl(run, "propose", *(tomli_w.dumps({k: v}).strip().replace(" = ", "=", 1) for k, v in given.items() if v))


@app.command
def status(run: RunName, *, json: bool = False) -> int:
    """Where a run stands, from its journal: needs no engine. json: one object."""
    import msgspec

    from whale_tui.service import discovery, lines

    rundir = opening.find(run)
    state = discovery.read_state(rundir)
    seen = discovery.status_of(rundir, state)
    if json:
        print(msgspec.json.encode(lines.status(rundir.name, state, seen)).decode())
    else:
        print(lines.describe(rundir.name, state, seen))
    return 0


@app.command(name="eval")
def eval_(
    run: RunName,
    *,
    pair: Annotated[list[str] | None, Parameter(negative="")] = None,
    split: Literal["test"] = "test",
    samples: int = 8,
    json: bool = False,
) -> int:
    """Measure pairs of RUN on D_test: mean@k with a 95% interval, pass@k, truncation, invalid, by subset.

    pair: "best" (the best seen; the default), "current", "start", or THETA,HARNESS such as theta-0004,h0002; may be
    repeated, and the later pairs are then compared with the first, task by task. split: the tasks; D_harness scores
    are in the report. samples: episodes a task (k). A pair with as many is not measured again. json: one object.
    """
    from whale_tui import evaluate

    return evaluate.evaluate(opening.find(run), pair or ["best"], samples, json=json)


@app.command
def report(run: RunName, *more: RunName, out: Path | None = None) -> int:
    """Write a page (HTML in one file, and Markdown) with figures (PNG and SVG) of RUN, or of several as a study.

    It needs no engine, and takes a run in whatever state it is. out: the folder; by default `report` in the run's own
    folder, or in the current one for several runs.
    """
    from whale_tui.report import page

    rundirs = [opening.find(name) for name in dict.fromkeys([run, *more])]
    made = page.write(rundirs, out or (rundirs[0].path / "report" if len(rundirs) == 1 else Path("report")))
    print(f"{made.text}\nwrote {made.html} and {made.markdown}")
    return 0


@app.command
def compare(
    target: Path,
    *,
    conditions: str = "whale,adaptive,weight-only,harness-only,fst,stagewise",
    seeds: str = "1,2,3",
    budget: int | None = None,
    set: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    out: Path | None = None,
) -> int:
    """Run TARGET, a config, once for each condition and seed at equal budgets, then write the report.

    Killed or stopped by Ctrl-C, the same command goes on where it was. conditions, seeds: separated by commas.
    budget: episodes of each run, in place of the config's. set: change a config value. out: folder of runs and report;
    by default `study-` and the config's name.
    """
    from whale_tui import study

    return study.compare(target, conditions, seeds, budget, set or [], out)


@app.command
def diagnose(
    target: Path,
    *,
    steps: int | None = None,
    set: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Search for 6 iterations and train for one short phase, both from the start of TARGET, a config; say which half
    holds the system back.

    Killed or stopped, the same command goes on. steps: of training; by default as many as the config's weight phases
    have, but no more than cost what the search may. set: change a config value. out: folder of the two runs; by default
    `diagnose-` and the config's name. json: one object, after the progress lines.
    """
    from whale_tui import diagnose as diagnosis

    return diagnosis.diagnose(target, steps, set or [], out, json=json)


@app.command
def export(run: RunName, out: Path, *, pair: str = "best", adapter: bool = False) -> int:
    """Write a pair of RUN into the new folder OUT: weights, harness, a runner that needs no whale-tui, model card.

    pair: "best" (the best seen), "current", "start", or THETA,HARNESS such as theta-0004,h0002. adapter: the LoRA
    adapter in peft's layout instead of merged weights; it then needs the base model beside it.
    """
    from whale_tui.export import command

    return command.export(opening.find(run), out, pair, adapter=adapter)


@app.command
def play(
    run: RunName,
    question: str = "",
    *,
    pair: str = "best",
    headless: bool = False,
    greedy: bool = False,
    json: Path | None = None,
    ascii: bool = False,
    mouse: bool = True,
    theme: str | None = None,
) -> int:
    """Let a pair of RUN solve a task: QUESTION, or one that you type or choose in the application.

    It runs beside the run, in a process of its own: a live engine goes on, and nothing of it is recorded or a score.
    pair: as for export. headless: print prompts, samples, tool uses and the answer; without QUESTION the tasks are read
    from stdin, one a line. greedy: take the likeliest token (headless). json: a file with the task's public fields as
    an object (headless).
    """
    from whale_tui import play as playing

    rundir = opening.find(run)
    chosen = playing.pair_of(rundir, pair)
    if opening.is_terminal() and not (headless or question or json):
        return opening.open_screen(rundir.path, ascii=ascii, mouse=mouse, theme=theme, play=chosen)
    return playing.headless(rundir, chosen, question, json, greedy=greedy)


@app.command(name="list")
def list_(*, json: bool = False) -> int:
    """Runs on this machine. json: one object a line."""
    import msgspec

    from whale_tui.service import discovery

    runs = discovery.list_runs()
    for summary in runs:
        if json:
            print(msgspec.json.encode(msgspec.to_builtins(summary, enc_hook=str)).decode())
        else:
            best = f"best {summary.best_mean:.1%}" if summary.best_mean is not None else "not tested"
            where = f"cycle {summary.cycle} {summary.phase or ''}".strip()
            print(f"{summary.name:20} {summary.status:10} {summary.condition:12} {where:18} {best:12} {summary.path}")
    if not runs and not json:
        print("no runs yet; start one with: whale-tui run sample_configs/quickstart.toml")
    return 0


@app.command
def config(target: Path | None = None, *, set: Annotated[list[str] | None, Parameter(name="--set")] = None) -> int:
    """Without TARGET, every key with its default and meaning. With one: the file as resolved, with origins."""
    from whale_tui import config as configuration

    if target is None:
        import tomli_w

        for key, default, text in configuration.document():
            print(f"# {' '.join(text.split())}\n{tomli_w.dumps({key.rpartition('.')[2]: default}).strip()}  # {key}\n")
    else:
        print(configuration.dump(configuration.load(target, set or [])))
    return 0


@app.command
def repair(run: RunName) -> int:
    """Go back to the last good state of a damaged journal. The broken file is kept beside it."""
    from whale_tui.journal import repair as repair_journal

    rundir = opening.find(run)
    with rundir.lock():
        kept = repair_journal(rundir.journal)
    print(f"{rundir.name}: {kept} events are good; go on with: whale-tui run {rundir.path}")
    return 0


@app.command(name="--install-completion")
def install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None, output: Path | None = None) -> int:
    """Let the shell complete commands, options and names of runs.

    shell: the one in use by default. output: file for the script; by default the place where the shell looks, which
    the shell's start-up file is then made to read.
    """
    print(f"wrote {app.install_completion(shell=shell, output=output, add_to_startup=output is None)}")
    print("open a new shell to use it")
    return 0


def _control_args(command: str, words: list[str]) -> dict[str, Any]:
    """`key=value` words, and the plain words of the commands that have an obvious first argument."""
    import tomli

    plain = {
        "pin": ["harness"], "approve": ["harness"], "veto": ["harness", "reason"], "propose": ["file"],
        "evaluate": ["policy", "harness", "samples"],
    }  # fmt: skip
    positions, values = list(plain.get(command, [])), {}
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key.isidentifier():
            try:
                values[key] = tomli.loads(f"v = {text}")["v"]
            except tomli.TOMLDecodeError:
                values[key] = text
        elif positions:
            values[positions.pop(0)] = word
        else:
            raise ValueError(f"{command}: {word!r} is not of the form key=value")
        if key in positions:
            positions.remove(key)
    if command == "propose":
        if "file" not in values:
            raise ValueError("propose: give the file of the harness")
        try:
            values["source"] = Path(values.pop("file")).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"propose: {error}") from None
    return values
