"""Themes: TOML files with Textual's colour fields and a `[roles]` table. A bad file is one notice, never a crash."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli
from textual.color import Color, ColorParseError
from textual.style import Style
from textual.theme import Theme

from whale_tui.tui.look import ROLES

DEFAULT = "whale-dark"
_COLOURS = (
    "primary", "secondary", "accent", "success", "warning", "error", "foreground", "background", "surface", "panel",
    "boost",
)  # fmt: skip
_OTHER = {"name", "dark", "ansi", "variables", "roles"}


class BadTheme(Exception):
    """The text names the file and what is wrong in it."""


@dataclass
class Loaded:
    theme: Theme
    roles: dict[str, str]


@dataclass
class Themes:
    """Every theme that could be read, and a notice for each that couldn't."""

    found: dict[str, Loaded] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def shipped_folder() -> Path:
    """themes/ of the wheel, or of the checkout."""
    package = Path(__file__).parent.parent
    inside = package / "themes"
    return inside if inside.is_dir() else package.parent / "themes"


def load(*folders: Path) -> Themes:
    """Themes of the folders; a later folder's theme replaces an earlier one's of the same name."""
    themes = Themes()
    for folder in folders:
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            try:
                loaded = read(path)
            except BadTheme as problem:
                themes.notices.append(str(problem))
            else:
                themes.found[loaded.theme.name] = loaded
    return themes


def read(path: Path) -> Loaded:
    """One theme. Raises BadTheme."""
    try:
        data = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise BadTheme(f"theme {path.name}: {error}") from None
    unknown = set(data) - set(_COLOURS) - _OTHER
    if unknown:
        raise BadTheme(f"theme {path.name}: no field {sorted(unknown)[0]!r}; there are {', '.join(_COLOURS)}")
    if "primary" not in data:
        raise BadTheme(f"theme {path.name}: primary is missing")
    for key in _COLOURS:
        if key in data:
            _colour(path, key, data[key])
    variables, roles = _strings(path, data, "variables"), _strings(path, data, "roles")
    for name, value in variables.items():
        if not _TEXT_STYLE.fullmatch(value):
            _colour(path, f"[variables] {name}", value)
    for role, style in roles.items():
        if role not in ROLES:
            raise BadTheme(f"theme {path.name}: no role {role!r}; there are {', '.join(ROLES)}")
        try:
            Style.parse(style, {"primary": "#000000"} | {name: "#000000" for name in _VARIABLES})
        except Exception as error:
            raise BadTheme(f"theme {path.name}: role {role} = {style!r} is no style ({error})") from None
    theme = Theme(
        name=str(data.get("name", path.stem)),
        dark=bool(data.get("dark", True)),
        ansi=bool(data.get("ansi", False)),
        variables=variables,
        **{key: data[key] for key in _COLOURS if key in data},
    )
    return Loaded(theme, ROLES | roles)


_TEXT_STYLE = re.compile(r"(none|bold|italic|underline|reverse|dim|strike|\s)+|\d+%")
_VARIABLES = (*_COLOURS, "text", "text-muted", "text-disabled", "border", "border-blurred")


def _colour(path: Path, key: str, value: Any) -> None:
    try:
        Color.parse(value)
    except (ColorParseError, TypeError, AttributeError):
        raise BadTheme(f"theme {path.name}: {key} = {value!r} is no colour") from None


def _strings(path: Path, data: dict[str, Any], table: str) -> dict[str, str]:
    values = data.get(table, {})
    if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
        raise BadTheme(f"theme {path.name}: [{table}] must hold strings")
    return values
