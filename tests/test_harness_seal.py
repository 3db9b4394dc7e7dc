"""Ways out of the sealed worker, each tried by a real one. The attacker is given more than a harness ever has: the
modules that reach the operating system, imported before the seal, ctypes among them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import sys
from pathlib import Path

import pytest

from whale_tui.harness.sealed import HarnessLoadError, SealedWorker, SealUnavailable, can_seal
from whale_tui.harness.worker import EpisodeEnd, Limits, Reply

SEALED, WHY_NOT = can_seal()
pytestmark = pytest.mark.skipif(not SEALED, reason=f"no seal here: {WHY_NOT}")
FEW = """read write mmap mprotect munmap mremap brk madvise futex rt_sigprocmask rt_sigreturn set_robust_list rseq
restart_syscall sched_yield clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday getrandom gettid getpid
exit exit_group""".split()  # noqa: SIM905
"""What is behind the seal, written out once more: a longer list in the product is a decision, not a slip."""

GIFTS = """os sys ctypes socket subprocess signal mmap resource threading fcntl select shutil tempfile multiprocessing
pty gc time pathlib asyncio sqlite3 importlib _thread multiprocessing.popen_fork""".split()  # noqa: SIM905
SMALL = Limits(memory_mb=512, episode_seconds=2.0, load_seconds=30)

ATTACK = """
import {gifts}
libc = ctypes.CDLL(None, use_errno=True)

