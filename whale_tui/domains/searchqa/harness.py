"""Two turns: the policy writes a query, which is passed on unchanged, reads one passage cut short, answers in tags."""

import re

SYSTEM = ""
TURN = "Question: {question}\nFirst write what to search for inside <search> and </search>. You then get a passage."
FOUND = "{passages}\nNow write the answer, a few words, inside <answer> and </answer>."
PASSAGE = "{title}\n{text}"
EXAMPLES = []
SEARCH_K = 1
PASSAGE_CHARS = 800  # about 200 tokens
MAX_TOKENS = 256
STOP = []


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def tagged(text, tag):
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else ""


def read(query, tools):
    found = tools.search(query, SEARCH_K)
    passages = "\n".join(PASSAGE.format(title=p["title"], text=p["text"][:PASSAGE_CHARS]) for p in found)
    return FOUND.format(passages=passages or "Nothing was found.")


def run(task, model, tools):
    chat = messages(TURN.format(question=task["question"]))
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    query = tagged(reply.text, "search")
    if query:
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": read(query, tools)}]
        reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return tagged(reply.text, "answer")
