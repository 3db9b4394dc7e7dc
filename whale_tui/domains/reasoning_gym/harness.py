"""The question as it is, the answer in tags: no example."""

import re

SYSTEM = ""
TURN = "{question}\nGive the final answer inside <answer> and </answer>."
EXAMPLES = []
MAX_TOKENS = 256
STOP = []


def ask(task, tools):
    return TURN.format(question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def parse(text, tools):
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return tagged[-1].strip() if tagged else ""


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
