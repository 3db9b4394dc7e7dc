"""How things look: the roles of a theme as styles, and the glyphs of a terminal that may know only ASCII."""

from __future__ import annotations

from dataclasses import dataclass, field

ROLES = {
    "muted": "$text-muted",
    "faint": "$text-disabled",
    "title": "bold $foreground",
    "key": "bold $accent",
    "rule": "$border-blurred",
    "phase-weight": "$primary",
    "phase-harness": "$accent",
    "accepted": "bold $success",
    "switch": "$text-muted",
    "test": "bold $warning",
    "good": "$success",
    "bad": "$error",
    "invalid": "$warning",
    "warning": "$warning",
    "failure": "bold $error",
    "patience-ok": "$success",
    "patience-low": "bold $warning",
    "diff-added": "$success",
    "diff-removed": "$error",
    "diff-hunk": "bold $primary",
    "changed": "bold $success",
    "sampled": "$foreground",
    "unlikely": "underline $warning",
    "cursor": "reverse",
    "pinned": "bold $warning",
    "best": "bold $success",
    "code-keyword": "$accent",
    "code-string": "$success",
    "code-number": "$warning",
    "code-comment": "italic $text-muted",
    "code-function": "bold $primary",
    "code-builtin": "$secondary",
}
"""Role -> style where a theme's `[roles]` is silent."""


@dataclass(frozen=True)
class Glyphs:
    cursor: str = "▸"
    raw: str = "•"
    iteration: str = "◇"
    accepted: str = "◆"
    test: str = "▲"
    switch: str = "┊"
    weight_band: str = "━"
    harness_band: str = "╍"
    full: str = "▰"
    empty: str = "▱"
    yes: str = "✓"
    no: str = "✗"
    dot: str = "·"
    times: str = "×"
    arrow: str = "→"
    pin: str = "◉"
    star: str = "★"
    on: str = "●"
    off: str = "○"
    gutter: str = "▎"
    sampled: str = "┃"
    rule: str = "─"
    bar: str = "│"
    tick: str = "┤"
    minus: str = "−"
    braille: bool = True


UNICODE = Glyphs()
ASCII = Glyphs(
    cursor=">", raw=".", iteration="o", accepted="A", test="T", switch="|", weight_band="=", harness_band="-",
    full="#", empty=".", yes="+", no="x", dot="-", times="x", arrow="->", pin="P", star="!", on="*", off="o",
    gutter="|", sampled="|", rule="-", bar="|", tick="+", minus="-", braille=False,
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """Handed to everything that draws."""

    roles: dict[str, str] = field(default_factory=lambda: dict(ROLES))
    glyphs: Glyphs = UNICODE

    def __call__(self, role: str) -> str:
        return self.roles[role]

    def phase(self, phase: str | None) -> str:
        return self.roles["phase-harness"] if phase == "harness" else self.roles["phase-weight"]
