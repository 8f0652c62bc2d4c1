"""The exit codes of the command line, and the one error that carries them.

Every sub-command ends with one of these codes; docs/cli.md lists them and a test compares. Whoever raises
`CommandError` says what happened, to which object, and what to do next.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a script may rely on; the numbers never change their meaning."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    PERMISSION = 4
    CONFLICT = 5
    INVALID = 6
    UNREACHABLE = 7
    TIMEOUT = 8
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "failed; the message says why",
    Exit.USAGE: "wrong usage, or a confirmation was refused",
    Exit.NOT_FOUND: "the named object does not exist",
    Exit.PERMISSION: "not allowed, or a file has the wrong owner or mode",
    Exit.CONFLICT: "it exists already, or somebody else holds it (a port, a state directory)",
    Exit.INVALID: "a setting, value or limit is not legal",
    Exit.UNREACHABLE: "a process that should answer does not",
    Exit.TIMEOUT: "it took too long",
    Exit.INTERRUPTED: "interrupted",
}


class CommandError(Exception):
    """Ends the command with a message for people and a code for scripts."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code


class SettingsError(CommandError):
    """A setting is unknown or illegal; the message names the key, the value, its origin and what is legal."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.INVALID)
