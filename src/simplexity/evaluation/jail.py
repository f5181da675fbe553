"""What runs beside the sandbox: a launcher, a script of its own in a fresh interpreter, that shuts a program in.

It takes network, files and other processes away with namespaces, drops every right, and runs the program with the
secret that its caller waits for, written only when the last statement has run. It imports nothing of this library, and
little else: a program often runs for less time than an import takes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import json
import operator
import os
import signal
import sys
import time
import types
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from simplexity.evaluation.limits import Isolation, Limits

MIB = 1 << 20
REASON = 2000  # characters of a reason
SECRET = 32  # bytes
VERDICT = 3  # the descriptor that the secret is written to
NOBODY = 65534
HOME = "/tmp/home"  # where a program finds itself, empty
PRIVATE_IDS = 1_900_000_000  # plus a process id: a user id of its own for each run, because limits count per user
TIMED_OUT, STOPPED, UNUSABLE = 97, 98, 99  # exit statuses of the launcher; 128 + n where signal n ended the program

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
REFUSED = frozenset(  # these could skip the tests or look for the secret, and no honest program needs them
    {
        "gc.get_objects",
        "gc.get_referents",
        "gc.get_referrers",
        "sys.monitoring.register_callback",
        "sys.setprofile",
        "sys.settrace",
    }
)

# from the kernel's headers
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE = 1024, 2048, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x20080522


def _launch(length: int, folder: str) -> int:
    """Isolate, start the program and outlive it; the exit status says how it ended."""
    job = json.loads(_read_exactly(0, length))  # the secret stays in the pipe
    limits: Any = types.SimpleNamespace(**job["limits"])
    mode = job["mode"]
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    user = _isolate(mode, folder)
    _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    complaint, failed = os.pipe()
    start: Callable[[], NoReturn] = functools.partial(_program, job["source"], limits, mode, user, folder)
    if mode is None:
        _libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        start = functools.partial(_first_process, start, failed, limits, user, folder)
    child = _fork(start, failed)
    os.close(failed)
    status = _wait_for(child, watched, limits.wall_seconds)
    _end_descendants()
    if said := os.read(complaint, REASON):
        raise RuntimeError(said.decode(errors="replace"))
    if status is None:
        return TIMED_OUT
    return os.WEXITSTATUS(status) if mode and os.WIFEXITED(status) else _ending(status)


def _read_exactly(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (data := os.read(descriptor, min(length, 1 << 16))):
        parts.append(data)
        length -= len(data)
    return b"".join(parts)


def _fork(start: Callable[[], NoReturn], failed: int) -> int:
    """A child; it complains through `failed`, which the program never has, so that no program can feign a failure."""
    child = os.fork()
    if child == 0:
        try:
            start()
        except BaseException as error:
            os.write(failed, _describe(error).encode(errors="replace"))
        finally:
            os._exit(0)
    return child


def _isolate(mode: Isolation | None, folder: str) -> int:
    """Enter new namespaces; returns the id of the user who is to run the program."""
    user = _private_id() if os.geteuid() == 0 else os.geteuid()
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if mode == "namespaces":
        _libc("unshare", spaces)
    elif mode == "user namespaces":
        if os.geteuid() == 0:
            os.chown(folder, user, user)
            _become(user)
            _libc("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # or the maps below would belong to root
        group = os.getegid()
        _libc("unshare", CLONE_NEWUSER | spaces)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
        user = NOBODY
    elif os.geteuid() == 0:
        os.chown(folder, user, user)
    return user


def _private_id() -> int:
    wanted = PRIVATE_IDS + os.getpid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(part) for part in line.split())
        if first <= wanted < first + count:
            return wanted
    return NOBODY


def _first_process(start: Callable[[], NoReturn], failed: int, limits: Limits, user: int, folder: str) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel ends every other process in there."""
    _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    _new_root(Path(folder), limits, user)
    program = _fork(start, failed)
    while True:
        child, status = os.wait()  # also those that lost their parent
        if child == program:
            os._exit(_ending(status))


def _ending(status: int) -> int:
    """The signal that ended a program, as an exit status; the status that it chose itself says nothing."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _wait_for(child: int, watched: set[signal.Signals], seconds: float) -> int | None:
    """Wait until the child has ended; None where it had to be killed, being out of time or told to stop."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        left = deadline - time.monotonic()
        event = signal.sigtimedwait(watched, left) if left > 0 else None
        if event is None or event.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # ends when everyone in its namespace has
            return None


