"""What a request may say about speculation, and the answer that it predicts."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.api.messages import text_of
from specserve.api.schemas import ChatBody, Generation
from specserve.errors import InvalidField, UnsupportedField
from specserve.types import ModelCard, RuleName, SourceName

_NOTHING = "none"


@dataclass(frozen=True, slots=True)
class Wish:
    """How a request wants to be drafted for; None leaves it to the deployment."""

    depth: int | None = None
    rule: RuleName | None = None
    source: SourceName | None = None


def wish_of(body: Generation, card: ModelCard) -> Wish:
    """The body's `speculation`. Raises InvalidField for what this deployment cannot do, and says what it can."""
    asked = body.speculation
    if asked is None:
        return Wish()
    if asked.enabled is False:
        return Wish(0, _rule(asked.rule, card))
    _check_possible(body, card)
    if asked.depth is not None and asked.depth > card.max_depth:
        raise InvalidField(f"speculation.depth: at most {card.max_depth} here", param="speculation.depth")
    return Wish(asked.depth, _rule(asked.rule, card), _source(asked.source, card))


def predicted_text(body: Generation, card: ModelCard) -> str | None:
    """The text that the body's `prediction` holds.

    Raises InvalidField for what is malformed or cannot go together, UnsupportedField where nothing can draft from it.
    """
    prediction = body.prediction
    if prediction is None:
        return None
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise InvalidField("prediction: must be an object of type content", param="prediction")
    if (body.n or 1) > 1:
        raise InvalidField("prediction: only for one answer; leave n out", param="prediction")
    if isinstance(body, ChatBody) and body.tools is not None:
        raise InvalidField("prediction: cannot go with tools", param="prediction")
    if card.max_depth == 0:
        raise UnsupportedField("prediction: this deployment does not speculate (engine.depth is 0)", param="prediction")
    text = text_of(prediction.get("content"), "prediction.content")
    if not text:
        raise InvalidField("prediction.content: must not be empty", param="prediction.content")
    return text


def _check_possible(body: Generation, card: ModelCard) -> None:
    """Refuse to be asked for speculation where there is none."""
    asked = body.speculation
    if asked is None or not (asked.enabled or asked.depth or asked.source is not None):
        return
    if card.max_depth == 0:
        raise UnsupportedField(
            "speculation: this deployment does not speculate (engine.depth is 0)", param="speculation"
        )
    if card.speculator == _NOTHING and asked.source is None and body.prediction is None:
        raise UnsupportedField(
            f"speculation: this deployment drafts only from a source of the request's own; name one of "
            f"{', '.join(card.sources)}",
            param="speculation.source",
        )


def _rule(rule: str | None, card: ModelCard) -> RuleName | None:
    if rule is not None and rule not in card.rules:
        raise InvalidField(
            f"speculation.rule {rule!r} is not to be had from this server; it has {', '.join(sorted(card.rules))}. "
            "Rules that cannot check trees are left out where trees are drafted (engine.tree)",
            param="speculation.rule",
        )
    return rule


def _source(source: str | None, card: ModelCard) -> SourceName | None:
    if source is not None and source not in card.sources:
        raise InvalidField(
            f"speculation.source {source!r} drafts nothing on this server; it has {', '.join(card.sources)}",
            param="speculation.source",
        )
    return source
