"""What a setting can be, where it is one of a few."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    prepare = "prepare"
    generate = "generate"
    distill = "distill"
    evaluate = "evaluate"
    publish = "publish"
    plan = "plan"  # what the others would take
    all = "all"


class SourceKind(StrEnum):
    package = "package"  # a file inside an installed package, found through its metadata
    file = "file"  # a local JSON lines or text file
    hub = "hub"  # a dataset on the Hugging Face Hub
    stdlib = "stdlib"  # Python's own documentation: path=functions or path=manual
    reasoning = "reasoning"  # generators of the reasoning-gym package


class Turns(StrEnum):
    every = "every"  # each user turn; the target's own answers take the place of recorded ones
    last = "last"  # the conversation as it is, up to its last user turn; of plain turns, the first


class Engine(StrEnum):
    builtin = "builtin"  # our own, with the target's weights in this process
    server = "server"  # OpenAI-compatible servers: vLLM, SGLang, llama.cpp, a cloud
    vllm = "vllm"  # in this process, where it is installed


class ServerApi(StrEnum):
    completions = "completions"  # prompts are sent as ids: the server reads what is recorded
    chat = "chat"  # prompts are sent as messages, which the server renders


class DraftInit(StrEnum):
    layers = "layers"  # the target's own layers
    pretrained = "pretrained"  # a small model with the target's tokenizer


class DraftVocab(StrEnum):
    same = "same"  # the target's, checked by content
    shared = "shared"  # one of its own: it drafts the tokens that both have, and is not trained


class LayerRule(StrEnum):
    first = "first"
    even = "even"
    ends = "ends"


class Divergence(StrEnum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    tv = "tv"
    lk_alpha = "lk_alpha"
    lk_lambda = "lk_lambda"
    tvd_plus_plus = "tvd_plus_plus"
    cross_entropy = "cross_entropy"  # of the target's tokens; reads no distribution


class Supervision(StrEnum):
    recorded = "recorded"  # the distributions that the target's answers were recorded with
    online = "online"  # the target runs beside the draft: its whole distributions
    on_policy = "on_policy"  # online, and the draft goes on by itself in some of the answers
    hard = "hard"  # the target's tokens alone, as of a target that shows no distributions


class Verification(StrEnum):
    chain = "chain"  # token by token (Leviathan et al.)
    block = "block"  # the drafted tokens together: the same law, accepting at least as many


class Optimizer(StrEnum):
    adamw = "adamw"
    muon = "muon"


class TrackerKind(StrEnum):
    wandb = "wandb"
    none = "none"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """`auto` is bfloat16 where the device multiplies it, else float32."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
