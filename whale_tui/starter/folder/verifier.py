"""Judges answers. It runs outside the seal, with the reference that no harness sees: it alone gives rewards."""

import string


def verify(task, answer):
    """Whether the answer is right. `task` is a dict with every column of the row, `answer` what the harness returned.

    Return True or False, or a whale_tui.records.Verdict with a reason of your own. An exception, or anything else,
    makes the episode invalid: it is counted as a failure of the machinery, not of the policy.
    """
    return plain(answer) in [plain(right) for right in task["answer"]]


def plain(text):
    """The text without case, punctuation and blanks around it."""
    return text.lower().strip(string.punctuation + string.whitespace)


def known_answers():
    """Answers whose verdict you know, which `whale-tui doctor` tries: right ones, and wrong ones that come near."""
    task = {"question": "What is the opposite of big?", "answer": ["small", "little"]}
    return [
        (task, "small", True),
        (task, " Little. ", True),
        (task, "The opposite of big is small", False),
        (task, "", False),
    ]


# Tools that a harness may call, each a function of JSON values: `tools.letters("hot")`. They run outside the seal too.
# Raise ValueError with a reason to refuse a call. With state of an episode's own, write `def tools(task)` that returns
# such a dict instead.
TOOLS = {}
