"""Runs a program as systemd's MemoryDenyWriteExecute=yes would: python no_wx.py PROGRAM ARGUMENT…

The same rules as systemd's seccomp filter (systemd.exec(5)): no mapping that is writable and executable, and
none that becomes executable later. They hold for the program and all that it starts.
"""

import ctypes
import os
import platform
import struct
import sys

SET_NO_NEW_PRIVS, SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD, EQUAL, ANY_OF, AND, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06  # BPF: ld, jeq, jset, and, ret
ALLOW, DENY = 0x7FFF_0000, 0x0005_0001  # the second is EPERM
THIRD_ARGUMENT = 16 + 2 * 8  # struct seccomp_data: nr, arch, instruction pointer, arguments
PROT_WRITE, PROT_EXEC, SHM_EXEC = 2, 4, 0o100000

# mmap; mprotect and pkey_mprotect; shmat
CALLS = {"x86_64": (9, (10, 329), 30), "aarch64": (222, (226, 288), 196)}

Instruction = tuple[int, int, int, int]


def rule(call: int, *test: Instruction) -> list[Instruction]:
    """Refuse the call when the test of its third argument lets the next instruction be reached."""
    body = [(LOAD, 0, 0, THIRD_ARGUMENT), *test, (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), call), *body]


def instructions() -> list[Instruction]:
    mmap, protects, shmat = CALLS[platform.machine()]
    both = PROT_WRITE | PROT_EXEC
    found: list[Instruction] = [(LOAD, 0, 0, 0)]
    found += rule(mmap, (AND, 0, 0, both), (EQUAL, 0, 1, both))
    for protect in protects:
        found += rule(protect, (ANY_OF, 0, 1, PROT_EXEC))
    found += rule(shmat, (ANY_OF, 0, 1, SHM_EXEC))
    return [*found, (RETURN, 0, 0, ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid() -> None:
    code = b"".join(struct.pack("HBBI", *each) for each in instructions())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.prctl(SET_NO_NEW_PRIVS, one, none, none, none) or libc.prctl(
        SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(program), none, none
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid()
    os.execv(sys.argv[1], sys.argv[1:])
