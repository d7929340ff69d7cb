"""llama.cpp with its own HTTP server, as the package xllamacpp holds it, on a GGUF file in float32."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.bench.peer_servers._launch import Asked

DISTRIBUTION = "xllamacpp"
REQUIREMENTS = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors==0.8.0", "numpy==2.4.6")
MODES = ("plain", "draft", "ngram")

_FILE = "model.gguf"
_NGRAM = 2
_NORMAL, _CONTROL = 1, 3

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
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


def export(source: Path, to: Path) -> None:
    """A GGUF file of a Llama with a byte-level tokenizer, in float32."""
    import gguf

    described = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(to / _FILE, "llama")
    _describe(writer, described)
    _write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text(encoding="utf-8")), described)
    for name, tensor in _tensors(source, described):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, described: dict[str, Any]) -> None:
    writer.add_file_type(0)
    writer.add_vocab_size(described["vocab_size"])
    writer.add_context_length(described["max_position_embeddings"])
    writer.add_embedding_length(described["hidden_size"])
    writer.add_feed_forward_length(described["intermediate_size"])
    writer.add_block_count(described["num_hidden_layers"])
    writer.add_head_count(described["num_attention_heads"])
    writer.add_head_count_kv(described["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(described["rms_norm_eps"])
    writer.add_rope_dimension_count(described["head_dim"])
    writer.add_rope_freq_base(described["rope_parameters"]["rope_theta"])


def _write_tokenizer(writer: Any, tokenizer: dict[str, Any], described: dict[str, Any]) -> None:
    """Prompts come as ids, so that all that matters here is which text an id stands for."""
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    pairs = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.add_bos_token_id(described["bos_token_id"])
    writer.add_eos_token_id(described["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(source: Path, described: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from safetensors.numpy import load_file

    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            stem = name.removesuffix(".weight")
            if stem in _OUTER:
                yield f"{_OUTER[stem]}.weight", tensor.astype("float32")
                continue
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            weight = tensor.astype("float32")
            if part in heads:
                weight = _interleaved(weight, described[heads[part]])
            yield f"blk.{layer}.{_INNER[part]}.weight", weight


def _interleaved(weight: Any, heads: int) -> Any:
    """The two halves that a rotation turns against each other lie row by row in GGUF files: [heads · width, in]."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def serve(asked: Asked) -> None:
    """Its server works on threads of its own."""
    import xllamacpp

    server = xllamacpp.Server(_parameters(xllamacpp, asked))
    print(server.listening_address, flush=True)
    threading.Event().wait()


def _parameters(xllamacpp: Any, asked: Asked) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(Path(asked.target) / _FILE)
    params.hostnames = ["127.0.0.1"]
    params.port = asked.port
    params.n_ctx = asked.context * asked.requests
    params.n_parallel = asked.requests
    params.n_gpu_layers = 0
    params.cache_prompt = False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    if asked.mode == "draft":
        _draft(xllamacpp, params.speculative, asked)
    elif asked.mode == "ngram":
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = _NGRAM
        params.speculative.ngram_simple.size_m = asked.depth
    return params


def _draft(xllamacpp: Any, speculative: Any, asked: Asked) -> None:
    speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = speculative.draft
    draft.mparams.path = str(Path(asked.draft) / _FILE)
    draft.n_max = asked.depth
    draft.n_min = 0
    draft.n_gpu_layers = 0
    draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = asked.threads