def c(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    if result == -1 or (name in ("fopen", "opendir", "shmat") and result in (0, -1)):
        raise OSError(ctypes.get_errno() or 1, name)
    return result

def way(task, model, tools):
{way}

def run(task, model, tools):
    if task.honest:
        return "honest " + model.chat([{{"role": "user", "content": "hello"}}]).text
    try:
        return f"escaped: {{way(task, model, tools)!r}}"
    except BaseException as error:
        return f"refused: {{type(error).__name__}} {{getattr(error, 'errno', None)}} {{error}}"
"""


async def chat(messages, max_tokens, stop, thinking):
    return Reply(messages[-1]["content"].upper(), "stop", 1, 1, remaining_calls=3, remaining_tokens=9)


async def tool(name, args, kwargs):
    return [name, args, kwargs]


async def attack(way: str, worker_limits: Limits = SMALL, **task) -> tuple[EpisodeEnd, EpisodeEnd, SealedWorker]:
    """Run a way out, then an honest episode in the same worker."""
    body = "\n".join("    " + line for line in way.splitlines())
    source = ATTACK.format(gifts=", ".join(GIFTS), way=body)
    worker = await SealedWorker.start(source, worker_limits, modules=GIFTS, path=sys.path)
    try:
        tried = await worker.run_episode({"honest": False, **task}, chat, tool)
        after = await worker.run_episode({"honest": True}, chat, tool)
    finally:
        await worker.close()
    return tried, after, worker


EPERM = {
    # files
    "open a file to read": "return open('/etc/passwd').read()",
    "os.open": "return os.open('/etc/passwd', os.O_RDONLY)",
    "open its own executable": "return os.open(sys.executable, os.O_RDONLY)",
    "create a file": "return os.open('/tmp/escaped', os.O_WRONLY | os.O_CREAT)",
    "a temporary file": "return os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "O_PATH": "return os.open('/', os.O_PATH)",
    "libc fopen": "return c('fopen', b'/etc/passwd', b'r')",
    "libc openat": "return c('openat', -100, b'/etc/passwd', 0)",
    "list a directory": "return os.listdir('/')",
    "scan a directory": "return list(os.scandir('/'))",
    "stat": "return os.stat('/etc/passwd')",
    "readlink": "return os.readlink('/proc/self/exe')",
    "working directory": "return os.getcwd()",
    "change directory": "return os.chdir('/')",
    "make a directory": "return os.mkdir('/tmp/escaped-dir')",
    "remove a file": "return os.unlink(task.victim)",
    "rename a file": "return os.rename(task.victim, task.victim + '2')",
    "truncate a file": "return os.truncate(task.victim, 0)",
    "chmod a file": "return os.chmod(task.victim, 0o777)",
    "chown a file": "return os.chown(task.victim, 0, 0)",
    "touch a file": "return os.utime(task.victim)",
    "symlink": "return os.symlink('/etc/passwd', task.victim + '-link')",
    "hard link": "return os.link(task.victim, task.victim + '-link')",
    "a fifo": "return os.mkfifo(task.victim + '-fifo')",
    "extended attributes": "return os.setxattr(task.victim, 'user.a', b'b')",
    "file system statistics": "return os.statvfs('/')",
    "umask": "return c('syscall', 95 if task.x86 else 166, 0)",
    # /proc
    "/proc/self/mem": "return os.open('/proc/self/mem', os.O_RDWR)",
    "/proc/self/environ": "return open('/proc/self/environ').read()",
    "/proc of the parent": "return open(f'/proc/{task.parent}/environ').read()",
    "/proc listing": "return os.listdir('/proc')",
    # descriptors
    "dup": "return os.dup(0)",
    "dup2": "return os.dup2(1, 7)",
    "fcntl": "return fcntl.fcntl(0, fcntl.F_GETFL)",
    "fcntl dup": "return fcntl.fcntl(1, fcntl.F_DUPFD, 0)",
    "close": "return os.close(1)",
    "pipe": "return os.pipe()",
    "eventfd": "return os.eventfd(0)",
    "epoll": "return select.epoll()",
    "memfd": "return os.memfd_create('a')",
    "inotify": "return c('inotify_init')",
    "fanotify": "return c('fanotify_init', 0, 0)",
    "signalfd": "return c('signalfd', -1, ctypes.byref(ctypes.create_string_buffer(128)), 0)",
    "timerfd": "return c('timerfd_create', 1, 0)",
    "write from memory to fd 0": "return os.write(0, b'x')",
    "read from fd 1": "return os.read(1, 1)",
    "positioned read": "return os.pread(0, 1, 0)",
    "sendfile": "return os.sendfile(1, 0, None, 10)",
    "splice": "return os.splice(0, 1, 10)",
    "terminal injection": "return c('ioctl', 0, 0x5412, ctypes.c_char_p(b'x'))",
    "poll": "return select.select([0], [], [], 0)",
    # network
    "tcp socket": "return socket.socket()",
    "unix socket": "return socket.socket(socket.AF_UNIX)",
    "netlink socket": "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket pair": "return socket.socketpair()",
    # processes
    "fork": "return os.fork()",
    "vfork": "return c('vfork')",
    "clone without thread": "return c('syscall', 56 if task.x86 else 220, 17, 0, 0, 0, 0)",
    "a new namespace by clone": "return c('syscall', 56 if task.x86 else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "exec": "return os.execv('/bin/sh', ['sh'])",
    "spawn": "return os.posix_spawn('/bin/sh', ['sh'], {})",
    "system by libc": """
status = libc.system(f'touch {task.victim}-touched'.encode())
if status == 127 << 8: raise OSError(1, 'could not be started')
return status""",
    "popen by libc": "return os.popen('true')",
    "subprocess": "return subprocess.run(['/bin/true'])",
    "pty": "return os.openpty()",
    "multiprocessing": "return multiprocessing.get_context('fork').Process(target=print).start()",
    "wait for a child": "return os.waitpid(-1, os.WNOHANG)",
    # signals and other processes
    "kill the engine": "return os.kill(task.parent, signal.SIGKILL)",
    "kill a sibling": "return os.kill(task.sibling, signal.SIGKILL)",
    "probe a process": "return os.kill(task.parent, 0)",
    "kill itself": "return os.kill(os.getpid(), signal.SIGKILL)",
    "kill a process group": "return os.killpg(0, signal.SIGKILL)",
    "kill everything": "return os.kill(-1, 0)",
    "signal a thread": "return signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)",
    "tgkill": "return c('tgkill', task.parent, task.parent, 9)",
    "pidfd": "return os.pidfd_open(task.parent)",
    "install a handler": "return c('signal', 10, None)",
    "alarm": "return signal.setitimer(signal.ITIMER_REAL, 1)",
    "its parent's id": "return c('getppid')",
    "its session": "return os.getsid(0)",
    "a new session": "return os.setsid()",
    "priorities": "return os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "niceness": "return os.nice(-5)",
    "scheduling": "return os.sched_setaffinity(0, {0})",
    "ptrace the engine": "return c('ptrace', 16, task.parent, 0, 0)",
    "ptrace itself": "return c('ptrace', 0, 0, 0, 0)",
    "read the engine's memory": """
b = ctypes.create_string_buffer(64)
v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 64)
return c('process_vm_readv', task.parent, v, 1, v, 1, 0)""",
    "write the engine's memory": """
