"""The contract of a harness as a real worker keeps it, hangs and their victims, and the runner that runs them again."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from whale_tui.harness.contract import LAZY, MODULES
from whale_tui.harness.sealed import can_seal
from whale_tui.harness.worker import (
    BudgetExceeded,
    EpisodeEnd,
    HarnessLoadError,
    HarnessRunner,
    Limits,
    Reply,
    SealedWorker,
    ToolError,
)

SEALED, WHY_NOT = can_seal()
pytestmark = pytest.mark.skipif(not SEALED, reason=f"no seal here: {WHY_NOT}")
QUICK = Limits(memory_mb=400, episode_seconds=1.0, load_seconds=30)


async def chat(messages, max_tokens, stop, thinking):
    return Reply(messages[-1]["content"].upper(), "stop", 7, 5, remaining_calls=3, remaining_tokens=90)


async def tool(name, args, kwargs):
    return [name, args, kwargs]


async def run(body: str, task=None, on_chat=chat, on_tool=tool, limits=QUICK, **more) -> EpisodeEnd:
    source = "def run(task, model, tools):\n" + "\n".join("    " + line for line in body.strip().splitlines())
    worker = await SealedWorker.start(source, limits)
    try:
        return await worker.run_episode(task or {}, on_chat, on_tool, **more)
    finally:
        await worker.close()


def user(text: str) -> str:
    return f'[{{"role": "user", "content": {text!r}}}]'


# ---------------------------------------------------------------------------------------------------- the contract


async def test_the_task_is_read_by_item_and_by_attribute_and_is_plain_json():
    task = {"question": "who?", "facts": [{"a": 1}, [2, 3]], "n": 1.5, "none": None}
    end = await run(
        """
import json
assert task.question == task["question"] == "who?"
assert task.facts[0].a == 1 and task["facts"][1] == (2, 3)
assert dict(task) == task and "n" in task and list(task)[0] == "question"
try: task.answer
except AttributeError as error: missing = str(error)
return json.dumps([task, missing])
""",
        task,
    )
    assert json.loads(end.answer) == [task, "the task has no field 'answer'; it has: question, facts, n, none"]


async def test_chat_passes_everything_on_and_the_reply_has_everything():
    seen = []

    async def look(*call):
        seen.append(call)
        return await chat(*call)

    end = await run(
        f"""
before = (model.remaining.calls, model.remaining.tokens)
reply = model.chat({user("hi")}, max_tokens=9, stop="END", thinking=False)
model.chat(iter({user("hi")}), stop=["a", "b"])
model.chat(({{"role": "system", "content": ""}}, {{"role": "tool", "content": "t"}}))
fields = reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens
return repr((before, fields, model.remaining))
""",
        on_chat=look,
        remaining_calls=4,
        remaining_tokens=95,
    )
    assert end.answer == "((4, 95), ('HI', 'stop', 7, 5), Remaining(calls=3, tokens=90))"
    assert seen == [
        ([{"role": "user", "content": "hi"}], 9, ["END"], False),
        ([{"role": "user", "content": "hi"}], None, ["a", "b"], None),
        ([{"role": "system", "content": ""}, {"role": "tool", "content": "t"}], None, [], None),
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("model.chat('hi')", "messages: Expected `object`, got `str`"),
        ("model.chat([])", "messages: the list is empty"),
        ("model.chat([{'role': 'root', 'content': ''}])", "messages: Invalid enum value 'root'"),
        ("model.chat([{'role': 'user', 'content': 7}])", "Expected `str`, got `int`"),
        ("model.chat([{'role': 'user'}])", "missing required field `content`"),
        ("model.chat([{'role': 'user', 'content': '', 'name': 'x'}])", "unknown field `name`"),
        ("model.chat(M, max_tokens=0)", "max_tokens: 0 is less than 1"),
        ("model.chat(M, max_tokens='9')", "max_tokens: Expected `int | null`, got `str`"),
        ("model.chat(M, stop=7)", "stop: Expected `str | array | null`"),
        ("model.chat(M, stop=[''])", "stop: at most 16 strings, none of them empty"),
        ("model.chat(M, thinking='yes')", "thinking: Expected `bool | null`"),
        ("model.chat(M, temperature=2)", "unexpected keyword argument 'temperature'"),
        ("model.chat(M, 9)", "positional argument"),
        ("model.chat(7)", "'int' object is not iterable"),
        ("model.chat([object()])", "not JSON serializable"),
        ("model.chat([{'role': 'user', 'content': 'x' * 2_000_000}])", "bytes; at most 1,000,000"),
        ("tools.search(float('nan'))", "not JSON compliant"),
        ("tools.search({1, 2})", "not JSON serializable"),
        ("tools.steal()", "there is no tool 'steal'; there are: search"),
    ],
)
async def test_a_wrong_call_is_the_harness_s_error_and_names_its_line(call, words):
    asked = []

    async def never(*call):
        asked.append(call)
        return await chat(*call)

    end = await run(f"M = {user('hi')}\n{call}\nreturn 'went on'", on_chat=never, on_tool=never, tools=["search"])
    assert end.kind == "error"
    assert words in end.detail
    assert f'File "harness.py", line 3, in run\n    {call[:200]}' in end.detail
    assert asked == []


async def test_a_wrong_call_can_be_caught():
    end = await run(f"try: model.chat([])\nexcept TypeError: return model.chat({user('ok')}).text")
    assert end.answer == "OK"


async def test_tools_pass_json_both_ways_and_refuse_as_tool_error():
    async def domain(name, args, kwargs):
        if name == "move":
            raise ToolError(f"illegal: {args[0]}")
        return {"name": name, "args": args, "kwargs": kwargs, "big": 2**80}

    end = await run(
        """
