"""The one interface of a domain, and how a domain is found."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from whale_tui.records import Brief, Decision, Demonstration, Episode, Split, Task, Verdict

GROUP = "whale_tui.domains"
"""Entry point group: a name -> a module with `build(options) -> Domain` and, where it takes options, `Options`."""

Tool = Callable[..., Any]
"""A tool runs in the engine, on the host's side, plain or `async def`. It takes and returns JSON values; ValueError is
the harness's to see (its text is raised inside the harness as ToolError), any other exception makes the episode
`invalid`. A plain one must return at once: while it runs, so does nothing else."""


class Domain(Protocol):
    """Tasks by split, tools, a verifier, h0 and a brief for the proposer.

    A domain may also have, plain or `async def` (see `problems` and `close` below):
    `report: tables.Report`, what its import read, kept and dropped; `preflight() -> list[str]`, what keeps it from
    working now, in words, empty where nothing does; `close()`, which ends what it started; `known_answers()`, a list
    of Known, by which `whale-tui doctor` tries the verifier; `export(folder) -> list[str] | None`, plain, which writes
    `tools.py` with a function `tools(task) -> {name: function}` (`task`: the public fields) and whatever that needs
    into the folder of an exported pair, without whale-tui; its result are further requirements, None where the tools
    can't be taken along.
    """

    name: str
    h0: str
    brief: Brief
    edits: Any
    """Edit rules of the domain's own for the `rules` proposer (proposers/edits.py), or None."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a fixed order, deduplicated."""
        ...

    def tools(self, task: Task) -> Mapping[str, Tool]:
        """Fresh tools for one episode; state of an environment lives in them."""
        ...

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict | Awaitable[Verdict]:
        """Judge the returned answer (and the environment's state). Raising makes the episode `invalid`.

        Where it also takes `sampled` or `tools` by name (with a default), it is given (see `judge`): the text of each
        call as the policy wrote it, in order, without the end-of-turn token and not cut at a stop string; and the
        mapping that `tools(task)` returned for this episode, with the state that is in it.
        """
        ...


class Known(msgspec.Struct, frozen=True):
    """An answer whose verdict is known. (task, answer, decision) alone will do where the answer is all that counts."""

    task: Task
    answer: str
    decision: Decision
    sampled: list[str] = []
    """What the policy wrote; empty: the answer, in the forms that harnesses ask for."""
    uses: list[tuple[str, list[Any]]] = []
    """Tools used after that, in order: name and arguments."""


class DomainError(Exception):
    """The domain can't be loaded; the text names the file or key and the mend."""


def names() -> list[str]:
    """Every domain that a name alone finds: the built-in ones, then those of installed packages."""
    here = Path(__file__).parent
    built_in = sorted(folder.name for folder in here.iterdir() if (folder / "__init__.py").is_file())
    return built_in + sorted({point.name for point in metadata.entry_points(group=GROUP)} - set(built_in))


def load(
    name: str,
    options: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    *,
    relative_to: Path | None = None,
) -> Domain:
    """The domain called `name` (built in, or an entry point), or the one in the user's `folder`.

    Its module gives `build(options) -> Domain`, and `Options`, a msgspec struct, where it takes options. An option of
    type `Path` starts from `relative_to`, the config's folder (else from the current one).
    Raises DomainError with the nearest name or key and the mend.
    """
    module = _from_folder(name, folder) if folder is not None else _from_name(name)
    given = read_options(name, options or {}, getattr(module, "Options", NoOptions), relative_to)
    domain: Domain = module.build(given)
    return domain


def load_from(folder: Path, name: str, options: Mapping[str, Any]) -> Domain:
    """The domain that a config in `folder` names: the one in its folder `name`, where that is one, else by its name.

    Raises DomainError."""
    own = folder / name
    return load(name, options, own if (own / "domain.py").is_file() else None, relative_to=folder)


def absolute(name: str, options: Mapping[str, Any], folder: Path | None, relative_to: Path) -> dict[str, Any]:
    """The options with every path among them made absolute, so that the config can be kept elsewhere. DomainError."""
    module = _from_folder(name, folder) if folder is not None else _from_name(name)
    given = read_options(name, options, getattr(module, "Options", NoOptions), relative_to)
    whole: dict[str, Any] = msgspec.to_builtins(given, enc_hook=str)
    return {key: whole.get(key, value) for key, value in options.items()}