b = ctypes.create_string_buffer(64)
v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 64)
return c('process_vm_writev', task.parent, v, 1, v, 1, 0)""",
    "compare processes": "return c('syscall', 312 if task.x86 else 272, task.parent, os.getpid(), 0, 0, 0)",
    # memory that can run
    "executable memory": "return mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
    "memory made executable": """
b = ctypes.create_string_buffer(8192)
return c('mprotect', ctypes.c_void_p((ctypes.addressof(b) + 4095) & ~4095), 4096, 7)""",
    "pkey_mprotect": "return c('pkey_mprotect', None, 4096, 4, -1)",
    # limits and privileges
    "raise a limit": "return c('setrlimit', resource.RLIMIT_AS, ctypes.byref((ctypes.c_ulong * 2)(1 << 40, 1 << 40)))",
    "read a limit of the engine": "return resource.prlimit(task.parent, resource.RLIMIT_CORE)",
    "prctl": "return c('prctl', 1, 0, 0, 0, 0)",
    "a second filter": "return c('prctl', 22, 2, None, 0, 0)",
    "seccomp": "return c('syscall', 317 if task.x86 else 277, 1, 0, None)",
    "user id": "return c('getuid')",
    "setuid": "return os.setuid(0)",
    "setgid": "return os.setgid(0)",
    "setgroups": "return os.setgroups([0])",
    "capabilities": "return c('capset', None, None)",
    "unshare": "return c('unshare', 0x10000000)",
    "setns": "return c('setns', 0, 0)",
    "chroot": "return os.chroot('/')",
    "mount": "return c('mount', b'none', b'/mnt', b'tmpfs', 0, None)",
    "umount": "return c('umount', b'/')",
    "pivot_root": "return c('syscall', 155 if task.x86 else 41, b'/', b'/')",
    "personality": "return c('personality', 0xffffffff)",
    "set the clock": "return time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "host name": "return socket.sethostname(socket.gethostname())",
    "uname": "return os.uname()",
    "reboot": "return c('reboot', 0)",
    "swap": "return c('swapoff', b'/swap')",
    "flush the disk": "return c('syncfs', 0)",
    "system log": "return c('klogctl', 10, None, 0)",
    # kernel surfaces
    "io_uring": "return c('syscall', 425, 1, ctypes.create_string_buffer(256))",
    "userfaultfd": "return c('syscall', 323 if task.x86 else 282, 0)",
    "bpf": "return c('syscall', 321 if task.x86 else 280, 0, None, 0)",
    "perf events": "return c('syscall', 298 if task.x86 else 241, None, 0, -1, -1, 0)",
    "keyrings": "return c('syscall', 250 if task.x86 else 219, 0, -3, 0)",
    "kernel modules": "return c('syscall', 175 if task.x86 else 105, None, 0, None)",
    "kexec": "return c('syscall', 246 if task.x86 else 104, 0, 0, None, 0)",
    "shared memory": "return c('shmget', 0, 4096, 0o1600)",
    "message queue": "return c('msgget', 0, 0o1600)",
    "semaphores": "return c('semget', 0, 1, 0o1600)",
    "posix message queue": "return c('mq_open', b'/a', 66, 0o600, None)",
    "landlock": "return c('syscall', 444, None, 0, 1)",
    "open by handle": "return c('open_by_handle_at', 0, None, 0)",
    "a database on disk": "return sqlite3.connect('/tmp/escaped.db').execute('create table a (b)')",
}
"""Each is refused by the kernel with EPERM, or by what stands in front of it with words of its own."""


@pytest.mark.parametrize("way", EPERM)
async def test_a_way_out_is_refused(way, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    sibling = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "input()", stdin=-1)
    facts = {
        "victim": str(victim),
        "parent": os.getpid(),
        "sibling": sibling.pid,
        "x86": platform.machine() == "x86_64",
    }
    try:
        tried, after, _ = await attack(EPERM[way], **facts)
        assert sibling.returncode is None
    finally:
        sibling.kill()
        await sibling.wait()
    assert tried.kind == "answer", tried
    assert tried.answer.startswith("refused: "), tried.answer
    words = "Operation not permitted", "PermissionError 1 ", "OSError 1 ", "NameError", "unable to open database file"
    assert any(word in tried.answer for word in words), tried.answer
    assert after.answer == "honest HELLO"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_text() == "whole"


async def test_every_system_call_but_the_few_is_refused():
    import pyseccomp

    few = [pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) for name in FEW]
    way = """