got = tools.search("q", [1, {"a": None}], k=2)
try: tools.move("e9")
except ToolError as error: refused = str(error)
return repr((got, refused, dir(tools)))
""",
        on_tool=domain,
        tools=["search", "move"],
    )
    got = {"name": "search", "args": ["q", [1, {"a": None}]], "kwargs": {"k": 2}, "big": 2**80}
    assert end.answer == repr((got, "illegal: e9", ["move", "search"]))


async def test_an_uncaught_refusal_is_an_error_of_the_harness():
    async def refuse(name, args, kwargs):
        raise ToolError("no")

    assert (await run("tools.search()", on_tool=refuse)).detail.endswith("ToolError: no")


async def test_odd_text_survives_or_is_mended_and_never_breaks_the_pipe():
    text = "a\nb\r\u2028\x00\x1b[31m漢字🐋\\"
    end = await run(f"return model.chat({user(text)}).text + task.t + '\\ud800'", {"t": text})
    assert end.answer == text.upper() + text + "?"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("return None", "error", "run() must return a str, not NoneType"),
        ("pass", "error", "run() must return a str, not NoneType"),
        ("return 42", "error", "run() must return a str, not int"),
        ("return 'x' * 10_000_000", "error", "an answer of 10,000,000 characters; at most 100,000"),
        ("return model.chat", "error", "not method"),
        (
            "raise ValueError('no such luck')",
            "error",
            "line 2, in run\n    raise ValueError('no such luck')\nValueError: no",
        ),
        ("raise SystemExit", "error", "SystemExit"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("raise ValueError('x' * 1_000_000)", "error", "ValueError: xxx"),
        ("f = lambda n: f(n + 1)\nreturn f(0)", "error", "more frames ..."),
        ("class Bad(Exception):\n  def __str__(self): raise ValueError\nraise Bad", "error", "Bad, and no more to say"),
        ("import json\nreturn json.loads('{')", "error", "JSONDecodeError"),
        ("return open('/etc/passwd').read()", "error", "NameError"),
        ("return 'x' * (1 << 40)", "error", "MemoryError"),
        ("import os", "error", "a harness can't import 'os'"),
    ],
)
async def test_how_a_harness_fails(body, kind, words):
    end = await run(body)
    assert end.kind == kind
    assert words in end.detail
    assert len(end.detail) <= 4_000
    assert "inside.py" not in end.detail
    assert end.answer == ""


async def test_the_budget_ends_an_episode_with_its_reason():
    async def spent(*_):
        raise BudgetExceeded("5 of 5 calls used")

    end = await run(f"try: model.chat({user('hi')})\nexcept Exception: return 'caught'\nreturn ''", on_chat=spent)
    assert (end.kind, end.detail) == ("budget", "5 of 5 calls used")


async def test_failures_of_the_machinery_come_out():
    async def broken(*_):
        raise RuntimeError("the policy worker is gone")

    with pytest.raises(RuntimeError, match="policy worker"):
        await run(f"return model.chat({user('hi')}).text", on_chat=broken)
    with pytest.raises(RuntimeError, match="policy worker"):
        await run("return tools.search()", on_tool=broken)


async def test_too_many_calls_are_a_flood():
    end = await run("while True: tools.search()", limits=Limits(messages_per_episode=50, episode_seconds=10))
    assert (end.kind, end.detail) == ("flood", "more than 50 calls")


async def test_waiting_is_free_and_computing_is_counted():
    async def slow(*_):
        await asyncio.sleep(0.7)
        return Reply("ok", "stop", 1, 1)

    end = await run(f"sum(range(3_000_000))\nreturn model.chat({user('hi')}).text", on_chat=slow)
    assert end.answer == "ok"
    assert 0.01 < end.seconds < 0.5
    assert end.messages == 3


async def test_episodes_share_no_state_by_accident():
    source = """
