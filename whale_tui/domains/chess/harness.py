"""The whole position every turn, the move in tags, in brackets or bare; one retry for the form, one for the rules."""

import re

SYSTEM = ""
TURN = """You are solving a chess puzzle. Find the best move for {side}.
FEN: {fen}
{board}
Legal moves: {moves}
Moves so far: {played}
Reply with your move in UCI inside <move> and </move>."""
MOVE = "{uci} ({san})"
LISTED = "all"
EXAMPLES = []
MAX_TOKENS = 64
STOP = []
TURNS = 9
RETRIES = 1
RETRY = "There was no move in that. Reply with one legal move in UCI inside <move> and </move>."


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
    for pattern in (r"<move>(.*?)</move>", r"\[(.*?)\]", r"\b([a-h][1-8][a-h][1-8][nbrq]?)\b"):
        found = re.findall(pattern, text, re.DOTALL)
        if found:
            return found[-1].strip()
    return ""


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
