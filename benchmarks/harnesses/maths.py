"""The calculation by the policy, its value by the calculator, worked examples, a vote over four."""

import re

SYSTEM = "Write the calculation that solves the problem."
TURN = "{question}\nExpression:"
EXAMPLES = [
    ("A farm has 14 hens and buys 9 more. How many hens does it have then?\nExpression:", "14 + 9"),
    ("Mia reads 12 pages a day for 6 days. How many pages has she read?\nExpression:", "12 * 6"),
    ("Tom has 85 stamps, gives 17 to Eva and loses 5. How many are left?\nExpression:", "85 - 17 - 5"),
    ("There are 96 chairs in 8 equal rows. How many chairs are in a row?\nExpression:", "96 / 8"),
    ("Ann buys 4 pens for 3 dollars each and a book for 15. How much does she pay?\nExpression:", "4 * 3 + 15"),
    ("Leo had 52 marbles and has 31 now. How many did he lose?\nExpression:", "52 - 31"),
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
    return str(tools.calc(found[0])) if found else ""


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    try:
        return parse(reply.text, tools)
    except ToolError:
        return ""


def run(task, model, tools):
    chat = messages(ask(task, tools))
    answers = [attempt(chat, model, tools) for _ in range(VOTES)]
    found = [answer for answer in answers if answer]
    return max(found, key=found.count) if found else ""