import random
SEEN = []
COUNT = 0
def run(task, model, tools):
    global COUNT
    COUNT += 1
    SEEN.append(task.n)
    return f"{COUNT} {SEEN} {random.Random(7).random():.3f}"
"""
    worker = await SealedWorker.start(source, QUICK)
    ends = await asyncio.gather(*(worker.run_episode({"n": n}, chat, tool) for n in range(20)))
    await worker.close()
    assert [end.answer for end in ends] == [f"1 [{n}] 0.324" for n in range(20)]
    assert worker.stats.episodes == 20


async def test_print_goes_to_the_log():
    worker = await SealedWorker.start("def run(task, model, tools):\n    print('seen', task)\n    return ''", QUICK)
    await worker.run_episode({"a": 1}, chat, tool)
    await worker.close()
    assert worker.log == "seen {'a': 1}\n"


@pytest.mark.parametrize("module", sorted(MODULES - {"__future__"}))
async def test_every_allowed_module_is_there(module):
    end = await run(f"import {module} as it\nreturn it.__name__")
    assert end.answer == module, end.detail


LATE = {
    "datetime": "return str(it.datetime.strptime('2024-02-29', '%Y-%m-%d').date())",
    "functools": "f = it.singledispatch(lambda x: 'other')\nf.register(int)(lambda x: 'int')\nreturn f(3)",
    "collections": "return str(it.Counter('aab').most_common(1)) + str(it.ChainMap({}).copy())",
    "re": r"return it.sub(r'\N{LATIN SMALL LETTER A}', 'b', 'cat')",
    "statistics": "return str(it.NormalDist(0, 1).samples(1, seed=1))",
    "xml.etree.ElementTree": "return it.tostring(it.fromstring('<a><b/></a>')).decode()",
    "traceback": "try: x = 1 + (2 / 0)\nexcept ZeroDivisionError: return it.format_exc()",
    "ast": "t = it.parse('\"a\"')\nreturn str(it.literal_eval('[1, -2]')) + it.unparse(t) + it.get_docstring(t)",
    "dataclasses": "D = it.make_dataclass('D', ['a'])\nreturn str(it.asdict(D(1)))",
    "hashlib": "return it.sha256(b'').hexdigest() + it.new('md5', b'').hexdigest()",
    "random": "return str(it.SystemRandom().random()) + str(it.Random(1).sample(range(9), 3))",
    "decimal": "return str(it.Decimal(1) / 7) + str(it.getcontext())",
    "fractions": "return str(it.Fraction('1/3') + it.Fraction(0.5))",
    "string": "return it.Formatter().format('{0:>5}', 1) + it.Template('$a').substitute(a=1)",
    "csv": "import io\nreturn str(list(it.DictReader(io.StringIO('a,b\\n1,2'))))",
    "pprint": "return it.pformat({'a': list(range(50))})",
    "difflib": "return ''.join(it.unified_diff(['a'], ['b'])) + it.HtmlDiff().make_table(['a'], ['b'])",
    "textwrap": "return it.fill('a b ' * 50, 20)",
    "urllib.parse": "return it.quote('a b') + str(it.urlparse('http://a/b?c=d'))",
    "html": "return it.unescape('&amp;&eacute;')",
    "typing": "class P(it.NamedTuple):\n  a: int\nreturn str(P(1)) + str(it.get_type_hints(P))",
    "enum": "E = it.Enum('E', 'A B')\nreturn str(E.A) + str(list(E))",
    "calendar": "return it.month(2024, 2)",
    "shlex": "return str(it.split('a \"b c\"'))",
    "base64": "return it.b85encode(b'abc').decode() + it.b64encode(b'abc').decode()",
    "json": "return it.dumps({'a': [1, 2.5, None]}, indent=1) + str(it.loads('[1]'))",
    "unicodedata": "return it.normalize('NFKD', 'é') + it.name('é')",
    "zlib": "return str(it.decompress(it.compress(b'abc')))",
}


@pytest.mark.parametrize("module", LATE)
async def test_what_the_library_imports_late_was_imported_in_time(module):
    end = await run(f"import {module} as it\n{LATE[module]}")
    assert end.kind == "answer", end.detail


def test_everything_in_the_table_of_late_imports_is_tried():
    assert set(LAZY) <= set(LATE)


# ------------------------------------------------------------------------------------------------- hangs and deaths

HANGS = """
import re
def run(task, model, tools):
    model.chat([{"role": "user", "content": "first"}])
    if task.hang == "python":
        while True: pass
    if task.hang == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if task.hang == "number":
        9 ** 9 ** 9
    if task.hang == "swallow":
        while True:
            try: model.chat([])
            except BaseException: pass
    if task.hang == "crash":
        return crash()
    if task.hang == "wait":
        model.remaining.__class__.__init__.__globals__["_thread"].allocate_lock().__enter__()
        lock = model.remaining.__class__.__init__.__globals__["_thread"].allocate_lock()
        lock.acquire(); lock.acquire()
    return tools.rest()

