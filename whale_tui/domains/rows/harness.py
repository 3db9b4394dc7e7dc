"""h0: one call with the public columns; the reply, as it is, is the answer.

It runs sealed: no files, no network, no clock. The names in capitals, and `ask`, `messages`, `parse`, `attempt` and
`run`, are those that the built-in proposer knows how to edit.
"""

SYSTEM = ""
TURN = "{question}"
EXAMPLES = []
MAX_TOKENS = 256
STOP = []


def ask(task, tools):
    return TURN.format(**{name: shown(value) for name, value in task.items()})


def shown(value):
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def parse(text, tools):
    return text.strip()


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
