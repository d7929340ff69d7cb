"""How long a device takes for a step: curves over the size of a step, each point with where it comes from.

A profile is a JSON file that describes a pair of devices, one with the target and one with the draft. Shipped ones lie
in `profiles/`. A point either was published, and names its source, or is assumed, and gives the reason in a line.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specserve.errors import ConfigError

FOLDER = Path(__file__).parent / "profiles"

Role = Literal["target", "draft"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Part):
    """A step of this size takes this long: published somewhere, or assumed for a reason."""

    size: int = Field(ge=1)
    ms: float = Field(gt=0)
    source: str | None = None
    assumed: bool = False
    reason: str | None = None

    @model_validator(mode="after")
    def _founded(self) -> Self:
        if self.assumed == (self.source is not None) or self.assumed != (self.reason is not None):
            raise ValueError(f"the point at {self.size} needs either a source, or assumed: true and a reason")
        return self


class Device(_Part):
    """One device (or tensor-parallel group) with one model on it.

    decode is the time of a step in which each row has one position, by rows; extend that of any other step, by
    positions: verification, prefill, catching up. Between points times are interpolated, beyond the last one they go
    on as between the last two. Sizes rise along a curve and times never fall.
    """

    about: str
    kv_bytes_per_position: int = Field(ge=1)
    kv_memory_gib: float = Field(gt=0)
    context_length: int = Field(ge=16)
    decode: tuple[Point, ...] = Field(min_length=2)
    extend: tuple[Point, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for curve in (self.decode, self.extend):
            for left, right in pairwise(curve):
                if right.size <= left.size or right.ms < left.ms:
                    raise ValueError(f"a curve falls, or does not go on, from size {left.size} to {right.size}")
        return self

    def step_s(self, rows: int, positions: int) -> float:
        """Seconds that a step with this many rows takes, of this many positions together."""
        if positions <= rows:
            return _interpolated(self.decode, rows) / 1000
        return _interpolated(self.extend, positions) / 1000


class DeviceProfile(_Part):
    """Two devices and the models on them."""

    about: str
    target: Device
    draft: Device

    def device(self, role: Role) -> Device:
        """The device of a role."""
        return self.target if role == "target" else self.draft


def _interpolated(curve: tuple[Point, ...], size: int) -> float:
    right = min(max(1, bisect_left(curve, size, key=lambda point: point.size)), len(curve) - 1)
    low, high = curve[right - 1], curve[right]
    if size <= low.size:
        return low.ms
    return low.ms + (high.ms - low.ms) * (size - low.size) / (high.size - low.size)


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> DeviceProfile:
    """A shipped profile by its name, or any by the path of its .json file. Raises ConfigError."""
    path = Path(name).expanduser() if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        return DeviceProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the device profile {name!r} ({error.strerror}); shipped are {', '.join(names())}, any other "
            f"is given by the path of its .json file"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the device profile {path} is wrong at {place or 'its root'}: {first['msg']}") from None


def settings(name: str) -> dict[str, Any]:
    """The settings, by dotted name, that make a configuration emulate this profile. Raises ConfigError."""
    profile = load(name)
    found: dict[str, Any] = {"model_name": f"emulated-{Path(name).name.removesuffix('.json')}"}
    for place, device in (("target", profile.target), ("draft.model", profile.draft)):
        found |= {
            f"{place}.source": "emulated",
            f"{place}.device": "cpu",
            f"{place}.threads": 1,
            f"{place}.kv_memory_gib": device.kv_memory_gib,
            f"{place}.emulated.profile": name,
        }
    return found
