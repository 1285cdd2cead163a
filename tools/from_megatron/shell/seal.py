"""A process that can start no program, write no file and open no connection, and what follows from it: a filter of
system calls (seccomp), which it and its children cannot take off again.

Calls that only compute and read are allowed; those that name a file, start a program or a process are put before the
process that holds the listener (``world``), which answers them; all others fail. Needs Linux 5.9 and no privilege.
"""

import ctypes
import os
import platform
import struct

_ALLOW, _ERRNO, _NOTIFY, _KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column of the tables below, the kernel's name for it, and the number of seccomp(2)."""
type Numbers = dict[str, tuple[int | None, int | None]]
"""Of a system call: on x86_64, on aarch64 (linux/asm-generic/unistd.h)."""

ALLOWED: Numbers = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57),
    "close_range": (436, 436), "fstat": (5, 80), "lseek": (8, 62),
    "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "pipe": (22, None), "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72), "poll": (7, None),
    "ppoll": (271, 73), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "alarm": (37, None), "setitimer": (38, 103),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "uname": (63, 160),
    "getcwd": (79, 17), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getgroups": (115, 158),
    "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156), "arch_prctl": (158, None),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "set_robust_list": (273, 99), "rseq": (334, 293),
    "getrandom": (318, 278), "fstatfs": (138, 44), "copy_file_range": (326, 285), "sendfile": (40, 71),
}  # fmt: skip
WITHOUT_EFFECT: Numbers = {"unlink": (87, None), "unlinkat": (263, 35)}
"""Answered as if done: bash removes its files of here-documents so."""
ASKED: Numbers = {
    "openat": (257, 56), "open": (2, None), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "execve": (59, 221),
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "readlink": (89, None), "readlinkat": (267, 78),
    "mmap": (9, 222), "execveat": (322, 281),
}  # fmt: skip
_ABSENT: Numbers = {"clone3": (435, 435), "statx": (332, 291), "openat2": (437, 437)}
"""Whose arguments a filter cannot see: the C library then takes an older one."""
_FCNTL: Numbers = {"fcntl": (72, 25)}
_MPROTECT: Numbers = {"mprotect": (10, 226)}
_IOCTL: Numbers = {"ioctl": (16, 29)}
_PRLIMIT: Numbers = {"prlimit64": (302, 261)}
_HARMLESS_REQUESTS = (0x5401, 0x5413, 0x541B)
"""Of ioctl(2): what a terminal is set to, its size, bytes that wait. None that types into it."""
_DESCRIPTORS = (0, 1, 2, 3, 4, 1030)
"""Of fcntl(2): copies of descriptors, and their flags. None that has signals sent."""
_NAMESPACES, _SHARED_MEMORY, _WAITS = 0x7E020000, 0x100, 0x4000
"""Flags of clone(2): those that would make some; of a thread, which could change a path behind its answer; of a child
whose parent waits until it has started a program."""
_EXECUTABLE = 4
"""Of a protection: what could be code. The C library maps it from files only."""
BASH = 250
"""The descriptor of the one program that may be started by it, once."""


class CannotSeal(Exception):
    """This kernel or machine has no such filter."""


def numbers(table: Numbers) -> dict[int, str]:
    """The calls of a table on this machine, by number. Raises CannotSeal for machines of other kinds."""
    column = _machine()[0]
    return {number: name for name, each in table.items() if (number := each[column]) is not None}


def seal() -> int:
    """Close this process for good; the listener's descriptor. Raises CannotSeal."""
    _, _, call = _machine()
    program = _program()
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    no_new_privileges = 38
    if libc.prctl(no_new_privileges, 1, 0, 0, 0):
        raise CannotSeal("no_new_privs is refused")
    set_filter, new_listener = 1, 8
    listener = libc.syscall(call, set_filter, new_listener, ctypes.create_string_buffer(header, len(header)))
    if listener < 0:
        raise CannotSeal(os.strerror(ctypes.get_errno()))
    return int(listener)


def start(arguments: list[str], environment: dict[str, str]) -> None:
    """Become the program that is open as ``BASH``. Returns only where that fails."""
    number = next(number for number, name in numbers(ASKED).items() if name == "execveat")
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*map(os.fsencode, arguments), None)
    texts = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    envp = (ctypes.c_char_p * (len(texts) + 1))(*texts, None)
    empty_path = 0x1000
    ctypes.CDLL(None).syscall(number, BASH, b"", argv, envp, empty_path)


def _machine() -> tuple[int, int, int]:
    found = _MACHINES.get(platform.machine())
    if found is None:
        raise CannotSeal(f"it is made for Linux on x86_64 and aarch64, and this is {platform.machine()}")
    return found


def _program() -> bytes:
    """The filter, as instructions of the kernel's packet filter: each test either returns or goes on to the next."""
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _machine()[1]), (_RETURN, 0, 0, _KILL)]
    code.append((_LOAD, 0, 0, _NUMBER))

    def argument(number: int) -> tuple[int, int, int, int]:
        return _LOAD, 0, 0, _FIRST_ARGUMENT + 8 * number

    def when(table: Numbers, action: int) -> None:
        for number in numbers(table):
            code.extend([(_EQUAL, 0, 1, number), (_RETURN, 0, 0, action)])

    def inspect(table: Numbers, tests: list[tuple[int, int, int, int]]) -> None:
        """Tests of one call's arguments, behind which nothing else is looked at."""
        for number in numbers(table):
            code.extend([(_EQUAL, 0, len(tests), number), *tests])

    when(ALLOWED, _ALLOW)
    when(WITHOUT_EFFECT, _ERRNO | 0)
    when(_ABSENT, _ERRNO | _ENOSYS)
    refused = (_RETURN, 0, 0, _ERRNO | _EPERM)
    asked = (_RETURN, 0, 0, _NOTIFY)
    inspect(
        {"clone": ASKED["clone"]},
        [argument(0), (_ANY_BIT, 0, 1, _NAMESPACES), refused, (_ANY_BIT, 1, 0, _SHARED_MEMORY), asked,
         (_ANY_BIT, 0, 1, _WAITS), asked, refused],
    )  # fmt: skip
    inspect({"mmap": ASKED["mmap"]}, [argument(2), (_ANY_BIT, 0, 1, _EXECUTABLE), asked, (_RETURN, 0, 0, _ALLOW)])
    inspect(_MPROTECT, [argument(2), (_ANY_BIT, 0, 1, _EXECUTABLE), refused, (_RETURN, 0, 0, _ALLOW)])
    by_descriptor = [argument(3), (_ANY_BIT, 0, 1, 0x1000), (_RETURN, 0, 0, _ALLOW), asked]
    inspect({"newfstatat": ASKED["newfstatat"]}, by_descriptor)  # fstat, with AT_EMPTY_PATH
    when(ASKED, _NOTIFY)
    for table, harmless in ((_IOCTL, _HARMLESS_REQUESTS), (_FCNTL, _DESCRIPTORS)):
        requests = [each for one in harmless for each in ((_EQUAL, 0, 1, one), (_RETURN, 0, 0, _ALLOW))]
        inspect(table, [argument(1), *requests, refused])
    inspect(_PRLIMIT, [argument(0), (_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), refused])
    code.append(refused)
    return b"".join(struct.pack("HBBI", *each) for each in code)
