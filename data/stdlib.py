"""The running Python's own documentation as records: its functions, and its language manual."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# Importing these has no side effect and warns of nothing. What users ask programs for comes first:
# of two functions
# with the same description, the first is kept.
# fmt: off
MODULES = (
    "builtins", "math", "statistics", "string", "textwrap", "re", "itertools", "functools",
    "operator", "collections", "heapq", "bisect", "random", "datetime", "calendar", "time",
    "fractions", "decimal", "cmath", "numbers", "array", "copy", "enum", "dataclasses",
    "graphlib", "json", "csv", "configparser", "os.path", "pathlib", "shutil", "glob", "fnmatch",
    "tempfile", "filecmp", "fileinput", "linecache", "os", "io", "gzip", "zipfile", "tarfile",
    "zlib", "base64", "binascii", "quopri", "hashlib", "hmac", "secrets", "uuid", "struct",
    "codecs", "unicodedata", "difflib", "pprint", "reprlib", "html", "urllib.parse",
    "urllib.request", "urllib.robotparser", "http.client", "http.cookies", "ipaddress", "socket",
    "smtplib", "ftplib", "imaplib", "email.utils", "mailbox", "mimetypes",
    "xml.etree.ElementTree", "xml.dom.minidom", "sqlite3", "shelve", "pickle", "plistlib",
    "colorsys", "wave", "locale", "gettext", "argparse", "shlex", "keyword", "tokenize", "ast",
    "dis", "symtable", "inspect", "types", "typing", "abc", "contextlib", "weakref", "queue",
    "threading", "sched", "selectors", "subprocess", "concurrent.futures", "asyncio", "logging",
    "logging.handlers", "timeit", "traceback", "platform", "stat", "zoneinfo",
)
# fmt: on
MANUAL_WORDS = (
    20,
    110,
)  # of a paragraph: long enough to say something, short enough to be a prompt

_MARKUP = re.compile(r":\w+:`~?([^`]*)`|``([^`]*)``")


def functions() -> Iterator[dict[str, Any]]:
    """Documented functions and methods, one for each distinct description.

    Columns: name, qualified_name, module, signature (the parameter list), description (the first
    paragraph, on one line), stub (`def` line and docstring).
    """
    described: set[str] = set()
    for module_name in MODULES:
        for owner, function in _routines(importlib.import_module(module_name)):
            record = _function_record(module_name, owner, function)
            if record is not None and record["description"] not in described:
                described.add(record["description"])
                yield record


def _routines(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions of the module and public methods of the classes it defines, with the class's
    name.
    """
    defined_here = {module.__name__, "_" + module.__name__, module.__name__.rpartition(".")[2]}
    for name, member in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if inspect.isclass(member) and member.__module__ in defined_here:
            for method_name, method in sorted(vars(member).items()):
                if not method_name.startswith("_") and inspect.isroutine(method):
                    yield member.__name__, getattr(member, method_name)
        elif inspect.isroutine(member):
            yield "", member


def _function_record(module: str, owner: str, function: Any) -> dict[str, Any] | None:
    documentation = inspect.getdoc(function)
    name = getattr(function, "__name__", "")
    if not documentation or not name.isidentifier():
        return None
    try:
        # A marker such as `/` matters to the interpreter, not to who is asked to write the function
        signature = re.sub(r", /(?=[,)])", "", str(inspect.signature(function)))
    except (ValueError, TypeError):  # functions of C do not always tell
        return None
    if " at 0x" in signature or "<" in signature:  # a default value that only this process knows
        return None
    # functions of C may start with a line that repeats the signature
    told = [
        p for p in documentation.split("\n\n") if not re.match(r"\s*[\w.]+\(.*\)(?: ->|\s*$)", p)
    ]
    if not told:
        return None
    description = " ".join(_MARKUP.sub(r"\1\2", told[0]).split())
    return {
        "name": name,
        "qualified_name": ".".join(part for part in (module, owner, name) if part),
        "module": module,
        "signature": signature,
        "description": description,
        "stub": f'def {name}{signature}:\n    """{description}"""',
    }


def manual() -> Iterator[dict[str, Any]]:
    """Paragraphs of prose of the language reference that `help()` shows. Columns: topic, text."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    least, most = MANUAL_WORDS
    for topic, page in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", page):
            # prose starts at the margin; grammar, examples and lists are indented or marked
            if re.match(r"[A-Z\"]", paragraph) and least <= len(paragraph.split()) <= most:
                yield {"topic": topic, "text": " ".join(_MARKUP.sub(r"\1\2", paragraph).split())}
