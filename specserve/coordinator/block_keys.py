"""Names of full blocks: what KV they hold, and so where else they can be used.

KV at a position depends on the model, all tokens up to it and nothing else. So a full block is named by a hash of its
tokens and of the name of the block before it, as in vLLM's automatic prefix caching. The model needs no part in a name,
because every pool of blocks belongs to one life of one model. A salt does: requests with different salts never share,
so that nobody can find out by timing what those of another salt have sent.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

_DIGEST_BYTES = 32  # clients choose the tokens: two texts of one name must be out of anybody's reach


class BlockKeys:
    """The names of one request's full blocks, made when they are asked for. tokens is the request's own list."""

    __slots__ = ("_keys", "_salt", "_tokens")

    def __init__(self, tokens: list[int], salt: str) -> None:
        self._tokens = tokens
        self._salt = salt
        self._keys: list[bytes] = []

    @property
    def length(self) -> int:
        """Committed tokens; they only ever grow in number."""
        return len(self._tokens)

    def between(self, first: int, end: int, block_tokens: int) -> list[bytes]:
        """The names of blocks first … end − 1, all of them full. block_tokens is the same in every call."""
        keys = self._keys
        while len(keys) < end:
            parent = keys[-1] if keys else _name(self._salt.encode("utf-8", "surrogatepass"))
            begin = len(keys) * block_tokens
            keys.append(_name(parent, array("i", self._tokens[begin : begin + block_tokens]).tobytes()))
        return keys[first:end]


def _name(parent: bytes, tokens: bytes = b"") -> bytes:
    return blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
