"""What a person chose: keys and theme from the config folder, layout from the state folder. None of it is fatal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import platformdirs
import tomli
from msgspec import Struct

from whale_tui.rundir import write_atomic
from whale_tui.tui.actions import BY_ID


class Layout(Struct):
    """Kept between sessions, for every run."""

    pane: str = "success"
    maximised: bool = False
    beside: bool = False
    best_first: bool = False
    theme: str = ""


class Preferences(Struct):
    """config.toml of the config folder: `theme`, and `[keys]` with an action's name or id and its keys."""

    theme: str = ""
    keys: dict[str, str] = {}
    notices: list[str] = []


def config_folder() -> Path:
    return Path(platformdirs.user_config_dir("whale-tui"))


def state_folder() -> Path:
    return Path(platformdirs.user_state_dir("whale-tui"))


def read_preferences(folder: Path) -> Preferences:
    """A bad file or entry is a notice."""
    path = folder / "config.toml"
    try:
        data = tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Preferences()
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        return Preferences(notices=[f"{path}: {error}"])
    keys: dict[str, str] = {}
    notices: list[str] = []
    given = data.get("keys", {})
    for name, value in given.items() if isinstance(given, dict) else ():
        action = name.replace(": ", ".").replace(" ", "-")
        if action not in BY_ID:
            notices.append(f"{path}: no action {name!r} in [keys]")
        elif not isinstance(value, str):
            notices.append(f"{path}: the keys of {name!r} must be a string")
        else:
            keys[action] = value
    theme = data.get("theme", "")
    return Preferences(theme=theme if isinstance(theme, str) else "", keys=keys, notices=notices)


def read_layout(folder: Path) -> Layout:
    try:
        return msgspec.json.decode((folder / "layout.json").read_bytes(), type=Layout)
    except (OSError, msgspec.DecodeError):
        return Layout()


def write_layout(folder: Path, layout: Layout) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "layout.json", msgspec.json.encode(layout))
    except OSError:
        pass


def put(folder: Path, name: str, data: Any) -> Path:
    """Write text to a file of the state folder and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    write_atomic(path, data.encode("utf-8", "replace"))
    return path
