"""The seal: what locks a process in before it runs code that nobody has read.

Resource limits, no descriptor beyond the three pipes, then a seccomp filter, for good. The file stands alone: the
engine makes the filter with it (needs libseccomp), the worker locks itself in with it (needs only the kernel).
"""

import ctypes
import errno
import os

PROT_EXEC = 0x4
THREAD = 0x00000100 | 0x00000800 | 0x00010000  # CLONE_VM, CLONE_SIGHAND, CLONE_THREAD
APART = 0x7E020080 | 0x00002000 | 0x00004000  # every new namespace, CLONE_PTRACE, CLONE_VFORK
ALLOWED = """munmap mremap brk madvise futex rt_sigprocmask rt_sigreturn set_robust_list rseq restart_syscall
sched_yield clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday getrandom gettid getpid exit
exit_group""".split()  # noqa: SIM905
"""Memory, threads, time, exit. Reading, writing, mapping and starting threads have a rule of their own below."""


def filter_program() -> bytes:
    """The seccomp filter as BPF, made by the engine. ImportError, RuntimeError or OSError without libseccomp."""
    import tempfile

    import pyseccomp as sc

    rules = sc.SyscallFilter(defaction=sc.ERRNO(errno.EPERM))
    rules.set_attr(sc.Attr.ACT_BADARCH, sc.KILL_PROCESS)
    for name in ALLOWED:
        rules.add_rule(sc.ALLOW, name)
    rules.add_rule(sc.ALLOW, "read", sc.Arg(0, sc.EQ, 0))
    rules.add_rule(sc.ALLOW, "write", sc.Arg(0, sc.EQ, 1))
    rules.add_rule(sc.ALLOW, "write", sc.Arg(0, sc.EQ, 2))
    for name in ("mmap", "mprotect"):
        rules.add_rule(sc.ALLOW, name, sc.Arg(2, sc.MASKED_EQ, PROT_EXEC, 0))
    rules.add_rule(sc.ALLOW, "clone", sc.Arg(0, sc.MASKED_EQ, THREAD | APART, THREAD))
    rules.add_rule(sc.ERRNO(errno.ENOSYS), "clone3")  # its flags are out of a filter's sight; libc falls back to clone
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def seal(setup: dict) -> None:
    """Limit this process and lock it in, for good. OSError where any part of that fails."""
    import resource
    import signal

    os.closerange(3, 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-8, 1)  # one malloc arena: a thread must not reserve 64 MB of address space for its own

    def control(*args) -> None:
        if libc.prctl(*args) != 0:
            raise OSError(ctypes.get_errno(), f"prctl{args[:2]} refused")

    sealed = setup["program"] is not None
    if sealed:
        control(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: never outlive the thread of the engine that started it
        if os.getppid() != setup["parent"]:
            os._exit(0)
    for name, value in {**setup["limits"], "CORE": 0, "FSIZE": 0, "NOFILE": 3}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1] if name == "AS" else value  # the engine makes room for thread stacks
        try:
            resource.setrlimit(kind, (value, hard))
        except (OSError, ValueError):
            if sealed:
                raise
    if not sealed:
        return
    program = bytes.fromhex(setup["program"])

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    control(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    control(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    try:
        os.open("/", os.O_RDONLY)
    except OSError as refusal:
        if refusal.errno == errno.EPERM:
            return
    raise OSError("the filter was loaded and has no effect")