let_through = []
for number in range(600):
    if number not in task.skip:
        ctypes.set_errno(0)
        result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
        if (result, ctypes.get_errno()) != (-1, 1):
            let_through.append((number, result, ctypes.get_errno()))
raise ValueError(let_through)"""
    probes = {335, 336} if platform.machine() == "x86_64" else set()  # never filtered; SIGILL if called
    tried, after, _ = await attack(way, skip=[*few, *probes])
    clone3 = pyseccomp.resolve_syscall(pyseccomp.system_arch(), "clone3")
    assert tried.answer == f"refused: ValueError None [({clone3}, -1, 38)]"
    assert after.answer == "honest HELLO"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the x32 ABI is x86-64's")
async def test_system_calls_of_another_abi_end_the_worker():
    tried, _, _ = await attack("return libc.syscall(0x40000000 | 39)")
    assert (tried.kind, tried.suspect) == ("died", True)
    assert "SIGSYS" in tried.detail


CONTAINED = {
    "environment": ("return dict(os.environ)", "escaped: {}"),
    "arguments": ("return [a for a in sys.argv[1:]]", "escaped: []"),
    "descriptors 3 to 99": (
        "found = []\nfor fd in range(3, 100):\n  try: found += [os.write(fd, b'')]\n  except OSError: 0\nreturn found",
        "escaped: []",
    ),
    "late import of a file": ("import ftplib", "refused: ImportError None a harness can't import 'ftplib'"),
    "late import around the guard": ("return importlib.import_module('ftplib')", "refused: ModuleNotFoundError"),
    "a late shared library": ("return ctypes.CDLL('libutil.so.1')", "refused: OSError"),
    "import machinery put back": (
        "sys.path.append('/usr/lib/python3')\nsys.path_hooks.append(importlib.machinery.FileFinder.path_hook())\n"
        "sys.meta_path.append(importlib.machinery.PathFinder)\nreturn importlib.import_module('ftplib')",
        "refused: ModuleNotFoundError",
    ),
    "exec of text with an import": ("exec('import os2')", "refused: ImportError"),
    "eval of __import__": ("return eval(\"__import__('pwd')\")", "refused: ImportError"),
    "the engine's package": ("import whale_tui", "refused: ImportError"),
    "reading a reply ahead": ("return hasattr(model, '_ask') and len(task)", "escaped: 1"),
    "writing to the task": ("task['honest'] = True", "refused: TypeError None a task is read-only"),
    "an attribute of the task": ("task.honest = True", "refused: TypeError None a task is read-only"),
    "threads that wait": ("[threading.Thread(target=lambda: None).start() for _ in range(5)]\nreturn 5", "escaped: 5"),
}


@pytest.mark.parametrize("way", CONTAINED)
async def test_what_can_be_reached_is_of_no_use(way):
    code, expected = CONTAINED[way]
    tried, after, _ = await attack(code)
    assert tried.kind == "answer"
    assert tried.answer.startswith(expected), tried.answer
    assert after.answer == "honest HELLO"


async def test_frames_lead_to_the_worker_and_no_further():
    """Without any gift: a harness climbs the frames, finds `os` there, and is refused by the kernel all the same."""
    source = """
