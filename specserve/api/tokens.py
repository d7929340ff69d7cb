"""/tokenize and /detokenize: the served model's tokenizer for clients that count or build prompts from tokens."""

from __future__ import annotations

from typing import Any

from specserve.api import convert
from specserve.api.messages import messages_of
from specserve.api.schemas import DetokenizeBody, TokenizeBody
from specserve.api.tools import shown_tools
from specserve.errors import InvalidField
from specserve.text import Tokenizer
from specserve.types import ModelCard


def tokenized(body: TokenizeBody, tokenizer: Tokenizer, card: ModelCard, most_tools: int) -> dict[str, Any]:
    """The tokens of a text, or of a conversation with the beginning of its answer.

    Raises InvalidField unless exactly one of both is there, and what the chat endpoint raises for messages and tools.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt: send either a prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, special=body.add_special_tokens is not False)
    else:
        messages = messages_of(body.messages or (), takes_calls=tokenizer.takes_calls)
        tokens = tokenizer.chat_prompt(messages, shown_tools(body.tools, tokenizer.call_format, most_tools))
    texts = [tokenizer.token_text(token)[0] for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": card.context_length, "tokens": tokens, "token_strs": texts}


def detokenized(body: DetokenizeBody, tokenizer: Tokenizer, card: ModelCard) -> dict[str, Any]:
    """The text of tokens, special ones spelt out. Raises InvalidField for ids that are not in the vocabulary."""
    convert.check_ids(body.tokens, card.vocab_size, "tokens")
    text = tokenizer.decode(body.tokens, skip_special=False)
    return {"prompt": text, "text": text}