def _end_descendants() -> None:
    """Without a namespace: those who lost their parent became our children, so all end when no child is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children.read_text().split() if children.exists() else []
        if not left:
            return
        for child in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(child), signal.SIGKILL)
        time.sleep(0.001)


# the root folder of the program: the system and the interpreter to read, and a small /tmp to write


def _new_root(folder: Path, limits: Limits, user: int) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    root = folder / "root"
    root.mkdir()
    (root / "tmp").mkdir()  # first, because the interpreter itself may lie below /tmp
    options = f"size={limits.disk},nr_inodes=4096,mode=700,uid={user},gid={user}"
    _mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    (root / HOME.removeprefix("/")).mkdir(mode=0o700)
    os.chown(root / HOME.removeprefix("/"), user, user)
    shown: list[Path] = []
    for name in dict.fromkeys((*SYSTEM_FOLDERS, *SYSTEM_FILES, sys.base_prefix, sys.base_exec_prefix, sys.prefix)):
        _show(Path(name), root, shown)
    for name in DEVICES:
        _bind(Path(name), root)
    (root / "dev" / "shm").mkdir()
    _mount(root / "tmp", root / "dev" / "shm", None, MS_BIND)  # what multiprocessing locks with
    _mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(folder)
    _libc("pivot_root", b".", b".")
    _libc("umount2", b".", MNT_DETACH)
    os.chroot("/root")  # not the root of its mounts: the kernel then refuses further user namespaces
    os.chdir(HOME)


def _show(path: Path, root: Path, shown: list[Path]) -> None:
    if not path.exists() or path == Path("/") or any(path.is_relative_to(other) for other in shown):
        return
    if path.is_symlink() and str(path) in SYSTEM_FOLDERS:
        (root / path.relative_to("/")).symlink_to(os.readlink(path))
        return
    _bind(path, root)
    shown.append(path)


def _bind(path: Path, root: Path) -> None:
    place = root / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(path, place, None, MS_BIND | MS_REC)
    # an unprivileged user may not lift the restrictions that are there already
    kept = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    device = 0 if str(path) in DEVICES else MS_NODEV
    _mount("none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept | device)


def _mount(source: str | Path, place: str | Path, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if x is None else os.fsencode(x) for x in (source, place, kind, options)]
    _libc("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def _libc(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} was refused: {os.strerror(number)}")


# the program's process


def _program(source: str, limits: Limits, mode: Isolation | None, user: int, folder: str) -> NoReturn:
    os.setsid()
    os.chdir(HOME if mode else folder)
    os.environ["HOME"] = os.getcwd()
    os.umask(0o077)
    _limit(limits, user, shared=mode is None and os.geteuid() != 0)
    _drop_rights(user)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["program.py"]
    os.closerange(VERDICT + 1, os.sysconf("SC_OPEN_MAX"))
    sys.addaudithook(_refuse)
    _execute(source, limits)


def _limit(limits: Limits, user: int, shared: bool) -> None:
    import resource

    processes = limits.processes + (_tasks_of(user) if shared else 0)
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 1),
        (resource.RLIMIT_AS, limits.memory, limits.memory),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_FSIZE, limits.file_size, limits.file_size),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def _tasks_of(user: int) -> int:
    """How many threads the user has already, because the limit counts them all."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(process / "task")) if process.stat().st_uid == user else 0
    return count


def _drop_rights(user: int) -> None:
    if os.geteuid() == 0:
        _become(user)
    nothing = (ctypes.c_uint32 * 6)()
    _libc("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), nothing)
    _libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    if not os.access(os.__file__, os.R_OK):
        raise PermissionError(f"the unprivileged user {user} cannot read the interpreter in {sys.base_prefix}")


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event in REFUSED:
        raise RuntimeError(f"{event} is not allowed here")


def _execute(source: str, limits: Limits) -> NoReturn:
    """Run the program and then write the secret.

    Frames are open to the program, so no variable of any may hold the secret: it only lies on the evaluation stack
    below, and goes when the program raises.
    """
    process, reason = os.getpid(), ""
    try:
        collections.deque(map(operator.call, _steps(source)), maxlen=0)
    except SystemExit:
        reason = "ended before its tests"
    except MemoryError:
        reason = f"killed: memory, more than {limits.memory // MIB} MiB"
    except BaseException as error:
        reason = _describe(error)
    if os.getpid() == process:  # not a child that came this far
        os.write(VERDICT, reason.encode(errors="replace"))
    os._exit(0)


def _steps(source: str) -> tuple[Callable[[], Any], ...]:
    module = types.ModuleType("program")
    sys.modules["program"] = module
    steps = (
        functools.partial(exec, compile(source, "program.py", "exec", dont_inherit=True), module.__dict__),
        functools.partial(os.write, VERDICT, _read_exactly(0, SECRET)),
        sys.stdout.flush,
        functools.partial(os._exit, 0),
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return steps


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        text = ""
    return (f"{name}: {text}" if text else name)[:REASON]


def _main() -> NoReturn:
    verdict, length, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if verdict != VERDICT:
        os.dup2(verdict, VERDICT)
        os.close(verdict)
    try:
        status = _launch(length, folder)
    except BaseException as error:
        os.write(VERDICT, str(error).encode(errors="replace"))
        status = UNUSABLE
    os._exit(status)


if __name__ == "__main__":
    _main()
