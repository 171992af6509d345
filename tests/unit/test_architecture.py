"""The house rules: which room may import which, and what is done in one place only."""

import ast
import fnmatch
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APP = "train/app.py"  # the composition root: reaches every room, from inside its functions

# room -> the rooms it may import
ROOMS = {
    "conf": {"conf"},
    "data": {"conf", "data"},
    "models": {"conf", "data", "models"},
    "train": {"conf", "data", "models", "train"},
    "eval": {"conf", "data", "models", "eval"},
}
# library -> the only files that may import it
HOMES = {
    "hydra": {"conf/schema.py", APP},
    "omegaconf": {"conf/groups/models.py", "conf/schema.py", APP},
    "wandb": {"conf/tracking.py", "conf/dashboard.py"},
}
PUBLISHER = "models/publish.py"
UPLOADS = {
    "CommitOperationAdd",
    "CommitScheduler",
    "create_commit",
    "create_repo",
    "preupload_lfs_files",
    "push_to_hub",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
}
FILES = {"Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md"}
GENERATED = ("outputs", "wandb", "build", "dist", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Import:
    """A dotted name that a file imports; `lazy` when loading the file does not run the import."""

    name: str
    line: int
    lazy: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports(path: str, tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Every import below `tree`: statements, and `import_module` of a literal name."""
    for node in ast.iter_child_nodes(tree):
        deferred = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deferred = deferred or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        yield from (Import(name, node.lineno, deferred) for name in imported_names(path, node))
        yield from imports(path, node, lazy=deferred)


def imported_names(path: str, node: ast.AST) -> list[str]:
    """Dotted names that this one node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = Path(path).parts[: -node.level] if node.level else ()
        module = ".".join((*parents, *([node.module] if node.module else [])))
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
        return [arg.value for arg in node.args if is_text(arg)]
    return []


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def called_name(call: ast.Call) -> str:
    """`f` for both `f(...)` and `module.f(...)`."""
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def against_the_arrows(path: str, tree: ast.Module) -> Iterator[str]:
    room = path.partition("/")[0]
    for found in imports(path, tree):
        if found.top not in (*ROOMS, "tests"):
            continue
        if path == APP:
            if not found.lazy and found.top != "conf":
                yield f"{path}:{found.line} imports {found.name} at the top, not inside a function"
        elif found.top not in ROOMS[room]:
            yield f"{path}:{found.line} imports {found.name}, but {room} may not import {found.top}"


def away_from_home(path: str, tree: ast.Module) -> Iterator[str]:
    for found in imports(path, tree):
        homes = HOMES.get(found.top)
        if homes is not None and path not in homes:
            yield f"{path}:{found.line} imports {found.top}, which belongs in {sorted(homes)}"
        if found.top == "torch" and path.startswith("conf/"):
            yield f"{path}:{found.line} imports torch, but conf loads in a moment"


def shadowed_eval(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == "eval" or alias.name == "eval":
                    yield f"{path}:{node.lineno} hides the builtin eval: from eval.file import ..."


def uploads(path: str, tree: ast.Module) -> Iterator[str]:
    if path == PUBLISHER:
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call):
            names = [keyword.arg for keyword in node.keywords if keyword.arg]
        for name in sorted(UPLOADS.intersection(names)):
            yield f"{path}:{node.lineno} uses {name}, but only {PUBLISHER} uploads"


def prints(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            yield f"{path}:{node.lineno} prints: report an event instead"


RULES = (against_the_arrows, away_from_home, shadowed_eval, uploads, prints)


def violations(path: str, source: str) -> list[str]:
    """What is wrong with one file; `path` is relative to the checkout."""
    tree = ast.parse(source, filename=path)
    return [message for rule in RULES for message in rule(path, tree)]


def strangers(names: set[str]) -> set[str]:
    """Names that do not belong at the top of the checkout."""
    known = {name for name in names if any(fnmatch.fnmatch(name, made) for made in GENERATED)}
    return {name for name in names - known - {*ROOMS, *FILES, "tests"} if not name.startswith(".")}


def folders_without_init(files: set[str]) -> set[str]:
    """Folders that hold Python files and are no packages."""
    folders = {str(Path(file).parent) for file in files}
    return {folder for folder in folders if f"{folder}/__init__.py" not in files}


def sources(room: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py")}


@pytest.mark.parametrize("room", ROOMS)
def test_room_keeps_the_rules(room: str) -> None:
    found = [
        message
        for path in sorted(sources(room))
        for message in violations(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_package_of_this_checkout(room: str) -> None:
    files = sources(room)
    assert f"{room}/__init__.py" in files
    assert not folders_without_init(files)
    for package in sorted(str(Path(file).parent).replace("/", ".") for file in files):
        located = importlib.import_module(package).__file__
        assert located is not None
        assert Path(located).is_relative_to(ROOT), f"{package} is imported from {located}"


def test_top_level_holds_only_the_permitted_names() -> None:
    assert not strangers({path.name for path in ROOT.iterdir()})


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("conf/run.py", "import data.shards", "conf may not import data"),
        ("conf/run.py", "from data import shards", "conf may not import data"),
        ("data/prepare.py", "from models.load import load", "data may not import models"),
        ("data/prepare.py", "from ..models import load", "data may not import models"),
        ("models/load.py", "def f():\n    from train.optim import step", "may not import train"),
        ("models/decoding/cache.py", "from eval.speed import f", "models may not import eval"),
        ("train/distill.py", "from eval.acceptance import f", "train may not import eval"),
        ("eval/speed.py", "from train.optim import step", "eval may not import train"),
        ("eval/speed.py", "import_module('train.optim')", "eval may not import train"),
        ("data/codec.py", "from tests.conftest import x", "data may not import tests"),
        ("train/app.py", "from eval.evaluate import evaluate", "not inside a function"),
        ("train/app.py", "import models.load", "not inside a function"),
        ("conf/run.py", "def f():\n    import torch", "imports torch"),
        ("conf/run.py", "from torch.nn import Module", "imports torch"),
        ("conf/validate.py", "from omegaconf import OmegaConf", "imports omegaconf"),
        ("train/distill.py", "import hydra.utils", "imports hydra"),
        ("train/loop.py", "import wandb", "imports wandb"),
        ("eval/page.py", "import eval", "hides the builtin eval"),
        ("eval/page.py", "import eval.acceptance", "hides the builtin eval"),
        ("eval/page.py", "import eval as evaluation", "hides the builtin eval"),
        ("models/export.py", "from huggingface_hub import upload_folder", "uses upload_folder"),
        ("models/export.py", "HfApi().create_commit(x)", "uses create_commit"),
        ("models/export.py", "model.save_pretrained(x, push_to_hub=True)", "uses push_to_hub"),
        ("data/sources.py", "def f():\n    print(1)", "prints"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, complaint: str) -> None:
    found = violations(path, source)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("conf/schema.py", "from omegaconf import OmegaConf\nfrom hydra import initialize"),
        ("conf/tracking.py", "def f():\n    import wandb"),
        ("data/prepare.py", "from conf.run import Run\nfrom .codec import encode\nimport torch"),
        ("models/decoding/engine.py", "from data.batches import f\nfrom ..load import g"),
        ("models/publish.py", "from huggingface_hub import HfApi\nHfApi().create_commit(x)"),
        ("data/sources.py", "from huggingface_hub import HfApi, hf_hub_download"),
        ("train/app.py", "import hydra\nfrom conf.schema import Config"),
        ("train/app.py", "def f():\n    from eval.evaluate import run\n    import models.load"),
        ("train/__main__.py", "from train.app import main"),
        ("eval/page.py", "from eval.acceptance import f\nlog.info('print(1)')"),
    ],
)
def test_permitted_code_is_left_alone(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_planted_names_and_folders_are_found() -> None:
    assert strangers({"utils.py", "conf", ".venv", "draftsmith.egg-info", "scripts"}) == {
        "utils.py",
        "scripts",
    }
    assert folders_without_init({"data/__init__.py", "data/x.py", "data/y/z.py"}) == {"data/y"}
