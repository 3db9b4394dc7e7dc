"""The question, the answer in a box: no tool, no example."""

import re

SYSTEM = ""
TURN = "{question}\nPut the final answer in \\boxed{{}}."
EXAMPLES = []
MAX_TOKENS = 32
STOP = []


def ask(task, tools):
    return TURN.format(question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def parse(text, tools):
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return boxed[-1].strip() if boxed else ""


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
