"""How each engine loads an independent draft: the commands that a model card shows."""

from __future__ import annotations

STAND_INS = {"TARGET": "the target named above", "DRAFT": "the path of this folder"}


def serving_commands(target: str, draft: str, gamma: int) -> str:
    """Markdown with the commands of five engines for Hub ids (or stand-ins) and a draft length."""
    vllm = f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": {gamma}}}'
    # SGLang counts the target's own token: a chain of gamma steps is verified as gamma + 1 tokens
    sglang = (
        f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {gamma + 1}"
    )
    return f"""**transformers** (batch size 1)

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained("{draft}")
draft.generation_config.num_assistant_tokens = {gamma}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0  # never stop drafting early

prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Why is the sky blue?"}}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
answer = target.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```

**vLLM**

```bash
vllm serve {target} \\
  --speculative-config '{vllm}'
```

**SGLang**

```bash
python -m sglang.launch_server --model-path {target} \\
  --speculative-algorithm STANDALONE --speculative-draft-model-path {draft} \\
  {sglang}
```

**llama.cpp** (the target as GGUF; `draft` is a download of this folder)

```bash
python convert_hf_to_gguf.py draft --outfile draft.gguf --outtype bf16
llama-server -m target.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max {gamma}
# builds older than these options: llama-server -m target.gguf -md draft.gguf --draft-max {gamma}
```

**TensorRT-LLM** (PyTorch backend; releases up to 1.0 call the argument `speculative_model_dir`)

```python
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import DraftTargetDecodingConfig

drafting = DraftTargetDecodingConfig(max_draft_len={gamma}, speculative_model="{draft}")
llm = LLM("{target}", speculative_config=drafting, disable_overlap_scheduler=True)
```"""
