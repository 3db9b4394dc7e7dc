# ruff: noqa: E501, SIM905 (worked examples, a turn a line)
"""Searches for the question, reads the most telling sentence, trims the reply, takes a vote of four; eight examples."""

import re

SYSTEM = ""
TURN = "{passages}\nQuestion: {question}\nReply with one line that begins with 'Answer:'."
PASSAGE = "{text}"
EXAMPLES = [
    (
        "It was drawn by the engineer Isla Corvane, who had lost an earlier bridge to a spring flood, and was opened to goods trains in 1887.\nQuestion: Which engineer drew the Brennoch Viaduct after losing an earlier bridge?\nReply with one line that begins with 'Answer:'.",
        "Answer: Isla Corvane",
    ),
    (
        "It is passed on by the brown upland tick and lasts about nine days.\nQuestion: How long does the fever last that the brown upland tick passes on?\nReply with one line that begins with 'Answer:'.",
        "Answer: about nine days",
    ),
    (
        "For most of its history it had no hall and played in the fish market, where the audience stood.\nQuestion: In which place was it that the orchestra played while it had no hall?\nReply with one line that begins with 'Answer:'.",
        "Answer: in the fish market",
    ),
    (
        "Its water is coloured green by a copper vein in the northern wall, and nothing lives in it but a small blind shrimp.\nQuestion: What gives Lake Ammerin its green colour?\nReply with one line that begins with 'Answer:'.",
        "Answer: a copper vein",
    ),
    (
        "Harn gave up its toll on salt, and received the forest of Old Linden in return.\nQuestion: What did Harn receive for giving up its toll?\nReply with one line that begins with 'Answer:'.",
        "Answer: the forest of Old Linden",
    ),
    (
        "His tide clock, which shows high water for eleven harbours, still runs in the customs house of Ebbery.\nQuestion: How many harbours does the tide clock show?\nReply with one line that begins with 'Answer:'.",
        "Answer: eleven",
    ),
    (
        "The recipe was kept by a single family, the Ostrands, and was lost when their workshop burned in 1744.\nQuestion: Which family kept the recipe of sorrel glass?\nReply with one line that begins with 'Answer:'.",
        "Answer: the Ostrands",
    ),
    (
        "Two drivers and fourteen dogs covered the 88 kilometres between Corrin and the lowland station in nine hours.\nQuestion: What is the distance between Corrin and the lowland station?\nReply with one line that begins with 'Answer:'.",
        "Answer: 88 kilometres",
    ),
]
SEARCH_K = 1
PASSAGE_CHARS = 800
SENTENCES = 1
MAX_TOKENS = 16
STOP = ["\n"]
VOTES = 4


def query(task):
    return task["question"]


def telling(text, question, count):
    """The `count` sentences of a text that share most words with a question, rare words first, in their order."""
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])", text) if part.strip()]
    stems = [
        {word[:5] for word in re.findall(r"[^\W_]+", each.lower()) if len(word) > 3 or word.isdigit()}
        for each in [question, *parts]
    ]
    weight = {word: 1 / (1 + sum(word in held for held in stems[1:])) for word in stems[0]}
    shared = [sum(weight[word] for word in sorted(stems[0] & held)) for held in stems[1:]]
    best = sorted(range(len(parts)), key=lambda n: -shared[n])[:count]
    return " ".join(parts[n] for n in sorted(best))


def shorten(text, question):
    return telling(text, question, SENTENCES) if SENTENCES else text[:PASSAGE_CHARS]


def ask(task, tools):
    found = tools.search(query(task)[:1000], SEARCH_K)
    shown = [PASSAGE.format(title=p["title"], text=shorten(p["text"], task["question"])) for p in found]
    return TURN.format(passages="\n".join(shown), question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return trimmed(parse(reply.text, tools), chat[-1]["content"])


def parse(text, tools):
    labelled = re.search(r"[Aa]nswer:(.*)", text)
    return labelled[1].strip() if labelled else ""


def trimmed(text, turn):
    """Of a reply, the first words in a row that stand so in the turn and are not the question's own; failing that, all.

    A small policy says a sentence where a few words are wanted, and says much that it has not read.
    """
    small = """a about also an and are as at be been but by did do does for from had has have he her his how in into
    is it its many much not of on or she so than that the their then there they this to was were what when where which
    who whom whose why with""".split()

    def bare(words):
        return [re.sub(r"^\W+|\W+$", "", word).lower() for word in words.split()]

    question = (re.findall(r"Question: (.*)", turn) or [""])[-1]
    asked, passages = {word[:5] for word in bare(question)}, " ".join(bare(turn.replace(question, " ? ")))
    words, runs, start = bare(text), [], 0
    while start < len(words):
        end = start
        while end < len(words) and words[end] and words[end][:5] not in asked:
            if f" {' '.join(words[start : end + 1])} " not in f" {passages} ":
                break
            end += 1
        if words[start] in small:
            end = start
        run = text.split()[start:end]
        while run and words[start + len(run) - 1] in small:
            run.pop()
        runs += [" ".join(run)] if run else []
        start = max(start + 1, end)
    return re.sub(r"^[^\w$(]+|[^\w)%]+$", "", runs[0]) if runs else text


def run(task, model, tools):
    chat = messages(ask(task, tools))
    answers = []
    while len(answers) < VOTES and (not answers or model.remaining.calls != 0):
        answers.append(attempt(chat, model, tools))
    found = [answer for answer in answers if answer]
    return max(found, key=found.count) if found else ""
