"""One search with the question passed on, one passage cut short, one example, the answer on the first line."""

SYSTEM = ""
TURN = "{passages}\nQuestion: {question}"
PASSAGE = "{text}"
EXAMPLES = [
    (
        "Saint Garwick stands on the Moss River. It was first settled in 1935. Its mayor is Sara Linby. "
        "Its main export is marble\nQuestion: What does Saint Garwick sell abroad?",
        "marble",
    ),
]
SEARCH_K = 1
PASSAGE_CHARS = 120
MAX_TOKENS = 16
STOP = ["\n"]


def query(task):
    return task["question"]


def ask(task, tools):
    found = tools.search(query(task), SEARCH_K)
    passages = "\n".join(PASSAGE.format(title=p["title"], text=p["text"][:PASSAGE_CHARS]) for p in found)
    return TURN.format(passages=passages, question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def parse(text, tools):
    return text.strip().split("\n")[0].strip()


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
