"""Every recipe composes and is valid; everything wrong with a command is one sentence on its last
line, and exit code 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from conf.errors import ConfigError
from conf.schema import CONFIG_FOLDER, GROUPS, Config, folder_name, register, setting_names, typed
from conf.validate import validate
from tests.stand_in_vllm import stand_in
from tests.tiny import tiny_model, tiny_tokenizer
from train import app

CONF = Path(CONFIG_FOLDER)
ROOT = CONF.parent
# what an option needs on the command line before it can run
NEEDED = {
    "target=hub": ["target.path=owner/name"],
    "draft=pretrained": ["draft.pretrained=owner/name"],
    "generate=server": ["generate.server.urls=[http://localhost:8000/v1]"],
    "data=file": ["data.sources.prompts.path=README.md"],
    "eval=file": ["eval.suites.prompts.path=README.md"],
}


def composed(*overrides: str) -> Config:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=CONFIG_FOLDER, job_name="test"):
        return typed(compose("config", overrides=list(overrides)))


def options(*groups: str) -> list[str]:
    return [
        f"{group}={path.stem}" for group in groups for path in sorted((CONF / group).glob("*.yaml"))
    ]


RECIPES = options("experiment", "sweep")
DEFAULTS = [
    f"{group}={option}"
    for choice in OmegaConf.load(CONF / "config.yaml").defaults
    if not isinstance(choice, str)
    for group, option in choice.items()
    if group in GROUPS
]


@pytest.mark.parametrize("choice", [*RECIPES, *options(*GROUPS)])
def test_recipe_and_option_compose_and_are_valid(
    choice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", stand_in())
    config = composed(choice, *NEEDED.get(choice, []))
    validate(config)
    for job in jobs(choice):
        swept = composed(choice, job)
        validate(swept)
    changes = config != composed() or any(composed(job) != composed() for job in jobs(choice))
    assert changes or choice in DEFAULTS, f"{choice} changes nothing"


def jobs(choice: str) -> list[str]:
    """Every value that a sweep tries, as an override of its own."""
    if not choice.startswith("sweep="):
        return []
    with initialize_config_dir(version_base="1.3", config_dir=CONFIG_FOLDER, job_name="test"):
        hydra = compose("config", overrides=[choice], return_hydra_config=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    swept = [f"{key}={values}" for key, values in hydra.sweeper.params.items()]
    return [
        f"{override.key_or_group}={value}"
        for override in OverridesParser.create().parse_overrides(swept)
        for value in (
            override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
        )
    ]


def test_every_group_has_options_and_one_is_the_default() -> None:
    assert {choice.partition("=")[0] for choice in options(*GROUPS)} == set(GROUPS)
    assert {choice.partition("=")[0] for choice in DEFAULTS} == set(GROUPS)
    assert composed() == composed(*DEFAULTS)
    assert {"experiment=smoke", "experiment=gpu"} <= set(RECIPES)


def test_nothing_leaves_the_machine_by_default() -> None:
    for choice in RECIPES:
        hub = composed(choice).hub
        assert (hub.push, hub.private) == (False, True)


def test_every_yaml_file_is_an_option_that_these_tests_know() -> None:
    known = {"config", *(choice.replace("=", "/") for choice in [*RECIPES, *options(*GROUPS)])}
    found = {str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*.yaml")}
    assert found == known


@pytest.mark.parametrize("text", ["objective=lk", "a/b={c:d}", "draft.layers=[0,1]", "x" * 300, ""])
def test_a_job_of_a_multirun_has_a_folder_name_of_its_own(text: str) -> None:
    name = folder_name(text)
    assert len(name) <= 120
    assert "/" not in name
    assert name != folder_name(text + "/")


# ---------------------------------------------------------------- mistakes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, prompts, and things that are wrong."""
    folder = tmp_path_factory.mktemp("config")
    tiny_model(num_layers=4).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_model().save_pretrained(folder / "stranger")
    _other_tokenizer().save_pretrained(folder / "stranger")
    for name in ("train", "suite"):
        lines = [json.dumps({"prompt": f"Say something about {name} {i} please"}) for i in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "empty.jsonl").write_text("")
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "none.yaml").write_text(
        "defaults:\n  - /schema/data/base@_here_\n  - _self_\n"
    )
    tiny_model(num_layers=4).config.save_pretrained(folder / "weightless")
    tiny_tokenizer().save_pretrained(folder / "weightless")
    (folder / "conf" / "data" / "absent.yaml").write_text(
        "defaults:\n  - /schema/data/base@_here_\n  - _self_\n"
        "sources: {x: {kind: package, package: no-such-package, path: a.jsonl}}\n"
    )
    return folder


