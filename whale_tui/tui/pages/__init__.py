"""The pages: Home, Run, Inbox, Episodes, Lineage, Ledger, Play, Help. Each is imported when it is first opened."""

from __future__ import annotations

from importlib import import_module

from whale_tui.tui.page import Page


def page(name: str) -> type[Page]:
    """The class of a page."""
    found: type[Page] = getattr(import_module(f"whale_tui.tui.pages.{name}"), f"{name.capitalize()}Page")
    return found
