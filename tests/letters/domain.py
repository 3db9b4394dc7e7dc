"""A domain that a tiny random model can be rewarded in: answer with a text that begins with one of a task's letters.

A random byte is right about half the time, so that every event of a run comes up within seconds.
"""

from __future__ import annotations

from typing import Any

from whale_tui.domains.base import NoOptions
from whale_tui.records import Brief, Episode, Split, Task, Verdict

Options = NoOptions
SIZES: dict[Split, int] = {"weight": 48, "harness": 6, "test": 6}

H0 = """
SYSTEM = "Say a letter."
EXAMPLES = []
MAX_TOKENS = 4


def run(task, model, tools):
    reply = model.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["ask"]}],
                       max_tokens=MAX_TOKENS)
    return tools.clean(reply.text)
"""


class Letters:
    name = "letters"
    h0 = H0
    brief = Brief(text="Begin with an even character.", tools={"clean": "clean(text): the text without spaces"})
    edits = None

    def tasks(self, split: Split) -> list[Task]:
        return [
            Task(key=f"{split}-{n}", public={"ask": f"{split} {n}"}, private={"rest": str(n % 2)})
            for n in range(SIZES[split])
        ]

    def tools(self, task: Task) -> dict[str, Any]:
        return {"clean": lambda text: text.strip()}

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        right = bool(answer) and ord(answer[0]) % 2 == 0
        return Verdict("accept" if right else "reject", "even" if right else "odd or empty")


def build(options: NoOptions) -> Letters:
    return Letters()
