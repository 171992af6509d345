"""The tiny Llama of `tests.tiny` as a GGUF file, for engines that read no other."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# transformers' name of a layer's tensor -> llama.cpp's
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write weights in float32, the vocabulary with its merges, and the chat template."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, tokenizer)
    for name, weight in model.state_dict().items():
        writer.add_tensor(*_tensor(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    special = set(tokenizer.all_special_tokens)
    kinds = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
        for token, _ in vocabulary
    ]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _tensor(name: str, weight: Tensor, config: object) -> tuple[str, object]:
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight", weight.float().numpy()
    _, _, number, rest = stem.split(".", 3)
    heads = {
        "self_attn.q_proj": config.num_attention_heads,  # type: ignore[attr-defined]
        "self_attn.k_proj": config.num_key_value_heads,  # type: ignore[attr-defined]
    }
    if rest in heads:  # llama.cpp rotates neighbouring pairs, transformers halves
        halves = weight.view(heads[rest], 2, -1, weight.shape[-1])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    return f"blk.{number}.{LAYER[rest]}.weight", weight.float().contiguous().numpy()