def _other_tokenizer() -> PreTrainedTokenizerFast:
    """As many tokens as the tiny target's, two of them swapped."""
    tree = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = tree["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    swapped = Tokenizer.from_str(json.dumps(tree))
    return PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="<|im_end|>")


Train = Callable[..., list[str]]


@pytest.fixture
def train(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Train:
    """`python -m train`, in this process: what a command that must fail with 2 says on stderr."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    defaults = {
        **{"target": "hub", "target.path": place / "target", "target.dtype": "float32"},
        **{"data": "file", "data.sources.prompts.path": place / "train.jsonl"},
        **{"eval": "file", "eval.suites.prompts.path": place / "suite.jsonl"},
        **{
            "draft.num_layers": 2,
            "tracker": "none",
            "runtime.device": "cpu",
            "outputs": tmp_path / "outputs",
        },
    }

    def command(*arguments: str) -> list[str]:
        given = [argument.format(place=place) for argument in arguments]
        keys = {argument.partition("=")[0] for argument in given}
        if "data" in keys:  # another group without the file's source
            keys.add("data.sources.prompts.path")
        settings = [f"{key}={value}" for key, value in defaults.items() if key not in keys]
        program = [str(ROOT / "train" / "__main__.py"), "--config-dir", str(place / "conf")]
        flags = [argument for argument in given if argument.startswith("-")]
        rest = [argument for argument in given if argument not in flags]
        monkeypatch.setattr(sys, "argv", [*program, *flags, *settings, *rest])
        with pytest.raises(SystemExit) as left:
            app.main()
        out, err = capfd.readouterr()
        assert left.value.code == 2
        assert out == ""
        return err.splitlines()

    for name in ("HYDRA_FULL_ERROR", "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1" if name != "TRANSFORMERS_VERBOSITY" else "error")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return command


MISTAKES: dict[str, tuple[list[str], list[str]]] = {  # -> what the sentence must contain
    "misspelt key": (["optim.lrr=1"], ["optim.lrr", "Did you mean optim.lr?", "--cfg job"]),
    "misspelt group": (["optm.lr=1"], ["optm.lr", "Did you mean optim.lr?"]),
    "added key": (["+optim.foo=1"], ["optim.foo", "Remove it"]),
    "wrong type": (["optim.lr=fast"], ["optim.lr=fast", "Float", "conf/groups"]),
    "fraction": (["data.num_train=2.5"], ["data.num_train=2.5", "Integer"]),
    "no list": (["eval.gammas=3"], ["eval.gammas=3", "list"]),
    "no choice": (["objective.divergence=kl"], ["objective.divergence=kl", "forward_kl"]),
    "no stage": (["stage=al"], ["stage=al", "evaluate"]),
    "no option": (["objective=kl"], ["objective=kl", "Choose one of forward_kl, hard"]),
    "no experiment": (["experiment=nope"], ["experiment=nope", "smoke"]),
    "half a list": (["eval.gammas=[1,2"], ["eval.gammas=[1,2", "Write key=value"]),
    "no value": (["optim.lr"], ["optim.lr", "Write key=value"]),
    "added twice": (["+optim.lr=1"], ["optim.lr", "remove + prefix"]),
    "key of a dictionary": (
        ["data.sources.prompts.match={{prompt:x}}"],
        ["data.sources.prompts.match", "use +data.sources.prompts.match"],
    ),
    "missing value": (["target.path=???"], ["target.path", "Give it on the command line"]),
    "bad interpolation": (["optim.lr=${{nope}}"], ["optim.lr: ", "nope"]),
    "laws of a target that shows none": (
        ["objective.source=hard"],
        ["objective.source=hard", "lk_lambda, which needs distributions", "objective=hard"],
    ),
    "tokens of the draft's": (
        ["objective.source=on_policy", "+objective.mixture={{cross_entropy:1}}"],
        ["objective.source=on_policy", "cross_entropy", "objective.source=online"],
    ),
    "share without a reference": (
        ["objective.select_share=0.4"],
        ["objective.select_share=0.4", "objective.reference=''", "Name a run"],
    ),
    "reference without a share": (
        ["objective.reference=main"],
        ["objective.select_share=1.0", "objective.reference='main'", "a share below 1"],
    ),
    "reference of itself": (
        ["objective.reference=me", "objective.select_share=0.4", "name=me"],
        ["objective.reference=me", "another name="],
    ),
    "selection by tokens": (
        ["objective=hard", "objective.reference=a", "objective.select_share=0.4"],
        ["objective.reference=a", "has none", "another source"],
    ),
    "share above 1": (
        ["objective.on_policy_share=1.5"],
        ["objective.on_policy_share=1.5", "0 and 1"],
    ),
    "a fit of fewer than no steps": (["draft.fit_steps=-1"], ["draft.fit_steps=-1", "Use 0"]),
    "a run of less than no time": (["optim.max_seconds=-5"], ["optim.max_seconds=-5.0", "60"]),
    "a last teacher without steps": (
        ["objective.finish_source=on_policy"],
        ["objective.finish_source_share=0.0", "on_policy", "Set both"],
    ),
    "steps without a last teacher": (
        ["objective.finish_source_share=0.2"],
        ["objective.finish_source_share=0.2", "None", "or neither"],
    ),
    "a last teacher for every step": (
        ["objective.finish_source=online", "objective.finish_source_share=1.0"],
        ["objective.finish_source_share=1.0", "less than 1"],
    ),
    "a last teacher without laws": (
        ["objective.finish_source=hard", "objective.finish_source_share=0.1"],
        ["objective.finish_source=hard", "lk_lambda, which needs distributions"],
    ),
    "a last teacher whose tokens the draft wrote": (
        [
            *("objective.finish=null", "objective.finish_share=0"),
            *("+objective.mixture={{cross_entropy:1}}", "objective.source=hard"),
            *("objective.finish_source=on_policy", "objective.finish_source_share=0.1"),
        ],
        ["objective.finish_source=on_policy", "cross_entropy", "objective.finish_source=online"],
    ),
    "rollout of nothing": (["objective.rollout_tokens=0"], ["rollout_tokens=0", "Use 1 or more"]),
    "mixture of a stranger": (
        ["+objective.mixture={{kl:1}}"],
        ["objective.mixture.kl=1", "Name some of forward_kl"],
    ),
    "mixture of nothing": (
        ["+objective.mixture={{tv:0}}"],
        ["objective.mixture.tv=0", "positive weights"],
    ),
    "fewer than no layers": (["draft.num_layers=-1"], ["draft.num_layers=-1", "or 0 to have"]),
    "no layers to consider": (
        ["draft.num_layers=0", "draft.most_layers=0"],
        ["draft.most_layers=0", "Use 1 or more"],
    ),
    "a depth to choose among layers that are not shared": (
        ["draft.num_layers=0", "draft.layer_rule=even"],
        ["draft.layer_rule=even", "share their first layers", "Use first"],
    ),
    "a depth to choose without a warm start": (
        ["draft.num_layers=0", "draft.warm_start=false"],
        ["draft.warm_start=False", "after the warm start", "say how many layers"],
    ),
    "a depth to choose without hidden states": (
        ["draft.num_layers=0", "generate.warm_start_tokens=0"],
        ["generate.warm_start_tokens=0", "hidden states", "say how many layers"],
    ),
    "a depth to choose for a pretrained draft": (
        ["draft=pretrained", "draft.pretrained={place}/target", "draft.num_layers=0"],
        ["draft.num_layers=0", "brings its own layers", "draft.init=layers"],
    ),
    "a depth to choose without laws": (
        [
            *("generate=server", "generate.server.urls=[http://a/v1]", "objective=hard"),
            *("generate.server.laws=false", "draft.num_layers=0"),
        ],
        ["draft.num_layers=0", "generate.server.laws=false", "Say how many layers"],
    ),
    "draft as deep as the target": (["draft.num_layers=4"], ["draft.num_layers=4", "Use 1 to 3"]),
    "layer named twice": (["draft.layers=[1,1]"], ["draft.layers=[1, 1]", "once"]),
    "layer out of range": (["draft.layers=[0,7]"], ["draft.layers=[0, 7]", "layers 0 to 3"]),
    "other tokenizer": (
        ["draft.init=pretrained", "draft.pretrained={place}/stranger"],
        ["draft.pretrained=", "2 differ", "draft.init=layers"],
    ),
    "no pretrained draft": (["draft.init=pretrained"], ["draft.pretrained=''", "Set"]),
    "no such draft": (
        ["draft=pretrained", "draft.pretrained={place}/nope"],
        ["draft.pretrained=", "no such folder", "Give"],
    ),
    "no such target": (["target.path={place}/nope"], ["target.path=", "no such folder", "Give"]),
    "gamma 0": (["eval.gammas=[0,2]"], ["eval.gammas=[0, 2]", "Use 1 or more"]),
    "stop above 1": (["eval.stop_below=1.5"], ["eval.stop_below=1.5", "less than 1"]),
    "lookup of -1": (["eval.lookup_gamma=-1"], ["eval.lookup_gamma=-1", "Use 0"]),
    "no gamma": (["eval.gammas=[]"], ["eval.gammas=[]", "Use for example"]),
    "negative temperature": (
        ["generate.temperatures=[-0.5]"],
        ["generate.temperatures=[-0.5]", "Use for example"],
    ),
    "every turn of a suite": (
        ["eval.suites.prompts.turns=every"],
        ["eval.suites.prompts.turns=every", "Use last"],
    ),
    "no Liger": (
        ["runtime.liger=true"],
        ["runtime.liger=True", "not installed", "pip install 'liger-kernel"],
    ),
    "no vLLM": (["generate=vllm"], ["generate.engine=vllm", "not installed", "pip install vllm"]),
    "no GPU for vLLM": (
        ["generate.vllm.tensor_parallel_size=0"],
        ["generate.vllm.tensor_parallel_size=0", "Use 1 or more"],
    ),
    "all memory and more": (
        ["generate.vllm.gpu_memory_utilization=90"],
        ["generate.vllm.gpu_memory_utilization=90", "Use for example 0.9"],
    ),
    "no server": (["generate=server"], ["generate.server.urls=[]", "Give the address"]),
    "no address": (
        ["generate=server", "generate.server.urls=[localhost]"],
        ["generate.server.urls=localhost", "http://localhost:8000/v1"],
    ),
    "nothing in flight": (["generate.server.in_flight=0"], ["in_flight=0", "Use 1 or more"]),
    "a key that is not there": (
        [
            "generate=server",
            "generate.server.urls=[http://a/v1]",
            "generate.server.api_key_env=NO_K",
        ],
        ["generate.server.api_key_env=NO_K", "export NO_K="],
    ),
    "layers of a target without weights": (
        ["generate=server", "target.path={place}/weightless", "stage=distill"],
        ["target.path=", "no weights", "draft=pretrained"],
    ),
    "evaluation of a target without weights": (
        ["generate=server", "generate.server.urls=[http://a/v1]", "target.path={place}/weightless"],
        ["target.path=", "evaluation decodes with the target", "run stage=prepare, generate"],
    ),
    "laws of a black box": (
        ["generate=server", "generate.server.urls=[http://a/v1]", "generate.server.laws=false"],
        ["objective.source=recorded", "records no distributions", "objective=hard"],
    ),
    "temperature nan": (["eval.temperatures=[nan]"], ["eval.temperatures=[nan]", "finite"]),
    "no data": (["data=none"], ["data.sources={}", "data=mix"]),
    "empty file": (
        ["data.sources.prompts.path={place}/empty.jsonl"],
        ["data.sources.prompts=", "holds no record", "Name a file"],
    ),
    "missing file": (
        ["data.sources.prompts.path={place}/nope.jsonl"],
        ["data.sources.prompts.path=", "no such file", "Give"],
    ),
    "missing package": (
        ["data=absent"],
        ["data.sources.x.package='no-such-package'", "make setup"],
    ),
    "unwritable outputs": (["outputs={place}/empty.jsonl/out"], ["Not a directory", "outputs="]),
    "name outside": (["name=../x"], ["name=../x", "plain name"]),
    "no name": (["name="], ["name=''", "name=main"]),
    "push to nowhere": (["stage=publish", "hub.push=true"], ["hub.push", "Set hub.repo_id="]),
    "no repository id": (["hub.repo_id=me"], ["hub.repo_id=me", "owner/name"]),
    "nothing to evaluate": (["stage=evaluate"], ["draft/manifest.json", "stage=distill"]),
    "nothing to publish": (["stage=publish"], ["draft/manifest.json", "stage=distill"]),
    "nothing to learn": (["stage=distill"], ["lessons/manifest.json", "stage=generate"]),
    "nothing to answer": (["stage=generate"], ["corpus/manifest.json", "stage=prepare"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, train: Train) -> None:
    arguments, said = MISTAKES[mistake]
    lines = train(*arguments)
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("error: ")
    assert lines[0].endswith((".", ")", "'"))
    for part in said:
        assert part in lines[0], lines[0]


def test_a_mistake_in_a_process_of_its_own(place: Path, tmp_path: Path) -> None:
    """The same through the real command: no traceback, nothing of a library on stderr."""
    settings = ["tracker=none", f"outputs={tmp_path}", "data=none", "--config-dir", place / "conf"]
    done = subprocess.run(
        [sys.executable, "-m", "train", *map(str, settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: data.sources={}: there are no prompts.")
    assert done.stderr.count("\n") == 1


def test_a_failure_of_ours_keeps_its_traceback(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Config) -> None:
        raise ConnectionError("no route to host")  # an OSError that no other folder puts right

    monkeypatch.setattr(app, "validate", broken)
    with pytest.raises(ConnectionError, match="no route"):
        train()


def test_a_failed_job_of_a_multirun_is_told_and_the_others_run(train: Train) -> None:
    lines = train("-m", "draft.num_layers=5,6")
    assert [line.partition(":")[0] for line in lines] == ["error", "error"]
    assert ["num_layers=5" in lines[0], "num_layers=6" in lines[1]] == [True, True]


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_vllm_is_asked_for_no_temperature_that_it_changes(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in())
    config = composed("generate=vllm", f"generate.temperatures=[0,{temperature}]")
    with pytest.raises(ConfigError, match="vLLM samples at 0 and at 0.01 to 2.0"):
        validate(config)


def test_names_of_settings_are_those_of_the_configuration() -> None:
    names = setting_names()
    assert len(set(names)) == len(names)
    assert {"name", "optim.lr", "eval.gammas", "hub.repo_id"} <= set(names)