def climb():
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame
    while frame is not None:
        if "os" in frame.f_globals:
            return frame.f_globals, frame.f_locals
        frame = frame.f_back

def run(task, model, tools):
    names, place = climb()
    os, sys = names["os"], names["sys"]
    got = []
    for act in (lambda: os.open("/etc/passwd", 0), lambda: os.listdir("/"), os.fork, lambda: os.kill(os.getppid(), 9),
                lambda: names["builtins"].open("/etc/passwd"), lambda: names["builtins"].__import__("socket")):
        try:
            got.append(f"escaped {act()}")
        except BaseException as error:
            got.append(type(error).__name__)
    secrets = sorted(key for key in place["self"].setup if key in ("answer", "private", "key"))
    return " ".join(got + secrets + [str("ctypes" in sys.modules)])
"""
    worker = await SealedWorker.start(source, SMALL)
    end = await worker.run_episode({}, chat, tool)
    await worker.close()
    assert end.answer == "PermissionError " * 4 + "PermissionError ModuleNotFoundError False"


async def test_objects_of_the_collector_hold_nothing_of_another_harness():
    other = await SealedWorker.start("SECRET = 'sibling-secret-42'\ndef run(task, model, tools): return ''", SMALL)
    # the needle is put together so that this worker's own source does not hold it
    way = """
needle = 'sibling-' + 'secret-42'
return [len(o) for o in gc.get_objects() if isinstance(o, dict) and needle in str(list(o.values()))[:100000]]"""
    tried, after, _ = await attack(way, Limits(memory_mb=512, episode_seconds=20))
    await other.close()
    assert tried.answer == "escaped: []"
    assert after.answer == "honest HELLO"


FORGED = {
    "not JSON": rb"os.write(1, b'hello\n')",
    "binary": rb"os.write(1, bytes(range(256)) + b'\n')",
    "an unknown episode": rb"""os.write(1, b'{"type":"done","ep":77,"answer":"x"}\n')""",
    "an unknown type": rb"""os.write(1, b'{"type":"accept","ep":1}\n')""",
    "an unknown field": rb"""os.write(1, b'{"type":"done","ep":1,"answer":"x","verdict":"accept"}\n')""",
    "a wrong type": rb"""os.write(1, b'{"type":"done","ep":"1","answer":"x"}\n')""",
    "an answer of another type": rb"""os.write(1, b'{"type":"done","ep":1,"answer":7}\n')""",
    "a list": rb"os.write(1, b'[]\n')",
    "a deep list": rb"os.write(1, b'[' * 100000 + b'\n')",
    "deep arguments": rb"""
os.write(1, b'{"type":"tool","ep":1,"name":"a","kwargs":{},"args":' + b'[' * 5000 + b']' * 5000 + b'}\n')""",
    "a second load": rb"""os.write(1, b'{"type":"loaded"}\n')""",
    "a second beginning": rb"""os.write(1, b'{"type":"begin","ep":1,"thread":1}\n')""",
    "a thread of five thousand digits": rb"""
os.write(1, b'{"type":"begin","ep":1,"thread":' + b'9' * 5000 + b'}\n')""",
    "an empty line": rb"os.write(1, b'\n')",
    "a huge number": rb"""os.write(1, b'{"type":"done","ep":' + b'9' * 5000 + b',"answer":"x"}\n')""",
    "an endless line": rb"""
while True: os.write(1, b'x' * 65536)""",
    "an endless log": rb"""
