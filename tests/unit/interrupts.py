"""Interrupts a call at a chosen function entry, Python's or C's, as Ctrl-C may come there."""

from __future__ import annotations

import sys
import threading

_UNDIVIDED = ("__exit__", "release", "setprofile")
"""Python lets no signal come between the end of a `with` block and the release of its lock. The last is our own."""


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(call, at):
    """Run `call`, and interrupt it when it enters a function for the `at`-th time. Returns whether it came so far; what it
    raises of its own passes."""
    entries = 0

    def profile(frame, kind, argument):
        nonlocal entries
        if frame.f_code.co_filename == threading.__file__:
            return  # `Condition.__exit__` is a function of Python's own, and leaves its lock taken when it is interrupted
        if kind == "call" or (kind == "c_call" and argument.__name__ not in _UNDIVIDED):
            entries += 1
            if entries == at:
                raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return entries >= at
