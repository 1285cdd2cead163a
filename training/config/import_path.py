"""Import paths in a recipe, ``"module:attribute"``: a user's own callbacks, loss, optimizer and
transformation of samples.

A module is looked for as Python does, and then in the recipe's folder and in the current one: names of Triplane and of
installed packages come first. A checkpoint's folder is not among them, so that a recipe in it runs no code beside it.
"""

import difflib
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from program import users_code
from program.errors import SharedMistake
from program.users_code import EndsProcess

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_FORM = re.compile(rf"{_NAME}:{_NAME}")
FOLDERS = "the recipe's folder, the current folder and PYTHONPATH"


def form_problems(field: str, text: str, also: str = "") -> list[str]:
    """Whether it has the form of an import path; nothing is imported. also: what else is expected, in words."""
    if _FORM.fullmatch(text):
        return []
    return [f'{field}: expected {also}"module:attribute", such as "my_module:MyClass", found "{text}".']


def add_folders(recipe: Path | None) -> None:
    """Let modules be found beside the recipe and in the current folder, in this process and those it starts."""
    own = recipe.resolve().parent if recipe else None
    is_checkpoint = own is not None and (own / "state.json").exists()
    for folder in [*([own] if own and not is_checkpoint else []), Path.cwd()]:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def load(field: str, path: str) -> Any:
    """What an import path leads to. Raises SharedMistake where it leads nowhere, or its module cannot be imported."""
    name, _, attributes = path.partition(":")
    found: Any = _module(f'{field} "{path}"', name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = difflib.get_close_matches(attribute, dir(found), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise SharedMistake(f'{field} "{path}": {_place(found)} has no {attribute}.{hint}')
        found = getattr(found, attribute)
    return found


def load_function(field: str, path: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """The function of an import path. Raises SharedMistake as ``load``, and where it cannot be called with these."""
    found = load(field, path)
    if not callable(found) or isinstance(found, type):
        raise SharedMistake(f'{field} "{path}": expected a function, found {type(found).__name__}.')
    if not accepts(found, len(arguments)):
        shown = f"{getattr(found, '__name__', 'it')}{inspect.signature(found)}"
        raise SharedMistake(f'{field} "{path}": expected ({", ".join(arguments)}), found {shown}.')
    return found


def _module(what: str, name: str) -> ModuleType:
    try:
        with users_code.users_code(f"the import of module {name} ({what})"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SharedMistake(_failed(what, name, error)) from error
        raise SharedMistake(
            f"{what}: there is no module {error.name}. Looked in {FOLDERS} (the current folder is {Path.cwd()})."
        ) from None
    except Exception as error:
        raise SharedMistake(_failed(what, name, error)) from error


def _failed(what: str, name: str, error: BaseException) -> str:
    """The error of a module that is there, and the last line of it that was reached."""
    if isinstance(error, SyntaxError):
        return f"{what}: {error.filename}, line {error.lineno}: {error.msg}."
    return f"{what}: module {name} cannot be imported: {raised(error)}."


def raised(error: BaseException) -> str:
    """What a user's code raised, and where: its kind, its text, file and line."""
    ended = error.__cause__ if isinstance(error, EndsProcess) and error.__cause__ else error
    frames = traceback.extract_tb(ended.__traceback__)
    own = [one for one in frames if "importlib" not in one.filename and one.filename != users_code.__file__]
    return f"{type(error).__name__}: {error} ({own[-1].filename}, line {own[-1].lineno})"


def accepts(call: Any, count: int, **names: object) -> bool:
    """Whether it can be called with ``count`` arguments and these names; what is not written in Python may not tell."""
    try:
        inspect.signature(call).bind(*range(count), **names)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _place(found: Any) -> str:
    """A module by its file, anything else by its name."""
    if isinstance(found, ModuleType):
        return f"module {found.__name__} ({getattr(found, '__file__', None) or 'a folder without __init__.py'})"
    return getattr(found, "__qualname__", repr(found))


def digest(paths: Iterable[str]) -> str:
    """Of the sources of these modules once they are imported: what must be the same on all ranks. "none" of none."""
    names = sorted({path.partition(":")[0] for path in paths})
    if not names:
        return "none"
    hashed = hashlib.blake2b(digest_size=8)
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        hashed.update(name.encode() + b"\0" + (Path(file).read_bytes() if file else b""))
    return hashed.hexdigest()