while True: os.write(2, b'x' * 65536)""",
    "two answers": rb"""
os.write(1, b'{"type":"done","ep":1,"answer":"first"}\n')
os.write(1, b'{"type":"done","ep":1,"answer":"second"}\n')""",
    "speaking while it is answered": rb"""
os.write(1, b'{"type":"tool","ep":1,"name":"slow","args":[],"kwargs":{}}\n' * 2)
time.sleep(60)""",
}


@pytest.mark.parametrize("how", FORGED)
async def test_a_forged_message_ends_its_own_worker_and_no_other(how):
    bystander = await SealedWorker.start("def run(task, model, tools): return tools.wait()", SMALL)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def wait(name, args, kwargs):
        asked.set()
        await answered.wait()
        return "well"

    waiting = asyncio.create_task(bystander.run_episode({}, chat, wait))
    await asked.wait()
    tried, after, _ = await attack(FORGED[how].decode() + "\nreturn time.sleep(60)")
    answered.set()
    assert (await waiting).answer == "well"
    await bystander.close()
    if how == "two answers":
        assert tried.answer == "first"  # equal to returning it; the second one is the violation
    else:
        assert tried.kind == "flood", tried
        assert tried.detail
    assert after.kind in ("flood", "died")


async def test_forging_takes_every_open_episode_of_the_harness_along():
    source = """
def run(task, model, tools):
    if task.bad:
        frame = (lambda: (yield))().gi_frame
        try: raise ValueError
        except ValueError as error: frame = error.__traceback__.tb_frame
        while "os" not in frame.f_globals: frame = frame.f_back
        frame.f_globals["os"].write(1, b"forged\\n")
    return tools.wait()
"""
    worker = await SealedWorker.start(source, SMALL)

    async def wait(name, args, kwargs):
        await asyncio.sleep(0.5)
        return "well"

    ends = await asyncio.gather(*(worker.run_episode({"bad": n == 3}, chat, wait) for n in range(4)))
    await worker.close()
    assert [end.kind for end in ends] == ["flood"] * 4


EXHAUSTED = {
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "refused: MemoryError"),
    "one huge string": ("return len('x' * (1 << 40))", "refused: MemoryError"),
    "a huge list": ("return len([0] * (1 << 36))", "refused: MemoryError"),
    "threads": (
        "lock = threading.Lock()\nlock.acquire()\nwhile True: _thread.start_new_thread(lock.acquire, ())",
        "refused: RuntimeError None can't start new thread",
    ),
    "recursion": ("f = lambda n: f(n + 1)\nreturn f(0)", "refused: RecursionError"),
    "recursion through C": (
        "f = lambda n: sorted([1], key=lambda _: f(n + 1))\nreturn f(0)",
        "refused: RecursionError",
    ),
    "recursion of repr": ("x = []\nfor _ in range(100000): x = [x]\nreturn repr(x)", "refused: RecursionError"),
    "100 MB printed": ("for _ in range(1000): print('x' * 100_000)\nreturn 'printed'", "escaped: 'printed'"),
    "shared mappings": (
        "x = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))",
        "refused: OSError 12",
    ),
}


@pytest.mark.parametrize("what", EXHAUSTED)
async def test_exhaustion_stays_inside(what):
    code, expected = EXHAUSTED[what]
    tried, after, worker = await attack(code, Limits(memory_mb=400, episode_seconds=20))
    assert tried.answer.startswith(expected), tried
    assert len(worker.log) < 2 * Limits().log_bytes
    if what == "100 MB printed":
        assert worker.log.endswith("... the rest of the output was dropped\n")
    if what not in ("threads", "shared mappings"):
        assert after.answer == "honest HELLO"


async def test_memory_of_a_worker_is_bounded_for_real():
    tried, _, _ = await attack(
        "x = []\ntry:\n  while True: x.append(bytearray(1 << 20))\nexcept MemoryError: return len(x)",
        Limits(memory_mb=300, episode_seconds=20),
    )
    assert 50 < int(tried.answer.removeprefix("escaped: ")) < 300


def state(pid: int) -> str:
    """One letter of the kernel's for what a process is doing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