def crash():
    climb = run.__class__(run.__code__, {})
    try: raise ValueError
    except ValueError as error: frame = error.__traceback__.tb_frame
    while "os" not in frame.f_globals: frame = frame.f_back
    frame.f_globals["os"]._exit(7)
"""


async def rest(name, args, kwargs):
    await asyncio.sleep(0.2)
    return "rested"


@pytest.mark.parametrize("hang", ["python", "regex", "number", "wait", "swallow"])
async def test_a_hang_costs_its_worker_and_names_the_culprit(hang):
    worker = await SealedWorker.start(HANGS, QUICK)
    ready = asyncio.Event()

    async def long_rest(name, args, kwargs):
        ready.set()
        await asyncio.sleep(10)

    waiting = [asyncio.create_task(worker.run_episode({"hang": ""}, chat, long_rest)) for _ in range(3)]
    await ready.wait()
    start = time.monotonic()
    end = await worker.run_episode({"hang": hang}, chat, rest)
    seconds = time.monotonic() - start
    async with asyncio.timeout(10):
        await worker._gone  # at once, or a moment later where an episode goes on after its end
    assert not worker.alive
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await worker.close()
    if hang == "swallow":
        assert end.kind in ("timeout", "flood")
    else:
        assert (end.kind, end.detail) == ("timeout", "the harness computed for over 1 s")
        assert 0.9 < seconds < 6


@pytest.mark.parametrize("hang", ["python", "regex", "wait"])
async def test_victims_of_a_hang_run_again_and_culprits_do_not(hang):
    restarts = []
    async with HarnessRunner(HANGS, QUICK) as runner:
        ends = await asyncio.gather(
            *(
                runner.run_episode(
                    {"hang": hang if n == 5 else ""}, chat, rest, restarted=lambda n=n: restarts.append(n)
                )
                for n in range(12)
            )
        )
    assert [end.kind for end in ends] == ["timeout" if n == 5 else "answer" for n in range(12)]
    assert {end.answer for n, end in enumerate(ends) if n != 5} == {"rested"}
    assert 5 not in restarts
    assert all(restarts.count(n) <= 1 for n in restarts)


async def test_starved_siblings_are_never_blamed():
    """Siblings that the loop keeps from computing are late too; the kernel knows who burned."""
    source = """
def run(task, model, tools):
    model.chat([{"role": "user", "content": "together"}])
    if task.n == 3:
        9 ** 9 ** 9
    return "done"
