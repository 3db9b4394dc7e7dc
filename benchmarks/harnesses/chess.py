"""The checks alone are listed, worked examples show the form, and the first listed move of a short reply is played."""

import re

SYSTEM = ""
TURN = "FEN: {fen}\n{side} to move. Moves: {moves}\nBest move:"
MOVE = "{uci}"
LISTED = "checks"
EXAMPLES = [
    (
        "FEN: r4rk1/ppp2p1p/6pQ/8/8/2B5/PP3PPP/6K1 w - - 0 1\nwhite to move. Moves: h6f8, h6g6, h6g7, h6h7\nBest move:",
        "h6g7",
    ),
    (
        "FEN: 6k1/pp3p1p/8/8/3q4/2b5/1P3PPP/6K1 b - - 0 1\nblack to move. Moves: d4d1, d4f2\nBest move:",
        "d4d1",
    ),
    (
        "FEN: 7k/R7/8/8/8/8/1R4PP/6K1 w - - 0 1\nwhite to move. Moves: a7a8, a7h7, b2b8\nBest move:",
        "b2b8",
    ),
    (
        "FEN: 8/8/8/8/8/1k6/7r/K7 b - - 0 1\nblack to move. Moves: h2a2, h2h1\nBest move:",
        "h2h1",
    ),
]
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