async def test_a_worker_dies_with_the_engine(tmp_path):
    """An engine killed outright leaves no worker behind, not even one that holds its interpreter busy."""
    script = tmp_path / "engine.py"
    script.write_text("""
import asyncio
from whale_tui.harness.worker import Limits, SealedWorker

async def main():
    worker = await SealedWorker.start("def run(task, model, tools):\\n    9 ** 9 ** 9", Limits())
    asyncio.create_task(worker.run_episode({}, None, None))
    await asyncio.sleep(0.2)
    print(worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
""")
    root = Path(__file__).parents[1]
    engine = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=-1, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert engine.stdout is not None
    pid = int(await engine.stdout.readline())
    assert state(pid) in ("R", "S")
    engine.kill()
    await engine.wait()
    for _ in range(100):
        if state(pid) in ("gone", "Z"):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the worker outlived its engine")


async def test_what_the_kernel_says_of_a_worker():
    def account(pid: int) -> tuple[dict[str, str], dict[str, str], str, bytes]:
        proc = Path(f"/proc/{pid}")
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
        links = {path.name: str(path.readlink()).partition(":")[0] for path in (proc / "fd").iterdir()}
        return status, links, " ".join((proc / "limits").read_text().split()), (proc / "environ").read_bytes()

    worker = await SealedWorker.start("def run(task, model, tools): return ''", SMALL)
    pid = worker.pid
    status, links, limits, environment = account(pid)
    session = os.getsid(pid)
    await worker.close()
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert set(links) == {"0", "1", "2"}
    assert set(links.values()) <= {"pipe", "socket"}
    assert environment == b""
    assert session == pid
    for line in ("Max core file size 0 0", "Max open files 3 3", "Max file size 0 0"):
        assert line in limits
    assert state(pid) == "gone"


async def test_a_filter_without_effect_is_noticed(monkeypatch):
    """The worker proves the lock before it runs anything: a filter that lets all through is no seal."""
    allow_all = (
        (ctypes.c_uint16(6).value).to_bytes(2, sys.byteorder) + b"\0\0" + (0x7FFF0000).to_bytes(4, sys.byteorder)
    )
    from whale_tui.harness import sealed

    monkeypatch.setattr(sealed, "_program", lambda: allow_all.hex())
    with pytest.raises(sealed.WorkerFailure, match="has no effect"):
        await SealedWorker.start("def run(task, model, tools): return ''", SMALL)


async def test_without_a_seal_nothing_runs_unless_asked_for(monkeypatch):
    from whale_tui.harness import sealed

    monkeypatch.setattr(sealed, "can_seal", lambda: (False, "no seccomp here"))
    source = "def run(task, model, tools): return 'unsealed'"
    with pytest.raises(SealUnavailable, match=r"no seccomp here.*allow_unsealed = true"):
        await SealedWorker.start(source, SMALL)
    worker = await SealedWorker.start(source, SMALL, allow_unsealed=True)
    assert (await worker.run_episode({}, chat, tool)).answer == "unsealed"
    await worker.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os", "can't import 'os'"),
        ("open('/etc/passwd')", "NameError"),
        ("while True: pass", "still running after 1 s"),
        ("x = [0] * (1 << 40)", "MemoryError"),
        (
            "raise ValueError('not today')",
            "line 2, in <module>\n    raise ValueError('not today')\nValueError: not today",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("run = 7", "defines no function run"),
        ("def f(:", "line 2\n    def f(:\nSyntaxError"),
    ],
)
async def test_a_module_body_is_behind_the_seal_too(body, words):
    limits = Limits(memory_mb=400, load_seconds=1.0)
    with pytest.raises(HarnessLoadError) as refusal:
        await SealedWorker.start(f"def run(task, model, tools): return ''\n{body}\n", limits)
    assert words in str(refusal.value)