def judge(
    domain: Domain, task: Task, answer: str, episode: Episode, *, sampled: Sequence[str], tools: Mapping[str, Tool]
) -> Verdict | Awaitable[Verdict]:
    """The domain's verdict: `verify`, with those of `sampled` and `tools` that it takes by name."""
    taken = inspect.signature(domain.verify).parameters
    given: dict[str, Any] = {"sampled": sampled, "tools": tools}
    return domain.verify(task, answer, episode, **{name: value for name, value in given.items() if name in taken})


async def problems(domain: Domain) -> list[str]:
    """What the domain's preflight, where it has one, says keeps it from working now. Empty: nothing does."""
    found: list[str] = await _called(domain, "preflight") or []
    return found


async def close(domain: Domain) -> None:
    """End what the domain started, where it started anything."""
    await _called(domain, "close")


async def _called(domain: Domain, name: str) -> Any:
    method = getattr(domain, name, None)
    result = method() if callable(method) else None
    return await result if inspect.isawaitable(result) else result


class NoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """A domain without options."""


def read_options(name: str, options: Mapping[str, Any], kind: type[Any], relative_to: Path | None = None) -> Any:
    """`options` as the struct `kind`, its paths from `relative_to`. Raises DomainError with the key path, what is wrong
    and the nearest valid key."""

    def path(wanted: type[Any], value: Any) -> Any:
        if wanted is not Path or not isinstance(value, str) or not value:
            raise TypeError(f"Expected {'a path' if wanted is Path else wanted.__name__}, got {value!r}")
        return Path(relative_to or "").joinpath(Path(value).expanduser()).absolute()

    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in options:
        if key not in known:
            raise DomainError(f"domain.options.{key}: the domain {name} has no such option{_nearest(key, known)}")
    try:
        return msgspec.convert(dict(options), kind, dec_hook=path)
    except msgspec.ValidationError as error:
        raise DomainError(f"domain.options of {name}: {str(error).replace('`$.', '`domain.options.')}") from error


def read_h0(module_file: str) -> str:
    """The text of `harness.py` beside a domain's module: it is run in the sealed worker, never imported."""
    return _read(Path(module_file).with_name("harness.py"))


def read_brief(
    module_file: str, tools: dict[str, str], demonstrations: Sequence[Demonstration], name: str = "brief.md"
) -> Brief:
    """`brief.md` beside a domain's module, with what its tools do and demonstrations that belong to no split."""
    return Brief(text=_read(Path(module_file).with_name(name)), tools=tools, demonstrations=list(demonstrations))


def _from_name(name: str) -> ModuleType:
    known = names()
    if name not in known:
        raise DomainError(
            f"domain {name!r} is not known{_nearest(name, known)}; a domain of your own is named by its folder"
        )
    points = list(metadata.entry_points(group=GROUP, name=name))
    built_in = importlib.util.find_spec(f"{GROUP}.{name}") is not None
    try:
        module = importlib.import_module(f"{GROUP}.{name}") if built_in else points[0].load()
    except ImportError as error:
        lacks = built_in and not (error.name or "whale_tui").startswith("whale_tui")
        mend = f"; what it needs comes with: pip install 'whale-tui[{name.replace('_', '-')}]'" if lacks else ""
        raise DomainError(f"domain {name}: its module can't be imported: {error}{mend}") from error
    return _checked(module, name)


def _from_folder(name: str, folder: Path) -> ModuleType:
    file = folder / "domain.py"
    if not file.is_file():
        raise DomainError(f"domain {name}: {file} does not exist; a domain's folder holds a domain.py")
    spec = importlib.util.spec_from_file_location(f"whale_tui_domain_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}", file)
    if spec is None or spec.loader is None:
        raise DomainError(f"domain {name}: {file} can't be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise DomainError(f"domain {name}: {file} fails to load: {type(error).__name__}: {error}") from error
    return _checked(module, name)


def _checked(module: ModuleType, name: str) -> ModuleType:
    if not callable(getattr(module, "build", None)):
        raise DomainError(f"domain {name}: {module.__file__} does not define build(options) -> Domain")
    return module


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there is {', '.join(known)}" if known else "; it takes none"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DomainError(f"{file} can't be read: {error.strerror or error}") from error
