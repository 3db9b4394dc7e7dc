"""The checks alone are listed, in SAN, and the first listed move of a short reply is played."""

import re

SYSTEM = ""
TURN = "FEN: {fen}\n{side} to move. Moves: {moves}\nBest move:"
MOVE = "{san}"
LISTED = "checks"
EXAMPLES = []
MAX_TOKENS = 8
STOP = ["\n"]
TURNS = 9
RETRIES = 1
RETRY = "That is none of the moves. Reply with one of them."


def listed(tools):
    wanted = {"all": (), "checks": ("check",), "forcing": ("check", "capture", "promotion")}[LISTED]
    moves = tools.legal_moves()
    return [move for move in moves if any(move[kind] for kind in wanted)] or moves


def turn(tools):
    position = tools.board()
    return TURN.format(
        side=position["to_move"],
        fen=position["fen"],
        board=position["board"],
        moves=", ".join(MOVE.format(uci=move["uci"], san=move["san"]) for move in listed(tools)),
        played=" ".join(position["played"]) or "none",
    )


def messages(shown):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": shown}]


def parse(text, tools):
    names = {}
    for move in tools.legal_moves():
        names[move["uci"]] = names[move["san"].rstrip("+")] = move["uci"]
    found = [names[word] for word in re.findall(r"[A-Za-z0-9=-]+", text) if word in names]
    return found[0] if found else ""


def attempt(chat, model, tools):
    answer = ""
    for _ in range(RETRIES + 1):
        reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
        try:
            answer, problem = parse(reply.text, tools), RETRY
        except ToolError as error:
            problem = str(error)
        if answer or model.remaining.calls == 0:
            break
        chat = [*chat, {"role": "assistant", "content": reply.text}, {"role": "user", "content": problem}]
    return answer


def choose(chat, model, tools):
    return attempt(chat, model, tools)


def run(task, model, tools):
    played, problem = [], ""
    for _ in range(TURNS):
        move = choose(messages(turn(tools) + problem), model, tools)
        if not move:
            break
        try:
            played.append(tools.move(move)["played"])
            problem = ""
        except ToolError as error:
            problem = f"\n{error}"
        if tools.board()["status"] != "open" or model.remaining.calls == 0:
            break
    return " ".join(played)
