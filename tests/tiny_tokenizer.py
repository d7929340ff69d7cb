"""Tiny tokenizers in model folders, built in a moment: byte-level BPE with a chat template, and two word-mark kinds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

SAMPLES = [
    "The quick brown fox jumps over the lazy dog. ",
    "Größe, Straße, çok güzel; Привет, мир! 你好，世界。こんにちは世界 안녕하세요 ",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก ",
    "😀😅🤣 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 e\u0301 \u200b\n\n\tdef f(x):\n    return x\n",
    "stop STOP </s> ### END \r\n 0123456789 ",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with a few merges and three special tokens: <|end_of_text|> 0, <|start|> 1, <|end|> 2."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end_of_text|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SAMPLES, trainer)
    core.add_tokens([AddedToken("→tool←", special=False)])
    return core


def word_mark() -> Tokenizer:
    """Unigram on word marks without byte fallback; unknown characters become <unk>."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(SAMPLES, trainer)
    return core


def byte_fallback() -> Tokenizer:
    """BPE on word marks that spells unknown characters as <0xNN> tokens, decoded as in the Llama family."""
    letters = sorted(set("▁" + SAMPLES[0].replace(" ", "▁")))
    spelt = [f"<0x{value:02X}>" for value in range(256)]
    vocabulary = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *spelt, *letters, "th", "▁th"])}
    core = Tokenizer(
        models.BPE(vocabulary, [("t", "h"), ("▁", "th")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def write_folder(folder: Path, core: Tokenizer | None = None, **settings: object) -> Path:
    """Write a tokenizer folder; `settings` go over the defaults of tokenizer_config.json, None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    (core or byte_level()).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    } | settings
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder
