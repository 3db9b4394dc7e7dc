"""The tools that harness.py may call. They could not be taken along: give them here.

What each takes and returns stands in agent.json under "tools". They take and return JSON values; a ValueError reaches
the harness as ToolError, with its text.
"""


def tools(task):
    """The tools for one task: name -> function. `task` is a dict of its public fields."""
    return {}
