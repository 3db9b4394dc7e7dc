"""One search, one passage, two worked examples, the answer behind a label: what the rules find in the quickstart."""

import re

TURN = "{passage}\nQuestion: {question}\nReply with one line that begins with 'Answer:'."
EXAMPLES = [
    (
        "Clara Penberg was born in the year 1955. He learned from Rosa Hartman. His trade was that of a carpenter. "
        "His birthplace was Old Corley.",
        "Who taught Clara Penberg?",
        "Rosa Hartman",
    ),
    (
        "Saint Garwick stands on the Moss River. It was first settled in 1935. Its mayor is Sara Linby. "
        "Its main export is marble.",
        "What does Saint Garwick sell abroad?",
        "marble",
    ),
]


def run(task, model, tools):
    chat = []
    for passage, question, answer in EXAMPLES:
        chat.append({"role": "user", "content": TURN.format(passage=passage, question=question)})
        chat.append({"role": "assistant", "content": f"Answer: {answer}"})
    found = tools.search(task["question"], 1)
    passage = found[0]["text"][:400] if found else ""
    chat.append({"role": "user", "content": TURN.format(passage=passage, question=task["question"])})
    reply = model.chat(chat, max_tokens=16, stop=["\n"])
    labelled = re.search(r"[Aa]nswer:(.*)", reply.text)
    return labelled[1].strip() if labelled else ""
