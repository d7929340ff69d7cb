"""The whole configuration as one frozen tree. A misspelt key is an error, never a silent default.

YAML files use the same names as this tree; units are in the names. What is *derived* from a machine or a model
(block counts, vocabulary size) is reported by the workers at start and never written back here.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specserve.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Section(BaseModel):
    """A part of the tree: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Where a model comes from and how it is held."""

    source: str = Field("demo", description="`demo`, a folder with safetensors weights, or a .gguf file")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, …")
    threads: int = Field(0, ge=0, description="CPU threads of the worker; 0 lets placement decide")
    context_length: int | None = Field(None, ge=16, description="cap on the model's own context, in tokens")
    kv_blocks: int | None = Field(None, ge=1, description="KV pages; None derives them from kv_memory_gib")
    kv_memory_gib: float = Field(1.0, gt=0, description="memory for KV pages when kv_blocks is None")
    allow_pickle_weights: bool = Field(False, description="also accept .bin/.pt weights (read with weights_only)")
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model folder")


class DraftConfig(Section):
    """Which speculator guesses, and with which model."""

    speculator: str = Field("small_model", description="the name of a file in drafting/, or `none`")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(kv_memory_gib=0.5))
    dist: Literal["sparse", "dense"] = "sparse"
    top_k: int = Field(64, ge=1, le=4096, description="support of a sparse draft dist")
    ngram_max: int = Field(3, ge=1, le=32, description="ngram: longest suffix looked up")
    ngram_min: int = Field(1, ge=1, le=32, description="ngram, suffix: shortest suffix looked up")

    @model_validator(mode="after")
    def _ngram_range(self) -> DraftConfig:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is above ngram_max {self.ngram_max}")
        return self


class EngineConfig(Section):
    """Limits of one pipeline."""

    depth: int = Field(4, ge=0, le=64, description="drafted tokens per request and round; 0 is plain decoding")
    rule: str = Field("rejection", description="the name of a rule file in verification/")
    synthetic_acceptance: tuple[float, ...] | None = Field(
        None, description="benchmarks only: how often chain position 1, 2, … is kept under the rule `synthetic`"
    )
    max_requests: int = Field(32, ge=1, le=4096, description="requests decoding at once")
    max_batch_tokens: int = Field(512, ge=2, description="positions in one target forward")
    prefill_chunk: int = Field(256, ge=1, description="prompt tokens of one request in one round, at most")
    block_tokens: int = Field(16, ge=1, le=1024, description="positions in one KV block")
    slots: int | None = Field(None, ge=1, description="draft slots; None is max_requests × depth")
    queue_limit: int = Field(256, ge=0, description="requests waiting for a place before 429")
    draft_wait_s: float = Field(2.0, gt=0, description="longest wait for a draft before a round goes on without it")
    recovery_wait_s: float = Field(120.0, gt=0, description="longest wait for a lost verifier")

    @model_validator(mode="after")
    def _admissible(self) -> EngineConfig:
        # Each decoding request needs one position in every round, and a prompt must still make progress beside them.
        if self.max_batch_tokens < self.max_requests + 1:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} can never hold max_requests {self.max_requests} decoding "
                f"requests and one prompt token; raise max_batch_tokens to at least {self.max_requests + 1} "
                f"or lower max_requests"
            )
        if self.depth + 1 > self.max_batch_tokens:
            raise ValueError(
                f"depth {self.depth} needs {self.depth + 1} positions for one request, "
                f"but max_batch_tokens is {self.max_batch_tokens}"
            )
        if self.slots is not None and self.depth > self.slots:
            raise ValueError(f"depth {self.depth} needs {self.depth} slots for one request, but slots is {self.slots}")
        return self

    @model_validator(mode="after")
    def _synthetic_profile(self) -> EngineConfig:
        profile = self.synthetic_acceptance
        if profile is None:
            if self.rule == "synthetic":
                raise ValueError("rule synthetic makes up acceptance; set synthetic_acceptance, e.g. [0.8, 0.6, 0.5]")
            return self
        if not all(0 <= rate <= 1 for rate in profile) or sorted(profile, reverse=True) != list(profile):
            raise ValueError(f"synthetic_acceptance {list(profile)} must be shares from 0 to 1 that never rise")
        return self

    @property
    def slot_count(self) -> int:
        """Slots in the pool: enough for every request at full depth unless fixed by `slots`."""
        return self.slots if self.slots is not None else max(1, self.max_requests * self.depth)


class ServerConfig(Section):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    max_stop_strings: int = Field(4, ge=1)
    max_stop_length: int = Field(256, ge=1, description="characters of one stop string")
    max_schema_bytes: int = Field(
        64 * 1024, ge=1, description="UTF-8 bytes of a request's JSON schema, regex, choices or grammar"
    )
    default_max_tokens: int = Field(16, ge=1, description="answer length of /v1/completions when none is asked for")
    max_n: int = Field(16, ge=1, description="answers to one prompt in one request")
    request_timeout_s: float = Field(600.0, gt=0)


class ClusterConfig(Section):
    """How Ray hosts a pipeline."""

    transport: Literal["socket", "ray"] = "socket"
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    start_timeout_s: float = Field(600.0, gt=0)
    heartbeat_s: float = Field(0.2, gt=0)
    lost_after_s: float = Field(1.5, gt=0, description="silence after which a worker's process counts as lost")


class Config(Section):
    """The root."""

    model_name: str | None = Field(None, description="name served to clients; None derives it from target.source")
    target: ModelConfig = Field(default_factory=ModelConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    log_format: Literal["text", "json"] = Field("text", description="form of log lines")

    @property
    def served_name(self) -> str:
        """The model id that clients use."""
        if self.model_name is not None:
            return self.model_name
        if self.target.source == "demo":
            return "smollm2-135m-instruct"
        return Path(self.target.source).stem.lower()


def parse(data: object, where: str = "config") -> Config:
    """Build a Config from plain data. Raises ConfigError that names each wrong key and value."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = error.errors()
        lines = [f"{where}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
        lines += [f"  {_told(problem)}" for problem in problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"  and {len(problems) - _MOST_PROBLEMS} more")
        raise ConfigError("\n".join(lines)) from None


def setting_names(section: type[BaseModel] = Config) -> Iterator[str]:
    """Every setting by its dotted name, e.g. `engine.depth`."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (f"{name}.{below}" for below in setting_names(kind))
        else:
            yield name


_MOST_PROBLEMS = 10

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "literal": "a word",
}

_BOUNDS = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
}


def _told(problem: ErrorDetails) -> str:
    """One problem that pydantic found, in a line for people."""
    place = ".".join(str(part) for part in problem["loc"]) or "(root)"
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown setting {place}{_suggestion(place)}"
    if kind == "model_type":
        return f"{place} is a section with settings of its own, such as {_example(place)} (found {_shown(value)})"
    if kind == "value_error":
        return f"{place}: {context['error']}"
    if kind in _BOUNDS:
        return f"{place} {_BOUNDS[kind].format(**context)} (found {_shown(value)})"
    return _wrong_kind(place, problem)


def _wrong_kind(place: str, problem: ErrorDetails) -> str:
    kind, value = problem["type"], problem["input"]
    wanted = _KINDS.get(kind.split("_", maxsplit=1)[0])
    if wanted is None:
        return f"{place}: {problem['msg']} (found {_shown(value)})"
    if isinstance(value, dict):
        return f"{place} is {wanted}, not a section with settings of its own (found {', '.join(map(str, value))})"
    wanted = f"one of {problem['ctx']['expected']}" if kind == "literal_error" else wanted
    return f"{place}: expected {wanted} (found {_shown(value)})"


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _example(section: str) -> str:
    return next((name for name in setting_names() if name.startswith(f"{section}.")), "a setting")


def _suggestion(place: str) -> str:
    """The setting that was most likely meant: one of the same last name elsewhere, or one spelt nearly alike."""
    names = list(setting_names())
    last = place.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last] or get_close_matches(place, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def load(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a YAML file and lay dotted overrides such as {"engine.depth": 2} over it.

    Raises ConfigError when the file is missing, is not YAML, or holds a wrong key or value.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    return parse(override({} if data is None else data, overrides or {}), where=str(path))


def override(data: object, overrides: dict[str, Any]) -> object:
    """Return `data` with dotted keys replaced, e.g. {"draft.speculator": "ngram"}. The input is left as it was."""
    if not isinstance(data, dict):
        return data
    result: dict[str, Any] = dict(data)
    for dotted, value in overrides.items():
        parts = dotted.split(".")
        here = result
        for part in parts[:-1]:
            below = here.get(part)
            here[part] = dict(below) if isinstance(below, dict) else {}
            here = here[part]
        here[parts[-1]] = value
    return result
