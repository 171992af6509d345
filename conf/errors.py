"""Errors that the person at the keyboard can put right."""

from __future__ import annotations


class UserError(Exception):
    """Something the person at the keyboard can put right: the message says all, a traceback would
    add nothing.
    """


class ConfigError(UserError, ValueError):
    """A configuration that cannot run. The message names the key, the value, the reason and the way
    out.
    """


def require(holds: bool, key: str, value: object, reason: str, way_out: str) -> None:
    """Raise `ConfigError` in the one form every configuration error has, unless the condition
    holds.
    """
    if not holds:
        raise ConfigError(f"{key}={value}: {reason}. {way_out}.")