"""
    together = asyncio.Barrier(8)

    async def in_step(messages, *_):
        if together.n_waiting < 8 and not together.broken and len(seen) < 8:
            seen.append(1)
            await together.wait()
        return Reply("x", "stop", 1, 1)

    seen: list[int] = []
    async with HarnessRunner(source, QUICK) as runner:
        ends = await asyncio.gather(*(runner.run_episode({"n": n}, in_step, tool) for n in range(8)))
    assert [end.kind for end in ends] == ["answer"] * 3 + ["timeout"] + ["answer"] * 4


async def test_one_that_ends_its_worker_is_found_and_the_others_finish():
    async with HarnessRunner(HANGS, QUICK) as runner:
        ends = await asyncio.gather(
            *(runner.run_episode({"hang": "crash" if n == 5 else ""}, chat, rest) for n in range(30))
        )
    assert [n for n, end in enumerate(ends) if end.kind != "answer"] == [5]
    assert ends[5].kind == "error"
    assert ends[5].detail == "alone in its worker, and yet: the worker ended with status 7"


async def test_a_harness_that_always_ends_its_worker_is_given_up_quickly():
    start = time.monotonic()
    async with HarnessRunner(HANGS, QUICK) as runner:
        ends = await asyncio.gather(*(runner.run_episode({"hang": "crash"}, chat, rest) for n in range(100)))
        assert len(runner._lost) < 30
    assert {end.kind for end in ends} == {"error"}
    assert time.monotonic() - start < 15


async def test_a_stack_overflow_in_c_is_the_harness_s_own():
    limits = Limits(memory_mb=400, stack_kb=128)
    source = "def run(task, model, tools):\n    f = lambda n: sorted([1], key=lambda _: f(n + 1))\n    return f(0)"
    async with HarnessRunner(source, limits) as runner:
        end = await runner.run_episode({}, chat, tool)
    assert end.kind == "error"
    assert "signal SIGSEGV" in end.detail


async def test_a_harness_that_does_not_load_is_an_error_and_is_tried_once(monkeypatch):
    async with HarnessRunner("raise ValueError('no')", QUICK) as runner:
        with pytest.raises(HarnessLoadError, match="ValueError: no"):
            await runner.start()

        async def never(*_, **__):
            raise AssertionError("started again")

        monkeypatch.setattr(SealedWorker, "start", never)
        ends = await asyncio.gather(*(runner.run_episode({}, chat, tool) for _ in range(5)))
    assert [end.kind for end in ends] == ["error"] * 5
    assert "can't be loaded" in ends[0].detail


async def test_a_cancelled_episode_leaves_the_worker_to_the_others():
    worker = await SealedWorker.start(HANGS, QUICK)
    asked = asyncio.Event()

    async def forever(*_):
        asked.set()
        await asyncio.sleep(60)

    dropped = asyncio.create_task(worker.run_episode({"hang": ""}, forever, rest))
    await asked.wait()
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    await asyncio.sleep(0.1)
    assert worker._episodes == {}
    assert (await worker.run_episode({"hang": ""}, chat, rest)).answer == "rested"
    await worker.close()


async def test_closing_ends_what_is_open_and_leaves_no_process():
    runner = HarnessRunner(HANGS, QUICK)
    asked = asyncio.Event()

    async def forever(*_):
        asked.set()
        await asyncio.sleep(0.5)
        return Reply("", "stop", 1, 1)

    running = asyncio.create_task(runner.run_episode({"hang": ""}, forever, rest))
    await asked.wait()
    worker = next(iter(runner._workers.values()))
    await runner.close()
    assert (await running).kind == "died"
    assert worker._gone.done()
    assert (await runner.run_episode({"hang": ""}, chat, rest)).kind == "died"


async def test_a_thousand_episodes_at_once():
    source = """
def run(task, model, tools):
    text = task.n
    for _ in range(3):
        text = model.chat([{"role": "user", "content": text}]).text
    return text
"""
    async with HarnessRunner(source, Limits(episode_seconds=60)) as runner:
        ends = await asyncio.gather(*(runner.run_episode({"n": f"n{n}"}, chat, tool) for n in range(1000)))
        assert runner._lost == set()
    assert [end.answer for end in ends] == [f"N{n}" for n in range(1000)]


async def test_a_killed_worker_costs_nothing_but_time():
    """The machine's own kill (out of memory, say): whoever computed runs again, nobody is blamed."""
    killed = []
    async with HarnessRunner(HANGS, QUICK) as runner:

        async def kill_once(name, args, kwargs):
            if not killed:
                killed.append(1)
                runner._workers["all"]._transport.kill()
            await asyncio.sleep(0.1)
            return "rested"

        ends = await asyncio.gather(*(runner.run_episode({"hang": ""}, chat, kill_once) for _ in range(10)))
    assert [end.answer for end in ends] == ["rested"] * 10
