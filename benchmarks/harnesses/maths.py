"""The policy writes the calculation, the calculator works it out; a vote over those of four that fit the question."""

import re

SYSTEM = "Write the calculation that solves the problem."
TURN = "{question}"
EXAMPLES = [
    (
        "Joan had 52 marbles. She lost some of them and has 31 marbles now. How many marbles did she lose ?",
        "52 - 31 = 21",
    ),
    (
        "Tom picked 14 pears and Sara picked 9 pears from the tree. How many pears did they pick in total ?",
        "14 + 9 = 23",
    ),
    ("Mary has 7 boxes of pencils. Each box has 12 pencils. How many pencils does Mary have ?", "7 * 12 = 84"),
    (
        "A gardener grew 48 roses, gave 18 away and tied the others into bunches of 5. How many bunches is that ?",
        "(48 - 18) / 5 = 6",
    ),
    ("Dan paid $ 3.25 for a sandwich and $ 1.50 for a drink. How much did Dan spend ?", "3.25 + 1.50 = 4.75"),
    ("There are 96 chairs in 8 equal rows. How many chairs are in each row ?", "96 / 8 = 12"),
    (
        "Fred had 15 cards and bought 4 packs with 6 cards in each pack. How many cards does he have now ?",
        "15 + 4 * 6 = 39",
    ),
    (
        "There were 85 stamps in the album. There are now 121 stamps. How many did Keith add ?",
        "121 - 85 = 36",
    ),
]
MAX_TOKENS = 24
STOP = ["\n"]
VOTES = 4


def ask(task, tools):
    return TURN.format(question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def parse(text, tools):
    found = re.search(r"[0-9(.][0-9+\-*/(). ]*[0-9)]|[0-9]", text.split("=")[0])
    return found[0].strip() if found else ""


def sensible(expression, question):
    """Whether it calculates, and with nothing but numbers of the question, each at most once."""
    given, used = (re.findall(r"[0-9]+(?:\.[0-9]+)?", text) for text in (question.replace(",", ""), expression))
    return len(used) > 1 and all(used.count(number) <= given.count(number) for number in used)


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    chat = messages(ask(task, tools))
    good, rest = [], []
    for _ in range(VOTES):
        expression = attempt(chat, model, tools)
        try:
            answer = str(tools.calc(expression))
        except ToolError:
            continue
        negative = answer.startswith("-")
        (good if sensible(expression, task["question"]) and not negative else rest).append(answer)
    found = good or rest
    return max(found, key=found.count) if found else ""
