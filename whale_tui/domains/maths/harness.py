"""The problem, the answer in a box, and one block of Python that is run between two turns."""

import re

SYSTEM = ""
TURN = (
    "{question}\n\nYou may write one ```python block: it is run, and what it prints is shown to you. "
    "Put the final answer in \\boxed{{}}."
)
EXAMPLES = []
OUTPUT = "```output\n{output}\n```"
TURNS = 2
MAX_TOKENS = None
STOP = []


def ask(task, tools):
    return TURN.format(question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def program(text):
    found = re.search(r"```python[ \t]*\n(.*?)```", text, re.DOTALL)
    return found[1] if found else ""


def parse(text, tools):
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + 6, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 7 : place].strip()
    return ""


def attempt(chat, model, tools):
    for turn in range(1, TURNS + 1):
        reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
        code = program(reply.text)
        if not code.strip() or turn == TURNS:
            break
        try:
            output = tools.python(code)
        except ToolError as refusal:
            output = str(refusal)
        chat = [
            *chat,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": OUTPUT.format(output=output.strip())},
        ]
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
